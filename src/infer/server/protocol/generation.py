"""The outputs of a job, read from its engines as pieces of one token each.

    Job ──► Request 0 ──► engine ──┐
        └─► Request 1 ──► engine ──┴──► Generation.read() ──► Piece

A generation is closed when its client leaves or its time is up, which aborts the engine's requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from time import perf_counter
from typing import Any, NamedTuple

import msgspec

from infer.dialects.events import TextDelta
from infer.errors import EngineError, EngineStopped, RequestError, RequestTimeout
from infer.finish_reason import FinishReason
from infer.frontend.outputs import OutputBuilder, RequestOutput
from infer.scheduling.request import DraftCounts, StepOutput
from infer.server.protocol.timings import AnswerTimes
from infer.server.protocol.translate import Job
from infer.server.protocol.turns import spelled
from infer.server.state import current_record

PAUSES = (*[False] * 15, True)  # True: yield to the event loop after a frame or an output
MERGE_AHEAD = 64  # outputs of several prompts that are buffered


class Piece(NamedTuple):
    """One token of one output."""

    prompt: int  # index of the prompt within the job
    output: StepOutput
    delta: TextDelta


class Generation:
    """The outputs of one job, read from its engines; closing it aborts the requests that have not ended."""

    def __init__(self, job: Job, spellings: Mapping[str, str]) -> None:
        """Open the streams of a job; errors name its fields by their `spellings`."""
        self.job = job
        self._spellings = spellings
        self.num_output = 0
        self.num_reasoning = 0  # output tokens that are reasoning
        self._begun_at, self._first_at = perf_counter(), 0.0  # 0: no output yet
        self._clients = [job.model.pick(request) for request in job.requests]
        self._builders = [
            OutputBuilder(request, job.model.encoder.tokenizer, text, is_chat=job.is_fresh, form=job.form)
            for request, text in zip(job.requests, job.prompts, strict=True)
        ]
        pairs = zip(self._clients, job.requests, strict=True)
        streams = [client.generate(request) for client, request in pairs]
        self._merged = merge(streams) if len(streams) > 1 else None
        self._first = streams[0]
        self._reader: asyncio.Task[Any] | None = None  # task that waits for an output
        self._is_late = False
        self._timer: asyncio.TimerHandle | None = None  # one for all outputs: a timeout for each is slower
        if job.time_limit_s is not None:
            self._timer = asyncio.get_running_loop().call_later(job.time_limit_s, self._end_in_time)
        self._num_prompt = sum(len(request.prompt) for request in job.requests)
        self._num_cached = [0] * len(job.requests)
        self._num_open = len(job.requests)
        self._drafts: dict[tuple[int, int], DraftCounts] = {}  # drafts by prompt and output, if any
        self._failure: EngineError | None = None
        self._times: AnswerTimes | None = None  # set if the client asked for them

    def keep_times(self) -> None:
        """Record when tokens arrive, for `metrics`."""
        record = current_record()
        self._times = AnswerTimes(perf_counter() if record is None else record.arrived_at)

    @property
    def is_open(self) -> bool:
        """True if an output of a prompt is still pending."""
        return self._num_open > 0

    @property
    def is_taken(self) -> bool:
        """True if the engines have accepted every request."""
        pairs = zip(self._clients, self.job.requests, strict=True)
        return all(client.has_taken(request.request_id) for client, request in pairs)

    async def read(self) -> list[Piece]:
        """Wait for the next output of an engine; returns one piece per token."""
        if self._failure is not None:
            raise self._failure
        where, output = await self._next_output()
        self._first_at = self._first_at or perf_counter()
        builder, request_id = self._builders[where], self.job.requests[where].request_id
        self._num_cached[where] = max(self._num_cached[where], output.num_cached)
        if self._times is not None:
            self._times.take(where, output, perf_counter())
        if output.drafts is not None:
            self._drafts[where, output.index] = output.drafts
        pieces: list[Piece] = []
        parts = (output,) if len(output.token_ids) < 2 else one_token_each(output)
        for part in parts:
            delta, can_stop = builder.take(part)
            if can_stop:
                self._clients[where].abort(request_id, part.index)
            if delta is None:
                continue
            if delta.finish_reason is not None:
                self._failure = _failure_of(delta)
                if self._failure is not None:
                    break
                self._num_open -= builder.is_finished
            self.num_output += len(delta.token_ids)
            self.num_reasoning += delta.num_reasoning
            pieces.append(Piece(where, part, delta))
        if self._failure is not None and not pieces:
            raise self._failure
        return pieces

    async def collect(self, note: Callable[[Piece], object] | None = None) -> list[RequestOutput]:
        """Wait for the complete outputs and return them, prompt by prompt; `note` gets every piece."""
        pauses = itertools.cycle(PAUSES)
        try:
            while self.is_open:
                pieces = await self.read()
                if note is not None:
                    for piece in pieces:
                        note(piece)
                if next(pauses):
                    await asyncio.sleep(0)
        finally:
            await self.aclose()
        answers = [builder.build() for builder in self._builders]
        outputs = [output for answer in answers for output in answer.outputs]
        self.num_output = sum(len(output.token_ids) for output in outputs)
        self.num_reasoning = sum(output.num_reasoning_tokens for output in outputs)
        return answers

    async def aclose(self) -> None:
        """Abort every request that has not ended."""
        if self._timer is not None:
            self._timer.cancel()
        await (self._first if self._merged is None else self._merged).aclose()

    def usage(self, num_output: int | None = None) -> dict[str, Any]:
        """Return the number of tokens so far, in OpenAI's format."""
        num_output = self.num_output if num_output is None else num_output
        usage: dict[str, Any] = {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": num_output,
            "total_tokens": self._num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }
        if self.job.form is not None and self.job.form.think is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        if self._drafts:
            num_kept, num_judged = self._count_drafts()
            usage.setdefault("completion_tokens_details", {}).update(
                accepted_prediction_tokens=num_kept, rejected_prediction_tokens=num_judged - num_kept
            )
        return usage

    def metrics(self) -> dict[str, Any]:
        """Return the times of the output, if requested, and the counts of drafts if there is one output.

        Names and place are vLLM's.
        """
        found: dict[str, Any] = {}
        if self._times is not None:
            found = self._times.to_wire(self.num_output, sum(self._num_cached))
            num_kept, num_judged = self._count_drafts()
            if num_judged:
                found["draft_acceptance_rate"] = round(num_kept / num_judged, 4)
        if self._drafts and len(self.job.requests) * self.job.params.num_sequences == 1:
            found["speculative_decoding"] = self._drafts[0, 0].to_wire()
        return {"metrics": found} if found else {}

    def phases_s(self) -> tuple[float, float]:
        """Return the seconds until the first output, and from there until now."""
        now = perf_counter()
        first_at = self._first_at or now
        return first_at - self._begun_at, now - first_at

    def _count_drafts(self) -> tuple[int, int]:
        """Return the number of accepted drafts, and of all drafts."""
        counts = self._drafts.values()
        return sum(each.num_accepted for each in counts), sum(each.num_drafts for each in counts)

    async def _next_output(self) -> tuple[int, StepOutput]:
        if self._is_late:
            raise self._timeout()
        self._reader = asyncio.current_task()
        try:
            return (0, await anext(self._first)) if self._merged is None else await anext(self._merged)
        except asyncio.CancelledError:
            if self._is_late and self._reader is not None and self._reader.uncancel() == 0:
                raise self._timeout() from None
            raise
        except RequestError as error:
            with spelled(self._spellings):
                raise error.of_prompt("prompt", "messages" if self.job.is_chat else "prompt") from None
        except StopAsyncIteration:
            raise EngineError("the engine ended a request without its last token") from None
        finally:
            self._reader = None

    def _end_in_time(self) -> None:
        """Mark the time as up, and wake the reader, if there is one, so that it raises."""
        self._is_late = True
        if self._reader is not None:
            self._reader.cancel()

    def _timeout(self) -> RequestTimeout:
        return RequestTimeout(
            f"the answer was not complete after {self.job.time_limit_s:g} s; "
            "ask for fewer tokens or allow a longer timeout"
        )


async def merge(
    streams: Sequence[AsyncGenerator[StepOutput, None]],
) -> AsyncGenerator[tuple[int, StepOutput], None]:
    """Merge several streams, each output with the number of its stream; the first error ends all."""
    queue: asyncio.Queue[tuple[int, StepOutput | Exception | None]] = asyncio.Queue(MERGE_AHEAD)

    async def pump(where: int, stream: AsyncGenerator[StepOutput, None]) -> None:
        async with aclosing(stream):
            try:
                async for output in stream:
                    await queue.put((where, output))
            except Exception as error:  # raised again by the merged stream
                await queue.put((where, error))
            else:
                await queue.put((where, None))

    tasks = [asyncio.create_task(pump(where, stream)) for where, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            where, message = await queue.get()
            if message is None:
                num_open -= 1
            elif isinstance(message, RequestError):
                raise message.of_prompt(f"prompt {where}", "prompt")
            elif isinstance(message, Exception):
                raise message
            else:
                yield where, message
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def one_token_each(output: StepOutput) -> Iterator[StepOutput]:
    """Split an output into one per token: a step may make several, and clients count a frame as one."""
    last = len(output.token_ids) - 1
    for i, token_id in enumerate(output.token_ids):
        yield msgspec.structs.replace(
            output,
            token_ids=(token_id,),
            logprobs=output.logprobs[i : i + 1],
            finish_reason=output.finish_reason if i == last else None,
            stop_reason=output.stop_reason if i == last else None,
            prompt_logprobs=output.prompt_logprobs if i == 0 else None,
        )


def _failure_of(delta: TextDelta) -> EngineError | None:
    if delta.finish_reason == FinishReason.ERROR:
        return EngineError(delta.error or "the engine could not finish this request")
    if delta.finish_reason == FinishReason.ABORT:
        return EngineStopped("the request was aborted before its end")
    return None
