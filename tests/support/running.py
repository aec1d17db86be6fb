"""Sequences that run without a scheduler: a pool and a batch state whose tables agree, and plans by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from infer.cache.paged_pool import PagedKVCachePool
from infer.scheduling.batch_state import BatchState
from infer.scheduling.plan import Chunk, Chunks, StepPlan
from infer.scheduling.sequence import Sequence


class Running:
    """A pool and the batch state beside it."""

    def __init__(self, pool: PagedKVCachePool, max_sequences: int = 16) -> None:
        self.pool = pool
        self.state = BatchState(
            max_sequences, pool.num_blocks, block_size=pool.block_size, num_tables=len(pool.windows)
        )
        self.sequences: dict[int, Sequence] = {}

    def enter(self, seq: Sequence, num_tokens: int) -> None:
        """Let a sequence run, with room for so many tokens, or give one that runs more room."""
        if not seq.is_running:
            seq.sort_key = (0.0, seq.seq_id)
            self.pool.match_prefix(seq.seq_id, ())
            self.state.enter(seq)
            self.sequences[seq.seq_id] = seq
        assert self.pool.reserve(seq.seq_id, num_tokens, seq.num_computed) == []
        self.state.write_tables(seq, self.pool.block_tables(seq.seq_id), [])

    def plan(
        self, *chunks: Chunk, step: int = 1, sequences: Mapping[int, Sequence] | None = None
    ) -> StepPlan:
        """A plan of these chunks of sequences that run."""
        known = self.sequences if sequences is None else sequences
        return StepPlan(step, Chunks.of(chunks, [known[chunk.seq_id] for chunk in chunks]))


def plan_of(chunks: Iterable[Chunk], sequences: Seq[Sequence] = (), step: int = 1) -> StepPlan:
    """A plan whose chunks belong to these sequences, or to none."""
    return StepPlan(step, Chunks.of(chunks, sequences))
