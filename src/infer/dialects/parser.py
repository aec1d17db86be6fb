"""Read an answer while it is written: pieces of text in, events out.

    "<think>hm</think>Let me see.⏎<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>"

    ReasoningDelta("hm")  ContentDelta("Let me see.")  CallStart(0, "call_…", "f")  CallDelta(0, '{"a": 1}')

The parser is a coroutine that takes one character at a time, so it does not matter where pieces are cut. It
holds back only the beginning of a marker, blanks that may belong to markup, and a call until its name is
known. After the name, arguments are passed on as they come.

Markup that turns out not to be a call is text, and nothing is lost: a marker with something else after it, an
object without a name, an unmarked object that names no known tool. Once a call has begun, its arguments are
passed on as written, even if they are not JSON, for the caller to see.

A call that was cut off is not text: neither a call that a limit or a stop string has cut before its name, nor
anything incomplete if calls are forced.

Arguments in another notation than JSON are converted: an XML parameter when it is complete (text as it
comes), a Python call when it is complete.

Harmony is different: the whole answer consists of messages, and the header of each gives the kind of its
text.

    <|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>

Models sometimes write broken headers. Known words are removed from a header, other words are text, and text
without a header is the answer; markers are never shown.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from infer.dialects.events import AnswerEvent, CallDelta, CallStart, ContentDelta, ReasoningDelta
from infer.dialects.table import GEMMA_QUOTE, HARMONY_MARKERS, KEYED_MARKERS
from infer.dialects.values import is_text, python_call, read_value, whole_characters

if TYPE_CHECKING:
    from infer.dialects.answer import AnswerFormat

T = TypeVar("T")
Reader = Generator[None, str, T]  # receives characters, an empty string at the end; returns T

ARGUMENT_KEYS = ("arguments", "parameters")
NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
KEY = re.compile(r"[^<>\n]{1,256}")  # the name of a parameter, which JSON does not restrict
JSON, PYTHON = ("{[", "}]", '"'), ("([{", ")]}", "\"'")  # opening brackets, closing brackets, quotes
HEADER = re.compile(r" ?[\w.:/=-]{0,160}( [\w.:/=-]{0,160}){0,2} ?", re.ASCII)  # words between markers
HEADER_WORD = re.compile(r" ?(to=(?P<recipient>\S*)|(?P<channel>analysis|commentary|final)|assistant)(?= |$)")
MAX_DEPTH = 64  # nested objects and lists of a Gemma call
_ALPHABET = string.ascii_letters + string.digits


class _NotACall(Exception):
    """The text since the last marker is not a call."""


def new_call_id(*, is_short: bool) -> str:
    """A new id for a tool call: `call_` and 24 hex digits, or 9 letters and digits for Mistral."""
    return (
        "".join(secrets.choice(_ALPHABET) for _ in range(9)) if is_short else f"call_{secrets.token_hex(12)}"
    )


class _Nesting:
    """Counts the depth of brackets and quotes in a text that comes character by character."""

    def __init__(self, opening: str, closing: str, quotes: str, *, begun: str) -> None:
        self._opening, self._closing, self._quotes = opening, closing, quotes
        self._depth = 0
        self._is_escaped = False
        self.quote = ""  # the open quote
        self.add(begun)

    @property
    def is_open(self) -> bool:
        return self._depth > 0 or self.quote != ""

    def add(self, char: str) -> None:
        if self.quote:
            if char == self.quote and not self._is_escaped:
                self.quote = ""
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char in self._quotes:
            self.quote = char
        else:
            self._depth += (char in self._opening) - (char in self._closing)


class AnswerParser:
    """Reads one answer. Not thread-safe: it belongs to the reader of the sequence."""

    def __init__(self, form: AnswerFormat, new_id: Callable[[], str] | None = None) -> None:
        dialect = form.dialect
        self._new_id = new_id or (lambda: new_call_id(is_short=dialect is not None and dialect.has_short_ids))
        self._form = form
        self._dialect = dialect
        allowed = form.allowed  # a call of another tool is text if it has no marker
        self._tools = {tool.name: tool for tool in form.tools if allowed is None or tool.name in allowed}
        self._out: list[tuple[type[AnswerEvent], int, list[str]]] = []  # kind, call, text in pieces
        self._ahead: list[str] = []  # characters to read again, the next one last
        self._raw: list[str] = []  # characters read since the last marker
        self._blank = ""  # blanks that are dropped if markup follows
        self._is_edge = False  # True after markup, to which the next blanks belong
        self._has_text = False
        self._num_calls = 0
        self._has_ended = False
        self._is_cut = False  # True if the answer did not end by itself
        self._skim: tuple[frozenset[str], Callable[[str], None]] | None = None  # set while `_until` waits
        self._in_call = False  # True: text is part of a call's arguments
        self._is_header = False  # True: the header of the next message is being read
        self.is_reasoning = form.in_reasoning
        self.is_done = False  # True at the most calls allowed: the rest is not read
        self._run = self._answer()
        self._is_running = True
        self._send(None)

    def push(self, text: str) -> list[AnswerEvent]:
        """Add a piece; returns the events that are certain now."""
        if self._skim is not None and self._skim[0].isdisjoint(text):
            self._skim[1](text)  # most pieces cannot begin an end
        else:
            for char in text:
                self._send(char)
        return self._take()

    def finish(self, *, is_cut: bool = False) -> list[AnswerEvent]:
        """Return the events held back: the answer has ended, or was cut by a limit or a stop string."""
        self._is_cut = is_cut
        self._send("")
        return self._take()

    @property
    def is_hidden(self) -> bool:
        """True in reasoning or a header: neither is shown in the answer, so stop strings do not apply."""
        return self.is_reasoning or self._is_header

    def _send(self, char: str | None) -> None:
        if self._is_running:
            try:
                self._run.send(char)  # type: ignore[arg-type]
            except StopIteration:
                self._is_running = False

    def _take(self) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        for kind, index, parts in self._out:
            if kind is CallStart:
                events.append(CallStart(index, *parts))
            elif text := "".join(parts):
                events.append(CallDelta(index, text) if kind is CallDelta else kind(text))  # type: ignore[call-arg, arg-type]
        self._out.clear()
        return events

    # -- output --------------------------------------------------------------------------------------

    def _emit(self, kind: type[AnswerEvent], index: int, text: str) -> None:
        if self._out and self._out[-1][:2] == (kind, index):
            self._out[-1][2].append(text)
        else:
            self._out.append((kind, index, [text]))

    def _say(self, text: str) -> None:
        """Text of the answer, or of the reasoning; blanks wait until it is clear that more text follows."""
        if text.isspace():
            self._blank += text
            return
        text = self._blank + text
        said = text.rstrip()
        self._blank = text[len(said) :]
        if said:
            kind: type[AnswerEvent] = ReasoningDelta if self.is_reasoning else ContentDelta
            kind, index = (CallDelta, self._num_calls - 1) if self._in_call else (kind, 0)
            self._emit(kind, index, said if self._has_text or not self._is_edge else said.lstrip())
            self._has_text, self._is_edge = True, False

    def _pass_markup(self) -> None:
        self._is_edge = True
        self._raw.clear()

    def _start(self, name: str) -> None:
        self._out.append((CallStart, self._num_calls, [self._new_id(), name]))
        self._num_calls += 1
        self._pass_markup()

    def _argue(self, text: str) -> None:
        self._emit(CallDelta, self._num_calls - 1, text)

    def _argue_string(self, text: str) -> None:
        """Add text to a string of the arguments."""
        self._argue(json.dumps(text, ensure_ascii=False)[1:-1])

    def _end_call(self) -> None:
        self._raw.clear()
        self.is_done = self._num_calls == self._form.max_calls

    # -- input ---------------------------------------------------------------------------------------

    def _char(self) -> Reader[str]:
        if self._ahead:
            char = self._ahead.pop()
        elif self._has_ended:
            return ""
        else:
            char = yield
            if not char:
                self._has_ended = True
                return ""
        self._raw.append(char)
        return char

    def _unread(self, text: str) -> None:
        if text:
            del self._raw[-len(text) :]
            self._ahead.extend(reversed(text))

    def _begins_with(self, text: str) -> Reader[bool]:
        """Return True if blanks and `text` come next, and read them; otherwise nothing is read."""
        read = ""
        while True:
            char = yield from self._char()
            read += char
            rest = read.lstrip()
            if rest == text:
                return True
            if not char or not text.startswith(rest):
                self._unread(read)
                return False

    def _rest(self) -> str:
        """The text to read again, which is all that follows once the answer has ended."""
        return "".join(reversed(self._ahead))

    def _take_rest(self) -> str:
        rest = self._rest()
        self._ahead.clear()
        return rest

    def _close(self, end: str) -> Reader[None]:
        """Read the end of a call, if it comes next; an end that was cut off is dropped."""
        is_there = yield from self._begins_with(end)
        if not is_there and self._has_ended and end.startswith(self._rest().lstrip()):
            self._ahead.clear()

    def _first(self) -> Reader[str]:
        """The next character that is not a blank."""
        while True:
            char = yield from self._char()
            if not char.isspace():
                return char

    def _expect(self, text: str) -> Reader[None]:
        if not (yield from self._begins_with(text)):
            raise _NotACall

    def _name(self, end: str = "", pattern: re.Pattern[str] = NAME) -> Reader[str]:
        """A name with blanks around it and `end` after it; anything else is text at once."""
        name, char = "", (yield from self._first())
        while char and pattern.fullmatch(name + char):
            name += char
            char = yield from self._char()
        self._unread(char)
        if not name:
            raise _NotACall
        if end:
            yield from self._expect(end)
        return name.rstrip()

    def _until(self, ends: Iterable[str], pass_on: Callable[[str], None]) -> Reader[str]:
        """Pass text on up to one of `ends`, and return that; text that may still become one is held back.

        At the end of the answer, return nothing: the text held back is the rest.
        """
        ends = tuple(ends)
        firsts, held = frozenset(end[0] for end in ends), ""
        while held not in ends:
            self._skim = None if held or self._ahead else (firsts, pass_on)
            char = yield from self._char()
            self._skim = None
            if not char:
                self._unread(held)
                return ""
            held += char
            while held and (held[0] not in firsts or not any(end.startswith(held) for end in ends)):
                pass_on(held[0])
                held = held[1:]
        return held

    def _prose(self, markers: Iterable[str]) -> Reader[str]:
        """Pass text of the answer on; returns the marker that ends it, or nothing at the end."""
        marker = yield from self._until(markers, self._say)
        rest = "" if marker else self._take_rest()
        if self.is_reasoning or not self._form.is_forced:
            self._say(rest)
        self._raw[:] = marker
        return marker

    # -- the answer ----------------------------------------------------------------------------------

    def _answer(self) -> Reader[None]:
        if self._dialect is not None and self._dialect.form == "harmony":
            yield from self._messages()
        else:
            yield from self._text_and_calls()
        if self._has_ended and not self._is_edge and not self._form.is_forced:
            self._emit(ContentDelta, 0, self._blank)

    def _text_and_calls(self) -> Reader[None]:
        think, begins = self._form.think, self._dialect.begins if self._dialect is not None else ()
        if think is not None and not self.is_reasoning:
            self.is_reasoning = yield from self._begins_with(think.begin)
        if think is not None and self.is_reasoning:
            self._pass_markup()
            marker = yield from self._prose((think.end, *begins))
            self.is_reasoning = not marker
            self._blank, self._has_text = "", False
            if marker in begins:  # a call in the middle of reasoning ends it
                self._unread(marker)
            self._pass_markup()
        ends: tuple[str, ...] = ()
        if think is not None and think.wrap is not None and (yield from self._begins_with(think.wrap[0])):
            ends = think.wrap[1:]
            self._pass_markup()
        if self._dialect is not None and self._dialect.is_bare:
            yield from self._calls("")
        while not self.is_done and (marker := (yield from self._prose((*begins, *ends)))):
            if marker in ends:
                self._blank, ends = "", ()
                self._pass_markup()
            else:
                yield from self._calls(marker)

    def _calls(self, marker: str) -> Reader[None]:
        """Read the calls after a marker, or at the start of an answer; anything else becomes text."""
        assert self._dialect is not None
        try:
            if marker == "<function=":
                yield from self._xml_call()
            elif self._dialect.form == "pythonic":
                yield from self._python_calls(is_fenced=marker != "")
            elif self._dialect.form == "gemma":
                yield from self._gemma_call()
            elif self._dialect.form == "keyed":
                yield from self._keyed_call()
            elif self._dialect.form == "named" and not marker:
                while not self.is_done:
                    yield from self._named_call(is_bare=True)
            elif not marker and not (yield from self._comes("{")):
                return
            elif self._dialect.form == "xml" and (yield from self._begins_with("<function=")):
                yield from self._xml_call()
            elif self._dialect.form == "named" and not (yield from self._comes("[{")):
                yield from self._named_call(is_bare=False)
            else:
                yield from self._json_calls(is_bare=not marker)
            if marker and self._dialect.end and not self.is_done:
                yield from self._close(self._dialect.end)
            self._raw.clear()
        except _NotACall:
            text = "".join(self._raw)
            self._end_call()
            if self._has_ended and (self._form.is_forced or (self._is_cut and marker)):
                self._ahead.clear()
                self._pass_markup()
            else:
                self._say(text)

    def _comes(self, texts: Iterable[str]) -> Reader[bool]:
        """Return True if one of the texts comes next, after blanks; it is not read."""
        for text in texts:
            if (yield from self._begins_with(text)):
                self._unread(text)
                return True
        return False

    # -- JSON ----------------------------------------------------------------------------------------

    def _json_calls(self, *, is_bare: bool) -> Reader[None]:
        """One object, several with semicolons between them, or a list of them."""
        is_list = yield from self._begins_with("[")
        between = "," if is_list else ";"
        while True:
            yield from self._json_call(is_bare=is_bare)
            if self.is_done:
                return
            if not (yield from self._begins_with(between)):
                break
        if is_list:
            yield from self._begins_with("]")

    def _json_call(self, *, is_bare: bool) -> Reader[None]:
        yield from self._expect("{")
        name: str | None = None
        arguments: str | None = None
        has_started = False
        while True:
            key = _loads((yield from self._value((yield from self._first()))))
            yield from self._expect(":")
            char = yield from self._first()
            if key in ARGUMENT_KEYS and char == "{" and name is not None and not has_started:
                self._start(name)
                has_started = True
                yield from self._stream_object()
                self._end_call()
                if self.is_done:
                    return
            else:
                value = yield from self._value(char)
                if key == "name":
                    name = self._known(_loads(value), is_bare=is_bare)
                elif key in ARGUMENT_KEYS:
                    arguments = value
            if not (yield from self._begins_with(",")):
                break
        if not (yield from self._begins_with("}")) and not has_started:
            raise _NotACall
        if not has_started:
            if name is None:
                raise _NotACall
            text = _object_text(arguments)
            self._start(name)
            self._argue(text)
        self._end_call()

    def _known(self, name: Any, *, is_bare: bool) -> str:
        """The name of a call, checked; without a marker it must be the name of a tool."""
        if not isinstance(name, str) or not NAME.fullmatch(name) or (is_bare and name not in self._tools):
            raise _NotACall
        return name

    def _stream_object(self) -> Reader[None]:
        """Pass an object on, character by character, up to its closing brace."""
        self._argue("{")
        inside = _Nesting(*JSON, begun="{")
        while inside.is_open:
            char = yield from self._char()
            if not char:
                return
            if char == "<" and not inside.quote:  # a marker: a brace is missing
                self._unread(char)
                return
            inside.add(char)
            self._argue(char)

    def _value(self, first: str, brackets: tuple[str, str, str] = JSON) -> Reader[str]:
        """A JSON value, or a Python bracket's content, as it was written; `first` is its first character."""
        if not first or first in ",:}]<":
            self._unread(first)
            raise _NotACall
        opening, _, quotes = brackets
        read, inside = first, _Nesting(*brackets, begun=first)
        while inside.is_open or first not in opening + quotes:
            char = yield from self._char()
            if not char:
                raise _NotACall
            if not inside.is_open and (char in ",}]" or char.isspace()):
                self._unread(char)
                break
            inside.add(char)
            read += char
        return read

    # -- a name, then JSON ---------------------------------------------------------------------------

    def _named_call(self, *, is_bare: bool) -> Reader[None]:
        """`f[ARGS]{…}`, with or without `[CALL_ID]id` in the middle; the markers may be missing."""
        name = self._known((yield from self._name()), is_bare=is_bare)
        if (yield from self._begins_with("[CALL_ID]")):
            yield from self._name("[ARGS]")
        else:
            yield from self._begins_with("[ARGS]")
        yield from self._expect("{")
        self._start(name)
        yield from self._stream_object()
        self._end_call()

    # -- XML -----------------------------------------------------------------------------------------

    def _xml_call(self) -> Reader[None]:
        """`f>`, parameters, and the end of the function."""
        name = yield from self._name(">")
        self._start(name)
        if (yield from self._parameters(name, "<parameter=", ">", "</parameter>", "\n")):
            yield from self._close("</function>")
            self._end_call()

    def _keyed_call(self) -> Reader[None]:
        """`f`, then a key and a value for each parameter; newlines between them may be missing."""
        assert self._dialect is not None
        begin, middle, value, end = KEYED_MARKERS
        name = yield from self._name()
        if not (yield from self._comes((begin, self._dialect.end))):
            raise _NotACall
        self._start(name)
        if (yield from self._parameters(name, begin, middle, end, "", value)):
            self._end_call()

    def _parameters(
        self, name: str, begin: str, middle: str, end: str, blank: str, value: str = ""
    ) -> Reader[bool]:
        """Pass on the parameters as they come; returns True if they are complete.

        Each is `begin`, a key, `middle`, `value`, a value and `end`; a `blank` around the value is dropped.
        """
        properties = self._tools[name].properties if name in self._tools else {}
        self._argue("{")
        separator = ""
        while (yield from self._begins_with(begin)):
            key = yield from self._name(middle, KEY)
            if value:
                yield from self._expect(value)
            self._argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            if not (yield from self._xml_value(properties.get(key), end, blank)):
                return False
            separator = ", "
        rest = self._rest().lstrip()
        if self._has_ended and len(rest) > 1 and begin.startswith(rest):  # cut off, so not closed
            self._ahead.clear()
            return False
        self._argue("}")
        return True

    def _xml_value(self, schema: Mapping[str, Any] | None, end: str, blank: str) -> Reader[bool]:
        """Pass on a parameter's value: text as it comes, others at their end; returns True if complete."""
        kept: list[str] = []
        if is_open := is_text(schema):
            self._argue('"')
        pass_on = self._argue_string if is_open else kept.append
        char = yield from self._char()
        if char != blank:
            self._unread(char)
        if not (yield from self._until((blank + end, end), pass_on)):  # cut off: passed on, but not closed
            pass_on(self._take_rest())
            self._argue("".join(kept))
            return False
        self._argue('"' if is_open else read_value("".join(kept), schema))
        self._raw.clear()
        return True

    # -- Gemma ---------------------------------------------------------------------------------------

    def _gemma_call(self) -> Reader[None]:
        """`call:f{…}`, JSON in which keys have no quotes, and strings have special quotes."""
        yield from self._expect("call:")
        name = yield from self._name()
        yield from self._expect("{")
        self._start(name)
        yield from self._gemma_value("{")
        self._end_call()

    def _gemma_value(self, char: str, depth: int = 1) -> Reader[None]:
        """Pass on a value as JSON, strings as they come; `char` is its first character."""
        if depth > MAX_DEPTH:
            raise _NotACall
        if char and char in "{[":
            close, separator = "}]"["{[".index(char)], ""
            self._argue(char)
            while (char := (yield from self._first())) not in ("", close):
                if char == ",":
                    continue
                self._argue(separator)
                separator = ", "
                if close == "}":
                    key = yield from self._gemma_word(char)
                    self._argue((key if key[0] == '"' else json.dumps(key, ensure_ascii=False)) + ": ")
                    if not (yield from self._begins_with(":")):
                        raise _NotACall
                    char = yield from self._first()
                yield from self._gemma_value(char, depth + 1)
                if self._has_ended:
                    return
            self._argue(char)
        elif char == "<":
            self._unread(char)
            yield from self._expect(GEMMA_QUOTE)
            self._argue('"')
            if not (yield from self._until((GEMMA_QUOTE,), self._argue_string)):  # cut off, so not closed
                self._argue_string(self._take_rest())
                return
            self._argue('"')
        else:
            word = yield from self._gemma_word(char)
            self._argue(word if word.startswith('"') else read_value(word, None))
        self._raw.clear()

    def _gemma_word(self, char: str) -> Reader[str]:
        """A key, a number, a name such as `true`, or a string in JSON's quotes, as it was written."""
        if char == '"':
            return (yield from self._value(char))
        word = ""
        while char and char not in ":,{}[]<":
            word += char
            char = yield from self._char()
        self._unread(char)
        if not word:
            raise _NotACall
        return word.strip()

    # -- Harmony -------------------------------------------------------------------------------------

    def _messages(self) -> Reader[None]:
        """Read messages, one after another, up to the marker that ends a call or the answer."""
        spoken: set[bool] = set()  # kinds of text so far: True for reasoning
        channel, recipient = ("analysis" if self.is_reasoning else "final"), ""
        if not self.is_reasoning and not self._form.in_text:
            channel, recipient = yield from self._header()
        while True:
            name = recipient.removeprefix("functions.")
            self._in_call = bool(self._tools and NAME.fullmatch(name) and name not in ("assistant", "user"))
            self.is_reasoning = channel == "analysis" and self._form.think is not None and not self._in_call
            if self._in_call:
                self._start(name)
            is_first = self._in_call or self.is_reasoning not in spoken
            self._blank, self._is_edge, self._has_text = "" if is_first else "\n\n", is_first, False
            marker = "<|message|>"
            while marker in ("<|message|>", "<|constrain|>"):  # neither has a meaning inside a message
                marker = yield from self._prose(HARMONY_MARKERS)
            if self._in_call:
                if not self._has_text and not (self._has_ended and self._is_cut):
                    self._argue("{}")
                self._end_call()
            elif self._has_text:
                spoken.add(self.is_reasoning)
            if marker or self._in_call or self.is_reasoning or not self._has_text:
                self._blank, self._is_edge = "", True
            self._in_call = False
            self.is_done = self.is_done or marker in ("<|call|>", "<|return|>")
            if not marker or self.is_done:
                return
            if marker != "<|end|>":
                self._unread(marker)
            self.is_reasoning = False
            channel, recipient = yield from self._header()

    def _header(self) -> Reader[tuple[str, str]]:
        """The channel and the recipient of the next message; other text is left unread."""
        self._is_header = True
        channel = recipient = text = ""
        has_begun = False  # True once a marker has come
        while True:
            char = yield from self._char()
            marker = ""
            if char == "<":
                self._unread(char)
                for each in HARMONY_MARKERS:
                    if (yield from self._begins_with(each)):
                        marker = each
                        break
                else:
                    yield from self._char()
            if char and not marker and HEADER.fullmatch(text + char):
                text += char
                continue
            if marker or has_begun or text.lstrip().startswith("to="):
                while (found := HEADER_WORD.match(text)) is not None:
                    channel, recipient = found["channel"] or channel, found["recipient"] or recipient
                    text = text[found.end() :]
            if recipient or (channel and marker in ("<|message|>", "<|constrain|>")):
                text = ""  # the type of the content
            if self._has_ended:
                is_lost = (self._is_cut and has_begun) or self._form.is_forced
                recipient, text = "", "" if is_lost else text
            if text.strip() or marker not in ("<|start|>", "<|channel|>", "<|constrain|>"):
                break
            if marker == "<|start|>":
                channel = recipient = ""
            has_begun, text = True, ""
        if text.strip() or marker != "<|message|>":
            self._unread(text + (marker or char))
        self._is_header = False
        return channel, recipient

    # -- Python --------------------------------------------------------------------------------------

    def _python_calls(self, *, is_fenced: bool) -> Reader[None]:
        """Read a list of calls; after a fence also calls without brackets, one after another."""
        assert self._dialect is not None
        end = self._dialect.end[:1]
        is_list = yield from self._begins_with("[")
        if not is_list and not is_fenced:
            return
        while True:
            yield from self._python_call(is_bare=not is_fenced)
            if self.is_done:
                return
            has_more = yield from self._begins_with(",")
            if not has_more and (is_list or (yield from self._comes(end)) or self._has_ended):
                break
        if is_list:
            yield from self._begins_with("]")

    def _python_call(self, *, is_bare: bool) -> Reader[None]:
        char = yield from self._first()
        text = ""
        while char and (char.isalnum() or char in "_."):
            text += char
            char = yield from self._char()
        if char != "(" or (is_bare and text not in self._tools):
            self._unread(char)
            raise _NotACall
        text += yield from self._value("(", PYTHON)
        call = python_call(text, {name: list(tool.properties) for name, tool in self._tools.items()})
        if call is None:
            raise _NotACall
        self._start(self._known(call[0], is_bare=is_bare))
        self._argue(call[1])
        self._end_call()


def _loads(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise _NotACall from None


def _object_text(arguments: str | None) -> str:
    """The arguments, read before they could be passed on: an object, or an object in a string."""
    if arguments is None:
        return "{}"
    value = _loads(arguments)
    if isinstance(value, str):
        arguments = whole_characters(value.strip()) or "{}"
        value = _loads(arguments)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise _NotACall
    return arguments
