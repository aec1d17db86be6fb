"""Events of a scheduler: admissions, chunks and preemptions of sequences, and why its queue waits.

    hold             the reason why the last plan did not admit the next sequence
    SequenceWatch    is called when a sequence is admitted, gets a chunk, or is preempted

There is one `hold` for the whole queue: sequences are admitted strictly in order, so the reason why the first
one waits holds for all others too. A watch only records (engine/stories.py); it decides nothing.
"""

from __future__ import annotations

from typing import Final, Protocol

from infer.scheduling.sequence import Sequence

HOLDS: Final = (
    "next step",  # no reason: the sequence arrived after the last plan
    "batch full",  # max_batch_size sequences run
    "no tokens left",  # running sequences use up the step's tokens, or its tokens for prompts
    "cache full",  # there are too few free blocks
    "batch closed",  # static batching: the batch runs until its last sequence ends
)
NEXT_STEP, BATCH_FULL, NO_TOKENS, CACHE_FULL, BATCH_CLOSED = range(len(HOLDS))


class SequenceWatch(Protocol):
    """Receives what plans decide about sequences."""

    def on_admit(self, seq: Sequence) -> None:
        """A sequence was admitted, for the first time or again, with `num_computed` tokens in the cache."""

    def on_chunk(self, seq: Sequence, num_tokens: int, num_running: int) -> None:
        """A plan computes a chunk of a prompt, or of a preempted sequence, in a batch of `num_running`."""

    def on_preempt(self, seq: Sequence, num_computed: int, num_planned: int, num_moved: int) -> None:
        """A sequence was preempted and lost its part of the plan.

        `num_moved` blocks are copied to host memory; 0: its computed tokens are lost.
        """
