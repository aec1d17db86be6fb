"""The terminal around an answer: typed keys are not echoed into it, and its lines break between words.

    at the prompt            prompt_toolkit has the terminal (prompt.py)
    while an answer comes    `quiet`: no echo; the keys wait, and are the beginning of the next message
    at the end               `guarded` puts the terminal back as it was: after SIGTERM, SIGHUP and errors too

Ctrl-C keeps its meaning in all of them.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO

FRAMES = "-\\|/"
FRAME_S = 0.1
ENDINGS = (signal.SIGTERM, signal.SIGHUP)
PLAIN = "\x1b[?2004l\x1b[?25h\r\n"  # no bracketed paste, a cursor, a new line
USUAL_COLUMNS = 80  # width of a terminal that does not know its size
LOCAL_MODES = 3  # index of the local modes in the result of tcgetattr
DUMB = ("dumb", "unknown")  # values of TERM for terminals that show control sequences as text


def is_terminal(stream: TextIO) -> bool:
    """Return True if a stream is a terminal of the system, with modes that can be set."""
    try:
        return os.isatty(stream.fileno())
    except (OSError, ValueError):  # a closed stream, or an object in its place
        return False


def columns_of(stream: TextIO) -> int | None:
    """Return the width of a terminal; None for another stream, and for a terminal that does not know it."""
    return os.get_terminal_size(stream.fileno()).columns or None if is_terminal(stream) else None


def obeys_sequences() -> bool:
    """Return True if the terminal obeys control sequences, which a dumb one would show as text."""
    return os.environ.get("TERM", "").lower() not in DUMB


@contextmanager
def guarded() -> Iterator[None]:
    """Put the modes of the terminal back when the block ends, however it does."""
    if not is_terminal(sys.stdin):
        yield
        return
    modes = termios.tcgetattr(sys.stdin)

    def restore() -> None:
        with suppress(termios.error, OSError, ValueError):  # the terminal may be gone
            termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)

    def leave(number: int, frame: FrameType | None) -> None:
        restore()
        for stream in (sys.stdout, sys.stderr):
            if is_terminal(stream) and obeys_sequences():
                with suppress(OSError):
                    os.write(stream.fileno(), PLAIN.encode())
                break
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # ends the process as if there were no handler

    previous = {number: signal.signal(number, leave) for number in ENDINGS}
    try:
        yield
    finally:
        restore()
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def quiet() -> Iterator[None]:
    """Echo no key while the block runs; keys are kept for the next reader."""
    if not is_terminal(sys.stdin):
        yield
        return
    modes = termios.tcgetattr(sys.stdin)
    silent = list(modes)
    silent[LOCAL_MODES] = modes[LOCAL_MODES] & ~(termios.ECHO | termios.ECHONL)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)


def drop_typed() -> None:
    """Discard keys that were pressed before a question was asked: they are not its answer."""
    if is_terminal(sys.stdin):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show `what` on a terminal's standard error while the block runs; then clear the line."""
    if not (is_terminal(sys.stderr) and obeys_sequences()):
        yield
        return
    is_done = threading.Event()

    def turn() -> None:
        number = 0
        while True:
            sys.stderr.write(f"\r{FRAMES[number % len(FRAMES)]} {what}\x1b[K")
            sys.stderr.flush()
            if is_done.wait(FRAME_S):
                return
            number += 1

    thread = threading.Thread(target=turn, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


class WordWrap:
    """Breaks the lines of a text that comes in pieces, between words and at the width of the terminal.

    A word is held back until it is complete. Wide characters are words of their own, since the languages that
    are written with them have no spaces. A word longer than a line is left to the terminal. Control
    characters are escaped: a text must not move the cursor, or forge the question about a tool call. Where a
    line is broken, the next one is indented.
    """

    def __init__(self, stream: TextIO, *, indent: int = 0) -> None:
        self._handle = stream.fileno() if is_terminal(stream) else None
        self._indent = indent
        self._column = 0
        self._spaces = ""
        self._word = ""

    def feed(self, text: str) -> str:
        """Return the text that is to be written now."""
        if self._handle is None:
            return text
        written = []
        for char in text:
            if unicodedata.category(char) == "Cc" and char not in "\n\t":
                self._word += ascii(char)[1:-1]
            elif char in "\n \t":
                written.append(self._take_word())
                self._spaces += char
                if char == "\n":
                    written.append(self._spaces)
                    self._spaces, self._column = "", 0
            elif char_width(char) == 2:
                written.append(self._take_word())
                self._word = char
                written.append(self._take_word())
            else:
                self._word += char
        return "".join(written)

    def end(self) -> str:
        """Return the text that was held back; the next text begins a line."""
        rest = self._take_word() + self._spaces  # empty where lines are not broken
        self._spaces, self._column = "", 0
        return rest

    def _take_word(self) -> str:
        word, self._word = self._word, ""
        if not word:
            return ""
        spaces, self._spaces = self._spaces, ""
        assert self._handle is not None
        columns = os.get_terminal_size(self._handle).columns or USUAL_COLUMNS  # asked again: windows change
        width = sum(map(char_width, word))
        if self._column and self._column + _width(spaces) + width > columns:
            indent = self._indent if self._indent + width <= columns else 0
            self._column = (indent + width - 1) % columns + 1
            return f"\n{' ' * indent}{word}"
        self._column = (self._column + _width(spaces) + width - 1) % columns + 1
        return spaces + word


def _width(spaces: str) -> int:
    return sum(8 if space == "\t" else 1 for space in spaces)


def char_width(char: str) -> int:
    """Return the columns of a character: 2 for a wide one, 0 for one that is drawn over its neighbour."""
    if char.isascii():
        return 1
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
