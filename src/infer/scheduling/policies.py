"""Scheduling policies: each decides which sequence goes first.

    fcfs                 arrival order; sequences decode first, prompts get the rest of the budget
    prefill_first        prompts first: the best time to first token, the worst inter-token latency
    decode_round_robin   like fcfs, but decoding sequences take turns if a step cannot hold them all
    priority             the request's `priority`, smaller first; then arrival
    deadline             the nearest `deadline` first, requests without one last; then arrival

A custom policy is a `Policy`, or a function from a sequence to its urgency; the knob names its module or file
(config/own_code.py).

Fairness does not depend on the policy: the scheduler promotes a sequence that has waited too long, and a
sequence that was left out of too many steps goes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from infer.config.own_code import load_code
from infer.errors import ConfigError, EngineError
from infer.scheduling.sequence import Sequence


class Policy(NamedTuple):
    """A scheduling policy: the urgency of a sequence, and two switches."""

    urgency: Callable[[Sequence], float] = lambda seq: 0.0  # smaller: admitted sooner and preempted later
    prompts_first: bool = False  # prompts get the step's budget before decoding sequences
    rotates: bool = False  # sequences take turns if not all can decode in one step

    def key(self, seq: Sequence) -> tuple[float, int]:
        """Return the sort key of a sequence; the arrival number makes it unique."""
        return self.urgency(seq), seq.arrival


POLICIES = {
    "fcfs": Policy(),
    "prefill_first": Policy(prompts_first=True),
    "decode_round_robin": Policy(rotates=True),
    "priority": Policy(lambda seq: float(seq.group.request.priority)),
    "deadline": Policy(lambda seq: math.inf if (by := seq.group.request.deadline) is None else by),
}


def _number(function: Callable[[Sequence], object], seq: Sequence, name: str) -> float:
    """Call a user's urgency function; refuse the request if the result is not a number."""
    try:
        urgency = function(seq)
    except Exception as error:
        raise EngineError(f"scheduler_policy={name} raised {type(error).__name__}: {error}") from error
    if isinstance(urgency, int | float) and not math.isnan(urgency):
        return float(urgency)
    raise EngineError(f"scheduler_policy={name} returned {urgency!r}; it must return a number")


def find_policy(name: str) -> Policy:
    """Return a policy by its name, or the user's own by its module or file."""
    if name in POLICIES:
        return POLICIES[name]
    found = load_code(name, "scheduler_policy")
    if isinstance(found, Policy):
        return found
    if callable(found) and not isinstance(found, type):
        return Policy(urgency=lambda seq: _number(found, seq, name))
    raise ConfigError(
        f"scheduler_policy={name} is {found!r}; it must be an infer.scheduling.policies.Policy, or a "
        "function that takes a sequence and returns a number (the smallest goes first)"
    )
