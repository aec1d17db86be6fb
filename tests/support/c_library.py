"""Another build of the C library, or none, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infer.kernels.cpu import library
from infer.kernels.cpu.build import CBuildError


@contextmanager
def use_library(chosen: library.Library | None) -> Iterator[None]:
    """Let `library()` return `chosen` within."""
    before = library._state
    library._state = chosen or CBuildError("a test does without")
    try:
        yield
    finally:
        library._state = before
