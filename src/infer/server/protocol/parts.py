"""An answer as parts, for APIs whose answers are lists: blocks of `/v1/messages`, items of `/v1/responses`.

    ReasoningDelta ReasoningDelta ContentDelta CallStart CallDelta CallDelta       events of the answer
    └──────── reasoning ────────┘ └── text ──┘ └────────── call ─────────┘        parts

A part ends where an event of another kind, or another call, begins. A stream opens a part, adds to it and
closes it; a whole answer is the same parts, closed.

Logprobs belong to tokens, and events have none: a token that may begin a marker is held back, and a marker
has no event. So the rows of tokens wait until a text comes, which takes the last ones that make it up.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from infer.dialects.events import (
    AnswerEvent,
    CallDelta,
    CallStart,
    ContentDelta,
    ReasoningDelta,
    TextDelta,
    read_arguments,
)
from infer.finish_reason import FinishReason
from infer.frontend.outputs import CompletionOutput, RequestOutput
from infer.sampling.params import RowLogprobs
from infer.server.protocol.generation import Generation, Piece
from infer.server.protocol.schemas import AskingBody
from infer.server.protocol.stream import FrameWriter
from infer.tokenizer.tokenizer import Tokenizer

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class Part:
    """A stretch of an answer: reasoning, text, or a tool call, whose text is its arguments."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    rows: list[RowLogprobs] = field(default_factory=list)  # logprobs of a text's tokens, if asked for

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The arguments of a call as an object that can be written; None: the call was cut short.

        Integers of more than 64 bits become floats; with one too large for a float there is no object.
        """
        found = read_arguments(self.text)
        with suppress(ValueError):
            return None if found is None else orjson.loads(json.dumps(found))
        return None


def events_of(answer: TextDelta | CompletionOutput) -> Sequence[AnswerEvent]:
    """The events of a piece or of a whole answer; one without a format is text."""
    return answer.events or ([ContentDelta(answer.text)] if answer.text else ())


def gather(output: CompletionOutput) -> list[Part]:
    """The parts of a whole answer; one that says nothing has an empty text."""
    parts: list[Part] = []
    for event in events_of(output):
        place(event, parts)
    return parts or [Part("text", 0)]


def place(event: AnswerEvent, parts: list[Part]) -> tuple[Part, str]:
    """Add an event to the last part, or begin another; returns the part and the text that is new in it."""
    match event:
        case CallStart(call_id=call_id, name=name):
            parts.append(Part("call", len(parts), call_id, name))
            return parts[-1], ""
        case CallDelta(arguments=text):
            kind: Kind = "call"
        case ReasoningDelta(text=text):
            kind = "reasoning"
        case ContentDelta(text=text):
            kind = "text"
    if not parts or parts[-1].kind != kind:
        parts.append(Part(kind, len(parts)))
    parts[-1].pieces.append(text)
    return parts[-1], text


class PartWriter(FrameWriter):
    """An answer of parts; in a stream, named events open, fill and close them."""

    def __init__(self, generation: Generation, body: AskingBody) -> None:
        super().__init__(generation, body)
        self.parts: list[Part] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None  # the stop string or stop token that ended it
        self._has_begun = False
        self._rows: list[RowLogprobs] = []  # logprobs of tokens whose text is still to come

    def begin(self) -> list[bytes]:
        """The frames before the first part."""
        return []

    def open(self, part: Part) -> list[bytes]:
        """The frames that begin a part."""
        return []

    @abstractmethod
    def add(self, part: Part, text: str) -> bytes:
        """The frame of more text of a part; empty where it is sent with the end of the part."""

    @abstractmethod
    def close(self, part: Part) -> list[bytes]:
        """The frames that end a part."""

    @abstractmethod
    def finish(self) -> list[bytes]:
        """The frames after the last part."""

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The answer, made of its parts and the reason why it ended."""

    def whole(self, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        output = answers[0].outputs[0]
        if self.note is None:
            self.parts = gather(output)
        self.parts = self.parts or [Part("text", 0)]
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        return self.body()

    def frames(self, piece: Piece) -> list[bytes]:
        """The frames that a piece adds to the answer."""
        frames: list[bytes] = [] if self._has_begun else self.begin()
        self._has_begun = True
        num_parts = len(self.parts)
        for part, text in self.take(piece):
            if len(self.parts) > num_parts:
                frames += (self.close(self.parts[-2]) if num_parts else []) + self.open(part)
                num_parts += 1
            if text and (frame := self.add(part, text)):
                frames.append(frame)
        self.finish_reason, self.stop_reason = piece.delta.finish_reason, piece.delta.stop_reason
        return frames

    def take(self, piece: Piece) -> Iterator[tuple[Part, str]]:
        """Add a piece to the parts; yields each part that it adds to, with the text that is new in it."""
        tokenizer = self.generation.job.model.encoder.tokenizer if piece.delta.logprobs else None
        rows = []
        if tokenizer is not None:
            rows = [row for row in piece.delta.logprobs if row.token_id not in tokenizer.special_ids]
            self._rows += rows
        for event in events_of(piece.delta):
            part, text = place(event, self.parts)
            if part.kind != "text":
                self._rows = rows
            elif tokenizer is not None:
                part.rows += covering(tokenizer, self._rows, text)
                rows = self._rows = []
            yield part, text

    def end(self) -> list[bytes]:
        """The end of the last part and of the answer; one that says nothing has an empty text."""
        frames: list[bytes] = []
        if not self.parts:
            self.parts.append(Part("text", 0))
            frames += self.open(self.parts[0])
        return frames + self.close(self.parts[-1]) + self.finish()


def covering(tokenizer: Tokenizer, rows: Sequence[RowLogprobs], text: str) -> Sequence[RowLogprobs]:
    """The last rows, as far as their tokens make up a text; those before them belong to markup."""
    num_missing, first = len(text.encode()), len(rows)
    while first and num_missing > 0:
        first -= 1
        token_id = rows[first].token_id
        num_missing -= len(tokenizer.token_bytes(token_id)) if token_id < tokenizer.vocab_size else 0
    return rows[first:]


def reasoning_tokens(usage: Mapping[str, Any]) -> int:
    """The number of an answer's tokens that are reasoning."""
    return int(usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0))
