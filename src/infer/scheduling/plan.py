"""What the scheduler decided for one step: integers only.

    transfers   blocks to move first, in this order: a shared block about to be written is copied, a
                preempted sequence leaves for host memory, a swapped one comes back
    chunks      tokens[start:stop] of one sequence each, to be computed together

A plan is data: it can be recorded, compared, replayed and sent to other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from infer.scheduling.sequence import Sequence as TokenSequence

COPY, SWAP_OUT, SWAP_IN = "copy", "swap_out", "swap_in"


class Transfer(NamedTuple):
    """Move one block; the books have moved it already."""

    kind: str  # COPY: device to device; SWAP_OUT: device to host; SWAP_IN: host to device
    source: int
    destination: int


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens[start:stop] of a sequence, then sample `num_samples` tokens after the last one.

    0 samples: the prompt goes on. More than 1: the sequence is about to fork into that many. A step makes
    one for each of its rows, and a struct is made and read in half the time of a named tuple.
    """

    seq_id: int
    start: int
    stop: int
    num_samples: int


class StepPlan(NamedTuple):
    """The work of one step, in the order in which the runner lays it out."""

    step: int
    chunks: Sequence[Chunk]
    preempted: tuple[int, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    grown: tuple[int, ...] = ()  # sequences that ran already and whose tables may have got blocks

    @property
    def num_tokens(self) -> int:
        """How many tokens the model will see."""
        return sum([chunk.stop - chunk.start for chunk in self.chunks])


class PlanDraft:
    """A plan in the making: a chunk can still be taken back when its sequence is preempted."""

    __slots__ = (
        "_granted",
        "budget",
        "chunks",
        "grown",
        "num_prefills",
        "preempted",
        "sequences",
        "transfers",
    )

    def __init__(self, budget: int) -> None:
        self.budget = self._granted = budget  # tokens that may still be added; and those that could be
        self.chunks: list[Chunk] = []
        self.sequences: list[TokenSequence] = []  # one for each chunk
        self.num_prefills = 0  # chunks that are of prompts
        self.preempted: list[int] = []
        self.grown: list[int] = []
        self.transfers: list[Transfer] = []  # never taken back: a later one may rely on an earlier one

    @property
    def num_tokens(self) -> int:
        """How many tokens the model will see."""
        return self._granted - self.budget

    def limit(self, budget: int) -> None:
        """Add at most so many more."""
        withdrawn = max(self.budget - budget, 0)
        self.budget -= withdrawn
        self._granted -= withdrawn

    def transfer(self, kind: str, pairs: list[tuple[int, int]]) -> None:
        """Move these blocks too, after all that move already."""
        self.transfers.extend([Transfer(kind, source, destination) for source, destination in pairs])

    def drop(self, seq: TokenSequence) -> None:
        """Take a chunk back, if there is one."""
        if seq in self.sequences:
            place = self.sequences.index(seq)
            del self.sequences[place]
            chunk = self.chunks.pop(place)
            self.budget += chunk.stop - chunk.start

    def to_plan(self, step: int, chunks: Sequence[Chunk] | None = None) -> StepPlan:
        """What it has become, of its own chunks or of these."""
        made = tuple(self.chunks) if chunks is None else chunks
        if self.preempted:  # who has given them back again
            self.grown = [seq_id for seq_id in self.grown if seq_id not in self.preempted]
        return StepPlan(step, made, tuple(self.preempted), tuple(self.transfers), tuple(self.grown))
