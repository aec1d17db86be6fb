"""Sequences that run without a scheduler: a pool and a batch state whose tables agree, and orders by hand."""

from __future__ import annotations

from infer.cache.paged_pool import PagedKVCachePool
from infer.engine.device_build import shape_of
from infer.engine.host_half import HostHalf
from infer.execution.device import StateShape
from infer.execution.order import StepOrder
from infer.scheduling.batch_state import BatchState
from infer.scheduling.plan import Chunk, Chunks, StepPlan
from infer.scheduling.sequence import Sequence


class Running:
    """A pool, the batch state beside it, and the host half that makes orders of plans."""

    def __init__(self, pool: PagedKVCachePool, max_sequences: int = 16) -> None:
        self.pool = pool
        self.state = BatchState(
            max_sequences, pool.num_blocks, block_size=pool.block_size, num_tables=len(pool.windows)
        )
        self.host = HostHalf(self.state)
        self.sequences: dict[int, Sequence] = {}
        self._changes: list[int] = []  # blocks that sequences have got while they ran, for the next plan

    @property
    def shape(self) -> StateShape:
        """The size of the state that a device half keeps for these sequences."""
        return shape_of(self.state)

    def enter(self, seq: Sequence, num_tokens: int) -> None:
        """Let a sequence run, with room for so many tokens, or give one that runs more room."""
        has_begun = seq.is_running
        if not has_begun:
            seq.sort_key = (0.0, seq.seq_id)
            self.pool.match_prefix(seq.seq_id, ())
            self.state.enter(seq)
            self.sequences[seq.seq_id] = seq
        assert self.pool.reserve(seq.seq_id, num_tokens, seq.num_computed) == []
        changes: list[int] = []
        self.state.write_tables(seq, self.pool.block_tables(seq.seq_id), changes)
        self._changes += changes if has_begun else []

    def leave(self, seq: Sequence) -> None:
        """Let a sequence run no more."""
        self.state.leave(seq)
        self.pool.release(seq.seq_id)
        del self.sequences[seq.seq_id]

    def plan(self, *chunks: Chunk, step: int = 1) -> StepPlan:
        """The next plan: of these chunks of sequences that run."""
        chosen = Chunks.of(chunks, [self.sequences[chunk.seq_id] for chunk in chunks])
        changes, self._changes = self._changes, []
        return StepPlan(step, chosen, table_changes=changes)

    def order(self, *chunks: Chunk, step: int = 1, awaits_masks: bool = False) -> StepOrder:
        """The order of the next plan, for a device half that is given all of them.

        The host half takes it that the device draws what an order samples, and knows it from then on.
        """
        return self.host.order(self.plan(*chunks, step=step), awaits_masks=awaits_masks)
