"""One scheduler step per key press: frames on a screen, the keys that move between them.

    space, enter   the next step            b   back: an earlier frame, as it was shown
    n 12, enter    to step 12               ?   help
    d, u           down and up in a frame that is taller than the terminal
    q              leave

Frames are kept, so going back costs nothing and shows exactly what was there. Going forward from the newest
frame runs a step of the engine. If standard input or output is not a terminal, frames are printed one after
the other without waiting; with `--watch` the next step comes by itself.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter, sleep
from typing import TYPE_CHECKING

from infer.cli.answer import write_out
from infer.cli.flags import KNOB
from infer.cli.interrupts import importing
from infer.cli.readers import zero_or_more
from infer.cli.terminal import guarded, is_terminal, obeys_sequences
from infer.errors import ConfigError
from infer.sampling.params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from infer.engine.observer import EngineObserver
    from infer.frontend.llm import LLM
    from infer.tools.step_frames import Frame, StepFrames

NUM_SHOWN = 5  # candidates of a draw, by default
WATCH_S = 1.0  # seconds between steps of `--watch`, where no number is given
OVERLAP = KNOB + "use_overlap"
CLEAR = "\x1b[H\x1b[2J\x1b[3J"
KEYS = "space next, b back, n N jump to step N, q quit, ? help"
TALL = "lines {first} to {last} of {of} (d down, u up), "
HELP = """\
space, enter   run the next step, or show the next frame
b              show the step before
n 12, enter    go to step 12: show an earlier frame, or run steps until then
d, u           down and up in a frame that is taller than the terminal
q, Ctrl-C      leave
?              this help

plan      who runs: prompt (a chunk of one), decode (one token), verify (drafts), recompute (after preemption)
waits     who does not, and why
sampled   the model's probability of each candidate, and its share of what the filters left; <- was chosen
text      the last tokens of each sequence, prompt + output
blocks    the KV cache: a letter for each block's request
"""


class LeaveSteps(Exception):  # noqa: N818  (a key that was pressed, not an error)
    """The user has pressed the key that leaves."""


class StepScreen:
    """Shows frames, and waits for keys between them."""

    def __init__(self, *, num_shown: int = NUM_SHOWN, watch_s: float | None = None) -> None:
        self.num_shown = num_shown  # candidates of each draw
        self.frames: list[Frame] = []
        self._watch_s = watch_s
        self._is_terminal = is_terminal(sys.stdin) and is_terminal(sys.stdout)
        self.is_left = False  # a key has ended the view
        self._until = 0  # the step that was jumped to

    @contextmanager
    def keys(self) -> Iterator[None]:
        """Read single keys while the block runs; the key that leaves ends the block."""
        with guarded():
            if self._is_terminal:
                tty.setcbreak(sys.stdin, termios.TCSANOW)
            try:
                yield
            except LeaveSteps:
                self.is_left = True
        if self._is_terminal:
            write_out("\n")

    def end(self) -> None:
        """Let the user look back once more; there are no further steps."""
        if self._is_terminal and self.frames:
            self._browse(is_last=True)

    def show(self, frame: Frame, *, is_last: bool = False) -> None:
        """Show a new frame, and return when the next step is wanted."""
        self.frames.append(frame)
        if not self._is_terminal:
            write_out(("" if len(self.frames) == 1 else "\n") + frame.text)
            if self._watch_s is not None and not is_last:
                sleep(self._watch_s)
        elif frame.step >= self._until or is_last:
            self._browse(is_last=is_last)

    def _browse(self, *, is_last: bool) -> None:
        place, newest, shown = len(self.frames) - 1, len(self.frames) - 1, ""
        top, drawn = 0, place  # the first line shown, and its frame
        while True:
            if place != drawn:
                top, drawn = 0, place
            page = self._draw(self.frames[place], top, shown, is_last=is_last)
            shown = ""
            key = self._read_key(waits=place < newest or is_last)
            if key in (" ", "\r", "\n", ""):
                if place == newest:
                    return
                place += 1
            elif key == "b":
                place = max(place - 1, 0)
            elif key == "d":
                top += page if top + page < len(_fold(self.frames[place])) else 0
            elif key == "u":
                top = max(top - page, 0)
            elif key == "n":
                step = self._read_number()
                if step is None or (is_last and step > self.frames[newest].step):
                    shown = "n needs the number of an existing step, then enter"
                elif step > self.frames[newest].step:
                    self._until = step
                    return
                else:
                    steps = [each.step for each in self.frames]
                    place = next((at for at, number in enumerate(steps) if number >= step), newest)
            elif key == "?":
                shown = HELP
            elif key == "q":
                raise LeaveSteps

    def _draw(self, frame: Frame, top: int, shown: str, *, is_last: bool) -> int:
        """Draw a frame from line `top` on, as far as the terminal has lines; returns that many."""
        columns, rows = shutil.get_terminal_size()
        lines = _fold(frame)
        status = f"[step {frame.step} of {self.frames[-1].step}" + (", the last one] " if is_last else "] ")
        page = max(rows - 2 - shown.count("\n") - len(status + KEYS + TALL) // columns - 1, 1)
        if len(lines) > page:
            status += TALL.format(first=top + 1, last=min(top + page, len(lines)), of=len(lines))
        write_out(
            (CLEAR if obeys_sequences() else "\n")
            + "\n".join(lines[top : top + page])
            + f"\n\n{shown}\n{status}{KEYS} "
        )
        return page

    def _read_key(self, *, waits: bool) -> str:
        """The next key; empty when the time of `--watch` is over."""
        if self._watch_s is not None and not waits:
            ready, _, _ = select.select([sys.stdin], [], [], self._watch_s)
            if not ready:
                return ""
        key = os.read(sys.stdin.fileno(), 1).decode(errors="replace")
        return key or "q"  # the terminal is gone

    def _read_number(self) -> int | None:
        digits = ""
        write_out("to step: ")
        while (key := self._read_key(waits=True)) not in ("\r", "\n", "q"):
            if key in "\x7f\b":
                digits = digits[:-1]
                write_out("\b \b")
            elif key.isdigit():
                digits += key
                write_out(key)
        return int(digits) if digits and int(digits) > 0 else None


def _fold(frame: Frame) -> list[str]:
    """The lines of a frame, broken at the width of the terminal."""
    width = max(shutil.get_terminal_size().columns - 1, 1)
    lines = frame.text.splitlines()
    return [line[start : start + width] for line in lines for start in range(0, max(len(line), 1), width)]


def add_watch(group: argparse._ActionsContainer) -> None:
    """Give a command `--watch`."""
    group.add_argument(
        "--watch",
        metavar="SECONDS",
        type=zero_or_more,
        nargs="?",
        const=WATCH_S,
        help=f"go on without keys, a step every SECONDS (default: {WATCH_S:g})",
    )


def forbid_overlap(args: argparse.Namespace) -> None:
    """Let each step be read before the next is planned; a flag that asks otherwise is refused."""
    if getattr(args, OVERLAP, False):
        raise ConfigError("steps are watched one at a time, so they cannot overlap; leave --use-overlap out")
    setattr(args, OVERLAP, False)


def with_candidates(params: SamplingParams) -> SamplingParams:
    """The parameters, with the most alternatives per token that can be reported."""
    return replace(params, logprobs=MAX_LOGPROBS)


def make_frames(
    screen: StepScreen, recorder: EngineObserver | None = None
) -> tuple[StepFrames, EngineObserver]:
    """The maker of frames for a screen, and the observer for the engine, which may also record."""
    with importing():
        from infer.engine.observer import Observers
        from infer.tools.step_frames import StepFrames

    frames = StepFrames(num_shown=screen.num_shown)
    return frames, frames if recorder is None else Observers((recorder, frames))


def step_through(llm: LLM, frames: StepFrames, screen: StepScreen) -> None:
    """Run the steps of all requests in the engine, one after the other, until a key ends it."""
    engine = llm.engine
    with screen.keys():
        while engine.has_work:
            started = perf_counter()
            outputs = llm.step()
            for frame in frames.take(outputs, perf_counter() - started):
                screen.show(frame, is_last=not engine.has_work)
