"""`POST /v1/chat/completions`: answer a conversation.

The model's chat template turns messages and tools into a prompt. After that, a chat is a completion whose
frames are called deltas. The first frame of every choice has the role, the last one the finish reason.

An answer that may have reasoning or tool calls has a format (`Job.form`), and its pieces have events:

    ReasoningDelta   delta: {"reasoning_content": …, "reasoning": …}     clients read one name or the other
    ContentDelta     delta: {"content": …}
    CallStart        delta: {"tool_calls": [{"index", "id", "type", "function": {"name", "arguments": ""}}]}
    CallDelta        delta: {"tool_calls": [{"index", "function": {"arguments": …}}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import Request, Response

from infer.dialects.events import AnswerEvent, CallDelta, CallStart, ContentDelta, ReasoningDelta
from infer.frontend.outputs import CompletionOutput, RequestOutput
from infer.server.protocol.generation import Generation, Piece
from infer.server.protocol.logprobs import chat_logprobs, prompt_logprobs
from infer.server.protocol.schemas import ChatRequest
from infer.server.protocol.stream import ChunkWriter, job_fields
from infer.server.protocol.translate import open_chat
from infer.server.routes.json_route import answer, make_router, server_state

router = make_router()


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(body: ChatRequest, http: Request) -> Response:
    """Answer a conversation."""
    if body.max_tokens == -1:  # some clients' way to say no limit
        body.max_tokens = None
    return await answer(http, body, open_chat(body, server_state(http)), ChatWriter)


class ChatWriter(ChunkWriter):
    """OpenAI's chat: in a stream, a role for each choice, a frame per token, usage on request, [DONE]."""

    kind, opening, closing = "chat.completion.chunk", b'"delta":{"content":', b"}"
    prompt_in_choice = False

    def __init__(self, generation: Generation, body: ChatRequest) -> None:
        num_choices = generation.job.params.n
        super().__init__(generation, body, num_choices=num_choices)
        self._tokenizer = generation.job.model.encoder.tokenizer
        self._has_logprobs = bool(body.logprobs)
        self._num_roles = num_choices  # roles that have not been sent
        self._has_form = generation.job.form is not None
        self._shows_reasoning = body.include_reasoning is not False  # True: reasoning is sent

    def frames(self, piece: Piece) -> list[bytes]:
        """Return the frame of one token; before the very first one, also the role of every choice."""
        delta = piece.delta
        logprobs = chat_logprobs(self._tokenizer, delta.logprobs) if self._has_logprobs else None
        if self._has_form:
            frames = self._event_frames(piece, logprobs)
        else:
            frames = [self.token(delta.index, delta, logprobs)]
        if not self._num_roles:
            return frames
        # as in OpenAI's API: null if the answer may be only a tool call
        content = b"null" if self.generation.job.has_tools else b'""'
        role = b'"delta":{"role":"assistant","content":' + content + b"}"
        prompt_ids = self.generation.job.requests[0].prompt
        roles = [
            self.frame(index, role, num_output=0, prompt_ids=None if index else prompt_ids)
            for index in range(self._num_roles)
        ]
        self._num_roles = 0
        return [*roles, *frames]

    def _event_frames(self, piece: Piece, logprobs: Mapping[str, Any] | None) -> list[bytes]:
        """Return a frame for each event, and one for the end; none for a token that is held back."""
        delta, index = piece.delta, piece.delta.index
        inners = []
        for event in delta.events:
            if self._shows_reasoning or not isinstance(event, ReasoningDelta):
                inners.append(b'"delta":' + orjson.dumps(event_delta(event)))
        if not inners and (logprobs is not None or (self.has_ids and delta.finish_reason is None)):
            inners.append(b'"delta":{}')
        frames = []
        ids: Sequence[int] = delta.token_ids
        for inner in inners:
            frames.append(self.frame(index, inner, logprobs, token_ids=ids))
            logprobs, ids = None, ()
        if delta.finish_reason is not None:
            reasons = delta.finish_reason, delta.stop_reason
            frames.append(self.frame(index, b'"delta":{}', None, *reasons, token_ids=ids))
        return frames

    def whole(self, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = [self._choice(output) for output in answers[0].outputs]
        fields = job_fields(self.generation.job, "chat.completion")
        fields |= {"choices": choices, "usage": self.generation.usage()} | self.generation.metrics()
        if (rows := answers[0].prompt_logprobs) is not None:
            ids = answers[0].prompt_token_ids
            fields["prompt_logprobs"] = prompt_logprobs(self._tokenizer, ids, rows)
        if self.has_ids:
            fields["prompt_token_ids"] = answers[0].prompt_token_ids
        return fields

    def _choice(self, output: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        if self._has_form:
            if not output.text and (self.generation.job.has_tools or output.reasoning):
                message["content"] = None
            if output.reasoning and self._shows_reasoning:
                message |= {"reasoning_content": output.reasoning, "reasoning": output.reasoning}
            if output.tool_calls:
                message["tool_calls"] = [call.to_wire() for call in output.tool_calls]
        choice = {
            "index": output.index,
            "message": message,
            "logprobs": None if output.logprobs is None else chat_logprobs(self._tokenizer, output.logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return choice | {"token_ids": output.token_ids} if self.has_ids else choice


def event_delta(event: AnswerEvent) -> dict[str, Any]:
    """Return an event in OpenAI's format."""
    match event:
        case ReasoningDelta(text):
            return {"reasoning_content": text, "reasoning": text}
        case ContentDelta(text):
            return {"content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallDelta(index, arguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
