"""Scheduling policies: each decides, in a few lines, which sequence goes first.

    fcfs                 arrival order; decoding goes on while prompts fill what is left of the budget
    prefill_first        prompts first: the best time to first token, the worst inter-token latency
    decode_round_robin   like fcfs, but if a step has too few tokens, decoding sequences share them equally
    priority             the request's `priority`, smaller first; then arrival
    deadline             the nearest `deadline` first, those without one last; then arrival

Your own policy is a `Policy`, or a function from a sequence to its urgency; the knob names its module or file
(config/own_code.py).

Fairness does not depend on the policy: the scheduler promotes a sequence that has waited too long, and a
sequence that has been left out of too many steps goes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from infer.config.own_code import load_code
from infer.errors import ConfigError, EngineError
from infer.scheduling.sequence import Sequence


class Policy(NamedTuple):
    """A scheduling policy: how urgent a sequence is, and two yes-or-no questions."""

    urgency: Callable[[Sequence], float] = lambda seq: 0.0  # smaller: admitted sooner and preempted later
    prompts_first: bool = False  # prompts get the step's budget before the sequences that decode
    rotates: bool = False  # when not all sequences can decode in one step, the turn goes round

    def key(self, seq: Sequence) -> tuple[float, int]:
        """Sort by this; the second part is the arrival number, so no two are equal."""
        return self.urgency(seq), seq.arrival


POLICIES = {
    "fcfs": Policy(),
    "prefill_first": Policy(prompts_first=True),
    "decode_round_robin": Policy(rotates=True),
    "priority": Policy(lambda seq: float(seq.group.request.priority)),
    "deadline": Policy(lambda seq: math.inf if (by := seq.group.request.deadline) is None else by),
}


def _number(function: Callable[[Sequence], object], seq: Sequence, name: str) -> float:
    """Return an urgency that sequences can be sorted by; refuse the request if it is not a number."""
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
        "function that takes a sequence and returns a number, smaller for what goes first"
    )
