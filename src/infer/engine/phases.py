"""The phases of a start, with the seconds each took.

    with phases("load weights"):
        ...

A phase that is entered again goes on counting. Phases do not overlap: one inside another is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Phases(dict[str, float]):
    """Seconds by phase, in the order in which they began."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of a block to a phase."""
        started = perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + perf_counter() - started


def spell_phases(seconds: dict[str, float]) -> str:
    """Phases as the end of a log line: `find_s=0.12 load_weights_s=1.40`."""
    return " ".join(f"{name.replace(' ', '_')}_s={value:.2f}" for name, value in seconds.items())
