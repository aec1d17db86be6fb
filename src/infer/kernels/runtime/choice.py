"""The choice of a kernel: each says what it covers, and the first of its operation's list that does runs.

    for way in ways:   covers(problem) ──► a launch                         this kernel runs
                                       ──► Declined("for 1 to 8 tokens")    the next one is asked

A problem is made of sizes and of facts about the GPU, not of tensors, so the choice for a GPU that is not
here can be computed: `infer doctor --kernels MODEL --profile l4` prints it, with the reason of every kernel
that was asked first. The lists: `dense_ways` (linear/small.py), `coded_ways` (linear/coded_linear.py),
`DECODE_WAYS` and `PROMPT_WAYS` (attention/choice.py), `EXPERT_WAYS` (moe/choice.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

P = TypeVar("P")  # a problem: a named tuple of one operation
L = TypeVar("L", covariant=True)  # a launch: the cut of a kernel, or the function that computes


class Declined(NamedTuple):
    """The answer of a kernel that does not cover a problem."""

    why: str


@dataclass(frozen=True, slots=True)
class Way(Generic[P, L]):
    """One way to compute an operation."""

    name: str  # its name in reports
    covers: Callable[[P], L | Declined]


class Explained(NamedTuple):
    """The way that was chosen, and why those before it in the list were not."""

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
    """Return the way that `choose` takes, with the reasons of the others."""
    declined: list[tuple[str, str]] = []
    for way in ways:
        launch = way.covers(problem)
        if not isinstance(launch, Declined):
            return Explained(way.name, tuple(declined))
        declined.append((way.name, launch.why))
    raise AssertionError(f"no kernel covers {problem}")
