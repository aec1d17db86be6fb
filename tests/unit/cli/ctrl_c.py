"""Ctrl-C in a test: Python may run a signal's handler some lines later where other threads want to run."""

from __future__ import annotations

import signal
from types import FrameType


def press_ctrl_c() -> None:
    """Return when the handler of this moment has run, or raise what it raises."""
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler)
    has_run = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal has_run
        has_run = True
        signal.signal(signal.SIGINT, handler)
        handler(number, frame)

    signal.signal(signal.SIGINT, note)
    signal.raise_signal(signal.SIGINT)
    while not has_run:
        pass
