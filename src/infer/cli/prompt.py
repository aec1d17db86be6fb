"""The messages of `infer chat`: typed in a line editor, or the lines of a pipe.

    > one line                    a message
    > \"\"\"several                 a message up to the line that ends with three quotes
    ... lines\"\"\"
    > (a pasted text)             one message, with all its lines
    > /command                    a command; a text of several lines, or in quotes, is never a command

Alt-Enter begins a new line within a message. prompt_toolkit is imported when the first message is read.

Typed messages are kept for the arrow keys of the next conversation, in `chat-history.jsonl` next to the
downloaded models: a JSON string per line, the last 1,000 messages, readable only by the user.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from infer.cli.answer import notice
from infer.cli.terminal import is_terminal, obeys_sequences
from infer.errors import ModelSourceError, RequestError
from infer.loader.find.default_model import models_dir

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyPressEvent

QUOTES = '"""'
PROMPT, MORE = "> ", "... "
MAX_KEPT = 1000  # messages in the history
MAX_KEPT_LEN = 10_000  # characters of a message that is kept

ReadLine = Callable[[str], str]  # shows a prompt; raises EOFError or KeyboardInterrupt, as input() does
Completes = Callable[[str], Iterable[str]]  # the words that Tab offers for the last one of a text


class Said(NamedTuple):
    """A message, or a command to the program."""

    text: str
    is_command: bool = False


class Cleared(KeyboardInterrupt):
    """Ctrl-C that cleared the typed text; it does not count as a wish to leave."""


def read_said(read_line: ReadLine) -> Said:
    """Read one message; it has several lines if it opens quotes."""
    text = read_line(PROMPT).strip()
    if not text.startswith(QUOTES):
        return Said(text, is_command=text.startswith("/") and "\n" not in text)
    text = text.removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        try:
            text += "\n" + read_line(MORE)
        except KeyboardInterrupt:
            raise Cleared from None
    return Said(text.rstrip().removesuffix(QUOTES).strip("\n"))


def typed_messages(read_line: ReadLine) -> Iterator[Said]:
    """Yield the typed messages, until Ctrl-D or the second Ctrl-C in a row on an empty line."""
    was_interrupted = False
    while True:
        try:
            said = read_said(read_line)
        except EOFError:
            return
        except Cleared:
            was_interrupted = False
            continue
        except KeyboardInterrupt:
            if was_interrupted:
                return
            was_interrupted = True
            notice("[press Ctrl-C again, or Ctrl-D, to leave]")
            continue
        was_interrupted = False
        yield said


def piped_messages() -> Iterator[Said]:
    """Yield the messages of standard input, one per line unless quotes are opened."""
    is_open = False

    def read_line(prompt: str) -> str:
        nonlocal is_open
        is_open = prompt == MORE
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    while True:
        try:
            yield read_said(read_line)
        except EOFError:
            if is_open:
                raise RequestError(f"a message was opened with {QUOTES} and not closed") from None
            return
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not UTF-8: {error}") from None


def line_reader(completes: Completes, *, keeps_history: bool) -> ReadLine:
    """Return the reader of lines from the terminal: an editor, or `input` where none can be drawn."""
    screen = sys.stdout if is_terminal(sys.stdout) else sys.stderr
    if not (is_terminal(sys.stdin) and is_terminal(screen) and obeys_sequences()):
        return _plain_line
    session = _open_editor(completes, keeps_history=keeps_history)

    def read_line(prompt: str) -> str:
        try:
            return session.prompt(prompt)
        except KeyboardInterrupt:
            if session.default_buffer.text:
                raise Cleared from None
            raise

    return read_line


def _plain_line(prompt: str) -> str:
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        notice("")  # the cursor is still on the line of the prompt
        raise


def _open_editor(completes: Completes, *, keeps_history: bool) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output.vt100 import Vt100_Output
    from prompt_toolkit.shortcuts import CompleteStyle

    class WordCompleter(Completer):
        """Offers the words of `completes`."""

        def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
            before = document.text_before_cursor
            begun = before.rpartition(" ")[2]
            for word in completes(before):
                yield Completion(word, start_position=-len(begun))

    class KeptHistory(History):
        """The messages of a file, and the messages of this conversation."""

        def __init__(self, file: HistoryFile) -> None:
            super().__init__()
            self._file = file

        def load_history_strings(self) -> Iterable[str]:
            return reversed(self._file.read())  # the newest first

        def store_string(self, string: str) -> None:
            self._file.add(string)

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    # A terminal reports the cursor position among the keys, late or never.
    output = Vt100_Output.from_pty(
        sys.stdout if is_terminal(sys.stdout) else sys.stderr, term=os.environ.get("TERM")
    )
    output.enable_cpr = False
    file = HistoryFile.open() if keeps_history else None
    return PromptSession(
        history=InMemoryHistory() if file is None else KeptHistory(file),
        completer=WordCompleter(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        key_bindings=keys,
        output=output,
        prompt_continuation="",
    )


class HistoryFile:
    """A file of typed messages that only its owner can read, and that stays short."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls) -> HistoryFile | None:
        """Return the user's file, made if there is none; None, with a notice, if it cannot be made."""
        try:
            file = cls(models_dir().parent / "chat-history.jsonl")
            file.path.parent.mkdir(parents=True, exist_ok=True)
            file._shorten()
        except (OSError, ModelSourceError) as error:
            notice(f"[no history of messages is kept: {error}]")
            return None
        return file

    def read(self) -> list[str]:
        """Return the messages, the oldest first, without lines that are not messages."""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return []
        return [text for line in lines if (text := _read_entry(line)) is not None][-MAX_KEPT:]

    def add(self, text: str) -> None:
        """Add a message; one that cannot be written is not kept."""
        if len(text) <= MAX_KEPT_LEN:
            try:
                self._write(os.O_APPEND, [text])
            except OSError as error:
                notice(f"[the message is not kept in {self.path}: {error.strerror}]")

    def _shorten(self) -> None:
        """Make the file, set its mode, and drop the oldest messages; other processes may write too."""
        entries = self.read()
        is_long = self.path.exists() and self.path.read_bytes().count(b"\n") > 2 * MAX_KEPT
        self._write(os.O_TRUNC if is_long else os.O_APPEND, entries if is_long else [])

    def _write(self, mode: int, entries: Iterable[str]) -> None:
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | mode, 0o600)
        try:
            os.fchmod(handle, 0o600)  # also if the file existed before
            os.write(handle, "".join(json.dumps(entry) + "\n" for entry in entries).encode())
        finally:
            os.close(handle)


def _read_entry(line: str) -> str | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, str) else None
