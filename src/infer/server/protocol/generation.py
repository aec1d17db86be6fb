"""A job on its way: its requests go to engines, what they make comes back as one sequence of pieces.

    Job ──► Request 0 ──► engine ──┐
        └─► Request 1 ──► engine ──┴──► Piece(prompt, token, text) ...  in the order they are made

One piece holds one token, whatever a step made at once. Whoever stops iterating aborts all requests of the
job; so does the time limit, which does not depend on an engine that still answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec

from infer.errors import EngineError, EngineStopped, RequestError, RequestTimeout
from infer.frontend.outputs import OutputBuilder, RequestOutput, TextDelta
from infer.frontend.prompts import blame
from infer.scheduling.request import StepOutput
from infer.server.protocol.translate import Job
from infer.server.threads import Breather

MERGE_AHEAD = 64  # outputs of several prompts read before somebody wants them


class Piece(NamedTuple):
    """One token of one output."""

    prompt: int  # which prompt of the job
    output: StepOutput
    delta: TextDelta


class Generation:
    """The answers to one job, in the making."""

    def __init__(self, job: Job) -> None:
        self.job = job
        tokenizer = job.model.encoder.tokenizer
        self._clients = [job.model.pick(request) for request in job.requests]
        self._builders = [
            OutputBuilder(request, tokenizer, text, is_chat=job.is_chat)
            for request, text in zip(job.requests, job.prompts, strict=True)
        ]
        loop_time = asyncio.get_running_loop().time()
        self._deadline = None if job.time_limit_s is None else loop_time + job.time_limit_s
        self._num_prompt = sum(len(request.prompt) for request in job.requests)
        self._num_cached = [0] * len(job.requests)
        self.num_output = 0

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Every token as it is made; closing the iterator ends the job."""
        num_open = len(self._builders)
        async with aclosing(self._outputs()) as outputs:
            while num_open:
                where, output = await self._next(outputs)
                builder, request_id = self._builders[where], self.job.requests[where].request_id
                self._num_cached[where] = max(self._num_cached[where], output.num_cached)
                for part in one_token_each(output):
                    delta, can_stop = builder.take(part)
                    if can_stop:
                        self._clients[where].abort(request_id, part.index)
                    if delta is None:
                        continue
                    _raise_if_failed(delta)
                    self.num_output += len(delta.token_ids)
                    num_open -= delta.finish_reason is not None and builder.is_finished
                    yield Piece(where, part, delta)

    async def collect(self) -> list[RequestOutput]:
        """The whole answers, prompt by prompt."""
        breather = Breather()
        async with aclosing(self.pieces()) as pieces:
            async for _ in pieces:
                await breather.pause()
        answers = [builder.build() for builder in self._builders]
        self.num_output = sum(len(output.token_ids) for answer in answers for output in answer.outputs)
        return answers

    def usage(self, num_output: int | None = None) -> dict[str, Any]:
        """Tokens so far, in OpenAI's words."""
        num_output = self.num_output if num_output is None else num_output
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": num_output,
            "total_tokens": self._num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }

    async def _next(self, outputs: AsyncGenerator[tuple[int, StepOutput], None]) -> tuple[int, StepOutput]:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await anext(outputs)
        except TimeoutError:
            raise RequestTimeout(
                f"the answer was not complete after {self.job.time_limit_s:g} s; "
                "ask for fewer tokens or allow a longer timeout"
            ) from None
        except RequestError as error:
            raise blame(error, "messages" if self.job.is_chat else "prompt") from None
        except StopAsyncIteration:
            raise EngineError("the engine ended a request without its last token") from None

    def _outputs(self) -> AsyncGenerator[tuple[int, StepOutput], None]:
        streams = [
            client.generate(request) for client, request in zip(self._clients, self.job.requests, strict=True)
        ]
        return _number(streams[0]) if len(streams) == 1 else merge(streams)


async def _number(stream: AsyncGenerator[StepOutput, None]) -> AsyncGenerator[tuple[int, StepOutput], None]:
    async with aclosing(stream):
        async for output in stream:
            yield 0, output


async def merge(
    streams: Sequence[AsyncGenerator[StepOutput, None]],
) -> AsyncGenerator[tuple[int, StepOutput], None]:
    """Several streams as one, each output with the number of its stream; the first error ends all."""
    queue: asyncio.Queue[tuple[int, StepOutput | Exception | None]] = asyncio.Queue(MERGE_AHEAD)

    async def pump(where: int, stream: AsyncGenerator[StepOutput, None]) -> None:
        async with aclosing(stream):
            try:
                async for output in stream:
                    await queue.put((where, output))
            except Exception as error:  # handed to whoever reads the merged stream
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
            elif isinstance(message, Exception):
                raise message
            else:
                yield where, message
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def one_token_each(output: StepOutput) -> Iterator[StepOutput]:
    """A step may make several tokens; clients count a chunk as one."""
    last = len(output.token_ids) - 1
    if last < 1:
        yield output
        return
    for i, token_id in enumerate(output.token_ids):
        yield msgspec.structs.replace(
            output,
            token_ids=(token_id,),
            logprobs=output.logprobs[i : i + 1],
            finish_reason=output.finish_reason if i == last else None,
            stop_reason=output.stop_reason if i == last else None,
            prompt_logprobs=output.prompt_logprobs if i == 0 else None,
        )


def _raise_if_failed(delta: TextDelta) -> None:
    if delta.finish_reason == "error":
        raise EngineError(delta.error or "the engine could not finish this request")
    if delta.finish_reason == "abort":
        raise EngineStopped("the request was aborted before its end")
