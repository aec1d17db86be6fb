"""The phases of a start, and the seconds that each took.

    with phases("load weights"):
        ...

Entering a phase again adds to its seconds. Phases must not be nested: the inner time would count twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Phases(dict[str, float]):
    """Seconds by phase, in the order in which they began."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of a `with` block to a phase."""
        started = perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + perf_counter() - started


def spell_phases(seconds: dict[str, float]) -> str:
    """Return phases as fields of a log line: `find_s=0.12 load_weights_s=1.40`."""
    return " ".join(f"{name.replace(' ', '_')}_s={value:.2f}" for name, value in seconds.items())
