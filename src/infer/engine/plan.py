"""What the scheduler decided for one step: integers only.

    chunks      tokens[start:stop] of one sequence each, to be computed together
    copies      (source, destination) block pairs to copy first: somebody shared a block about to be written
    swap_out    (device, host) block pairs: a preempted sequence leaves
    swap_in     (host, device) block pairs: a swapped sequence returns; never in one plan with swap_out

A plan is data: it can be recorded, compared, replayed and sent to other ranks.
"""

from __future__ import annotations

from typing import NamedTuple

BlockPairs = tuple[tuple[int, int], ...]


class Chunk(NamedTuple):
    """Compute tokens[start:stop] of a sequence, then sample `num_samples` tokens after the last one.

    0 samples: the prompt goes on. More than 1: the sequence is about to fork into that many.
    """

    seq_id: int
    start: int
    stop: int
    num_samples: int


class StepPlan(NamedTuple):
    """The work of one step, in the order in which the runner lays it out."""

    step: int
    chunks: tuple[Chunk, ...]
    preempted: tuple[int, ...] = ()
    copies: BlockPairs = ()
    swap_out: BlockPairs = ()
    swap_in: BlockPairs = ()

    @property
    def num_tokens(self) -> int:
        """How many tokens the model will see."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)
