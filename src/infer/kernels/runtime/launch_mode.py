"""Whether launches run their kernels or only compile them: a switch of each thread (compile_ahead.py)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_this_thread = threading.local()


def compiles_only() -> bool:
    """Whether launches of this thread compile their kernels and do not run them."""
    return getattr(_this_thread, "compiles_only", False)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Let launches of this thread compile their kernels and not run them."""
    _this_thread.compiles_only = True
    try:
        yield
    finally:
        _this_thread.compiles_only = False
