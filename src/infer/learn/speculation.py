"""Lesson 10: guesses of the next tokens, verified in one step."""

from __future__ import annotations

from collections.abc import Sequence

from infer.engine.speculation import Speculation
from infer.learn.student import Student, expect
from infer.learn.world import World, hashed
from infer.scheduling.scheduler import Scheduler
from infer.speculative.adaptive import DraftLengths, StepCosts

TITLE = "Speculative decoding"
STARTER = '''\
"""Lesson 10: guess the next tokens from the text so far."""


class Guesses:
    """A proposer: its guesses may be wrong, and the text stays right."""

    def propose(self, wishes):
        """Return a list of guesses for each wish.

        wish.tokens: prompt and output so far. wish.num_drafts: the most guesses that can be used. The list
        is empty if there is nothing to guess.
        """
        raise NotImplementedError

    def has_match(self, wish):
        """Return True if guesses for this text are likely."""
        return True

    def finish(self, wish):
        """Forget a sequence that has ended."""
'''

ENOUGH = 0.5  # share of the guesses that must be right in a text that repeats itself
PERIOD = 6


def check(student: Student) -> None:
    """Serve texts that repeat themselves and texts that do not; all must stay right."""
    proposer = student.get("Guesses")()
    for name in ("propose", "has_match", "finish"):
        expect(callable(getattr(proposer, name, None)), f"Guesses has no method {name}")

    def speculation(scheduler: Scheduler) -> Speculation:
        costs = StepCosts.measured([(1, 1.0), (16, 1.5)])
        return Speculation(
            scheduler,
            DraftLengths(costs),
            proposer,
            max_drafts=4,
            max_rows=4,
            vocab_size=997,
            is_adaptive=False,
        )

    student.doing = "guessing in texts that do not repeat themselves"
    world = World(num_blocks=64, speculation=speculation)
    world.ask([3, 1, 4], 20)
    world.ask([1, 5], 20)
    world.finish()
    student.doing = f"guessing in texts that repeat themselves after {PERIOD} tokens"
    world = World(num_blocks=64, next_token=_repeating, speculation=speculation)
    for start in (10, 20):
        world.ask([*range(start, start + PERIOD), *range(start, start + 3)], 60)
    world.finish()
    assert world.speculation is not None
    totals = world.speculation.totals
    expect(totals.num_drafts > 0, "no guess was made for texts that repeat themselves")
    expect(
        totals.num_accepted >= ENOUGH * totals.num_drafts,
        f"{totals.num_accepted} of {totals.num_drafts} guesses were right, in texts that repeat themselves "
        f"after {PERIOD} tokens; {ENOUGH:.0%} are required",
    )


def _repeating(tokens: Sequence[int]) -> int:
    return tokens[-PERIOD] if len(tokens) >= PERIOD else hashed(tokens)
