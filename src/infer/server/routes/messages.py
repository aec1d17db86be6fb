"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, answered as a chat.

The body becomes a chat (messages_to_chat.py), with the same checks, template and engine. Its answer consists
of blocks:

    message_start, ping
    content_block_start, content_block_delta ..., content_block_stop     each block: thinking, text, tool_use
    message_delta, message_stop                                          the stop reason and the usage
    error                                                                instead of the rest, if it fails

A request whose max_tokens do not fit after its prompt is not rejected, unlike in a chat: agents ask for more
than small models have. Its answer may fill the context, and then ends with the stop reason
model_context_window_exceeded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import orjson
from fastapi import Request, Response
from pydantic import BaseModel

from infer.errors import ContextOverflow
from infer.finish_reason import FinishReason
from infer.server.protocol.messages_to_chat import CountTokensRequest, MessagesRequest, messages_to_chat
from infer.server.protocol.parts import Part, PartWriter, reasoning_tokens
from infer.server.protocol.stream import named_event
from infer.server.protocol.translate import Job, fill_context
from infer.server.protocol.turns import spelled
from infer.server.routes.json_route import answer, json_response, make_router, open_agent


class MessageError(BaseModel):
    """The type and message of an error."""

    type: str
    message: str


class MessageErrorBody(BaseModel):
    """The body of every error of these routes."""

    type: Literal["error"]
    error: MessageError
    request_id: str


router = make_router(MessageErrorBody)

UNSIGNED = "unsigned"  # signature of reasoning, which clients require and send back
DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


@router.post("/v1/messages", response_model=None)
async def create_message(body: MessagesRequest, http: Request) -> Response:
    """Answer a conversation."""
    return await answer(http, body, open_message(body, http), MessageWriter)


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(body: CountTokensRequest, http: Request) -> Response:
    """Return the number of tokens of a conversation's prompt."""
    with spelled(body.spellings):
        job = await _open_agent(http, body)
    return json_response({"input_tokens": len(job.requests[0].prompt)}, body)


async def open_message(body: MessagesRequest, http: Request) -> Job:
    """Return the job of a chat; without its `max_tokens` if that exceeds the rest of the context."""
    job = await _open_agent(http, body)
    num_prompt, context_len = len(job.requests[0].prompt), job.model.encoder.context_len
    if num_prompt >= context_len:
        raise _too_long(num_prompt, context_len)
    return fill_context(job)


async def _open_agent(http: Request, body: CountTokensRequest) -> Job:
    """Return the job of a chat; a prompt that is too long is refused in Anthropic's words."""
    try:
        return await open_agent(http, body, messages_to_chat)
    except ContextOverflow as error:
        raise _too_long(*error.lengths) from None


def _too_long(num_prompt_tokens: int, context_len: int) -> ContextOverflow:
    """Return the error with the words that make agents shorten a conversation."""
    message = f"prompt is too long: {num_prompt_tokens} tokens > {context_len} maximum; shorten the messages"
    return ContextOverflow.in_words(message, param="messages")


class MessageWriter(PartWriter):
    """Anthropic's format: a stream opens, fills and closes blocks between its start and its end."""

    ping = named_event("ping", b'{"type":"ping"}')

    def begin(self) -> list[bytes]:
        """Return the message without content, and the ping that Anthropic sends after it."""
        message = self._message([], {"stop_reason": None, "stop_sequence": None})
        return [_event("message_start", message=message), _event("ping")]

    def open(self, part: Part) -> list[bytes]:
        """Return the event of an empty block."""
        return [_event("content_block_start", index=part.index, content_block=block(part, is_open=True))]

    def add(self, part: Part, text: str) -> bytes:
        """Return the event of a block's next text."""
        kind, key = DELTAS[part.kind]
        return _delta(part, {"type": kind, key: text})

    def close(self, part: Part) -> list[bytes]:
        """Return the end of a block; reasoning is signed first."""
        stop = _event("content_block_stop", index=part.index)
        if part.kind != "reasoning":
            return [stop]
        return [_delta(part, {"type": "signature_delta", "signature": UNSIGNED}), stop]

    def finish(self) -> list[bytes]:
        """Return the events with the stop reason and the usage."""
        metrics = self.generation.metrics()
        ended = _event("message_delta", delta=self._reason(), usage=self._usage(), **metrics)
        return [ended, _event("message_stop")]

    def body(self) -> dict[str, Any]:
        """Return the whole message, without calls that were cut short (arguments that are not an object)."""
        whole = [part for part in self.parts if part.kind != "call" or part.arguments is not None]
        content = [block(part) for part in whole or [Part("text", 0)]]
        return self._message(content, self._reason()) | self.generation.metrics()

    def _message(self, content: list[dict[str, Any]], reason: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": "msg_" + self.generation.job.job_id.rpartition("-")[2],
            "type": "message",
            "role": "assistant",
            "model": self.generation.job.model_name,
            "content": content,
            **reason,
            "usage": self._usage(),
        }

    def _reason(self) -> dict[str, Any]:
        """Return the stop reason, with Anthropic's names."""
        sequence = self.stop_reason if isinstance(self.stop_reason, str) else None
        calls = [part for part in self.parts if part.kind == "call"]
        if self.finish_reason == FinishReason.LENGTH:
            is_full = self.generation.job.params.max_tokens is None  # `fill_context` has lifted the limit
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif calls and calls[-1].arguments is not None:
            reason = "tool_use"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        """Return the usage so far; Anthropic counts cached prompt tokens separately."""
        counts = self.generation.usage()
        num_cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": reasoning_tokens(counts)},
        }


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, orjson.dumps({"type": kind, **fields}))


def _delta(part: Part, delta: dict[str, str]) -> bytes:
    return _event("content_block_delta", index=part.index, delta=delta)


def block(part: Part, *, is_open: bool = False) -> dict[str, Any]:
    """Convert a part of an answer to a block; with `is_open`, an empty one."""
    text = "" if is_open else part.text
    match part.kind:
        case "text":
            return {"type": "text", "text": text}  # no citations: some clients reject a null there
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": "" if is_open else UNSIGNED}
        case "call":
            given = {} if is_open else part.arguments
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": given}
