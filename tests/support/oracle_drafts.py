"""What drafts for the token oracle: an engine's own `Speculation`, over a proposer or a model that knows it.

`Knowing` asks the oracle and is right with a given probability at each place, so windows of all lengths are
kept, in part or whole. A `KnowingProposer` may also be silent, say ids that are no tokens, or say too many; a
`KnowingModel` may raise.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from infer.engine.speculation import Speculation
from infer.sampling.params import sequence_seed
from infer.scheduling.plan import StepPlan
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import Sequence
from infer.speculative.adaptive import DraftLengths, StepCosts
from infer.speculative.ngram import NgramProposer
from infer.speculative.proposer import Proposer, Wish
from tests.support.oracle import VOCAB_SIZE, next_token

KINDS = ("ngram", "proposer", "drafter")
COSTS = StepCosts(((1, 1e-3), (64, 3e-3)))  # drafts pay if some are right


class Knowing:
    """Knows what the oracle will say, with a probability at each place."""

    def __init__(self, scheduler: Scheduler, share: float, seed: object) -> None:
        self._scheduler, self._share = scheduler, share
        self._rng = random.Random(str(seed))

    def _drafts(self, seq: Sequence, count: int) -> list[int]:
        seed, text = sequence_seed(seq.group.seed, seq.index), list(seq.tokens)
        for _ in range(count):
            is_right = self._rng.random() < self._share
            text.append(next_token(text, seed) if is_right else self._rng.randrange(VOCAB_SIZE))
        return text[len(seq.tokens) :]


class KnowingProposer(Knowing):
    """Proposes what it knows."""

    def propose(self, wishes: Seq[Wish]) -> list[Seq[int]]:
        """Drafts of wishes: too few, too many, or ids that no vocabulary has among them."""
        found: list[Seq[int]] = []
        for wish in wishes:
            drafts = self._drafts(
                self._scheduler._by_id[wish.seq_id], self._rng.randint(0, wish.num_drafts + 1)
            )
            if drafts and self._rng.random() < 0.1:
                drafts[self._rng.randrange(len(drafts))] = self._rng.choice((-1, VOCAB_SIZE, 1 << 33))
            found.append(drafts)
        return found

    def has_match(self, wish: Wish) -> bool:
        """Mostly."""
        return self._rng.random() < 0.8

    def finish(self, wish: Wish) -> None:
        """Forget nothing: nothing is kept."""


class KnowingModel(Knowing):
    """Fills places with what it knows."""

    is_late = False
    fails = 0.0  # how likely it raises
    _begun: Seq[Sequence] = ()

    def fitted(self, sequences: Seq[Sequence], counts: list[int]) -> list[int]:
        """Return the counts: no drafts are being made."""
        return counts

    def begin(self, sequences: Seq[Sequence]) -> None:
        """Take sequences whose places are to be filled."""
        if self._rng.random() < self.fails:
            raise RuntimeError("the draft model was told to fail")
        self._begun = sequences

    def go_on(self, sequences: Seq[Sequence], counts: Seq[int], *, verifies: bool) -> None:
        """Do nothing: it is asked when the step is over."""

    def collect(self) -> list[list[int]]:
        """One draft for each place."""
        return [self._drafts(seq, len(seq.drafts)) for seq in self._begun]

    def note(self, plan: StepPlan) -> bool:
        """See a plan: nothing to do, and no head that may skip it."""
        return False

    def num_missed(self, seq: Sequence) -> int:
        """Return 0: it knows all texts."""
        return 0

    def take_missed(self) -> int:
        """The number of missed tokens: it computes none."""
        return 0

    def is_ready(self, seq: Sequence) -> bool:
        """Say that it can always draft."""
        return True


def speculation_of(
    kind: str, *, seed: object = 0, share: float = 0.7, is_adaptive: bool = True, max_drafts: int = 4
) -> Callable[[Scheduler], Speculation]:
    """What makes the `Speculation` of a world; `kind` is one of KINDS."""

    def make(scheduler: Scheduler) -> Speculation:
        proposer: Proposer = NgramProposer(1, 8)
        if kind == "proposer":
            proposer = KnowingProposer(scheduler, share, seed)
        return Speculation(
            scheduler,
            DraftLengths(COSTS),
            None if kind == "drafter" else proposer,
            KnowingModel(scheduler, share, seed) if kind == "drafter" else None,
            max_drafts=max_drafts,
            max_rows=64,
            vocab_size=VOCAB_SIZE,
            is_adaptive=is_adaptive,
        )

    return make
