"""An output as a list of parts: content blocks of `/v1/messages`, output items of `/v1/responses`.

    ReasoningDelta ReasoningDelta ContentDelta CallStart CallDelta CallDelta       events of the answer
    └──────── reasoning ────────┘ └── text ──┘ └────────── call ─────────┘        parts

A part ends where an event of another kind, or another call, begins. A stream opens a part, adds to it and
closes it; an unstreamed answer has the same parts, closed.

Logprobs belong to tokens, but events have no tokens: a token that may begin a marker is held back, and a
marker has no event. So the rows of tokens are buffered until text arrives: the last rows cover it.
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
    """A part of an output: reasoning, text, or a tool call, whose text is its arguments."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    rows: list[RowLogprobs] = field(default_factory=list)  # logprobs of a text's tokens, if requested

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The arguments of a call as a JSON-serialisable object; None: the call was cut short.

        Integers of more than 64 bits become floats; None if one is too large for a float.
        """
        found = read_arguments(self.text)
        with suppress(ValueError):
            return None if found is None else orjson.loads(json.dumps(found))
        return None


def events_of(answer: TextDelta | CompletionOutput) -> Sequence[AnswerEvent]:
    """Return the events of a piece or of a complete output; one without a format is text."""
    return answer.events or ([ContentDelta(answer.text)] if answer.text else ())


def gather(output: CompletionOutput) -> list[Part]:
    """Return the parts of a complete output; an empty output has one empty text."""
    parts: list[Part] = []
    for event in events_of(output):
        place(event, parts)
    return parts or [Part("text", 0)]


def place(event: AnswerEvent, parts: list[Part]) -> tuple[Part, str]:
    """Add an event to the last part, or begin another; returns the part and its new text."""
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
    """Writes an answer as parts; in a stream, named events open, fill and close them."""

    def __init__(self, generation: Generation, body: AskingBody) -> None:
        super().__init__(generation, body)
        self.parts: list[Part] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None  # stop string or stop token that ended it
        self._has_begun = False
        self._rows: list[RowLogprobs] = []  # logprobs of tokens whose text is pending

    def begin(self) -> list[bytes]:
        """Return the frames before the first part."""
        return []

    def open(self, part: Part) -> list[bytes]:
        """Return the frames that begin a part."""
        return []

    @abstractmethod
    def add(self, part: Part, text: str) -> bytes:
        """Return the frame for more text of a part; empty if the text is sent at the part's end."""

    @abstractmethod
    def close(self, part: Part) -> list[bytes]:
        """Return the frames that end a part."""

    @abstractmethod
    def finish(self) -> list[bytes]:
        """Return the frames after the last part."""

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the answer, from its parts and its finish reason."""

    def whole(self, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        output = answers[0].outputs[0]
        if self.note is None:
            self.parts = gather(output)
        self.parts = self.parts or [Part("text", 0)]
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        return self.body()

    def frames(self, piece: Piece) -> list[bytes]:
        """Return the frames that a piece adds to the answer."""
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
        """Add a piece to the parts; yields each part that grows, with its new text."""
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
        """Return the frames that end the last part and the answer; an empty answer has one empty text."""
        frames: list[bytes] = []
        if not self.parts:
            self.parts.append(Part("text", 0))
            frames += self.open(self.parts[0])
        return frames + self.close(self.parts[-1]) + self.finish()


def covering(tokenizer: Tokenizer, rows: Sequence[RowLogprobs], text: str) -> Sequence[RowLogprobs]:
    """Return the last rows, whose tokens make up a text; earlier rows belong to markup."""
    num_missing, first = len(text.encode()), len(rows)
    while first and num_missing > 0:
        first -= 1
        token_id = rows[first].token_id
        num_missing -= len(tokenizer.token_bytes(token_id)) if token_id < tokenizer.vocab_size else 0
    return rows[first:]


def reasoning_tokens(usage: Mapping[str, Any]) -> int:
    """Return the number of an output's reasoning tokens."""
    return int(usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0))
