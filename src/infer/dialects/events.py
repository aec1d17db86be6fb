"""The parts of an answer, in the order it was written: reasoning, text, tool calls.

A dialect's parser turns pieces of text into these events, whatever the family's notation; each API
(`/v1/chat/completions`, `/v1/messages`, `/v1/responses`), the command line and `LLM.chat` turn the events
into their own form. Joined, the pieces of a call's arguments are one JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from infer.finish_reason import FinishReason
from infer.sampling.params import RowLogprobs

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # name of a function that a model may call


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow."""

    index: int  # number among the answer's calls, from 0
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call's arguments, as JSON text."""

    index: int
    arguments: str


AnswerEvent = ReasoningDelta | ContentDelta | CallStart | CallDelta


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The text and tokens that one step added to one output of a request.

    There is one for every token, so it is a struct, which is faster than a dataclass. The ids of a remote
    server's answer are unknown.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None  # None before the end
    index: int = 0  # number among the request's n outputs
    logprobs: tuple[RowLogprobs, ...] = ()
    error: str | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    events: tuple[AnswerEvent, ...] = ()  # parts of the piece, where the answer has a format
    num_reasoning: int = 0  # tokens of reasoning among its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model asks for."""

    call_id: str
    name: str
    arguments: str  # a JSON object, as the model wrote it

    def to_wire(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


def join_calls(events: Iterable[AnswerEvent]) -> tuple[ToolCall, ...]:
    """The calls of an answer, with their arguments joined.

    Pieces of a call before its start, and a second start, are ignored: other servers may send them.
    """
    calls: dict[int, tuple[CallStart, list[str]]] = {}
    for event in events:
        if isinstance(event, CallStart):
            calls.setdefault(event.index, (event, []))
        elif isinstance(event, CallDelta) and event.index in calls:
            calls[event.index][1].append(event.arguments)
    return tuple(
        ToolCall(call_id=start.call_id, name=start.name, arguments="".join(pieces))
        for start, pieces in calls.values()
    )


def read_arguments(arguments: str) -> dict[str, Any] | None:
    """The arguments of a call as an object; None if they are not one, for example cut.

    Line ends in strings are accepted, which models write and JSON forbids; unpaired surrogates are not.
    """
    try:
        found = json.loads(arguments, strict=False)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
