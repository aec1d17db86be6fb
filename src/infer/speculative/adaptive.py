"""Adaptive drafts: each sequence of a step gets the number of drafts that gives the most text per second.

A draft costs a token of the step, and is accepted only if it and all drafts before it are right. At an
acceptance rate of r, the draft at depth i survives with probability r^i:

    rate    depth 1    2      3      4               step of 2 rows: 4.0 ms, 0.1 ms more for each draft
    0.8     [0.80]  [0.64] [0.51] [0.41]             drafts taken, best first           tokens / ms
    0.3     [0.30]   0.09   0.03   0.01                 none                            2.00 / 4.0 = 0.50
                                                        .80 .64 .51 .41                 4.36 / 4.4 = 0.99
    in brackets: the best choice                        .80 .64 .51 .41 .30             4.66 / 4.5 = 1.04
                                                        .80 .64 .51 .41 .30 .09         4.75 / 4.6 = 1.03

`choose` maximises expected tokens per second over all choices. Survival falls with depth, so taking drafts in
the order of survival never skips a draft of a sequence, and this one order serves every number of drafts.
Drafting takes time for each position of the longest window (`draft_s`), so with a draft model the search is
repeated for each longest window. The tokens of other sequences in the step count too, so drafts must be worth
delaying them. In a step that is bound by arithmetic they never are, and speculation is off. Several sequences
in a step get drafts only if these gain LEAST_GAIN: the sequences that gain least end last.

    windows    ▪▪▪▪▪▪▪ · · · · · · · · · · · · · · · ▪ · · · · · · · · · · · · · · · ▪▪▪▪▪▪▪▪▪▪▪▪▪▪
    drafts     4433222                               1 rejected                      1 accepted, then 4, 4, ..
               wrong: the rate falls                 └───────── PROBE_STEPS ─────────┘

A draft model must first compute the tokens that it has missed. Drafts must repay this time, an equal part in
each step that the text has left, in at most REPAY_STEPS. A text that cannot repay its part gets no drafts.

A sequence's rate is a mean over about its last MEMORY judged drafts. Until its first drafts it has the rate
of all sequences, which starts at PRIOR_RATE and weighs as much as up to MOST_PRIOR_WEIGHT judged drafts. A
sequence without drafts would learn nothing. So now and then all sequences without drafts are probed with one
draft each, or with LONG_PROBE if only longer windows can pay off, provided that drafts at HOPED_RATE would
pay off in that step. If a draft model would have to catch up with too many texts, only some are probed. A
probe raises the rate to PRIOR_RATE and lowers its weight to PROBE_WEIGHT, so a few windows follow, and they
decide. Time lost by windows, and by a draft model that catches up with missed tokens, is a debt: the next
probe comes when the debt is PROBE_SHARE of the time since the last probe, PROBE_STEPS to MOST_PROBE_STEPS
steps after it. Windows that gain time pay debts, and up to CREDIT_STEPS steps in advance. Nothing here reads
a clock: equal calls give equal lengths.

A text that is easy to draft may begin with words that are not. Stopping too soon loses more than a few
windows too many, so a rate that is little known is high and changes slowly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, chain, pairwise, product
from operator import itemgetter
from typing import Any, NamedTuple

MEMORY = 32  # judged drafts that a sequence's rate averages
PRIOR_RATE = 0.7  # rate before any draft was judged; high enough to draft wherever drafts are cheap
PRIOR_WEIGHT = 6.0  # weight of PRIOR_RATE, in judged drafts
PROBE_WEIGHT = 3.0  # weight of the rate of a sequence that is probed
MOST_PRIOR_WEIGHT = 8.0  # largest weight of the rate of all sequences in a new one, in judged drafts
ALL_MEMORY = 64  # judged drafts that the rate of all sequences averages
PROBE_STEPS = 64  # fewest steps between two probes of sequences without drafts
MOST_PROBE_STEPS = 1024  # most steps between two probes
PROBE_SHARE = 0.005  # share of the time that probes may lose
LEAST_GAIN = 0.1  # least gain of speed by drafts where several sequences share a step
CREDIT_STEPS = 16  # most time that drafts may save for later probes, in steps of one sequence
HOPED_RATE = 0.95  # acceptance rate at which a probe must pay off to be worth making
LONG_PROBE = 4  # drafts of a probe where a single draft can never pay off
REPAY_STEPS = 256  # most steps in which drafts must repay the time of catching up
TRIAL_GAPS = 8, 64  # sequences from one trial to the next: after the first trial, and at most

Pairs = tuple[tuple[int, float], ...]


class MissedText(NamedTuple):
    """A text that a draft model may not have computed in full."""

    num_missed: int  # tokens that it computes before its first draft
    num_left: int  # tokens that the text can still get


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step by the number of its tokens: linear between measured pairs and after the last."""

    pairs: Pairs  # (tokens, seconds); more tokens never take less time
    gap_s: float = 0.0  # host seconds of a step with drafts: reading, planning and launching it
    draft_s: float = 0.0  # seconds of drafting one more position
    draft_row_s: float = 0.0  # seconds that each sequence adds to `draft_s`
    row_gap_s: float = 0.0  # host seconds that each sequence adds to `gap_s`
    seen_s: float = 0.0  # seconds for each position that a token attends to
    is_ahead: bool = False  # True: the device drafts while the host works, and may start the verifying step
    plain: Pairs = ()  # (sequences, seconds) of steps without drafts, if these run other kernels
    turns_s: float = 0.0  # fixed seconds of drafting, for any number of positions
    draft_seen_s: float = 0.0  # seconds for each position that a token of the draft model attends to
    missed_token_s: float | None = None  # seconds of a token that a draft model missed; None: `draft_row_s`

    def __post_init__(self) -> None:
        if not self.pairs or any(pairs and not pairs[0][1] > 0 <= pairs[0][0] for pairs in self._tables):
            raise ValueError(f"step costs need pairs of tokens >= 0 and seconds > 0, got {self._tables}")
        for (fewer, less), (more, later) in chain.from_iterable(map(pairwise, self._tables)):
            if not (fewer < more and less <= later):
                raise ValueError(f"step costs must ascend, got {(fewer, less)} before {(more, later)}")
        known = {each.name: getattr(self, each.name) for each in fields(self) if each.name.endswith("_s")}
        known["missed_token_s"] = self.missed_s(1)
        known["seconds"] = max(pairs[-1][1] for pairs in self._tables if pairs)
        for name, value in known.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} of step costs must be finite and not negative, got {value}")

    @property
    def _tables(self) -> tuple[Pairs, Pairs]:
        return self.pairs, self.plain

    @classmethod
    def measured(
        cls, pairs: Iterable[tuple[int, float]], plain: Iterable[tuple[int, float]] = (), **others: Any
    ) -> StepCosts:
        """Return the costs from measured pairs in any order; `others` are the other fields."""
        return cls(_ascending(pairs), plain=_ascending(plain), **others)

    @classmethod
    def roofline(cls, floor_s: float, per_token_s: float, gap_s: float = 0, draft_s: float = 0) -> StepCosts:
        """Return estimated costs: a step takes the time of its weights or of its arithmetic, the longer one.

        With the sum of both times, drafts would seem to pay off at any batch size.
        """
        critical = int(floor_s / max(per_token_s, 1e-12))  # tokens whose arithmetic takes as long
        return cls(((critical, floor_s), (critical + 1, floor_s + per_token_s)), gap_s, draft_s)

    def seconds(self, num_tokens: int, seen: float = 0.0) -> float:
        """Return the seconds of a step with drafts that computes `num_tokens` in all.

        `seen`: the positions that a token attends to, on average, in all these methods.
        """
        return _at(self.pairs, num_tokens) + num_tokens * seen * self.seen_s

    def without_drafts(self, num_rows: int, seen: float = 0.0) -> float:
        """Return the seconds of a step without drafts, at most `seconds(num_rows)`."""
        windows_s = self.seconds(num_rows)
        fastest = min(_at(self.plain, num_rows), windows_s) if self.plain else windows_s
        return fastest + num_rows * seen * self.seen_s

    def host_s(self, num_rows: int) -> float:
        """Return the host seconds of a step with drafts."""
        return self.gap_s + num_rows * self.row_gap_s

    def _making_s(self, num_drafted: int, longest: int, seen: float) -> float:
        row_s = self.draft_row_s + seen * self.draft_seen_s
        return self.turns_s + (self.draft_s + num_drafted * row_s) * longest

    def with_drafts(
        self, step_s: float, num_rows: int, num_drafted: int, longest: int, seen: float = 0.0
    ) -> float:
        """Return the seconds from a step of `step_s` seconds to the next one, if some rows draft for it.

        `longest`: the most drafts of a row. A device that is ahead drafts while the host works; if all rows
        draft, it does not wait for the host before the verifying step either.
        """
        host, making = self.host_s(num_rows), self._making_s(num_drafted, longest, seen)
        if not self.is_ahead:
            return step_s + host + making
        return max(step_s + making, host) if num_drafted == num_rows else step_s + max(making, host)

    def missed_s(self, num_tokens: int) -> float:
        """Estimate the seconds that missed tokens add to a pass of a draft model."""
        return num_tokens * (self.draft_row_s if self.missed_token_s is None else self.missed_token_s)

    def catch_up_s(self, num_tokens: int) -> float:
        """Estimate the seconds in which a draft model computes the tokens that it has missed."""
        return self.turns_s + self.draft_s + self.missed_s(num_tokens) if num_tokens else 0.0

    def is_host_slower(self, num_rows: int, longest: int, seen: float = 0.0) -> bool:
        """True if the device has drafted for all rows before the host has finished with the last step."""
        return self.is_ahead and self._making_s(num_rows, longest, seen) < self.host_s(num_rows)

    def per_draft(
        self, num_rows: int, num_drafted: int, num_drafts: int, longest: int, seen: float = 0.0
    ) -> tuple[float, float]:
        """Return the seconds that an accepted draft saves, and the seconds that each draft adds to its step.

        An accepted draft saves a token's share of a step without drafts; all drafts share the added time.
        """
        plain, window = self.without_drafts(num_rows, seen), self.seconds(num_rows + num_drafts, seen)
        added = self.with_drafts(window, num_rows, num_drafted, longest, seen) - plain
        return plain / num_rows, added / num_drafts


def _at(pairs: Pairs, count: int) -> float:
    """Return the seconds of a count, interpolated in a table."""
    place = min(bisect_right(pairs, count, key=itemgetter(0)), len(pairs) - 1)
    (fewer, less), (more, later) = pairs[max(place - 1, 0)], pairs[place]
    slope = (later - less) / (more - fewer) if more > fewer else 0.0
    return less + slope * max(count - fewer, 0)


def _ascending(pairs: Iterable[tuple[int, float]]) -> Pairs:
    """Sort pairs; disturbances only add time, so a count takes at most the time of any larger count."""
    falling = sorted(pairs, reverse=True)
    fastest = accumulate((seconds for _, seconds in falling), min)
    return tuple((count, least) for (count, _), least in zip(falling, fastest, strict=True))[::-1]


@dataclass(slots=True)
class Acceptance:
    """Statistics of a sequence's drafts: the acceptance rate, and counts to report."""

    num_drafts: int = 0
    is_new: bool = True  # True: it was neither judged nor probed, and follows the rate of all sequences
    by_length: list[int] = field(default_factory=list)  # windows by the number of accepted drafts, from 0
    saved_s: float = 0.0  # seconds that the drafts saved, estimated with `StepCosts.per_draft`
    _right: float = PRIOR_RATE * PRIOR_WEIGHT  # decayed counts, which start from the prior
    _judged: float = PRIOR_WEIGHT
    _memory: int = MEMORY

    def update(self, num_drafts: int, num_accepted: int, longest: int | None = None) -> None:
        """Count a window. Drafts after the first rejected one are not judged and teach nothing.

        `longest`: the number of drafts on the longest path, if the window is a tree.
        """
        assert 0 <= num_accepted <= num_drafts, f"{num_accepted} of {num_drafts} drafts accepted"
        if not num_drafts:
            return
        self.num_drafts, self.is_new = self.num_drafts + num_drafts, False
        self.by_length += [0] * (num_accepted + 1 - len(self.by_length))
        self.by_length[num_accepted] += 1
        for place in range(min(num_accepted + 1, num_drafts if longest is None else longest)):
            self._right += (place < num_accepted) - self._right / self._memory
            self._judged += 1 - self._judged / self._memory

    def begin_probe(self) -> None:
        """Raise the rate to PRIOR_RATE, and lower its weight to PROBE_WEIGHT: the next windows decide."""
        self._right, self._judged = max(self.rate, PRIOR_RATE) * PROBE_WEIGHT, PROBE_WEIGHT
        self.is_new = False

    @property
    def rate(self) -> float:
        """The estimated probability that a draft is right if all drafts before it are."""
        return self._right / self._judged

    @property
    def num_windows(self) -> int:
        """The number of steps in which the sequence had drafts."""
        return sum(self.by_length)

    @property
    def num_accepted(self) -> int:
        """The number of accepted drafts."""
        return sum(length * count for length, count in enumerate(self.by_length))

    @property
    def by_position(self) -> list[int]:
        """The number of accepted drafts at each position of a window, from the first."""
        return list(accumulate(reversed(self.by_length[1:])))[::-1]


class DraftLengths:
    """Chooses the number of drafts of each sequence in a step, and learns from judged windows."""

    def __init__(
        self,
        costs: StepCosts,
        *,
        survival: Callable[[float, float, int], float] = lambda before, rate, place: before * rate,
        turns: Callable[[int], int] = int,
    ) -> None:
        """`survival`: the probability that the draft at a place is accepted, given the probability of the
        draft before it and a rate; `turns`: the passes that make a number of drafts. Defaults suit chains.
        """
        self.costs, self._survival, self._turns = costs, survival, turns
        self._seconds: list[float] = []  # seconds of steps without drafts, by number of tokens
        self.totals = Acceptance(_memory=ALL_MEMORY)
        self._known: dict[int, Acceptance] = defaultdict(self._new)
        self._last_probe, self._debt_s = 0, 0.0  # step; negative: the probe of a trial is due
        self._num_untried, self._between = 0, 1  # sequences since the last trial, and from it to the next
        self._most_rows: float = math.inf  # the largest batch with drafts
        self._paying: dict[tuple[int, int, float], bool] = {}  # results of `_pays`: rows, drafts and rate
        # arguments for which `is_worth_it` was last False, and the step until which it stays False
        self._unworthy: tuple[list[tuple[int, int]], int] = [], 0
        self._unworthy_until = 0

    def lengths(
        self,
        step: int,
        wishes: Sequence[tuple[int, int]],
        num_others: int = 0,
        room: int | None = None,
        seen: float = 0.0,
        missed: Iterable[MissedText] = (),
    ) -> list[int]:
        """Return the number of drafts of each wish, which is a sequence and the most drafts that it can use.

        `seen`: the positions that a token attends to, on average; `missed`: the text of each wish, if a draft
        model may have to catch up.
        """
        chosen, idle = self._chosen(step, wishes, num_others, room, seen, missed)
        if any(map(chosen.__getitem__, idle)):
            # nothing overlaps a probe: the device waits for the host before it, and again after it
            waited = self._last_probe >= 0  # False for a trial, which does not wait for the old debt
            owed_s = min(self._debt_s, 0.0) if waited else self._debt_s
            self._debt_s = owed_s + self.costs.host_s(len(wishes) + num_others)
        if idle:
            self._last_probe = step
        for row in filter(chosen.__getitem__, idle):
            self._known[wishes[row][0]].begin_probe()
        return chosen

    def is_worth_it(
        self,
        step: int,
        wishes: Sequence[tuple[int, int]],
        num_others: int = 0,
        room: int | None = None,
        seen: float = 0.0,
        missed: Iterable[MissedText] = (),
    ) -> bool:
        """True if any wish would get drafts in this step."""
        asked = list(wishes), num_others
        if asked == self._unworthy and step < self._unworthy_until:
            return False
        if any(self._chosen(step, wishes, num_others, room, seen, missed)[0]):
            return True
        probe = self._next_probe(len(wishes) + num_others)
        self._unworthy, self._unworthy_until = asked, probe if probe > step else step + PROBE_STEPS
        return False

    def is_tried(self, num_rows: int, num_drafts: int) -> bool:
        """True if a new sequence should be followed, which takes time but is needed before it can get drafts.

        All are followed while drafts at the rate of all sequences pay off in a batch of `num_rows`. If only
        better drafts would, one sequence in several is a trial. Its probe comes at once and adds to the debt.
        """
        if self._pays(num_rows, num_drafts, self.totals.rate):
            self._num_untried, self._between = 0, TRIAL_GAPS[0]
            return True
        could_pay = self._pays(num_rows, num_drafts, HOPED_RATE)
        self._num_untried += could_pay
        if not could_pay or self._num_untried < self._between:
            return False
        self._num_untried, self._between = 0, min(max(2 * self._between, TRIAL_GAPS[0]), TRIAL_GAPS[1])
        self._last_probe, self._unworthy_until = -MOST_PROBE_STEPS, 0
        return True

    def _pays(self, num_rows: int, num_drafts: int, rate: float) -> bool:
        """True if drafts with about this acceptance rate pay off in a batch; results are cached."""
        if num_rows > self._most_rows:
            return False
        asked = num_rows, num_drafts, round(rate, 2)
        if asked not in self._paying:
            self._paying[asked] = any(self.choose([(asked[2], num_drafts)] * num_rows))
        return self._paying[asked]

    def charge(self, lost_s: float) -> None:
        """Add the seconds that a step with drafts has lost against steps without; negative: it has gained."""
        self._debt_s = max(self._debt_s + lost_s, -CREDIT_STEPS * self.costs.without_drafts(1))

    def use(self, costs: StepCosts) -> None:
        """Use other costs from now on."""
        self.costs = costs
        self._seconds.clear()
        self._paying.clear()
        self._unworthy_until = 0

    def most_rows(self, limit: int) -> int:
        """Return the largest batch, up to `limit`, in which a probe pays off at HOPED_RATE."""
        lengths = product(range(limit, 0, -1), (1, LONG_PROBE))
        found = (num for num, most in lengths if any(self.choose([(HOPED_RATE, most)] * num)))
        self._most_rows = next(found, 0)
        return int(self._most_rows)

    def _next_probe(self, num_rows: int) -> int:
        """Return the first step that may have a probe."""
        waits = self._debt_s / (PROBE_SHARE * self.costs.without_drafts(num_rows))
        return self._last_probe + int(min(max(waits, PROBE_STEPS), MOST_PROBE_STEPS))

    def _new(self) -> Acceptance:
        weight = min(self.totals._judged, MOST_PRIOR_WEIGHT)
        return Acceptance(_right=self.totals.rate * weight, _judged=weight)

    def _chosen(
        self,
        step: int,
        wishes: Sequence[tuple[int, int]],
        num_others: int,
        room: int | None,
        seen: float,
        missed: Iterable[MissedText],
    ) -> tuple[list[int], list[int]]:
        """Return the number of drafts of each wish, and the places of the wishes that are probed."""
        missed = [*missed]
        rows = [(self._rate(seq_id), available) for seq_id, available in wishes]
        token_s = self.costs.without_drafts(len(rows) + num_others, seen) / max(len(rows) + num_others, 1)
        able, repaid_s = self._able(rows, missed, token_s)
        chosen = self.choose(able, num_others, room, seen, repaid_s)
        if step < self._next_probe(len(rows) + num_others):
            return chosen, []
        idle = [row for row, (_, available) in enumerate(rows) if available and not chosen[row]]
        for most in (1, LONG_PROBE) if idle else ():
            for row in idle:
                rows[row] = HOPED_RATE, min(most, wishes[row][1])
            able, repaid_s = self._able(rows, missed, token_s)
            chosen = self.choose(able, num_others, room, seen, repaid_s)
            if any(map(chosen.__getitem__, idle)):
                break
        if missed:
            for row in self._unaffordable(idle, missed, len(rows) + num_others):
                chosen[row] = 0
        return chosen, idle

    def _able(
        self, rows: Sequence[tuple[float, int]], missed: Sequence[MissedText], token_s: float
    ) -> tuple[Sequence[tuple[float, int]], float]:
        """Return the rows, without drafts for texts that cannot repay, and the seconds that others repay.

        The seconds are per step; `token_s`: the seconds that an accepted draft saves.
        """
        able, repaid_s = [*rows], 0.0
        for row, ((rate, most), (num_missed, num_left)) in enumerate(zip(rows, missed, strict=bool(missed))):
            if not (num_missed and most):
                continue
            own_s = self.costs.missed_s(num_missed) / min(max(num_left, 1), REPAY_STEPS)
            survival, num_expected = 1.0, 0.0  # accepted drafts on average
            for place in range(most):
                survival = self._survival(survival, rate, place)
                num_expected += survival
            if own_s < token_s * num_expected:
                repaid_s += own_s
            else:
                able[row] = rate, 0
        return able, repaid_s

    def _unaffordable(
        self, idle: Sequence[int], missed: Sequence[MissedText], num_rows: int
    ) -> Iterator[int]:
        """Yield the places that a probe leaves out, because catching up with all is more than its share.

        The first is never left out. These texts then have the rate that the others teach.
        """
        left_s = MOST_PROBE_STEPS * PROBE_SHARE * self.costs.without_drafts(num_rows)
        for number, row in enumerate(idle):
            left_s -= self.costs.missed_s(missed[row].num_missed)
            if number and left_s < 0:
                yield row

    def _rate(self, seq_id: int) -> float:
        """Return the acceptance rate of a sequence; until it is probed or judged, the rate of all."""
        known = self._known[seq_id]
        if known.is_new:
            known = self._known[seq_id] = self._new()
        return known.rate

    def choose(
        self,
        rows: Sequence[tuple[float, int]],
        num_others: int = 0,
        room: int | None = None,
        seen: float = 0.0,
        repaid_s: float = 0.0,
    ) -> list[int]:
        """Return the number of drafts of each row that gives the most tokens per second.

        A row is an acceptance rate and the drafts available. Each row computes one token in any case, and the
        step `num_others` more, with at most `room` drafts; a token attends to `seen` positions. Drafts must
        save `repaid_s` seconds before they gain any, and in a batch gain LEAST_GAIN.
        """
        assert room is None or room >= 0, f"room for {room} drafts"
        counts, base, available = [0] * len(rows), len(rows) + num_others, [each for _, each in rows]
        if not (longest := max(available, default=0)):
            return counts
        layer, survivals = [1.0] * len(rows), list[float]()  # all rows at depth 1, then all at depth 2, ..
        for depth in range(longest):
            layer = [
                self._survival(layer[row], rate, depth) if depth < most else -1.0
                for row, (rate, most) in enumerate(rows)
            ]
            survivals += layer
        order = sorted(range(len(survivals)), key=survivals.__getitem__, reverse=True)[: sum(available)]
        end = base + len(order) + 1
        self._seconds += map(self.costs.seconds, range(len(self._seconds), end))
        attending = seen * self.costs.seen_s
        seconds = [each + count * attending for count, each in enumerate(self._seconds[base:end], base)]
        plain_s = self.costs.without_drafts(base, seen)
        least = 1.0 if base == 1 else 1.0 + LEAST_GAIN
        best, taken = (least * base / (plain_s - repaid_s) if repaid_s < plain_s else math.inf), order[:0]
        for cap in range(1 if self.costs.draft_s else longest, longest + 1):
            places = order if cap == longest else [place for place in order if place < cap * len(rows)]
            turns = self._turns(cap)
            gained = accumulate([survivals[place] for place in places[:room]], initial=float(base))
            drafted = accumulate([place < len(rows) for place in places], initial=0)  # rows with drafts
            speeds = [
                each / self.costs.with_drafts(taking, base, count, turns, seen)
                for each, count, taking in zip(gained, drafted, seconds, strict=False)
            ][1:]
            if (fastest := max(speeds, default=0.0)) > best:
                best, taken = fastest, places[: speeds.index(fastest) + 1]
        for place in taken:
            counts[place % len(rows)] += 1
        return counts

    def begin(self, seq_id: int) -> None:
        """Start the statistics of a sequence, even if its lengths are not chosen here."""
        self._known[seq_id] = self._new()

    def update(
        self, seq_id: int, num_drafts: int, num_accepted: int, longest: int | None = None
    ) -> Acceptance | None:
        """Learn from a judged window; if its sequence is already forgotten, only the totals learn."""
        self.totals.update(num_drafts, num_accepted, longest)
        known = self._known.get(seq_id)
        if known is not None:
            known.update(num_drafts, num_accepted, longest)
        return known

    def forget(self, seq_id: int) -> Acceptance:
        """Remove and return the statistics of a sequence that has ended."""
        return self._known.pop(seq_id, None) or Acceptance()
