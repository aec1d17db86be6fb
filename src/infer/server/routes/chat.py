"""`POST /v1/chat/completions`: answer a conversation.

The model's chat template turns messages and tools into a prompt; from there on a chat is a completion
whose frames are called deltas. The first frame of every choice says who speaks, the last one why it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response

from infer.frontend.outputs import CompletionOutput, RequestOutput
from infer.server.protocol.generation import Generation
from infer.server.protocol.logprobs import chat_logprobs, count_logprobs
from infer.server.protocol.schemas import ChatRequest
from infer.server.protocol.stream import DONE, ChunkWriter, Frames, data_error, start_stream
from infer.server.protocol.translate import open_chat
from infer.server.routes.json_route import (
    ignored_headers,
    json_response,
    make_router,
    server_state,
    unless_disconnected,
)
from infer.server.threads import off_loop_if_large

router = make_router()


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(body: ChatRequest, http: Request) -> Response:
    """Answer a conversation."""
    job = await open_chat(body, server_state(http))
    generation = Generation(job)
    if not body.stream:
        answers = await unless_disconnected(http.receive, generation.collect())
        content = await off_loop_if_large(count_logprobs(answers), chat_body, generation, answers)
        return json_response(content, body)
    return await start_stream(
        http,
        chat_frames(generation, body),
        on_error=data_error,
        headers=ignored_headers(body),
        time_limit_s=job.time_limit_s,
    )


def chat_body(generation: Generation, answers: Sequence[RequestOutput]) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    job = generation.job
    return {
        "id": job.job_id,
        "object": "chat.completion",
        "created": job.created,
        "model": job.model_name,
        "choices": [_choice(generation, output) for output in answers[0].outputs],
        "usage": generation.usage(),
    }


def _choice(generation: Generation, output: CompletionOutput) -> dict[str, Any]:
    tokenizer = generation.job.model.encoder.tokenizer
    return {
        "index": output.index,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": None if output.logprobs is None else chat_logprobs(tokenizer, output.logprobs),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


async def chat_frames(generation: Generation, body: ChatRequest) -> Frames:
    """OpenAI's chat stream: who speaks, one frame per token, usage where it was asked for, then [DONE]."""
    job, options = generation.job, body.stream_options
    tokenizer = job.model.encoder.tokenizer
    writer = ChunkWriter(
        job_id=job.job_id,
        kind="chat.completion.chunk",
        created=job.created,
        model=job.model_name,
        num_choices=job.params.n,
        opening=b'"delta":{"content":',
        closing=b"}",
    )
    counts_always = options is not None and bool(options.continuous_usage_stats)
    is_plain = not body.logprobs and not counts_always
    has_begun = False
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            delta = piece.delta
            if not has_begun:
                has_begun = True
                for index in range(job.params.n):
                    yield writer.role(index, generation.usage(0) if counts_always else None)
            if is_plain and delta.finish_reason is None:
                yield writer.token(delta.index, delta.text)
                continue
            yield writer.chunk(
                delta.index,
                delta.text,
                logprobs=chat_logprobs(tokenizer, delta.logprobs) if body.logprobs else None,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                usage=generation.usage() if counts_always else None,
            )
    if options is not None and options.include_usage:
        yield writer.usage(generation.usage())
    yield DONE
