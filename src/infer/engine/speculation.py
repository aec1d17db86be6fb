"""Speculative decoding: decides which sequences get drafts and how many, and learns from acceptance.

    propose    before a plan: sequences whose ids are all known get drafts, or places for drafts
    complete   after the plan, when blocks are reserved: a draft model fills the places
    judge      after the step: the number of accepted drafts decides how many are tried next

A step with drafts is read before the next is planned, because the accepted ids decide what comes next. Drafts
pay only while a step is limited by reading the weights. So no sequence gets drafts while prompts are computed
or could be admitted, or while the batch is too large. Steps then overlap as without speculation, and the
newest ids are still on the device: `is_due` estimates from the known ids if waiting for the rest pays.

Penalties and masks depend on all earlier tokens, so they differ from one draft to the next; devices handle
this (execution/host_sampling.py, execution/gpu/lanes.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise
from typing import Protocol

from infer.config.speculation import WINDOW_TOKENS
from infer.execution.order import StepOrder
from infer.execution.trees import main_line
from infer.sampling.params import NO_TOKEN
from infer.scheduling.plan import StepPlan
from infer.scheduling.request import DraftCounts
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import Sequence
from infer.speculative.adaptive import DraftLengths, MissedText, StepCosts
from infer.speculative.proposer import Proposer, Wish

LONGEST_PAUSE = 16  # most overlapping steps after waiting for ids in vain: no draft was found


class Drafter(Protocol):
    """A draft model: fills places whose blocks are reserved."""

    @property
    def is_late(self) -> bool:
        """True if `collect` may come after the step that verifies the drafts is launched."""

    def fitted(self, sequences: Seq[Sequence], counts: list[int]) -> list[int]:
        """Return the counts, limited to drafts that are already being made for these sequences."""

    def begin(self, sequences: Seq[Sequence]) -> None:
        """Begin to draft for these sequences, one draft for each reserved place."""

    def go_on(self, sequences: Seq[Sequence], counts: Seq[int], *, verifies: bool) -> None:
        """Begin to draft for the next window while the launched step runs, if possible.

        `verifies`: the step that verifies that window may be launched as well.
        """

    def collect(self) -> Seq[Seq[int]]:
        """Return the drafts that were begun, sequence by sequence."""

    def note(self, plan: StepPlan) -> bool:
        """Record a plan that is about to run, with or without drafts; True: a head may skip its step."""

    def is_ready(self, seq: Sequence) -> bool:
        """True if it can draft for a running sequence now; False: only after its next step."""

    def num_missed(self, seq: Sequence) -> int:
        """Return the number of tokens that it must compute before its first draft for a sequence."""

    def take_missed(self) -> int:
        """Return the number of missing tokens that it has computed since the last call."""


class Speculation:
    """Gives sequences drafts before each step in which they pay. One engine thread owns it."""

    def __init__(
        self,
        scheduler: Scheduler,
        lengths: DraftLengths,
        proposer: Proposer | None = None,
        drafter: Drafter | None = None,
        *,
        max_drafts: int,
        max_rows: int,
        vocab_size: int,
        max_len: int = sys.maxsize,
        is_adaptive: bool = True,
        is_synthetic: bool = False,
        has_trees: bool = False,
        prepare: Callable[[], bool] = lambda: False,
        again: Iterable[tuple[StepCosts, float | None]] = (),
    ) -> None:
        """`max_rows`: most rows of a batch with drafts; `max_len`: most tokens of a text with drafts.

        `again`: an iterator that times a step at each turn and yields the costs and the idle seconds until
        the next turn. `is_synthetic`: acceptance is random, so every place gets a draft, found or not.
        """
        assert (proposer is None) != (drafter is None), "give a proposer or a draft model, not both"
        self._scheduler, self._lengths = scheduler, lengths
        self._proposer, self._drafter = proposer, drafter
        self._max_drafts, self._vocab_size, self._max_len = max_drafts, vocab_size, max_len
        self._is_adaptive, self._is_synthetic, self._has_trees = is_adaptive, is_synthetic, has_trees
        self.prepare = prepare  # does one piece of warm-up work for drafting; False: none is left
        self._pool = scheduler.pool
        # most tokens of a step with drafts; more pay on no device
        self._max_tokens = min(WINDOW_TOKENS, scheduler.config.max_num_batched_tokens)
        self._most_rows = min(max_rows, scheduler.config.max_batch_size, self._max_tokens - 1)
        self._max_rows = self._paying_rows()
        self._again = iter(again)
        # wishes for the next step, the size of its batch, and the number of drafts for each wish
        self._chosen: tuple[list[tuple[int, int]], int, list[int]] = ([], 0, [])
        # overlapping steps after a wait that found no draft, and the step at which they end
        self._pause = self._pause_end = 0
        self._drafted: list[Sequence] = []  # sequences whose drafts are being made
        self._limits: dict[int, int] = {}  # most drafts of each known sequence, by seq_id
        self.totals = lengths.totals

    @property
    def costs(self) -> StepCosts:
        """The measured seconds of steps, from which draft lengths are chosen."""
        return self._lengths.costs

    def measure_again(self) -> float | None:
        """Time a step of an idle engine; returns the idle seconds until the next one; None: no more."""
        costs, wait_s = next(self._again, (self.costs, None))
        if costs != self.costs:
            self._lengths.use(costs)
            self._max_rows = self._paying_rows()
        return wait_s

    # -- before a step ----------------------------------------------------------------------------

    def is_due(self) -> bool:
        """True if the next step should have drafts, judging by the ids that are known.

        After a wait that found no draft there is a pause, which doubles each time.
        """
        if self._scheduler.step < self._pause_end or not self._is_quiet():
            return False
        pairs = list(self._wishes())
        if self._proposer is not None and not self._is_synthetic:
            pairs = [(seq, wish) for seq, wish in pairs if self._proposer.has_match(wish)]
        if not pairs or not self._is_adaptive:
            return bool(pairs)
        asked, missed = [(wish.seq_id, wish.num_drafts) for _, wish in pairs], self._missed(pairs)
        step, num_others = self._scheduler.step, len(self._scheduler.running) - len(asked)
        return self._lengths.is_worth_it(step, asked, num_others, self._room, self._seen(), missed)

    def propose(self) -> None:
        """Give sequences drafts for the next step, or places for them; all their ids are known."""
        self._scheduler.state.ahead = 0
        if not self._is_quiet():
            return
        pairs = list(self._wishes())
        wishes = [wish for _, wish in pairs]
        found: Seq[Seq[int]] = [(0,) * wish.num_drafts for wish in wishes]  # places
        if self._proposer is not None:
            proposed = self._proposer.propose(wishes)
            if not self._is_synthetic:
                found = [
                    self._usable(seq, drafts[: wish.num_drafts])
                    for (seq, wish), drafts in zip(pairs, proposed, strict=True)
                ]
        counts = self._counts(pairs, found)
        if self._drafter is not None:
            counts = self._drafter.fitted([seq for seq, _ in pairs], counts)
        if not any(counts):
            self._scheduler.state.ahead = 0
        for (seq, _), drafts, count in zip(pairs, found, counts, strict=True):
            if count:
                self._scheduler.propose(seq, drafts[:count])
        is_in_vain = self._proposer is not None and not any(counts)
        self._pause = min(max(2 * self._pause, 2), LONGEST_PAUSE) if is_in_vain else 0
        self._pause_end = self._scheduler.step + self._pause

    def complete(self, plan: StepPlan) -> bool:
        """Let a draft model fill the places of a plan; return True if a draft head may skip its step."""
        if self._drafter is None:
            return False
        is_unseen = self._drafter.note(plan)
        self._scheduler.state.ahead = 0
        self._drafted = [seq for seq in plan.chunks.sequences if seq.drafts]
        if self._drafted:
            self._drafter.begin(self._drafted)
            if not self._drafter.is_late:
                self._fill()
        return is_unseen

    def settle(self, order: StepOrder) -> None:
        """Write drafts into an order that was launched before they were known."""
        drafted, drafter = self._drafted, self._drafter
        if not drafted or drafter is None:
            return
        # choose the next lengths now, while the device works
        pairs = list(self._wishes())
        asked = [(wish.seq_id, wish.num_drafts) for _, wish in pairs]
        counts = self._choose(pairs, asked) if self._is_adaptive else [count for _, count in asked]
        self._chosen = asked, len(self._scheduler.running), counts
        going_on = [(seq, count) for (seq, _), count in zip(pairs, counts, strict=True) if count]
        num_rows = len(self._scheduler.running)
        is_short = self.costs.is_host_slower(num_rows, max(counts, default=0), self._seen())
        sequences, lengths = [seq for seq, _ in going_on], [count for _, count in going_on]
        drafter.go_on(sequences, lengths, verifies=is_short and len(going_on) == num_rows)
        self._fill()
        places = (order.counts.cumsum() - order.counts)[order.num_sampled > 1].tolist()
        for seq, place in zip(drafted, places, strict=True):
            order.tokens[place + 1 : place + 1 + len(seq.drafts)] = seq.drafts

    def _fill(self) -> None:
        """Wait for drafts, and put them into the places of their sequences."""
        assert self._drafter is not None
        for seq, drafts in zip(self._drafted, self._drafter.collect(), strict=True):
            assert len(drafts) == len(seq.drafts), "each place gets one draft"
            seq.drafts = tuple(draft if draft != NO_TOKEN else 0 for draft in drafts)
        self._drafted = []

    # -- after a step -----------------------------------------------------------------------------

    def judge(self, plan: StepPlan, ids: Seq[Seq[int]]) -> None:
        """Count a step's accepted drafts, before the rejected ones are retracted."""
        sequences = plan.chunks.sequences
        longest, num_drafted = max(map(_longest, sequences)), sum(1 for seq in sequences if seq.drafts)
        kept_s, draft_s = self.costs.per_draft(
            len(sequences), num_drafted, plan.chunks.num_drafts, longest, self._seen()
        )
        before_s = self.totals.saved_s
        for seq, kept in zip(sequences, ids, strict=True):
            if not seq.drafts or not kept:
                continue
            num_drafts, num_kept = len(seq.drafts), len(kept) - 1
            saved_s = num_kept * kept_s - num_drafts * draft_s
            self.totals.saved_s += saved_s
            known = self._lengths.update(seq.seq_id, num_drafts, num_kept, _longest(seq))
            if known is not None:
                known.saved_s += saved_s
                seq.draft_counts = DraftCounts(known.num_drafts, tuple(known.by_length), known.saved_s)
        missed = 0 if self._drafter is None else self._drafter.take_missed()
        self._lengths.charge(before_s - self.totals.saved_s + self.costs.catch_up_s(missed))

    def accepted_by_position(self) -> tuple[int, ...]:
        """Return the number of accepted drafts at each position of the longest window."""
        counts = self.totals.by_position
        return tuple(counts + [0] * (self._max_drafts - len(counts)))

    def finish(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        if self._limits.pop(seq.seq_id, None) is None:
            return
        if self._proposer is not None:
            self._proposer.finish(self._wish(seq, 0))
        self._lengths.forget(seq.seq_id)

    # -- which sequences, how many drafts ---------------------------------------------------------

    def _paying_rows(self) -> int:
        """Return the largest batch in which drafts can pay."""
        return self._lengths.most_rows(self._most_rows) if self._is_adaptive else self._most_rows

    def _is_quiet(self) -> bool:
        """True if no prompt is computed or could be admitted, and drafts pay in a batch of this size."""
        scheduler = self._scheduler
        if not 0 < len(scheduler.running) <= self._max_rows:
            return False
        if scheduler.may_admit:
            return False
        if self._has_trees and any(not seq.num_output or seq.is_beam for seq in scheduler.running):
            return False  # a step with trees samples all tokens in the same way
        return all(seq.num_pending == 1 for seq in scheduler.running)

    def _wishes(self) -> Iterator[tuple[Sequence, Wish]]:
        """Yield the sequences that could use drafts, with the most that each could use."""
        for seq in self._scheduler.running:
            limit = self._limits.get(seq.seq_id)
            if limit is None:
                limit = self._limits[seq.seq_id] = self._limit(seq)
                self._lengths.begin(seq.seq_id)
            limit = min(limit, min(seq.max_total - 1, self._max_len) - seq.num_tokens)
            has_use = limit > 0 and seq.num_samples == 1 and seq.num_output > 0
            if has_use and (self._drafter is None or self._drafter.is_ready(seq)):
                yield seq, self._wish(seq, limit)

    def _limit(self, seq: Sequence) -> int:
        """Return the most drafts of a sequence; 0: it never gets any."""
        request = seq.group.request
        asked = request.params.num_speculative_tokens
        if seq.is_beam or request.pooling is not None:
            return 0
        return self._max_drafts if asked is None else min(asked, self._max_drafts)

    def _wish(self, seq: Sequence, num_drafts: int) -> Wish:
        return Wish(seq.seq_id, seq.tokens, seq.num_prompt, seq.group.request.cache_salt, num_drafts)

    def _usable(self, seq: Sequence, drafts: Seq[int]) -> Seq[int]:
        """Return the drafts before the first that is not in the vocabulary or would end the text."""
        for place, token_id in enumerate(drafts):
            if not 0 <= token_id < self._vocab_size or token_id in seq.stop_ids:
                return drafts[:place]
        return drafts

    def _counts(self, pairs: Seq[tuple[Sequence, Wish]], found: Seq[Seq[int]]) -> list[int]:
        """Return how many of the found drafts each sequence gets.

        Drafts never cause a preemption and never push a sequence out of the step.
        """
        scheduler, available = self._scheduler, [len(drafts) for drafts in found]
        asked = [(wish.seq_id, count) for (_, wish), count in zip(pairs, available, strict=True)]
        is_late = self._drafter is not None and self._drafter.is_late
        scheduler.state.ahead = self._max_drafts + 1 if is_late else 0  # turns may begin before the results
        if not self._has_room(asked):
            scheduler.state.ahead = 0
            if not (is_late and self._has_room(asked)):
                return [0] * len(available)
        if self._is_adaptive:
            (*chosen_for, counts), self._chosen = self._chosen, ([], 0, [])
            is_chosen = chosen_for == [asked, len(scheduler.running)]
            return counts if is_chosen else self._choose(pairs, asked)
        ends = [min(end, self._room) for end in accumulate(available, initial=0)]
        return [end - start for start, end in pairwise(ends)]

    def _has_room(self, asked: list[tuple[int, int]]) -> bool:
        """True if there are blocks for the asked drafts and for `ahead` more tokens of each sequence."""
        count_of, num_blocks, ahead = dict(asked), 0, self._scheduler.state.ahead
        for seq in self._scheduler.running:
            num_short = seq.num_tokens + count_of.get(seq.seq_id, 0) + ahead - seq.num_reserved
            num_blocks += self._pool.blocks_of(max(num_short, 0))
        return num_blocks <= self._pool.num_free_blocks

    def _choose(self, pairs: Seq[tuple[Sequence, Wish]], asked: list[tuple[int, int]]) -> list[int]:
        """Return the number of drafts that pay for each sequence, given how many it could use."""
        scheduler, missed = self._scheduler, self._missed(pairs)
        num_others = len(scheduler.running) - len(asked)
        return self._lengths.lengths(scheduler.step, asked, num_others, self._room, self._seen(), missed)

    def _missed(self, pairs: Seq[tuple[Sequence, Wish]]) -> Iterator[MissedText]:
        """Yield what a draft model has missed of each text."""
        if (drafter := self._drafter) is not None:
            for seq, _ in pairs:
                yield MissedText(drafter.num_missed(seq), seq.max_total - seq.num_tokens)

    @property
    def _room(self) -> int:
        """The number of drafts that fit into a step, in addition to one token of each sequence."""
        return max(self._max_tokens - len(self._scheduler.running), 0)

    def _seen(self) -> float:
        """Return the average number of positions that a token of the batch attends to; 0.0: nothing runs."""
        return float(self._scheduler.state.num_tokens.mean()) if self._scheduler.running else 0.0


def _longest(seq: Sequence) -> int:
    """Return the number of drafts on the longest path of a window; 0: it has no drafts in this step."""
    return main_line(seq.draft_backs) if seq.drafts and seq.draft_backs else len(seq.drafts)
