"""The books of the KV cache, as the scheduler sees them.

A pool knows, for every sequence, which blocks hold its tokens and how far they may be written. The
scheduler makes the same few calls whatever the layout of the cache:

    match_prefix   a sequence comes in: attach the cached start of its prompt
    reserve        make room up to a length, and let go of what lies behind a window
    commit         tokens are computed: full blocks become visible to the prefix tree
    fork           a second sequence goes on from the same tokens
    swap_out/in    move a sequence's tokens to host memory and back
    release        the sequence is finished, aborted or preempted

**What may be written.** A block with more than one owner is never written. A sequence that is about to write
into a shared block (after a fork, or because its whole prompt was cached and the last token must be
computed once more) gets a copy: `reserve` returns the pair (source, destination) and has already put
the destination into the sequence's table.

**Transfers run in order.** Copies and swaps come back as pairs of blocks. All of them, even those of a
sequence preempted since, must be carried out in the order in which the pool returned them and before
the step's tokens are written. A source may be given to another sequence at once: it is written later.

A pool is integers. The tensors are in `kv_store.py`; the pools that keep these promises in `paged_pool.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from infer.cache.block_allocator import Leak

BlockPair = tuple[int, int]  # (source, destination)
NEVER: Final = sys.maxsize  # a num_computed that no sequence reaches


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks it takes to hold this many tokens."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """How full the cache is, for metrics and people."""

    num_blocks: int
    num_free: int  # without an owner
    num_idle: int  # held by the prefix tree alone: can be had at once
    num_cached: int  # held by the prefix tree, idle ones included
    num_used: int  # held by sequences
    num_unfilled_slots: int  # this and the next: 0 unless they were asked for
    fragmentation: float  # unfilled slots / all slots of the blocks of sequences
    num_free_host_blocks: int
    num_queried_tokens: int  # of all prompts admitted
    num_hit_tokens: int  # of these, found in the cache
    num_evicted_blocks: int


class KVCachePool(Protocol):
    """What the scheduler asks of a cache, whatever its layout."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        ...

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How far the layers of each block table see back, in tokens; None: to the start."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had at once, those included that only the prefix tree holds."""
        ...

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether one sequence of this length fits when it has the cache to itself."""
        ...

    def blocks_of(self, num_tokens: int) -> int:
        """How many blocks a sequence of this length holds at most, in all of its tables."""
        ...

    def longest(self, num_sequences: int = 1) -> int:
        """How many tokens each of so many sequences can have when they have the cache to themselves."""
        ...

    def match_prefix(self, seq_id: int, tokens: Sequence[int], salt: str | None = None) -> int:
        """Enter a sequence and attach its cached prefix; returns how many tokens need no computing.

        At least the last token is left to compute. Give the blocks back with `release` if the sequence
        is not admitted after all.
        """
        ...

    def reserve(self, seq_id: int, num_tokens: int, num_computed: int) -> list[BlockPair] | None:
        """Let a sequence write from `num_computed` to `num_tokens`; returns block copies, None: no room.

        Of a long prompt a table with a window gets less at once, at least the tokens of one step: the rest
        has to be asked for again.
        Blocks behind a window are let go of, cached ones that no sequence uses are evicted as needed; after
        None every sequence has what it needs and had.
        A pair in the answer means that one entry of a table of the sequence has changed.
        """
        ...

    def commit(self, seq_id: int, tokens: Sequence[int], num_computed: int) -> int:
        """Let the full blocks of the first `num_computed` tokens, which are in the cache for good, be shared.

        Returns the `num_computed` at which the next block is full: until then there is nothing to commit.
        """
        ...

    def fork(self, parent_id: int, child_id: int, num_computed: int) -> None:
        """Enter a second sequence that shares the `num_computed` tokens of its parent.

        Between steps only: a parent with a write under way must commit it first.
        """
        ...

    def release(self, seq_id: int) -> None:
        """Let go of all a sequence holds; one that holds nothing is fine, so abort may come at any time."""
        ...

    def swap_out(self, seq_id: int, num_computed: int) -> list[BlockPair] | None:
        """Move a sequence's computed tokens to host memory; returns (device, host) pairs, None: no room."""
        ...

    def swap_in(self, seq_id: int) -> list[BlockPair] | None:
        """Bring a sequence back; returns (host, device) pairs to copy, None: no room."""
        ...

    def block_tables(self, seq_id: int) -> list[list[int]]:
        """The sequence's tables: its blocks in order, NO_BLOCK behind a window; live, to be read only."""
        ...

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, those of running sequences included; returns blocks forgotten."""
        ...

    def usage(self, num_computed: Mapping[int, int] | None = None) -> PoolUsage:
        """How full the cache is; unfilled slots are counted by what each sequence (by id) has computed."""
        ...

    def is_shared(self, seq_id: int, start: int, stop: int) -> bool:
        """Whether a block that holds one of the tokens `start` to `stop` has another owner as well."""
        ...

    def audit_blocks(self) -> list[Leak]:
        """Name every block whose owner is gone; empty after every normal life."""
        ...

    def check(self) -> None:
        """Raise EngineError unless every book agrees with every other; walks over everything."""
        ...
