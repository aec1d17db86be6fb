"""`POST /v1/chat/completions`: answer a conversation.

The model's chat template turns messages and tools into a prompt; from there on a chat is a completion whose
frames are called deltas. The first frame of every choice holds the role, the last one the finish reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from infer.frontend.outputs import CompletionOutput, RequestOutput
from infer.server.protocol.logprobs import chat_logprobs, count_logprobs
from infer.server.protocol.schemas import ChatRequest
from infer.server.protocol.stream import ChunkWriter, EventStream, Generation, Piece, unless_disconnected
from infer.server.protocol.translate import open_chat
from infer.server.routes.json_route import (
    ignored_headers,
    in_thread_if_large,
    json_response,
    make_router,
    server_state,
)

router = make_router()


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(body: ChatRequest, http: Request) -> Response:
    """Answer a conversation."""
    generation = Generation(await open_chat(body, server_state(http)))
    if body.stream:
        return await EventStream.start(
            http, generation, ChatWriter(generation, body), headers=ignored_headers(body)
        )
    answers = await unless_disconnected(http.receive, generation.collect())
    content = await in_thread_if_large(count_logprobs(answers), chat_body, generation, answers)
    return json_response(content, body)


class ChatWriter(ChunkWriter):
    """OpenAI's chat stream: a role for each choice, one frame per token, usage on request, then [DONE]."""

    def __init__(self, generation: Generation, body: ChatRequest) -> None:
        num_choices = generation.job.params.n
        super().__init__(
            generation,
            body,
            kind="chat.completion.chunk",
            num_choices=num_choices,
            opening=b'"delta":{"content":',
            closing=b"}",
        )
        self._tokenizer = generation.job.model.encoder.tokenizer
        self._has_logprobs = bool(body.logprobs)
        self._num_roles = num_choices  # roles that have not been sent

    def frames(self, piece: Piece) -> list[bytes]:
        """The frame of one token; before the first of all, the role of every choice."""
        delta = piece.delta
        logprobs = chat_logprobs(self._tokenizer, delta.logprobs) if self._has_logprobs else None
        frame = self.token(delta.index, delta, logprobs)
        if not self._num_roles:
            return [frame]
        roles, self._num_roles = [self.role(index) for index in range(self._num_roles)], 0
        return [*roles, frame]


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
