"""One answer, shown piece by piece as it comes, and what it cost.

    command --load_s--> model ready --first_token_s--> first token ... last token
                                    |--------------- total_s ------------------|

`generate` and `chat` share this file: both load a model, print its text as it comes and then have the
whole answer. Besides text, an answer may hold reasoning, which is shown separately or not at all, and tool
calls, which are shown when they are complete.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter

from infer.cli.terminal import WordWrap, obeys_sequences
from infer.dialects.events import AnswerEvent, ReasoningDelta, TextDelta, ToolCall, join_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAnswer:
    """The text and tokens of one answer, why it ended, and its times in seconds."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # None: stopped by the user
    first_token_s: float
    total_s: float
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """The speed after the first token, whose time is mostly spent on the prompt."""
        decode_s = self.total_s - self.first_token_s
        return (len(self.token_ids) - 1) / decode_s if decode_s > 0 and len(self.token_ids) > 1 else 0.0

    def stats(self) -> str:
        """The line of `--stats`."""
        if not self.token_ids:
            return f"no token in {self.total_s:.2f} s, finish: {self.finish_reason or 'stopped'}"
        return (
            f"first token {self.first_token_s:.2f} s, {len(self.token_ids)} tokens in {self.total_s:.2f} s, "
            f"{self.tokens_per_s:.1f} tokens/s after the first, finish: {self.finish_reason or 'stopped'}"
        )


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of an answer."""

    def __init__(self, answer: ShownAnswer) -> None:
        super().__init__()
        self.answer = answer  # the answer so far


def show_answer(
    deltas: Iterator[TextDelta], screen: Screen | None, is_stopped: Callable[[], bool] = lambda: False
) -> ShownAnswer:
    """Read an answer to its end, or until `is_stopped` says so; a screen shows each piece as it comes."""
    started = perf_counter()
    first_token_s = 0.0
    pieces: list[str] = []
    events: list[AnswerEvent] = []
    token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    is_interrupted = False
    try:
        for delta in deltas:
            if delta.token_ids and not token_ids:
                first_token_s = perf_counter() - started
            token_ids += delta.token_ids
            finish_reason, stop_reason = delta.finish_reason, delta.stop_reason
            events += delta.events
            pieces.append(delta.text)
            if screen is not None:
                screen.show(delta)
            if is_stopped():
                break
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        if screen is not None:
            screen.end()
    total_s = perf_counter() - started
    if hasattr(deltas, "seconds") and token_ids:  # the stream began before it was read
        first_token_s, total_s = deltas.seconds
    if hasattr(deltas, "close"):
        deltas.close()  # ends the request now, not when the stream is garbage-collected
    answer = ShownAnswer(
        text="".join(pieces),
        token_ids=tuple(token_ids),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        first_token_s=first_token_s,
        total_s=total_s,
        reasoning="".join(_reasoning_of(events)),
        calls=join_calls(events),
    )
    if is_interrupted:
        raise Interrupted(answer)
    return answer


def _reasoning_of(events: Iterable[AnswerEvent]) -> list[str]:
    return [event.text for event in events if isinstance(event, ReasoningDelta)]


class Screen:
    """One answer at the terminal: the reasoning on standard error, then the text on standard output."""

    def __init__(self, *, shows_reasoning: bool) -> None:
        self._shows_reasoning = shows_reasoning
        is_dim = sys.stderr.isatty() and obeys_sequences() and "NO_COLOR" not in os.environ
        self._dim, self._plain = ("\x1b[2m", "\x1b[0m") if is_dim else ("", "")
        self._num_hidden = 0  # characters of reasoning
        self._is_reasoning = False
        self._is_begun = False  # text was written
        self._text_lines, self._thought_lines = WordWrap(sys.stdout), WordWrap(sys.stderr)

    def show(self, delta: TextDelta) -> None:
        """Write a piece of the answer, and of the reasoning before it, or only count the reasoning."""
        for thought in _reasoning_of(delta.events):
            if self._shows_reasoning:
                self._think(self._thought_lines.feed(thought))
                self._is_reasoning = True
            else:
                self._num_hidden += len(thought)
        if delta.text:
            self._end_reasoning()
            self._is_begun = True
            write_out(self._text_lines.feed(delta.text))

    def end(self) -> None:
        """End the last line, if there is one."""
        self._end_reasoning()
        if self._is_begun:
            write_out(self._text_lines.end() + "\n")
        self._is_begun = False

    def _end_reasoning(self) -> None:
        if self._is_reasoning:
            self._think(self._thought_lines.end() + "\n")
        if self._num_hidden:
            notice(f"[{self._num_hidden} characters of reasoning; --show-reasoning shows them]")
        self._is_reasoning, self._num_hidden = False, 0

    def _think(self, text: str) -> None:
        print(f"{self._dim}{text}{self._plain}", end="", file=sys.stderr, flush=True)


def write_out(text: str) -> None:
    """Write text to standard output now, without waiting for the end of the line."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_rows(text: str) -> None:
    """Write the rows of a table; a row too long for the terminal goes on in its last column.

    A line without columns is left to the terminal: it may be a command to copy.
    """
    for line in text.splitlines():
        column = max((gap.end() for gap in re.finditer(r" {2,}", line)), default=0)
        wrapped = WordWrap(sys.stdout, indent=column)
        write_out((wrapped.feed(line) + wrapped.end() if column else line) + "\n")


def notice(text: str, *, indent: int = 0) -> None:
    """Tell the user something that is not part of the answer; a line too long for the terminal is broken."""
    lines = WordWrap(sys.stderr, indent=indent)
    print(lines.feed(text) + lines.end(), file=sys.stderr, flush=True)
