"""Counters and histograms for dashboards, in Prometheus' text format.

Only one event loop uses these objects, so observing a token is an addition to a plain list: no lock, no label
lookup. prometheus-client runs only at a scrape, to format what `collect` yields.

    requests ──► MeteredClient, one per engine   (times of its requests, measured in the server)
    engine   ──► EngineStats, its last snapshot  (running, waiting, cache; read at the scrape)
    HTTP     ──► ServerMetrics.count_http
    GPU      ──► NVML, read at the scrape        (tools/nvml.py; nothing on a CPU)

Names are as in vLLM's dashboards, with the prefix `infer_`. `--metrics-prefix vllm` writes every series
also under vLLM's own name (`vllm:`), so that a dashboard made for vLLM works unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from infer.client.client import EngineClient
from infer.config.settings import CacheConfig
from infer.engine.stats import GRAMMAR_SECONDS, RANK_WAITS, STEP_TOKENS, EngineStats, Histogram
from infer.finish_reason import FinishReason
from infer.server.fleet.metered_client import COUNTED, MEASURED, MeteredClient
from infer.server.state import STAGES
from infer.tools.nvml import GpuReading, read_gpu

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


def _filled(bounds: tuple[float, ...], counts: Sequence[int], total: float) -> Histogram:
    histogram = Histogram(bounds)
    if counts:
        histogram.counts, histogram.total = list(counts), total
    return histogram


def _cache_use(client: EngineClient) -> float:
    stats = client.stats()
    return stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0


# An engine's own gauges, read at a scrape.
GAUGES: dict[str, tuple[str, Callable[[EngineClient], float]]] = {
    "num_requests_running": ("Running sequences.", lambda c: c.stats().num_running),
    "num_requests_waiting": ("Waiting sequences.", lambda c: c.stats().num_waiting),
    "kv_cache_usage_perc": ("Share of KV-cache blocks used by sequences, 0 to 1.", _cache_use),
    "kv_host_blocks": ("KV-cache blocks in host memory.", lambda c: c.stats().num_used_host_blocks),
    "spec_decode_seconds_saved": (
        "Estimated seconds saved by drafts; decreases when drafts are wrong.",
        lambda c: c.stats().draft_saved_s,
    ),
    "engine_up": ("1 if the engine is alive and makes progress.", lambda c: c.failure is None),
}
COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", lambda s: s.num_queried_tokens),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda s: s.num_hit_tokens),
    "prefix_cache_host_hits": ("Prompt tokens found cached in host memory.", lambda s: s.num_host_hit_tokens),
    "kv_host_bytes_out": ("Bytes of blocks copied to host memory.", lambda s: s.host_bytes_out),
    "kv_host_bytes_in": ("Bytes of blocks copied from host memory.", lambda s: s.host_bytes_in),
    "num_preemptions": ("Times that a running sequence was preempted.", lambda s: s.num_preemptions),
    "engine_restarts": ("Times that the engine was restarted.", lambda s: s.num_restarts),
    "spec_decode_num_drafts": ("Steps of sequences with drafts.", lambda s: s.num_draft_windows),
    "spec_decode_num_draft_tokens": ("Draft tokens that were checked.", lambda s: s.num_draft_tokens),
    "spec_decode_num_accepted_tokens": ("Draft tokens that were accepted.", lambda s: s.num_accepted_tokens),
    "grammar_failures": ("Constraints that could not be compiled.", lambda s: s.num_grammar_failures),
}
HISTOGRAMS: dict[str, tuple[str, Callable[[EngineStats], Histogram]]] = {
    "iteration_tokens": (
        "Tokens that the model computes in a step.",
        lambda s: _filled(STEP_TOKENS, s.step_sizes, s.num_step_tokens),
    ),
    "grammar_compile_seconds": (
        "Seconds to compile the constraint of a request.",
        lambda s: _filled(GRAMMAR_SECONDS, s.grammar_times, s.grammar_s),
    ),
}
GPU_GAUGES: tuple[tuple[str, str, Callable[[GpuReading], float | None]], ...] = (
    ("gpu_memory_used_bytes", "Bytes in use on the engine's GPU.", lambda r: r.memory_used),
    ("gpu_memory_total_bytes", "Bytes of memory of the engine's GPU.", lambda r: r.memory_total),
    ("gpu_utilization", "Share of the last moments with a kernel running, 0 to 1.", lambda r: r.busy_share),
    (
        "gpu_memory_utilization",
        "Share of the last moments with memory traffic, 0 to 1.",
        lambda r: r.memory_busy_share,
    ),
    ("gpu_power_watts", "Watts that the GPU draws.", lambda r: r.power_watts),
    ("gpu_temperature_celsius", "Temperature of the GPU.", lambda r: r.temperature_celsius),
)
OWN_PREFIX = "infer"
VLLM_NAMES = {"iteration_tokens": "iteration_tokens_total"}  # names that differ in vLLM
LABELS = ("model_name", "engine")
Rows = Iterable[tuple[tuple[str, ...], float]]  # labels and a value
_SHOWN = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)


class ServerMetrics(Collector):
    """All metrics of a server, collected for Prometheus."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix  # prefix of every metric's second name
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.meters: list[MeteredClient] = []
        self.num_active = 0  # HTTP requests in progress
        self.startup_s = 0.0
        self.stages: Mapping[str, str] = {}  # stages of all models by name, set at a scrape
        self.host_bytes: Mapping[str, int] = {}  # bytes of `model_memory` that models take, by name
        self._http: Counter[tuple[str, str, str]] = Counter()
        self._errors: Counter[str] = Counter()  # errors by code
        self._num_gone = 0

    def add(
        self, model: str, client: EngineClient, *, label: str | None = None, cache: CacheConfig | None = None
    ) -> MeteredClient:
        """Meter one more engine of a model, under a given label or the first free one."""
        if label is None:
            taken = {meter.labels[1] for meter in self.meters if meter.labels[0] == model}
            label = next(number for number in map(str, range(len(taken) + 1)) if number not in taken)
        self.meters.append(MeteredClient(client, (model, label), cache))
        return self.meters[-1]

    def remove(self, client: EngineClient) -> None:
        """Stop metering an engine that is gone."""
        self.meters = [meter for meter in self.meters if meter is not client]

    def count_http(
        self, method: str, route: str, status: int, *, is_gone: bool, error_code: str | None = None
    ) -> None:
        """Count a finished HTTP request, with the code of its error, if any."""
        self._http[method, route, str(status)] += 1
        if error_code is not None:
            self._errors[error_code] += 1
        self._num_gone += is_gone

    def snapshot(self) -> dict[str, Any]:
        """Return the counters of this process, as plain data for another process."""
        return {
            "meters": [meter.snapshot() for meter in self.meters],
            "http": [(*row, count) for row, count in self._http.items()],
            "errors": dict(self._errors),
            "num_gone": self._num_gone,
            "num_active": self.num_active,
        }

    def sum_with(self, snapshots: Iterable[Mapping[str, Any]]) -> ServerMetrics:
        """Return the sum of this process and others; the engines' own statistics come from this process."""
        total = ServerMetrics(self.prefix)
        total.startup_s = self.startup_s
        total.meters = [MeteredClient(meter.client, meter.labels, meter.cache) for meter in self.meters]
        by_labels = {meter.labels: meter for meter in total.meters}
        for snapshot in (self.snapshot(), *snapshots):
            for counted in snapshot["meters"]:
                found = by_labels.get(tuple(counted["labels"]))
                if found is not None:  # else its model is being unloaded
                    found.add(counted)
            for *row, count in snapshot["http"]:
                total._http[row[0], row[1], row[2]] += count
            total._errors.update(snapshot["errors"])
            total._num_gone += snapshot["num_gone"]
            total.num_active += snapshot["num_active"]
        return total

    def text(self) -> bytes:
        """Return the page at /metrics."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, as prometheus-client requires, and again under its second name."""
        for metric in self._collect():
            yield metric
            if self.prefix != OWN_PREFIX:
                yield _renamed(metric, self.prefix)

    def _collect(self) -> Iterator[Metric]:
        meters = [(meter, meter.stats()) for meter in self.meters]
        for name, (text, gauge) in GAUGES.items():
            yield self._gauge(name, text, [(meter.labels, gauge(meter)) for meter, _ in meters])
        for name, (text, counter) in COUNTERS.items():
            yield self._counter(name, text, [(meter.labels, counter(stats)) for meter, stats in meters])
        yield self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were accepted, by their position in a window.",
            [
                ((*meter.labels, str(position)), count)
                for meter, stats in meters
                for position, count in enumerate(stats.accepted_by_position)
            ],
            (*LABELS, "position"),
        )
        yield from self._collect_ranks(meters)
        for name, text in COUNTED.items():
            yield self._counter(name, text, [(meter.labels, meter.counts[name]) for meter, _ in meters])
        for name, (text, _) in MEASURED.items():
            yield self._histogram(name, text, [(meter.labels, meter.histograms[name]) for meter, _ in meters])
        for name, (text, find) in HISTOGRAMS.items():
            yield self._histogram(name, text, [(meter.labels, find(stats)) for meter, stats in meters])
        yield from self._collect_gpus()
        yield from self._collect_models()
        yield from self._collect_requests()

    def _gauge(self, name: str, text: str, rows: Rows, labels: Sequence[str] = LABELS) -> Metric:
        return _filled_family(GaugeMetricFamily(f"{OWN_PREFIX}_{name}", text, labels=labels), rows)

    def _counter(self, name: str, text: str, rows: Rows, labels: Sequence[str] = LABELS) -> Metric:
        return _filled_family(CounterMetricFamily(f"{OWN_PREFIX}_{name}", text, labels=labels), rows)

    def _histogram(self, name: str, text: str, rows: Iterable[tuple[tuple[str, str], Histogram]]) -> Metric:
        family = HistogramMetricFamily(f"{OWN_PREFIX}_{name}", text, labels=LABELS)
        for labels, histogram in rows:
            family.add_metric(labels, histogram.cumulative(), histogram.total)
        return family

    def _collect_gpus(self) -> Iterator[Metric]:
        """Yield the readings of the engines' GPUs: nothing on a CPU or without NVML."""
        readings = {}
        for meter in self.meters:
            name = meter.stats().gpu
            if name and (reading := read_gpu(name)) is not None:
                readings[(*meter.labels, name)] = reading
        for name, text, value in GPU_GAUGES if readings else ():
            found = [(labels, value(reading)) for labels, reading in readings.items()]
            rows = [(labels, number) for labels, number in found if number is not None]
            yield self._gauge(name, text, rows, (*LABELS, "gpu"))

    def _collect_models(self) -> Iterator[Metric]:
        """Yield the stage of each known model, and the host memory that models take."""
        rows = [((name, each), each == stage) for name, stage in self.stages.items() for each in STAGES]
        yield self._gauge(
            "model_state",
            "1 for the state of the model: loaded, asleep (weights in host memory) or unloaded.",
            rows,
            ("model_name", "state"),
        )
        taken = [((name,), num_bytes) for name, num_bytes in self.host_bytes.items()]
        text = "Bytes of host memory for the weights of a sleeping model, or kept for its next sleep."
        yield self._gauge("model_host_bytes", text, taken, ("model_name",))

    def _collect_ranks(self, meters: list[tuple[MeteredClient, EngineStats]]) -> Iterator[Metric]:
        """Yield the step and wait times of engines with several ranks."""
        shared = [(meter, stats) for meter, stats in meters if stats.rank_wait_s]
        if shared:
            steps = [(meter.labels, stats.rank_step_s) for meter, stats in shared]
            yield self._counter(
                "rank_step_seconds", "Seconds of steps that several ranks compute together.", steps
            )
            kinds = len(RANK_WAITS)
            waits = [
                ((*meter.labels, str(place // kinds), RANK_WAITS[place % kinds]), seconds)
                for meter, stats in shared
                for place, seconds in enumerate(stats.rank_wait_s)
            ]
            labels = (*LABELS, "rank", "wait")
            yield self._counter(
                "rank_wait_seconds", "Seconds that a rank has waited for others.", waits, labels
            )

    def _collect_requests(self) -> Iterator[Metric]:
        ends = [
            ((*meter.labels, reason), meter.finished[reason])
            for meter in self.meters
            for reason in _SHOWN  # even reasons that never happened: a rate needs a start
        ]
        yield self._counter(
            "request_success", "Sequences that ended, by reason.", ends, (*LABELS, "finished_reason")
        )
        cache = Metric(
            f"{OWN_PREFIX}_cache_config_info", "Settings of the KV cache, in labels; always 1.", "gauge"
        )
        for meter in self.meters:
            labels = dict(zip(LABELS, meter.labels, strict=True)) | meter.cache_labels
            cache.add_sample(cache.name, labels, 1.0)
        yield cache
        route = ("method", "route", "status")
        yield self._counter("http_requests", "HTTP requests that were answered.", self._http.items(), route)
        errors = [((code,), count) for code, count in self._errors.items()]
        yield self._counter("http_errors", "Errors sent to clients, by code.", errors, ("code",))
        yield self._counter(
            "http_clients_gone", "Clients that left before the end.", [((), self._num_gone)], ()
        )
        yield self._gauge("http_requests_active", "HTTP requests in progress.", [((), self.num_active)], ())
        yield self._gauge(
            "startup_time_seconds", "Seconds from start until ready.", [((), self.startup_s)], ()
        )


def _renamed(metric: Metric, prefix: str) -> Metric:
    """Return a copy of a metric under its name with another prefix."""
    name = metric.name.removeprefix(f"{OWN_PREFIX}_")
    new_name = f"vllm:{VLLM_NAMES.get(name, name)}" if prefix == "vllm" else f"{prefix}_{name}"
    copy = Metric(new_name, metric.documentation, metric.type)
    copy.samples = [
        sample._replace(name=new_name + sample.name.removeprefix(metric.name)) for sample in metric.samples
    ]
    return copy


def _filled_family(family: CounterMetricFamily | GaugeMetricFamily, rows: Rows) -> Metric:
    for labels, value in rows:
        family.add_metric(labels, value)
    return family
