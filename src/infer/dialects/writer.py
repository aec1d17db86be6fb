"""The events of one answer, written while it is read."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from infer.dialects.cursor import NAME, Cursor, NotACall, Reader
from infer.dialects.events import AnswerEvent, CallDelta, CallStart, ContentDelta, ReasoningDelta

if TYPE_CHECKING:
    from infer.dialects.answer import AnswerFormat

_ALPHABET = string.ascii_letters + string.digits


def new_call_id(*, is_short: bool) -> str:
    """A new id for a tool call: `call_` and 24 hex digits, or 9 letters and digits for Mistral."""
    return (
        "".join(secrets.choice(_ALPHABET) for _ in range(9)) if is_short else f"call_{secrets.token_hex(12)}"
    )


class AnswerWriter:
    """Joins pieces of text, reasoning and calls to events; moves the cursor's mark past what was a call."""

    def __init__(self, form: AnswerFormat, text: Cursor, new_id: Callable[[], str]) -> None:
        self._form, self._text, self._new_id = form, text, new_id
        allowed = form.allowed  # a call of another tool is text if it has no marker
        self.tools = {tool.name: tool for tool in form.tools if allowed is None or tool.name in allowed}
        self._out: list[tuple[type[AnswerEvent], int, list[str]]] = []  # kind, call, text in pieces
        self._blank = ""  # blanks that are dropped if markup follows
        self._is_edge = False  # True after markup, to which the next blanks belong
        self._num_calls = 0
        self.has_text = False
        self.in_call = False  # True: text is part of a call's arguments
        self.is_header = False  # True: the header of the next message is being read
        self.is_reasoning = form.in_reasoning
        self.is_done = False  # True at the most calls allowed: the rest is not read

    def take(self) -> list[AnswerEvent]:
        """Return the events so far and drop them."""
        events: list[AnswerEvent] = []
        for kind, index, parts in self._out:
            if kind is CallStart:
                events.append(CallStart(index, *parts))
            elif text := "".join(parts):
                events.append(CallDelta(index, text) if kind is CallDelta else kind(text))  # type: ignore[call-arg, arg-type]
        self._out.clear()
        return events

    def _emit(self, kind: type[AnswerEvent], index: int, text: str) -> None:
        if self._out and self._out[-1][:2] == (kind, index):
            self._out[-1][2].append(text)
        else:
            self._out.append((kind, index, [text]))

    # -- text ----------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Add text of the answer or the reasoning; blanks wait until it is clear that more text follows."""
        if text.isspace():
            self._blank += text
            return
        text = self._blank + text
        said = text.rstrip()
        self._blank = text[len(said) :]
        if said:
            kind: type[AnswerEvent] = ReasoningDelta if self.is_reasoning else ContentDelta
            kind, index = (CallDelta, self._num_calls - 1) if self.in_call else (kind, 0)
            self._emit(kind, index, said if self.has_text or not self._is_edge else said.lstrip())
            self.has_text, self._is_edge = True, False

    def read_prose(self, markers: Iterable[str]) -> Reader[str]:
        """Read text of the answer; returns the marker that ends it, or nothing at the end."""
        marker = yield from self._text.until(markers, self.say)
        rest = "" if marker else self._text.take_rest()
        if self.is_reasoning or not self._form.is_forced:
            self.say(rest)
        self._text.mark(marker)
        return marker

    def begin_text(self, blank: str = "") -> None:
        """Begin another part of the answer, separated by a blank from the text before it."""
        self._blank, self._is_edge, self.has_text = blank, not blank, False

    def end_text(self) -> None:
        """Drop the blanks around the markup that ends a part of the answer."""
        self._blank, self._is_edge = "", True

    def pass_markup(self) -> None:
        """Let the next blanks belong to the markup that was read."""
        self._is_edge = True
        self._text.mark()

    def finish(self) -> None:
        """Add the blanks at the end of the answer, unless they belong to markup."""
        if not self._is_edge and not self._form.is_forced:
            self._emit(ContentDelta, 0, self._blank)

    # -- calls ---------------------------------------------------------------------------------------

    def known(self, name: Any, *, is_bare: bool) -> str:
        """The name of a call, checked; without a marker it must be the name of a tool."""
        if not isinstance(name, str) or not NAME.fullmatch(name) or (is_bare and name not in self.tools):
            raise NotACall
        return name

    def start(self, name: str) -> None:
        """Begin a call."""
        self._out.append((CallStart, self._num_calls, [self._new_id(), name]))
        self._num_calls += 1
        self.pass_markup()

    def argue(self, text: str) -> None:
        """Add text to the arguments of the call."""
        self._emit(CallDelta, self._num_calls - 1, text)

    def argue_string(self, text: str) -> None:
        """Add text to a string of the arguments."""
        self.argue(json.dumps(text, ensure_ascii=False)[1:-1])

    def end_call(self) -> None:
        """End a call, and the answer with the last one allowed."""
        self._text.mark()
        self.is_done = self._num_calls == self._form.max_calls
