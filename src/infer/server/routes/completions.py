"""`POST /v1/completions`: continue a text. And `/v1/completions/stream`, the same with named events.

A body may hold several prompts and ask for n outputs of each; the choices of prompt p are p*n ... p*n+n-1.

    event: token    {"text", "id", "index"}        one per token, in order
    event: done     {"finish_reason", "usage", ..}  exactly one of these two
    event: error    {"error": ..}                   ends the stream
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response

from infer.errors import RequestError
from infer.frontend.outputs import CompletionOutput, RequestOutput
from infer.sampling.params import RowLogprobs
from infer.server.protocol.generation import Generation, Piece
from infer.server.protocol.logprobs import CompletionLogprobs, count_logprobs, join
from infer.server.protocol.schemas import CompletionRequest
from infer.server.protocol.stream import (
    DONE,
    ChunkWriter,
    Frames,
    data_error,
    named_error,
    named_event,
    start_stream,
)
from infer.server.protocol.translate import Job, open_completion
from infer.server.routes.json_route import (
    ignored_headers,
    json_response,
    make_router,
    server_state,
    unless_disconnected,
)
from infer.server.threads import off_loop_if_large
from infer.tokenizer.detokenizer import Detokenizer

router = make_router()


@router.post("/v1/completions", response_model=None)
async def create_completion(body: CompletionRequest, http: Request) -> Response:
    """Continue one prompt or several."""
    job = await open_completion(body, server_state(http))
    generation = Generation(job)
    view = CompletionView(job, body)
    if not body.stream:
        answers = await unless_disconnected(http.receive, generation.collect())
        content = await off_loop_if_large(count_logprobs(answers), view.whole, answers, generation)
        return json_response(content, body)
    return await start_stream(
        http,
        completion_frames(generation, view, body),
        on_error=data_error,
        headers=ignored_headers(body),
        time_limit_s=job.time_limit_s,
    )


@router.post("/v1/completions/stream", response_model=None)
async def stream_completion(body: CompletionRequest, http: Request) -> Response:
    """Continue prompts as a stream of named events."""
    if body.stream is False:
        raise RequestError("this route always streams; leave stream out", param="stream")
    if body.echo:
        raise RequestError("this route sends the tokens it makes; leave echo out", param="echo")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise RequestError(
            "this route sends usage once, with its done event; leave continuous_usage_stats out",
            param="stream_options.continuous_usage_stats",
        )
    body.stream = True
    job = await open_completion(body, server_state(http))
    return await start_stream(
        http,
        event_frames(Generation(job), CompletionView(job, body)),
        on_error=named_error,
        headers=ignored_headers(body),
        time_limit_s=job.time_limit_s,
    )


class CompletionView:
    """How a job's outputs look to the client: echoed prompts, logprobs, choice numbers."""

    def __init__(self, job: Job, body: CompletionRequest) -> None:
        self.job = job
        self.echoes = bool(body.echo)
        self.shows_output = body.max_tokens != 0
        self._tokenizer = job.model.encoder.tokenizer
        self._logprobs: list[CompletionLogprobs] | None = None
        if body.logprobs is not None:
            self._logprobs = [
                CompletionLogprobs(self._tokenizer, prompt_ids=() if self.echoes else request.prompt)
                for request in job.requests
                for _ in range(job.params.n)
            ]

    @property
    def num_choices(self) -> int:
        """How many answers the client gets."""
        return len(self.job.requests) * self.job.params.n

    def choice(self, prompt: int, index: int) -> int:
        """The number of a prompt's output among all choices."""
        return prompt * self.job.params.n + index

    def prompt_text(self, prompt: int) -> str:
        """What echo puts in front: the text as given, or that of the ids, up to its last whole character."""
        text = self.job.prompts[prompt]
        if text is not None:
            return text
        return Detokenizer(self._tokenizer).push(self.job.requests[prompt].prompt)

    def prompt_logprobs(
        self, choice: int, prompt: int, rows: Sequence[RowLogprobs | None] | None
    ) -> dict[str, Any] | None:
        """The logprobs of an echoed prompt."""
        if self._logprobs is None:
            return None
        ids = self.job.requests[prompt].prompt
        return self._logprobs[choice].take(ids, rows or [None] * len(ids))

    def logprobs(self, choice: int, ids: Sequence[int], rows: Sequence[RowLogprobs]) -> dict[str, Any] | None:
        """The logprobs of some tokens of an output."""
        return None if self._logprobs is None else self._logprobs[choice].take(ids, rows)

    def whole(self, answers: Sequence[RequestOutput], generation: Generation) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [
            self._whole_choice(prompt, answer, output)
            for prompt, answer in enumerate(answers)
            for output in answer.outputs
        ]
        return {
            "id": self.job.job_id,
            "object": "text_completion",
            "created": self.job.created,
            "model": self.job.model_name,
            "choices": choices,
            "usage": generation.usage() if self.shows_output else generation.usage(0),
        }

    def _whole_choice(self, prompt: int, answer: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        choice = self.choice(prompt, output.index)
        text, logprobs = "", None
        if self.echoes:
            text = self.prompt_text(prompt)
            logprobs = self.prompt_logprobs(choice, prompt, answer.prompt_logprobs)
        if self.shows_output:
            text += output.text
            made = self.logprobs(choice, output.token_ids, output.logprobs or ())
            logprobs = join(logprobs, made) if logprobs is not None and made is not None else made
        return {
            "index": choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason if self.shows_output else "length",
            "stop_reason": output.stop_reason if self.shows_output else None,
        }


async def completion_frames(generation: Generation, view: CompletionView, body: CompletionRequest) -> Frames:
    """OpenAI's stream: one data frame per token, usage where it was asked for, then [DONE]."""
    job, options = view.job, body.stream_options
    writer = ChunkWriter(
        job_id=job.job_id,
        kind="text_completion",
        created=job.created,
        model=job.model_name,
        num_choices=view.num_choices,
        opening=b'"text":',
        closing=b"",
    )
    counts_always = options is not None and bool(options.continuous_usage_stats)
    is_plain = body.logprobs is None and not counts_always
    begun: set[int] = set()
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            delta = piece.delta
            choice = view.choice(piece.prompt, delta.index)
            usage = generation.usage() if counts_always else None
            if view.echoes and choice not in begun:
                begun.add(choice)
                yield await asyncio.to_thread(_echo_frame, writer, view, piece, choice, usage)
            if not view.shows_output:
                continue
            if is_plain and delta.finish_reason is None:
                yield writer.token(choice, delta.text)
                continue
            yield writer.chunk(
                choice,
                delta.text,
                logprobs=view.logprobs(choice, delta.token_ids, delta.logprobs),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                usage=usage,
            )
    if options is not None and options.include_usage:
        yield writer.usage(generation.usage() if view.shows_output else generation.usage(0))
    yield DONE


def _echo_frame(
    writer: ChunkWriter, view: CompletionView, piece: Piece, choice: int, usage: dict[str, Any] | None
) -> bytes:
    """The prompt, in front of the first token of a choice."""
    return writer.chunk(
        choice,
        view.prompt_text(piece.prompt),
        logprobs=view.prompt_logprobs(choice, piece.prompt, piece.output.prompt_logprobs),
        finish_reason=None if view.shows_output else "length",
        usage=usage,
    )


async def event_frames(generation: Generation, view: CompletionView) -> Frames:
    """Named events: a token each, then the end of all."""
    ends: dict[int, dict[str, Any]] = {}
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            delta = piece.delta
            choice = view.choice(piece.prompt, delta.index)
            for token_id in delta.token_ids:
                event: dict[str, Any] = {"text": delta.text, "id": token_id, "index": choice}
                logprobs = view.logprobs(choice, delta.token_ids, delta.logprobs)
                if logprobs is not None and logprobs["token_logprobs"]:
                    event["logprob"] = logprobs["token_logprobs"][0]
                    event["top_logprobs"] = logprobs["top_logprobs"][0] if logprobs["top_logprobs"] else {}
                yield named_event("token", event)
            if delta.finish_reason is not None:
                ends[choice] = {
                    "index": choice,
                    "finish_reason": delta.finish_reason,
                    "stop_reason": delta.stop_reason,
                }
    yield named_event(
        "done",
        {
            "id": view.job.job_id,
            "model": view.job.model_name,
            "finish_reason": ends[0]["finish_reason"],
            "choices": [ends[choice] for choice in sorted(ends)],
            "usage": generation.usage(),
        },
    )
