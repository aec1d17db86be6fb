"""Which sequence goes first: the scheduling policies, each a few lines.

A policy answers three questions and nothing else:

    key(seq)          the smaller, the sooner it is admitted and the later it is preempted
    prompts_first     do prompts get the step's budget before the sequences that are decoding?
    rotates           when not all sequences can decode in one step, does the turn go round?

    fcfs                 arrival order; decoding goes on while prompts fill what is left of the budget
    prefill_first        prompts first: the best time to first token, the worst inter-token latency
    decode_round_robin   like fcfs, but the turn to decode goes round
    priority             the request's `priority`, smaller first; then arrival
    deadline             the nearest `deadline` first; then arrival

Fairness does not depend on the policy: the scheduler promotes a sequence that has waited too long.
"""

from __future__ import annotations

import math
from typing import Protocol

from infer.errors import ConfigError
from infer.scheduling.sequence import Sequence


class Policy(Protocol):
    """What a scheduling policy decides: a sort key, and two yes-or-no questions."""

    prompts_first: bool
    rotates: bool

    def key(self, seq: Sequence) -> tuple[float, int]:
        """Sort by this; the second part is the arrival number, so no two are equal."""
        ...


class FirstComeFirstServed:
    """Arrival order."""

    prompts_first = False
    rotates = False

    def key(self, seq: Sequence) -> tuple[float, int]:
        """The arrival number alone: the older, the sooner."""
        return (0.0, seq.arrival)


class PrefillFirst(FirstComeFirstServed):
    """Arrival order, and prompts take the budget first."""

    prompts_first = True


class DecodeRoundRobin(FirstComeFirstServed):
    """Arrival order, and the turn to decode goes round."""

    rotates = True


class ByPriority(FirstComeFirstServed):
    """The request's own priority, smaller first."""

    def key(self, seq: Sequence) -> tuple[float, int]:
        """More urgent first, then older."""
        return (float(seq.priority), seq.arrival)


class ByDeadline(FirstComeFirstServed):
    """Earliest deadline first; requests without one come after all that have one."""

    def key(self, seq: Sequence) -> tuple[float, int]:
        """Nearer deadline first, then older."""
        return (seq.deadline if seq.deadline is not None else math.inf, seq.arrival)


POLICIES: dict[str, type[FirstComeFirstServed]] = {
    "fcfs": FirstComeFirstServed,
    "prefill_first": PrefillFirst,
    "decode_round_robin": DecodeRoundRobin,
    "priority": ByPriority,
    "deadline": ByDeadline,
}


def make_policy(name: str) -> Policy:
    """The policy of that name, or an error that lists them."""
    if name not in POLICIES:
        raise ConfigError(f"scheduler_policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]()
