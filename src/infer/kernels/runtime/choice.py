"""Kernel selection: every operation has a list of kernels, and the first one that covers a problem runs.

    for way in ways:   covers(problem) ──► a launch                              this kernel runs
                                       ──► Declined("only for 1 to 8 tokens")    the next one is tried

A problem consists of sizes and facts about the GPU, not of tensors, so the choice can also be computed for a
GPU that is not present: `infer doctor --kernels MODEL --profile l4` prints it, with the reason why each
earlier kernel declined. The lists: `dense_ways` (linear/small.py), `coded_ways` (linear/coded_linear.py),
`DECODE_WAYS` and `PROMPT_WAYS` (attention/choice.py), `EXPERT_WAYS` (moe/choice.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

P = TypeVar("P")  # a problem: a named tuple of one operation
L = TypeVar("L", covariant=True)  # a launch: the tile sizes of a kernel, or the function that computes


class Declined(NamedTuple):
    """The answer of a kernel that does not cover a problem."""

    why: str


@dataclass(frozen=True, slots=True)
class Way(Generic[P, L]):
    """One way to compute an operation."""

    name: str  # its name in reports
    covers: Callable[[P], L | Declined]


class Explained(NamedTuple):
    """The chosen way, and why the ways before it in the list declined."""

    name: str
    declined: tuple[tuple[str, str], ...]  # (name, reason)


def choose(ways: Iterable[Way[P, L]], problem: P) -> L:
    """Return the launch of the first way that covers a problem."""
    for way in ways:
        launch = way.covers(problem)
        if not isinstance(launch, Declined):
            return launch
    raise AssertionError(f"no kernel covers {problem}")


def explain(ways: Iterable[Way[P, L]], problem: P) -> Explained:
    """Return the way that `choose` takes, with the reasons of the ways that declined."""
    declined: list[tuple[str, str]] = []
    for way in ways:
        launch = way.covers(problem)
        if not isinstance(launch, Declined):
            return Explained(way.name, tuple(declined))
        declined.append((way.name, launch.why))
    raise AssertionError(f"no kernel covers {problem}")
