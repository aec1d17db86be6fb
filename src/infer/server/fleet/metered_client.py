"""An engine client that measures the requests that pass through it.

Every route reads outputs through this client, so that all requests are measured in the same way. Times start
at the arrival of the HTTP request, if there is one, because a client also waits for its body to be read and
tokenized.

    reason    how a request ended
    stop      an end-of-text token, a stop token, or a stop string the reader found (it then calls `abort`)
    length    max_tokens or the context was reached
    abort     ended before that: the client left, its time was up, another prompt of its body failed
    error     the engine failed or died

A request that the engine rejects (a prompt that does not fit, a full queue), or cannot accept because it is
down, has not begun, so it counts only as an HTTP error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from time import perf_counter, time
from typing import Any

from infer.client.client import EngineClient
from infer.config.settings import CacheConfig
from infer.engine.stats import Histogram
from infer.errors import AdapterFailed, EngineError, EngineStopped, QueueFull, RequestError, UnknownModel
from infer.finish_reason import FinishReason
from infer.scheduling.request import Request, StepOutput
from infer.server.explain.served import ServedPart, ServedRequest, add_part, answer_key
from infer.server.state import RequestRecord, Span, current_record

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

# The counters and histograms of requests: one entry here defines the metric and its help text.
COUNTED = {
    "prompt_tokens": "Prompt tokens of requests that began to answer.",
    "prompt_tokens_cached": "Prompt tokens of these requests found in the prefix cache.",
    "generation_tokens": "Tokens that were generated.",
}
MEASURED = {
    "time_to_first_token_seconds": ("Seconds from arrival to the first token.", FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Seconds from one token to the next.", TOKEN_S),
    "request_time_per_output_token_seconds": ("Mean seconds per token after the first.", TOKEN_S),
    "e2e_request_latency_seconds": ("Seconds from arrival to the last token.", REQUEST_S),
    "request_queue_time_seconds": ("Seconds spent waiting for the first step.", REQUEST_S),
    "request_prefill_time_seconds": ("Seconds from the first step to the first token.", REQUEST_S),
    "request_decode_time_seconds": ("Seconds from the first token to the last.", REQUEST_S),
    "request_inference_time_seconds": ("Seconds from the first step to the last token.", REQUEST_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", TOKENS),
    "request_generation_tokens": ("Tokens of all choices of a request.", TOKENS),
    "request_max_num_generation_tokens": ("Tokens of the longest choice of a request.", TOKENS),
    "request_params_n": ("Choices that a request asked for (n).", CHOICES),
    "request_params_max_tokens": ("max_tokens of a request, if given.", TOKENS),
}


class MeteredClient:
    """An `EngineClient` with metrics of its requests; made by `ServerMetrics.add`."""

    def __init__(self, client: EngineClient, labels: tuple[str, str], cache: CacheConfig | None) -> None:
        self.labels = labels  # the model's name, and the engine's number
        self.cache = cache  # the settings of its cache, if they are known
        self.counts: Counter[str] = Counter()  # counters by the names of COUNTED
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in MEASURED.items()}
        self.finished: Counter[str] = Counter()  # ended sequences by reason
        self.is_down = False  # its state at the last check
        self._num_restored = 0  # restarts after which its adapters were reloaded; -1: they must be again
        self.client = client
        self._open: dict[str, _RequestTimes] = {}  # open requests by id
        # methods that are passed through without measuring
        self.has_taken, self.stats, self.close = client.has_taken, client.stats, client.close
        self.reset_prefix_cache, self.set_adapter = client.reset_prefix_cache, client.set_adapter
        self.explain, self.look = client.explain, client.look

    async def generate(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        """Yield the outputs of a request and measure them; its end is counted in every case."""
        record = current_record() or RequestRecord(request_id="", arrived_at=perf_counter())
        times = self._open[request.request_id] = _RequestTimes(request, record, self)
        is_down = isinstance(self.failure, EngineStopped)  # down: accepts no requests, unlike a stuck engine
        try:
            async with aclosing(self.client.generate(request)) as outputs:
                async for output in outputs:
                    times.take(output)
                    yield output
        except Exception as error:
            times.has_failed = True
            times.is_refused = is_down or isinstance(error, RequestError | QueueFull)
            if isinstance(error, AdapterFailed):  # after a restart of its engine
                raise EngineError(
                    f"{error}; the operator can load it again with replace, or unload it"
                ) from None
            if isinstance(error, UnknownModel):  # the name was served a moment ago
                reason = (
                    f"adapter {request.adapter!r} was unloaded, or its engine was just restarted; try again"
                )
                raise EngineStopped(reason) from None
            raise
        finally:
            if self._open.get(request.request_id) is times:  # an id may be in use twice: one is rejected
                del self._open[request.request_id]
            times.finish()

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sequence of it, before the next step; it counts as stopped."""
        if (times := self._open.get(request_id)) is not None:
            times.stop(index)
        self.client.abort(request_id, index)

    @property
    def prefixes(self) -> AbstractSet[int]:
        """The hashes of the engine's cached prefixes."""
        return self.client.prefixes

    @property
    def failure(self) -> EngineError | None:
        """The reason the engine cannot serve; None if it can."""
        return self.client.failure

    @property
    def silent_s(self) -> float:
        """Seconds without progress while there is work to do; 0: none is pending."""
        return self.client.silent_s

    def reload_adapters(self) -> None:
        """Have the adapters reloaded when the engine is up."""
        self._num_restored = -1

    def takes_adapters(self) -> bool:
        """Return True, once, if the engine is up and its adapters must be reloaded: it was restarted."""
        num_restarts = self.stats().num_restarts  # an engine may be back before it was seen to be down
        if self.failure is not None or num_restarts == self._num_restored:
            return False
        self._num_restored = num_restarts
        return True

    def observe(self, name: str, value: float) -> None:
        """Add a value to one of the histograms of MEASURED."""
        self.histograms[name].observe(value)

    def snapshot(self) -> dict[str, Any]:
        """Return the metrics of this engine, as plain data for another process."""
        return {
            "labels": self.labels,
            "counts": dict(self.counts),
            "finished": dict(self.finished),
            "histograms": {name: (mine.counts, mine.total) for name, mine in self.histograms.items()},
        }

    def add(self, snapshot: Mapping[str, Any]) -> None:
        """Add the metrics of another process for the same engine."""
        self.counts.update(snapshot["counts"])
        self.finished.update(snapshot["finished"])
        for name, (counts, total) in snapshot["histograms"].items():
            mine = self.histograms[name]
            mine.counts = [a + b for a, b in zip(mine.counts, counts, strict=True)]
            mine.total += total

    @property
    def cache_labels(self) -> dict[str, str]:
        """The labels of `cache_config_info`, with vLLM's names."""
        stats = self.stats()
        labels = {"block_size": str(stats.block_size), "num_gpu_blocks": str(stats.num_blocks)}
        if self.cache is not None:
            labels["enable_prefix_caching"] = str(self.cache.caches_prefixes)
            labels["kv_cache_backend"] = self.cache.kv_cache_backend
            labels["num_cpu_blocks"] = str(stats.num_host_blocks)
        return labels


class _RequestTimes:
    """The times of one request, reported to the meter at each token and at the end."""

    def __init__(self, request: Request, record: RequestRecord, meter: MeteredClient) -> None:
        self._request = request
        self._record = record
        self._meter = meter
        self._submitted_at = perf_counter()
        record.mark("submit", self._submitted_at)
        self._part = self._begin_story(meter.labels)
        self._longest_gap_s = 0.0
        self._last_at: dict[int, float] = {}  # time of the last token, by sequence
        self._first_at: float | None = None
        self._embedded_at: float | None = None
        self._queue_s = 0.0
        self._num_tokens: Counter[int] = Counter()  # tokens by sequence
        self._open = set(range(request.params.num_reported))
        self._stopped: set[int] = set()  # sequences that ended at a stop string
        self._reason: FinishReason | None = None
        self.has_failed = False
        self.is_refused = False

    def take(self, output: StepOutput) -> None:
        now = perf_counter()
        count = len(output.token_ids)
        if count:
            if self._first_at is None:
                self._begin(now, output)
            before = self._last_at.get(output.index)
            if before is not None:
                gap_s = now - before
                self._meter.observe("inter_token_latency_seconds", gap_s)
                if gap_s > self._longest_gap_s:
                    self._longest_gap_s = gap_s
            self._last_at[output.index] = now
            self._num_tokens[output.index] += count
            self._meter.counts["generation_tokens"] += count
        if output.embedding:
            self._mark_stages(now, output)
            self._count_prompt(output)
            self._queue_s, self._embedded_at = output.queue_s, now
        if output.finish_reason is not None:
            self._open.discard(output.index)
            is_stop = output.finish_reason == FinishReason.ABORT and output.index in self._stopped
            self._reason = FinishReason.STOP if is_stop else output.finish_reason

    def stop(self, index: int | None) -> None:
        """Count a sequence, or all, as stopped and not as aborted."""
        self._stopped |= self._open if index is None else {index}

    def _begin_story(self, labels: tuple[str, str]) -> ServedPart | None:
        """Start the server's part of the request's story, if stories are recorded."""
        record, request = self._record, self._request
        if record.stories is None:
            return None
        if record.story is None:
            record.story = ServedRequest(
                request_id=record.request_id,
                owner=record.owner or "",
                path=record.path,
                arrived_at=record.arrived_at,
                arrived=time() - (self._submitted_at - record.arrived_at),
                key=answer_key(request.request_id),
                marks=[] if record.marks is None else record.marks,
            )
            record.stories.open(record.story)
        return add_part(record.story, request, labels, self._submitted_at)

    def _begin(self, now: float, output: StepOutput) -> None:
        self._first_at = now
        if self._part is not None:
            self._part.first_at = now
        self._queue_s = output.queue_s
        self._mark_stages(now, output)
        self._meter.observe("time_to_first_token_seconds", now - self._record.arrived_at)
        self._count_prompt(output)

    def _mark_stages(self, now: float, output: StepOutput) -> None:
        if output.made_at:
            self._record.mark("to_engine", output.added_at)
            self._record.mark("wait", output.added_at + output.queue_s)
            self._record.mark("compute", output.made_at)
        self._record.mark("from_engine", now)

    def _count_prompt(self, output: StepOutput) -> None:
        self._meter.counts["prompt_tokens"] += len(self._request.prompt)
        self._meter.counts["prompt_tokens_cached"] += output.num_cached
        self._meter.observe("request_queue_time_seconds", output.queue_s)

    def _reason_of_end(self) -> FinishReason:
        if self.has_failed:
            return FinishReason.ERROR
        if not self._open:
            return self._reason or FinishReason.ERROR
        return FinishReason.STOP if self._open <= self._stopped else FinishReason.ABORT

    def _spans(self) -> Iterator[Span]:
        """Yield the stages that the request has reached."""
        facts: dict[str, str | int] = {"infer.request_id": self._request.request_id}
        computed_at = self._first_at or self._embedded_at
        if computed_at is None:
            yield Span("queue", self._submitted_at, perf_counter(), facts)
            return
        begun_at = min(self._submitted_at + self._queue_s, computed_at)
        yield Span("queue", self._submitted_at, begun_at, facts)
        prompt: dict[str, str | int] = {"gen_ai.usage.input_tokens": len(self._request.prompt)}
        yield Span("prefill", begun_at, computed_at, facts | prompt)
        if self._first_at is not None:
            made: dict[str, str | int] = {"gen_ai.usage.output_tokens": self._num_tokens.total()}
            made["gen_ai.response.finish_reason"] = self._reason_of_end()
            yield Span("decode", self._first_at, max(self._last_at.values()), facts | made)

    def finish(self) -> None:
        meter, record, params = self._meter, self._record, self._request.params
        num_tokens = self._num_tokens.total()
        if not self.is_refused:
            meter.finished[self._reason_of_end()] += 1
        record.num_prompt_tokens += len(self._request.prompt)
        record.num_output_tokens += num_tokens
        if self._part is not None:
            self._part.num_tokens, self._part.longest_gap_s = num_tokens, self._longest_gap_s
            self._part.finish_reason = self._reason_of_end()
        if record.spans is not None and not self.is_refused:
            record.spans += self._spans()
        if self._first_at is None:
            return
        last_at = max(self._last_at.values())
        if self._part is not None:
            self._part.last_at = last_at
        prefill_s = max(self._first_at - self._submitted_at - self._queue_s, 0.0)
        meter.observe("e2e_request_latency_seconds", last_at - record.arrived_at)
        meter.observe("request_prefill_time_seconds", prefill_s)
        meter.observe("request_decode_time_seconds", last_at - self._first_at)
        meter.observe("request_inference_time_seconds", prefill_s + last_at - self._first_at)
        per_sequence = num_tokens / len(self._last_at)
        if per_sequence > 1:
            meter.observe(
                "request_time_per_output_token_seconds", (last_at - self._first_at) / (per_sequence - 1)
            )
        meter.observe("request_prompt_tokens", len(self._request.prompt))
        meter.observe("request_generation_tokens", num_tokens)
        meter.observe("request_max_num_generation_tokens", max(self._num_tokens.values()))
        meter.observe("request_params_n", params.n)
        if params.max_tokens is not None:
            meter.observe("request_params_max_tokens", params.max_tokens)
