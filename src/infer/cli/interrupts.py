"""Signals that end a command: Ctrl-C while torch is imported, and signals after which it still cleans up.

The import takes a second or two, in which Ctrl-C may come. An exception raised in the middle of it gets lost:
torch swallows it and goes on, or numpy raises an ImportError in its place. So during the import Ctrl-C ends
the process, which has nothing to clean up yet (`infer/__main__.py` does the same for the command line).

    with importing():
        from infer.frontend.llm import LLM

SIGTERM and SIGHUP end a process at once, and half-written files stay. In a `sweeping` block they raise an
exception, as Ctrl-C does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from infer.cli.terminal import ENDINGS
from infer.client.imports import quick_imports

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@contextmanager
def importing() -> Iterator[None]:
    """Import quickly; Ctrl-C ends the process, unless the caller handles it."""
    handler = signal.getsignal(signal.SIGINT)
    is_ours = handler is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGINT, _leave)
    try:
        with quick_imports():
            yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, handler)


@contextmanager
def sweeping() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, unless they are ignored."""
    kept = {number: signal.getsignal(number) for number in ENDINGS}
    for number in (each for each in ENDINGS if kept[each] is not signal.SIG_IGN):
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
