"""A place in a text that is still being written, for coroutines that read it character by character.

A reader gets one character at a time, so it does not matter where the text's pieces are cut. When it has
looked too far ahead, it gives characters back and reads them again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Reader = Generator[None, str, T]  # receives characters, an empty string at the end; returns T

NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
JSON = ("{[", "}]", '"')  # opening brackets, closing brackets, quotes


class NotACall(Exception):
    """The text since the last marker is not a call."""


class Nesting:
    """Counts the depth of brackets and quotes in a text that comes character by character."""

    def __init__(self, opening: str, closing: str, quotes: str, *, begun: str) -> None:
        self._opening, self._closing, self._quotes = opening, closing, quotes
        self._depth = 0
        self._is_escaped = False
        self.quote = ""  # the open quote
        self.add(begun)

    @property
    def is_open(self) -> bool:
        """True until every bracket and quote is closed."""
        return self._depth > 0 or self.quote != ""

    def add(self, char: str) -> None:
        """Count the next character."""
        if self.quote:
            if char == self.quote and not self._is_escaped:
                self.quote = ""
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char in self._quotes:
            self.quote = char
        else:
            self._depth += (char in self._opening) - (char in self._closing)


class Cursor:
    """The place up to which one answer has been read."""

    def __init__(self) -> None:
        self._ahead: list[str] = []  # characters to read again, the next one last
        self._since: list[str] = []  # characters read since the last mark
        self._skim: tuple[frozenset[str], Callable[[str], None]] | None = None  # set while `until` waits
        self.has_ended = False
        self.is_cut = False  # True if the answer did not end by itself

    def skim(self, piece: str) -> bool:
        """Pass a piece on if nothing in it can begin an awaited end, which holds for most pieces."""
        if self._skim is None or not self._skim[0].isdisjoint(piece):
            return False
        self._skim[1](piece)
        return True

    def mark(self, text: str = "") -> None:
        """Begin `since_mark` anew, with a text that has been read."""
        self._since[:] = text

    @property
    def since_mark(self) -> str:
        """The text read since the last mark."""
        return "".join(self._since)

    @property
    def rest(self) -> str:
        """The text to read again, which is all that follows once the answer has ended."""
        return "".join(reversed(self._ahead))

    def take_rest(self) -> str:
        """Return the rest and drop it."""
        rest = self.rest
        self._ahead.clear()
        return rest

    def unread(self, text: str) -> None:
        """Give back text that was just read."""
        if text:
            del self._since[-len(text) :]
            self._ahead.extend(reversed(text))

    def char(self) -> Reader[str]:
        """The next character; nothing at the end."""
        if self._ahead:
            char = self._ahead.pop()
        elif self.has_ended:
            return ""
        else:
            char = yield
            if not char:
                self.has_ended = True
                return ""
        self._since.append(char)
        return char

    def first(self) -> Reader[str]:
        """The next character that is not a blank."""
        while True:
            char = yield from self.char()
            if not char.isspace():
                return char

    def begins_with(self, text: str) -> Reader[bool]:
        """Return True if blanks and `text` come next, and read them; otherwise nothing is read."""
        read = ""
        while True:
            char = yield from self.char()
            read += char
            rest = read.lstrip()
            if rest == text:
                return True
            if not char or not text.startswith(rest):
                self.unread(read)
                return False

    def comes(self, texts: Iterable[str]) -> Reader[bool]:
        """Return True if one of the texts comes next, after blanks; it is not read."""
        for text in texts:
            if (yield from self.begins_with(text)):
                self.unread(text)
                return True
        return False

    def expect(self, text: str) -> Reader[None]:
        """Read `text`, after blanks; anything else is not a call."""
        if not (yield from self.begins_with(text)):
            raise NotACall

    def close(self, end: str) -> Reader[None]:
        """Read the end of a call, if it comes next; an end that was cut off is dropped."""
        is_there = yield from self.begins_with(end)
        if not is_there and self.has_ended and end.startswith(self.rest.lstrip()):
            self._ahead.clear()

    def name(self, end: str = "", pattern: re.Pattern[str] = NAME) -> Reader[str]:
        """A name with blanks around it and `end` after it; anything else is text at once."""
        name, char = "", (yield from self.first())
        while char and pattern.fullmatch(name + char):
            name += char
            char = yield from self.char()
        self.unread(char)
        if not name:
            raise NotACall
        if end:
            yield from self.expect(end)
        return name.rstrip()

    def value(self, first: str, brackets: tuple[str, str, str] = JSON) -> Reader[str]:
        """A JSON value, or what `brackets` enclose, as it was written; `first` is its first character."""
        if not first or first in ",:}]<":
            self.unread(first)
            raise NotACall
        opening, _, quotes = brackets
        read, inside = first, Nesting(*brackets, begun=first)
        while inside.is_open or first not in opening + quotes:
            char = yield from self.char()
            if not char:
                raise NotACall
            if not inside.is_open and (char in ",}]" or char.isspace()):
                self.unread(char)
                break
            inside.add(char)
            read += char
        return read

    def until(self, ends: Iterable[str], pass_on: Callable[[str], None]) -> Reader[str]:
        """Pass text on up to one of `ends`, and return that; text that may still become one is held back.

        At the end of the answer, return nothing: the text held back is the rest.
        """
        ends = tuple(ends)
        firsts, held = frozenset(end[0] for end in ends), ""
        while held not in ends:
            self._skim = None if held or self._ahead else (firsts, pass_on)
            char = yield from self.char()
            self._skim = None
            if not char:
                self.unread(held)
                return ""
            held += char
            while held and (held[0] not in firsts or not any(end.startswith(held) for end in ends)):
                pass_on(held[0])
                held = held[1:]
        return held
