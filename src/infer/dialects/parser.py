"""Read an answer while it is written: pieces of text in, events out.

    "<think>hm</think>Let me see.⏎<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>"

    ReasoningDelta("hm")  ContentDelta("Let me see.")  CallStart(0, "call_…", "f")  CallDelta(0, '{"a": 1}')

The parser is a coroutine that reads with a `Cursor` and tells an `AnswerWriter` what it found; each notation
of calls has its own coroutine (notations/). Only the beginning of a marker, blanks that may belong to markup,
and a call whose name is not known yet are held back. After the name, arguments are passed on as they come.

Markup that turns out not to be a call is text, and nothing is lost: a marker with something else after it, an
object without a name, an unmarked object that names no known tool. Once a call has begun, its arguments are
passed on as written, even if they are not JSON, for the caller to see.

A call that was cut off is not text: neither a call that a limit or a stop string has cut before its name, nor
anything incomplete if calls are forced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from infer.dialects.cursor import Cursor, NotACall, Reader
from infer.dialects.events import AnswerEvent
from infer.dialects.notations.gemma_calls import read_gemma
from infer.dialects.notations.harmony import read_messages
from infer.dialects.notations.json_calls import read_json, read_named
from infer.dialects.notations.python_calls import read_python
from infer.dialects.notations.xml_calls import read_keyed, read_xml
from infer.dialects.table import Dialect
from infer.dialects.writer import AnswerWriter, new_call_id

if TYPE_CHECKING:
    from infer.dialects.answer import AnswerFormat

# reads the calls after a marker, or with the marker "" at the start of an answer, and raises `NotACall`
CallReader = Callable[[Cursor, AnswerWriter, Dialect, str], Reader[None]]
READERS: Mapping[str, CallReader] = {
    "json": read_json, "named": read_named, "xml": read_xml, "keyed": read_keyed, "pythonic": read_python,
    "gemma": read_gemma,
}  # fmt: skip


class AnswerParser:
    """Reads one answer. Not thread-safe: it belongs to the reader of the sequence."""

    def __init__(self, form: AnswerFormat, new_id: Callable[[], str] | None = None) -> None:
        dialect = form.dialect
        new_id = new_id or (lambda: new_call_id(is_short=dialect is not None and dialect.has_short_ids))
        self._form = form
        self._text = Cursor()
        self._out = AnswerWriter(form, self._text, new_id)
        self._run = self._answer()
        self._is_running = True
        self._send(None)

    def push(self, piece: str) -> list[AnswerEvent]:
        """Add a piece; returns the events that are certain now."""
        if not self._text.skim(piece):
            for char in piece:
                self._send(char)
        return self._out.take()

    def finish(self, *, is_cut: bool = False) -> list[AnswerEvent]:
        """Return the events held back: the answer has ended, or was cut by a limit or a stop string."""
        self._text.is_cut = is_cut
        self._send("")
        return self._out.take()

    @property
    def is_reasoning(self) -> bool:
        """True inside of reasoning."""
        return self._out.is_reasoning

    @property
    def is_hidden(self) -> bool:
        """True in reasoning or a header: neither is shown in the answer, so stop strings do not apply."""
        return self._out.is_reasoning or self._out.is_header

    @property
    def is_done(self) -> bool:
        """True at the most calls allowed: the rest of the answer is not read."""
        return self._out.is_done

    def _send(self, char: str | None) -> None:
        if self._is_running:
            try:
                self._run.send(char)  # type: ignore[arg-type]
            except StopIteration:
                self._is_running = False

    def _answer(self) -> Reader[None]:
        text, out, dialect = self._text, self._out, self._form.dialect
        if dialect is not None and dialect.form == "harmony":
            yield from read_messages(text, out, self._form)
        else:
            yield from self._read_reasoning(dialect.begins if dialect is not None else ())
            yield from self._read_text_and_calls(dialect)
        if text.has_ended:
            out.finish()

    def _read_reasoning(self, calls: tuple[str, ...]) -> Reader[None]:
        """Read reasoning, if the answer begins with it, up to its end or the marker of a call."""
        text, out, think = self._text, self._out, self._form.think
        if think is None:
            return
        if out.is_reasoning or (yield from text.begins_with(think.begin)):
            out.is_reasoning = True
            out.pass_markup()
            marker = yield from out.read_prose((think.end, *calls))
            out.is_reasoning = not marker
            out.begin_text()
            text.unread(marker if marker in calls else "")  # a call in the middle of reasoning ends it
            text.mark()

    def _read_text_and_calls(self, dialect: Dialect | None) -> Reader[None]:
        text, out, think = self._text, self._out, self._form.think
        begins = dialect.begins if dialect is not None else ()
        ends: tuple[str, ...] = ()
        if think is not None and think.wrap is not None and (yield from text.begins_with(think.wrap[0])):
            ends = think.wrap[1:]
            out.pass_markup()
        if dialect is not None and dialect.is_bare:
            yield from self._read_calls(dialect, "")
        while not out.is_done and (marker := (yield from out.read_prose((*begins, *ends)))):
            if marker in ends:
                out.end_text()
                ends = ()
            elif dialect is not None:
                yield from self._read_calls(dialect, marker)

    def _read_calls(self, dialect: Dialect, marker: str) -> Reader[None]:
        """Read the calls after a marker, or at the start of an answer; anything else becomes text."""
        text, out = self._text, self._out
        try:
            yield from READERS[dialect.form](text, out, dialect, marker)
            if marker and dialect.end and not out.is_done:
                yield from text.close(dialect.end)
            text.mark()
        except NotACall:
            said = text.since_mark
            out.end_call()
            if text.has_ended and (self._form.is_forced or (text.is_cut and marker)):
                text.take_rest()
                out.pass_markup()
            else:
                out.say(said)
