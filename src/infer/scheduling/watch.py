"""Reports of a scheduler, in integers: what became of a sequence, and why its queue stands still.

    hold             the reason why the sequence whose turn it is was not let in by the last plan
    SequenceWatch    is called when a sequence is let in, when it gets a chunk, and when it is preempted

There is one `hold` for the whole queue: sequences come in strictly in order, so whatever keeps the first one
out keeps out all after it. A watch is for those who explain (engine/stories.py); nothing is decided by it.
"""

from __future__ import annotations

from typing import Final, Protocol

from infer.scheduling.sequence import Sequence

HOLDS: Final = (
    "next step",  # nothing: what waits came after the last plan, and the next one lets it in
    "batch full",  # max_batch_size sequences run
    "no tokens left",  # running sequences use the step's tokens, or all that prompts may use
    "cache full",  # there are too few free blocks
    "batch closed",  # static batching: the batch runs until its last sequence is done
)
NEXT_STEP, BATCH_FULL, NO_TOKENS, CACHE_FULL, BATCH_CLOSED = range(len(HOLDS))


class SequenceWatch(Protocol):
    """Sees what plans do to sequences."""

    def on_admit(self, seq: Sequence) -> None:
        """A sequence was let in, for the first time or again; its computed tokens need not be computed."""

    def on_chunk(self, seq: Sequence, num_tokens: int, num_running: int) -> None:
        """A plan computes this many tokens of a prompt, or of what was preempted, in a batch of this size."""

    def on_preempt(self, seq: Sequence, num_computed: int, num_planned: int, num_moved: int) -> None:
        """A sequence lost its place, and the part of the plan that it had.

        `num_moved` blocks went to host memory; 0: what it had computed is forgotten.
        """
