"""Counts and times for dashboards, in Prometheus' text format.

Everything here is touched by one event loop only, so observing a token is an addition to a plain list:
no lock, no label lookup. prometheus-client is asked at a scrape, to write what `collect` yields.

    requests ──► EngineMeter, one per engine     (what its requests took, seen from this side of the wire)
    engine   ──► EngineStats, its last snapshot  (running, waiting, cache; read at the scrape)
    HTTP     ──► ServerMetrics.count_http
    GPU      ──► NVML, asked at the scrape       (tools/nvml.py; nothing on a CPU)

The names are those of vLLM's dashboards with the prefix `infer_`; `--metrics-prefix vllm` writes `vllm:`
instead, and such a dashboard works as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from infer.client.client import EngineClient, failure_of
from infer.config.settings import CacheConfig
from infer.engine.stats import GRAMMAR_SECONDS, STEP_TOKENS, Histogram
from infer.tools.nvml import GpuReading, read_gpu

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


NUMBERS = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens")


class EngineMeter:
    """The counts and times of the requests of one engine."""

    def __init__(self, model: str, engine: str, client: EngineClient) -> None:
        self.labels = (model, engine)
        self.client = client
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.finished: Counter[str] = Counter()  # by reason
        self.is_down = False  # when last looked at
        self.cache: CacheConfig | None = None  # how its cache was asked for
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.inter_token_s = Histogram(TOKEN_S)
        self.per_token_s = Histogram(TOKEN_S)
        self.request_s = Histogram(REQUEST_S)
        self.queue_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.inference_s = Histogram(REQUEST_S)
        self.prompt_tokens = Histogram(TOKENS)
        self.output_tokens = Histogram(TOKENS)
        self.longest_output = Histogram(TOKENS)
        self.max_tokens = Histogram(TOKENS)
        self.choices = Histogram(CHOICES)

    def snapshot(self) -> dict[str, Any]:
        """What was counted here, as plain data for another process."""
        histograms = {name: (found.counts, found.total) for name, found in self._histograms().items()}
        numbers = {name: getattr(self, name) for name in NUMBERS}
        return {
            "labels": self.labels,
            "numbers": numbers,
            "finished": dict(self.finished),
            "histograms": histograms,
        }

    def add(self, snapshot: Mapping[str, Any]) -> None:
        """Add what another process counted for the same engine."""
        for name, value in snapshot["numbers"].items():
            setattr(self, name, getattr(self, name) + value)
        self.finished.update(snapshot["finished"])
        mine = self._histograms()
        for name, (counts, total) in snapshot["histograms"].items():
            mine[name].counts = [a + b for a, b in zip(mine[name].counts, counts, strict=True)]
            mine[name].total += total

    def _histograms(self) -> dict[str, Histogram]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Histogram)}

    @property
    def step_tokens(self) -> Histogram:
        """The sizes of the engine's steps, which the engine counts."""
        stats = self.client.stats()
        return _filled(STEP_TOKENS, stats.step_sizes, float(stats.num_step_tokens))

    @property
    def grammar_seconds(self) -> Histogram:
        """How long constraints took to compile, which the engine counts."""
        stats = self.client.stats()
        return _filled(GRAMMAR_SECONDS, stats.grammar_times, stats.grammar_s)

    @property
    def cache_labels(self) -> dict[str, str]:
        """The labels of `cache_config_info`, in vLLM's words."""
        stats = self.client.stats()
        labels = {"block_size": str(stats.block_size), "num_gpu_blocks": str(stats.num_blocks)}
        if self.cache is not None:
            labels["enable_prefix_caching"] = str(self.cache.caches_prefixes)
            labels["kv_cache_backend"] = self.cache.kv_cache_backend
            labels["num_cpu_blocks"] = str(self.cache.swap_blocks)
        return labels


def _filled(bounds: tuple[float, ...], counts: Sequence[int], total: float) -> Histogram:
    histogram = Histogram(bounds)
    if counts:
        histogram.counts, histogram.total = list(counts), total
    return histogram


def _cache_use(client: EngineClient) -> float:
    stats = client.stats()
    return stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0


Reading = Callable[[EngineMeter], float]

GAUGES: tuple[tuple[str, str, Reading], ...] = (
    ("num_requests_running", "sequences being computed", lambda m: m.client.stats().num_running),
    ("num_requests_waiting", "sequences waiting for room", lambda m: m.client.stats().num_waiting),
    ("kv_cache_usage_perc", "share of KV-cache blocks in use, 0 to 1", lambda m: _cache_use(m.client)),
    ("engine_up", "1 if the engine is alive and makes progress", lambda m: failure_of(m.client) is None),
)
COUNTERS: tuple[tuple[str, str, Reading], ...] = (
    ("prefix_cache_queries", "prompt tokens looked up", lambda m: m.client.stats().num_queried_tokens),
    ("prefix_cache_hits", "of these, found", lambda m: m.client.stats().num_hit_tokens),
    ("num_preemptions", "sequences that gave back blocks", lambda m: m.client.stats().num_preemptions),
    ("prompt_tokens", "prompt tokens of requests that began to answer", lambda m: m.num_prompt_tokens),
    ("prompt_tokens_cached", "of these, found in the prefix cache", lambda m: m.num_cached_tokens),
    ("generation_tokens", "tokens made", lambda m: m.num_output_tokens),
    ("engine_restarts", "times the engine was started again", lambda m: m.client.stats().num_restarts),
    ("grammar_failures", "constraints not compiled", lambda m: m.client.stats().num_grammar_failures),
)
HISTOGRAMS: tuple[tuple[str, str, Callable[[EngineMeter], Histogram]], ...] = (
    ("time_to_first_token_seconds", "from arrival to the first token", lambda m: m.first_token_s),
    ("inter_token_latency_seconds", "from one token to the next", lambda m: m.inter_token_s),
    ("request_time_per_output_token_seconds", "mean of a request, after its first", lambda m: m.per_token_s),
    ("e2e_request_latency_seconds", "from arrival to the last token", lambda m: m.request_s),
    ("request_queue_time_seconds", "waiting for the first step", lambda m: m.queue_s),
    ("request_prefill_time_seconds", "from the first step to the first token", lambda m: m.prefill_s),
    ("request_decode_time_seconds", "from the first token to the last", lambda m: m.decode_s),
    ("request_inference_time_seconds", "from the first step to the last token", lambda m: m.inference_s),
    ("request_prompt_tokens", "prompt length", lambda m: m.prompt_tokens),
    ("request_generation_tokens", "output length, all choices together", lambda m: m.output_tokens),
    ("request_max_num_generation_tokens", "its longest choice", lambda m: m.longest_output),
    ("request_params_n", "outputs asked for", lambda m: m.choices),
    ("request_params_max_tokens", "max_tokens, where it was given", lambda m: m.max_tokens),
    ("iteration_tokens_total", "tokens the model saw in a step", lambda m: m.step_tokens),
    ("grammar_compile_seconds", "to compile the constraint of a request", lambda m: m.grammar_seconds),
)
GPU_GAUGES: tuple[tuple[str, str, Callable[[GpuReading], float | None]], ...] = (
    ("gpu_memory_used_bytes", "of the engine's GPU, by all processes", lambda r: r.memory_used),
    ("gpu_memory_total_bytes", "of the engine's GPU", lambda r: r.memory_total),
    ("gpu_utilization", "share of the last moments in which a kernel ran, 0 to 1", lambda r: r.busy_share),
    ("gpu_memory_utilization", "in which its memory was read or written", lambda r: r.memory_busy_share),
    ("gpu_power_watts", "what it draws", lambda r: r.power_watts),
    ("gpu_temperature_celsius", "of the chip", lambda r: r.temperature_celsius),
)
LABELS = ("model_name", "engine")
FINISH_REASONS = ("stop", "length", "abort", "error")


class ServerMetrics(Collector):
    """Every meter of a server, collected for Prometheus."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}:" if prefix == "vllm" else f"{prefix}_"
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.meters: list[EngineMeter] = []
        self.num_active = 0  # HTTP requests in progress
        self.startup_s = 0.0
        self._http: Counter[tuple[str, str, str]] = Counter()
        self._errors: Counter[str] = Counter()  # by the code in the body
        self._num_gone = 0

    def add(self, model: str, client: EngineClient, label: str | None = None) -> EngineMeter:
        """Add a meter for one more engine of a model, under a label that was chosen or a free one."""
        if label is None:
            taken = {meter.labels[1] for meter in self.meters if meter.labels[0] == model}
            label = next(number for number in map(str, range(len(taken) + 1)) if number not in taken)
        meter = EngineMeter(model, label, client)
        self.meters.append(meter)
        return meter

    def remove(self, client: EngineClient) -> None:
        """Stop reporting an engine that is no longer there."""
        self.meters = [meter for meter in self.meters if meter.client is not client]

    def count_http(
        self, method: str, route: str, status: int, *, is_gone: bool, error_code: str | None = None
    ) -> None:
        """Count an HTTP request that has ended, with the code of the error it got, if any."""
        self._http[method, route, str(status)] += 1
        if error_code is not None:
            self._errors[error_code] += 1
        self._num_gone += is_gone

    def snapshot(self) -> dict[str, Any]:
        """What was counted in this process, as plain data for another one."""
        return {
            "meters": [meter.snapshot() for meter in self.meters],
            "http": [(*row, count) for row, count in self._http.items()],
            "errors": dict(self._errors),
            "num_gone": self._num_gone,
            "num_active": self.num_active,
        }

    def sum_with(self, snapshots: Iterable[Mapping[str, Any]]) -> ServerMetrics:
        """The counts of this process and of others; what the engines count themselves is taken from here."""
        total = ServerMetrics(self._prefix)
        total._prefix, total.startup_s = self._prefix, self.startup_s
        for meter in self.meters:
            summed = EngineMeter(*meter.labels, meter.client)
            summed.cache = meter.cache
            total.meters.append(summed)
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
        """The page at /metrics."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, as prometheus-client wants it."""
        for name, help_text, reading in GAUGES:
            gauge = GaugeMetricFamily(self._prefix + name, help_text, labels=LABELS)
            for meter in self.meters:
                gauge.add_metric(meter.labels, reading(meter))
            yield gauge
        for name, help_text, reading in COUNTERS:
            counter = CounterMetricFamily(self._prefix + name, help_text, labels=LABELS)
            for meter in self.meters:
                counter.add_metric(meter.labels, reading(meter))
            yield counter
        for name, help_text, find in HISTOGRAMS:
            family = HistogramMetricFamily(self._prefix + name, help_text, labels=LABELS)
            for meter in self.meters:
                histogram = find(meter)
                family.add_metric(meter.labels, histogram.cumulative(), histogram.total)
            yield family
        yield from self._collect_gpus()
        yield from self._collect_requests()

    def _collect_gpus(self) -> Iterator[Metric]:
        """Yield what the GPUs of engines say of themselves: nothing on a CPU, or where NVML is not there."""
        readings = {}
        for meter in self.meters:
            name = meter.client.stats().gpu
            if name and (reading := read_gpu(name)) is not None:
                readings[(*meter.labels, name)] = reading
        for name, help_text, value in GPU_GAUGES if readings else ():
            gauge = GaugeMetricFamily(self._prefix + name, help_text, labels=(*LABELS, "gpu"))
            for labels, reading in readings.items():
                if (number := value(reading)) is not None:
                    gauge.add_metric(labels, number)
            yield gauge

    def _collect_requests(self) -> Iterator[Metric]:
        finished = CounterMetricFamily(
            self._prefix + "request_success", "requests that ended", labels=(*LABELS, "finished_reason")
        )
        cache = Metric(self._prefix + "cache_config_info", "the KV cache, in labels", "gauge")
        for meter in self.meters:
            for reason in FINISH_REASONS:  # also those that never happened: a rate needs a start
                finished.add_metric((*meter.labels, reason), meter.finished[reason])
            labels = dict(zip(LABELS, meter.labels, strict=True)) | meter.cache_labels
            cache.add_sample(cache.name, labels, 1.0)
        yield finished
        yield cache
        http = CounterMetricFamily(
            self._prefix + "http_requests", "HTTP requests", labels=("method", "route", "status")
        )
        for row, count in self._http.items():
            http.add_metric(row, count)
        yield http
        errors = CounterMetricFamily(
            self._prefix + "http_errors", "errors told, in streams too", labels=("code",)
        )
        for code, count in self._errors.items():
            errors.add_metric((code,), count)
        yield errors
        yield _single(CounterMetricFamily, self._prefix + "http_clients_gone", "left early", self._num_gone)
        yield _single(
            GaugeMetricFamily, self._prefix + "http_requests_active", "being served", self.num_active
        )
        yield _single(GaugeMetricFamily, self._prefix + "startup_time_seconds", "until ready", self.startup_s)


def _single(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, help_text: str, value: float
) -> Metric:
    metric = family(name, help_text, labels=())
    labels: Sequence[str] = ()
    metric.add_metric(labels, value)
    return metric
