"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, as a chat in other words.

    message_start, ping
    content_block_start, content_block_delta ..., content_block_stop     each block: thinking, text, tool_use
    message_delta, message_stop                                          why it ended, and the usage
    error                                                                in place of the rest, if it fails

A request whose max_tokens do not fit behind its prompt is not refused, as it would be in a chat: agents ask
for more than small models have. Its answer may fill the context, and then ends with the reason
model_context_window_exceeded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import orjson
from fastapi import Request, Response
from pydantic import BaseModel

from infer.dialects.events import is_complete
from infer.server.protocol.messages import CountTokensRequest, MessagesRequest, messages_to_chat
from infer.server.protocol.parts import Part, PartWriter, reasoning_tokens
from infer.server.protocol.stream import Generation, named_event
from infer.server.protocol.translate import Job
from infer.server.protocol.turns import spelled
from infer.server.routes.json_route import answer, json_response, make_router, open_agent


class MessageError(BaseModel):
    """What went wrong."""

    type: str
    message: str


class MessageErrorBody(BaseModel):
    """Every error answer of these routes."""

    type: Literal["error"]
    error: MessageError
    request_id: str


router = make_router(MessageErrorBody)

UNSIGNED = "unsigned"  # clients want a signature under reasoning, and send it back; it says nothing here
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
    """The length of a conversation's prompt."""
    with spelled(body.spellings):
        job = await open_agent(http, body, body.messages, messages_to_chat)
    return json_response({"input_tokens": len(job.requests[0].prompt)}, body)


async def open_message(body: MessagesRequest, http: Request) -> Job:
    """The job of a chat, with an answer that may fill the context where it asks for more than that."""
    job = await open_agent(http, body, body.messages, messages_to_chat)
    request, max_tokens = job.requests[0], job.params.max_tokens
    room = job.model.encoder.context_len - len(request.prompt)
    if max_tokens is None or not 0 < room < max_tokens:
        return job
    return replace(job, requests=(replace(request, params=replace(request.params, max_tokens=None)),))


class MessageWriter(PartWriter):
    """Anthropic's form: in a stream, blocks are opened, filled and closed between the start and the end."""

    def __init__(self, generation: Generation, body: MessagesRequest) -> None:
        super().__init__(generation)

    def begin(self) -> list[bytes]:
        """The message without content, and the ping that Anthropic sends behind it."""
        message = self._message([], {"stop_reason": None, "stop_sequence": None})
        return [_event("message_start", message=message), _event("ping")]

    def open(self, part: Part) -> list[bytes]:
        """An empty block."""
        return [_event("content_block_start", index=part.index, content_block=block(part, is_open=True))]

    def add(self, part: Part, text: str) -> bytes:
        """More of a block."""
        kind, key = DELTAS[part.kind]
        return _delta(part, {"type": kind, key: text})

    def close(self, part: Part) -> list[bytes]:
        """The end of a block; reasoning is signed before."""
        stop = _event("content_block_stop", index=part.index)
        if part.kind != "reasoning":
            return [stop]
        return [_delta(part, {"type": "signature_delta", "signature": UNSIGNED}), stop]

    def finish(self) -> list[bytes]:
        """Why the answer ended, and what it cost."""
        ended = _event("message_delta", delta=self._reason(), usage=self._usage())
        return [ended, _event("message_stop")]

    def body(self) -> dict[str, Any]:
        """The whole message; calls that were cut, whose arguments are no object, are left out."""
        whole = [part for part in self.parts if part.kind != "call" or _arguments(part.text) is not None]
        return self._message([block(part) for part in whole or [Part("text", 0)]], self._reason())

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
        """Why the answer ended, in Anthropic's words."""
        sequence = self.stop_reason if isinstance(self.stop_reason, str) else None
        if self.finish_reason == "length":
            is_full = self.generation.job.params.max_tokens is None  # `open_message` has lifted the limit
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif (calls := [part for part in self.parts if part.kind == "call"]) and is_complete(calls[-1].text):
            reason = "tool_use"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        """The tokens so far; Anthropic counts those of the prompt that came from the cache by themselves."""
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
    """A part of an answer as a block; the block of a stream begins empty."""
    text = "" if is_open else part.text
    match part.kind:
        case "text":
            return {"type": "text", "text": text, "citations": None}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": "" if is_open else UNSIGNED}
        case "call":
            given = {} if is_open else _arguments(text)
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": given}


def _arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call as an object; None of a call that was cut short."""
    try:  # models write line ends in strings as they are, which JSON does not allow
        found = orjson.loads(json.dumps(json.loads(text, strict=False)))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
