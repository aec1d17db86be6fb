"""An engine client that measures the requests that pass through it.

Every route reads a request's outputs through this client, so that every request is measured alike. Times run
from the arrival of the HTTP request, where there is one: what a client waits for includes the reading of its
body and the tokenizing.

    reason    how a request ended
    stop      an end-of-text token, a stop token, or a stop string the reader found (it then calls `abort`)
    length    max_tokens or the context was reached
    abort     given up before that: the client left, its time was up, another prompt of its body failed
    error     the engine failed or died

A request that the engine refuses (a prompt that does not fit, a full queue) has not begun, so it is counted
among the HTTP errors alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import perf_counter

from infer.client.client import EngineClient
from infer.engine.stats import EngineStats
from infer.errors import QueueFull, RequestError
from infer.scheduling.request import Request, StepOutput
from infer.server.metrics import EngineMeter, ServerMetrics
from infer.server.state import RequestRecord, current_record


class MeteredClient:
    """An `EngineClient` whose requests are metered."""

    def __init__(
        self, client: EngineClient, model: str, metrics: ServerMetrics, label: str | None = None
    ) -> None:
        self._client = client
        self._open: dict[str, _RequestTimes] = {}  # by request id
        self.meter = metrics.add(model, self, label)

    async def generate(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        """Yield the outputs of a request and measure them; its end is counted, however it comes."""
        record = current_record() or RequestRecord(request_id="", arrived_at=perf_counter())
        times = self._open[request.request_id] = _RequestTimes(request, record, self.meter)
        try:
            async with aclosing(self._client.generate(request)) as outputs:
                async for output in outputs:
                    times.take(output)
                    yield output
        except (RequestError, QueueFull):
            times.is_refused = True
            raise
        except Exception:
            times.has_failed = True
            raise
        finally:
            if self._open.get(request.request_id) is times:  # an id may be in use twice: one is refused
                del self._open[request.request_id]
            times.finish()

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sequence of it, before the next step; it counts as stopped."""
        if (times := self._open.get(request_id)) is not None:
            times.stop(index)
        self._client.abort(request_id, index)

    def stats(self) -> EngineStats:
        """Return the engine's last snapshot of itself."""
        return self._client.stats()

    def check_health(self) -> None:
        """Raise `EngineStopped` if the engine is dead, or `EngineError` if it is stuck; else return."""
        self._client.check_health()

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns how many blocks were forgotten."""
        return await self._client.reset_prefix_cache()

    async def close(self) -> None:
        """Stop the engine; open requests get `EngineStopped`."""
        await self._client.close()


class _RequestTimes:
    """The times of one request, written to the meter token by token and at the end."""

    def __init__(self, request: Request, record: RequestRecord, meter: EngineMeter) -> None:
        self._request = request
        self._record = record
        self._meter = meter
        self._submitted_at = perf_counter()
        record.mark("submit", self._submitted_at)
        self._last_at: dict[int, float] = {}  # by sequence
        self._first_at: float | None = None
        self._queue_s = 0.0
        self._num_tokens: Counter[int] = Counter()  # by sequence
        self._open = set(range(request.params.num_reported))
        self._stopped: set[int] = set()  # sequences that met a stop string
        self._reason: str | None = None
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
                self._meter.observe("inter_token_latency_seconds", now - before)
            self._last_at[output.index] = now
            self._num_tokens[output.index] += count
            self._meter.counts["generation_tokens"] += count
        if output.embedding:
            self._mark_stages(now, output)
            self._count_prompt(output)
        if output.finish_reason is not None:
            self._open.discard(output.index)
            is_stop = output.finish_reason == "abort" and output.index in self._stopped
            self._reason = "stop" if is_stop else output.finish_reason

    def stop(self, index: int | None) -> None:
        """Count a sequence, or all, as stopped and not as aborted."""
        self._stopped |= self._open if index is None else {index}

    def _begin(self, now: float, output: StepOutput) -> None:
        self._first_at = now
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

    def _reason_of_end(self) -> str:
        if self.has_failed:
            return "error"
        if not self._open:
            return self._reason or "error"
        return "stop" if self._open <= self._stopped else "abort"

    def finish(self) -> None:
        meter, record, params = self._meter, self._record, self._request.params
        num_tokens = self._num_tokens.total()
        if not self.is_refused:
            meter.finished[self._reason_of_end()] += 1
        record.num_prompt_tokens += len(self._request.prompt)
        record.num_output_tokens += num_tokens
        if self._first_at is None:
            return
        last_at = max(self._last_at.values())
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
