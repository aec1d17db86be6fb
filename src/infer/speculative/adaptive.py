"""Adaptive drafts: each sequence of a step gets the number of drafts that gives the most text per second.

A draft costs a token of the step, and is kept only if it and all drafts before it are right. If a sequence's
drafts are right at a rate r, the one at depth i survives with probability r^i:

    rate    depth 1    2      3      4               step of 2 rows: 4.0 ms, 0.1 ms more for each draft
    0.8     [0.80]  [0.64] [0.51] [0.41]             drafts taken, best first           tokens / ms
    0.3     [0.30]   0.09   0.03   0.01                 none                            2.00 / 4.0 = 0.50
                                                        .80 .64 .51 .41                 4.36 / 4.4 = 0.99
    in brackets: the best choice                        .80 .64 .51 .41 .30             4.66 / 4.5 = 1.04
                                                        .80 .64 .51 .41 .30 .09         4.75 / 4.6 = 1.03

`choose` maximises expected tokens per second over all choices. Survival falls with depth, so taking drafts in
the order of survival always takes the first drafts of each sequence, and this one order serves every number
of drafts. A draft model also costs time for depth (`draft_s` for each position of the longest window), so its
search runs once for every longest window. Tokens that a step computes for other sequences count too, so
drafts must be worth delaying them. If arithmetic bounds a step, no draft is, and speculation is off.

    windows    ▪▪▪▪▪▪▪ · · · · · · · · · · · · · · · ▪ · · · · · · · · · · · · · · · ▪▪▪▪▪▪▪▪▪▪▪▪▪▪
    drafts     4433222                               1 refused                       1 right, then 4, 4, ..
               wrong: the rate falls                 └───────── PROBE_STEPS ─────────┘

A rate is a mean over about the last MEMORY judged drafts, and starts at PRIOR_RATE. Without drafts nothing
would be learned. So every PROBE_STEPS steps all sequences without drafts get one each, provided that drafts
at HOPED_RATE would pay off in that step. Older results then weigh little, so a right probe soon leads to
longer windows. Nothing here reads a clock: equal calls give equal lengths.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

MEMORY = 16  # judged drafts over which a rate is a mean
PRIOR_RATE = 0.6  # rate of a sequence of which nothing is known: it is tried wherever drafts are cheap
PRIOR_WEIGHT = 2.0  # judged drafts that weigh as much as the prior
PROBE_STEPS = 64  # steps between two probes of sequences without drafts
HOPED_RATE = 0.95  # rate that a probe hopes to find


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step by the number of its tokens: linear between measured pairs and after the last."""

    pairs: tuple[tuple[int, float], ...]  # tokens and seconds; more tokens never take less time
    gap_s: float = 0.0  # seconds of the host from one step with drafts to the next, in which nothing overlaps
    draft_s: float = 0.0  # seconds of drafting one more position, and
    draft_row_s: float = 0.0  # more for each sequence
    row_gap_s: float = 0.0  # more of them for each sequence of a step with drafts
    seen_s: float = 0.0  # seconds for each position that a token attends to
    is_ahead: bool = False  # a device makes drafts in the gap, and may go on with the step that verifies them

    def __post_init__(self) -> None:
        if not self.pairs or self.pairs[0][0] < 0 or not self.pairs[0][1] > 0:
            raise ValueError(f"step costs need pairs of tokens >= 0 and seconds > 0, got {self.pairs}")
        for (fewer, less), (more, later) in pairwise(self.pairs):
            if not (fewer < more and less <= later):
                raise ValueError(f"step costs must ascend, got {(fewer, less)} before {(more, later)}")
        known = {
            name: getattr(self, name) for name in ("gap_s", "draft_s", "draft_row_s", "row_gap_s", "seen_s")
        }
        for name, value in (known | {"seconds": self.pairs[-1][1]}).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} of step costs must be finite and not negative, got {value}")

    @classmethod
    def measured(cls, pairs: Iterable[tuple[int, float]], **others: Any) -> StepCosts:
        """The costs that measurements show; `others` are the other fields.

        Disturbances only slow steps, so more tokens bound fewer.
        """
        falling = sorted(pairs, reverse=True)
        fastest = accumulate((seconds for _, seconds in falling), min)
        repaired = [(tokens, least) for (tokens, _), least in zip(falling, fastest, strict=True)]
        return cls(tuple(reversed(repaired)), **others)

    @classmethod
    def roofline(cls, floor_s: float, per_token_s: float, gap_s: float = 0, draft_s: float = 0) -> StepCosts:
        """The costs of a machine that was not measured: a step waits for the weights or for its arithmetic.

        Not for the sum of both, in which drafts would seem to pay at any batch by sharing the weights.
        """
        critical = int(floor_s / max(per_token_s, 1e-12))  # tokens whose arithmetic takes as long
        return cls(((critical, floor_s), (critical + 1, floor_s + per_token_s)), gap_s, draft_s)

    def seconds(self, num_tokens: int) -> float:
        """The seconds of a step without drafts."""
        place = min(bisect_right(self.pairs, num_tokens, key=itemgetter(0)), len(self.pairs) - 1)
        (fewer, less), (more, later) = self.pairs[max(place - 1, 0)], self.pairs[place]
        slope = (later - less) / (more - fewer) if more > fewer else 0.0
        return less + slope * max(num_tokens - fewer, 0)

    def with_drafts(self, step_s: float, num_rows: int, num_drafted: int, longest: int) -> float:
        """The seconds from one step to the next, one of `step_s`, for which some rows make drafts.

        `longest`: the most drafts of a row. A device that is ahead waits only where the host takes longer.
        """
        host = num_rows * self.row_gap_s
        making = (self.draft_s + num_drafted * self.draft_row_s) * longest
        if self.is_ahead:
            return max(step_s + max(making, host), self.gap_s + host)
        return step_s + self.gap_s + host + making

    def is_host_slower(self, num_rows: int, longest: int) -> bool:
        """True if drafts for all rows of a step are made before the host has read the step before."""
        making = self.draft_s + num_rows * self.draft_row_s
        return self.is_ahead and making * longest < self.gap_s + num_rows * self.row_gap_s

    def per_draft(self, num_rows: int, num_drafts: int, longest: int) -> tuple[float, float]:
        """The seconds that a kept draft of a step saves, and the seconds that each draft adds to the step.

        A kept one saves what a token takes in a step without drafts; all drafts share what they add.
        """
        plain, window = self.seconds(num_rows), self.seconds(num_rows + num_drafts)
        added = self.with_drafts(window, num_rows, num_rows, longest) - plain
        return plain / num_rows, added / num_drafts


@dataclass(slots=True)
class Acceptance:
    """Statistics of a sequence's drafts: the rate at which they are right, and counts to report."""

    num_drafts: int = 0
    by_length: list[int] = field(default_factory=list)  # windows by the number of drafts kept, from 0
    saved_s: float = 0.0  # seconds that the drafts saved, as `StepCosts.per_draft` has it
    _right: float = PRIOR_RATE * PRIOR_WEIGHT  # decayed counts, which begin with the prior
    _judged: float = PRIOR_WEIGHT

    def update(self, num_drafts: int, num_accepted: int, longest: int | None = None) -> None:
        """Count a window. Drafts after the first that was refused were not judged and teach nothing.

        `longest`: the drafts of its longest path, if they are a tree.
        """
        assert 0 <= num_accepted <= num_drafts, f"{num_accepted} of {num_drafts} drafts accepted"
        if not num_drafts:
            return
        self.num_drafts += num_drafts
        self.by_length += [0] * (num_accepted + 1 - len(self.by_length))
        self.by_length[num_accepted] += 1
        for place in range(min(num_accepted + 1, num_drafts if longest is None else longest)):
            self._right += (place < num_accepted) - self._right / MEMORY
            self._judged += 1 - self._judged / MEMORY

    def fade(self) -> None:
        """Let past windows weigh no more than a prior, so that the next ones decide."""
        excess = max(self._judged / PRIOR_WEIGHT, 1.0)
        self._right, self._judged = self._right / excess, self._judged / excess

    @property
    def rate(self) -> float:
        """The estimated probability that a draft is right if all before it are."""
        return self._right / self._judged

    @property
    def num_windows(self) -> int:
        """The number of steps in which the sequence had drafts."""
        return sum(self.by_length)

    @property
    def num_accepted(self) -> int:
        """The number of drafts that were kept."""
        return sum(length * count for length, count in enumerate(self.by_length))

    @property
    def by_position(self) -> list[int]:
        """The number of drafts kept at each position of a window, from the first."""
        return list(accumulate(reversed(self.by_length[1:])))[::-1]


class DraftLengths:
    """Gives each sequence of a step its number of drafts, and learns from how they fared."""

    def __init__(
        self,
        costs: StepCosts,
        *,
        survival: Callable[[float, float, int], float] = lambda before, rate, place: before * rate,
        turns: Callable[[int], int] = int,
    ) -> None:
        """`survival`: the probability that the draft at a place is kept, given the previous one's and a
        rate; `turns`: the passes that make a number of drafts. The defaults are for chains.
        """
        self.costs, self._survival, self._turns = costs, survival, turns
        self._seconds: list[float] = []  # seconds of steps without drafts, by number of tokens
        self._known: dict[int, Acceptance] = defaultdict(Acceptance)
        self._last_probe = 0

    def lengths(
        self,
        step: int,
        wishes: Sequence[tuple[int, int]],
        num_others: int = 0,
        room: int | None = None,
        seen: float = 0.0,
    ) -> list[int]:
        """The number of drafts of each wish, a sequence and the drafts that it could use, in a step.

        `seen`: the positions that a token attends to, on average.
        """
        chosen, idle = self._chosen(step, wishes, num_others, room, seen)
        if idle:
            self._last_probe = step
        for row in filter(chosen.__getitem__, idle):
            self._known[wishes[row][0]].fade()
        return chosen

    def is_worth_it(
        self, step: int, wishes: Sequence[tuple[int, int]], num_others: int = 0, seen: float = 0.0
    ) -> bool:
        """True if any wish would get drafts in a step."""
        return any(self._chosen(step, wishes, num_others, None, seen)[0])

    def use(self, costs: StepCosts) -> None:
        """Choose by other costs from now on."""
        self.costs = costs
        self._seconds.clear()

    def most_rows(self, limit: int) -> int:
        """The largest batch up to `limit` in which a draft that is hardly ever wrong pays."""
        return max(
            (num for num in range(1, limit + 1) if any(self.choose([(HOPED_RATE, 1)] * num))), default=0
        )

    def _chosen(
        self, step: int, wishes: Sequence[tuple[int, int]], num_others: int, room: int | None, seen: float
    ) -> tuple[list[int], list[int]]:
        """The number of drafts of each wish, and which of the wishes are probes."""
        rows = [(self._known[seq_id].rate, available) for seq_id, available in wishes]
        chosen = self.choose(rows, num_others, room, seen)
        if step - self._last_probe < PROBE_STEPS:
            return chosen, []
        idle = [row for row, (_, available) in enumerate(rows) if available and not chosen[row]]
        for row in idle:
            rows[row] = HOPED_RATE, 1
        return (self.choose(rows, num_others, room, seen) if idle else chosen), idle

    def choose(
        self,
        rows: Sequence[tuple[float, int]],
        num_others: int = 0,
        room: int | None = None,
        seen: float = 0.0,
    ) -> list[int]:
        """The number of drafts of each row, a rate and the drafts available, for most tokens per second.

        Each row computes one token in any case, the step `num_others` more, and drafts at most `room`; a
        token attends to `seen` positions.
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
        best, taken = base / seconds[0], order[:0]
        for cap in range(1 if self.costs.draft_s else longest, longest + 1):
            places = order if cap == longest else [place for place in order if place < cap * len(rows)]
            turns = self._turns(cap)
            gained = accumulate([survivals[place] for place in places[:room]], initial=float(base))
            speeds = [
                each / self.costs.with_drafts(taking, base, len(rows), turns)
                for each, taking in zip(gained, seconds, strict=False)
            ]
            if (fastest := max(speeds)) > best:
                best, taken = fastest, places[: speeds.index(fastest)]
        for place in taken:
            counts[place % len(rows)] += 1
        return counts

    def begin(self, seq_id: int) -> None:
        """Count the windows of a sequence from now on, also if its lengths are not chosen here."""
        self._known[seq_id] = Acceptance()

    def update(
        self, seq_id: int, num_drafts: int, num_accepted: int, longest: int | None = None
    ) -> Acceptance | None:
        """Learn how a window fared; one of a sequence that was forgotten meanwhile teaches nothing."""
        known = self._known.get(seq_id)
        if known is not None:
            known.update(num_drafts, num_accepted, longest)
        return known

    def forget(self, seq_id: int) -> Acceptance:
        """Remove and return the statistics of a sequence that has ended."""
        return self._known.pop(seq_id, None) or Acceptance()
