"""Pools that count the computed tokens of their sequences, as the batch state does for an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infer.cache.paged_pool import BlockPair, PagedKVCachePool, PoolUsage


class CountingPool(PagedKVCachePool):
    """A paged pool for tests that make the calls of a scheduler by hand."""

    _computed: dict[int, int] | None = None

    @property
    def computed(self) -> dict[int, int]:
        """How many tokens of each sequence are computed."""
        if self._computed is None:
            self._computed = {}
        return self._computed

    def match_prefix(self, seq_id: int, tokens: Sequence[int], salt: str | None = None) -> int:
        self.computed[seq_id] = super().match_prefix(seq_id, tokens, salt)
        return self.computed[seq_id]

    def reserve(
        self, seq_id: int, num_tokens: int, num_computed: int | None = None
    ) -> list[BlockPair] | None:
        known = self.computed.get(seq_id, 0) if num_computed is None else num_computed
        return super().reserve(seq_id, num_tokens, known)

    def commit(self, seq_id: int, tokens: Sequence[int], num_computed: int) -> int:
        next_commit = super().commit(seq_id, tokens, num_computed)
        self.computed[seq_id] = num_computed
        return next_commit

    def fork(self, parent_id: int, child_id: int, num_computed: int | None = None) -> None:
        known = self.computed.get(parent_id, 0) if num_computed is None else num_computed
        super().fork(parent_id, child_id, known)
        self.computed[child_id] = known

    def swap_out(self, seq_id: int, num_computed: int | None = None) -> list[BlockPair] | None:
        known = self.computed.get(seq_id, 0) if num_computed is None else num_computed
        return super().swap_out(seq_id, known)

    def usage(self, num_computed: Mapping[int, int] | None = None) -> PoolUsage:
        return super().usage(self.computed if num_computed is None else num_computed)
