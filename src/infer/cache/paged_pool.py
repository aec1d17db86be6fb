"""The block pool of the KV cache: keeps block tables, the prefix tree and host blocks consistent.

    BlockAllocator   the owners of each block, on the device and on the host
    PrefixTree       the blocks of cached prefixes; one more owner of each
    SequenceBooks    the tables of each sequence, and the number of their blocks in the tree

The scheduler makes the same few calls for every layout of the cache:

    match_prefix   a sequence enters: attach the cached prefix of its prompt
    reserve        allocate slots up to a length, and free blocks that have left a window
    commit         tokens are computed: full blocks enter the prefix tree
    fork           a second sequence continues from the same tokens
    swap_out/in    move a sequence's blocks to host memory and back
    release        the sequence is finished, aborted or preempted
    take_moves     other transfers between device and host since the last call

**Copy on write.** A block with more than one owner is never written. If a sequence is about to write into a
shared block (after a fork, or because its whole prompt was cached and the last token must be computed once
more), it gets a copy: `reserve` puts the destination into the sequence's table and returns the pair
(source, destination).

**Transfers run in order.** Copies and swaps are returned as pairs of blocks. All of them must run in the
order in which the pool returned them, before the step's tokens are written, even if their sequence has been
preempted since. So the pool may give a source block to another sequence at once. Transfers of `take_moves`
come before the pairs that `reserve` or `swap_in` returned with them.

**Host memory is one pool** for preempted sequences and, with `keep_evicted`, for blocks that the prefix tree
evicts. A cached prefix may then be on the device, on the host, or partly on each: `match_prefix` counts all
of it, and `reserve` brings in the host part. The tree's copies are evicted to make room for sequences.

**A decode step needs no call** unless it crosses a block boundary: the batch state knows the number of
reserved slots (`reserve`) and when the next block is full (`commit`).

**Windows move in `reserve`**: it first frees the blocks that have completely left the window of their layers,
also between the chunks of a prompt. For a long prompt, a table with a window gets at most the blocks of the
window and one chunk.

**New blocks** are free blocks first, then cached blocks that no sequence uses, least recently used first.
Only the scheduler decides to preempt a sequence.

The contiguous layout is a pool with other numbers: blocks of `max_seq_len` tokens, one for each sequence
(`max_blocks_per_sequence`), and no prefix cache. The pool is integers only; the tensors are in `kv_store.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from infer.cache.block_allocator import PREFIX_TREE, BlockAllocator, Leak, Owner
from infer.cache.layout import (
    STATE,
    STATE_WINDOW,
    SWAP_IN,
    SWAP_OUT,
    Transfer,
    blocks_of_sequence,
    longest_sequence,
    window_blocks,
)
from infer.cache.prefix_tree import NO_BLOCK, ROOT, PrefixNode, PrefixTree
from infer.cache.sequence_books import SequenceBooks
from infer.errors import ConfigError, EngineError

BlockPair = tuple[int, int]  # (source, destination)
NEVER: Final = sys.maxsize  # a num_computed that no sequence reaches


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks for `num_tokens`."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """The usage of the cache, for metrics and messages."""

    num_blocks: int
    num_free: int  # blocks without an owner
    num_idle: int  # blocks held by the prefix tree alone, which can be evicted at once
    num_cached: int  # blocks held by the prefix tree, including idle ones
    num_used: int  # blocks held by sequences
    num_unfilled_slots: int  # 0 unless it was asked for
    fragmentation: float  # unfilled slots / all slots of sequences' blocks; 0 unless it was asked for
    num_free_host_blocks: int
    num_cached_host: int  # host blocks that are copies of evicted blocks
    num_blocks_out: int  # blocks copied to host memory since the start
    num_blocks_in: int  # blocks copied from host memory since the start
    num_queried_tokens: int  # tokens of all admitted prompts
    num_hit_tokens: int  # queried tokens that were found in the cache
    num_host_hit_tokens: int  # queried tokens that were found in host memory
    num_evicted_blocks: int


class PagedKVCachePool:
    """Blocks that sequences share by common prefixes and copy on write; one thread uses the pool.

    `windows` has the window of each table (cache/layout.py); `max_chunk` is the most tokens of a sequence
    that a step computes, None: any number. `allocator` is the class that allocates device blocks, each of
    `block_bytes`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        use_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        max_blocks_per_sequence: int | None = None,
        placement_seed: int | None = None,
        windows: Sequence[int | None] = (None,),
        max_chunk: int | None = None,
        allocator: type[BlockAllocator] = BlockAllocator,
        block_bytes: int = 0,
    ) -> None:
        if num_blocks < 1 or block_size < 1 or num_host_blocks < 0:
            raise ConfigError(
                f"the cache needs at least one block of one token, got num_blocks={num_blocks}, "
                f"block_size={block_size}, num_host_blocks={num_host_blocks}"
            )
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.windows = tuple(windows)  # window of each table's layers in tokens; None: no window
        self.max_chunk = max_chunk
        self.block_bytes = block_bytes
        self.caches_prefixes = use_prefix_caching
        self._longest_table = longest_sequence(windows, num_blocks, block_size, max_chunk) // block_size
        if max_blocks_per_sequence is not None:
            self._longest_table = min(self._longest_table, max_blocks_per_sequence)
        self._sliding = [
            (table, window or STATE_WINDOW) for table, window in enumerate(windows) if window is not None
        ]
        self._has_states = STATE in windows
        self._most_held = [window_blocks(window, block_size, max_chunk) for window in windows]
        self.num_host_blocks = num_host_blocks
        self._device = allocator(num_blocks, placement_seed=placement_seed)
        self._host = BlockAllocator(num_host_blocks, place="host", placement_seed=placement_seed)
        self.tree = PrefixTree(self._device, block_size, windows, self._host)
        self.moves = self.tree.moves  # transfers that `take_moves` has not returned yet
        self._num_out = self._num_in = 0
        self._sequences: dict[int, SequenceBooks] = {}

    @property
    def num_free_blocks(self) -> int:
        """The number of free and idle blocks: all can be allocated at once."""
        return self._device.num_free + self._device.num_idle

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Return True if one sequence of this length fits into an empty cache."""
        return blocks_for(num_tokens, self.block_size) <= self._longest_table

    def blocks_of(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of this length holds, in all of its tables."""
        return blocks_of_sequence(self.windows, num_tokens, self.block_size, self.max_chunk)

    def longest(self, num_sequences: int = 1) -> int:
        """Return the longest length at which `num_sequences` fit into an empty cache together."""
        share = self.num_blocks // num_sequences
        fitting = longest_sequence(self.windows, share, self.block_size, self.max_chunk)
        return min(fitting, self._longest_table * self.block_size)

    def block_tables(self, seq_id: int) -> list[list[int]]:
        """Return the live, read-only tables of a sequence: its blocks in order, NO_BLOCK before a window."""
        books = self._sequences.get(seq_id)
        if books is None:
            raise self._not_resident(seq_id)
        return books.tables

    def match_prefix(self, seq_id: int, tokens: Sequence[int], salt: str | None = None) -> int:
        """Enter a sequence and attach its cached prefix; returns the number of cached tokens.

        At least the last token is left to compute. Call `release` if the sequence is not admitted after all.
        """
        books = self._enter(seq_id, salt)
        if not self.caches_prefixes:
            return 0
        size = self.block_size
        path = self.tree.match(tokens, salt)
        # A model must compute at least one token to sample from. If every token is cached, the last block
        # stays attached, and `reserve` copies it so that this token can be written.
        num_cached = max(0, min(len(path) * size, len(tokens) - 1))
        if self._sliding:
            num_cached = self._continuable(path, len(tokens))
        del path[blocks_for(num_cached, size) :]
        books.tables = [[node.blocks[table] for node in path] for table in range(len(self.windows))]
        for table, window in self._sliding:
            books.starts[table] = start = max(num_cached - window + 1, 0) // size
            books.tables[table][:start] = [NO_BLOCK] * start
        books.num_entered = num_cached // size
        if self.tree.num_host_blocks:
            self._attach_copies(books, path, num_cached)
        self._device.share(books.holdings()[::-1], seq_id)
        if books.num_entered:
            books.cursor = path[books.num_entered - 1].number
        books.uncounted = (len(tokens), path, num_cached)
        return num_cached

    def _attach_copies(self, books: SequenceBooks, path: list[PrefixNode], num_cached: int) -> None:
        """Hold the host copies of a prefix's blocks that are not on the device.

        From the first of these on, blocks are committed to the tree again after they are brought in.
        """
        size = self.block_size
        books.incoming = [
            (table, index, path[index].host[table])
            for table, blocks in enumerate(books.tables)
            for index in range(len(path) - 1, books.starts[table] - 1, -1)
            if blocks[index] < 0
        ]
        self._host.share([block for _, _, block in books.incoming], books.seq_id)
        indices = {index for _, index, _ in books.incoming}
        books.num_entered = min([books.num_entered, *indices])
        books.num_from_host = sum(min(size, num_cached - index * size) for index in indices)

    def _continuable(self, path: list[PrefixNode], num_tokens: int) -> int:
        """Return the token from which a prompt can continue: all blocks in windows before it are cached."""
        num_cached = 0
        runs = dict.fromkeys(self._sliding, 0)  # number of consecutive nodes with a block, by table
        for depth, node in enumerate(path, start=1):
            candidate = min(depth * self.block_size, num_tokens - 1)
            # a state covers all tokens of its block, of which the last must be computed again
            is_whole = not self._has_states or candidate == depth * self.block_size
            for table, window in self._sliding:
                run = runs[table, window] + 1 if node.blocks[table] >= 0 or node.host[table] >= 0 else 0
                runs[table, window] = run
                is_whole &= run >= depth - max(candidate - window + 1, 0) // self.block_size
            if is_whole:
                num_cached = candidate
        return num_cached

    def reserve(self, seq_id: int, num_tokens: int, num_computed: int) -> list[BlockPair] | None:
        """Reserve slots from `num_computed` to `num_tokens`; returns block copies to make, None: no room.

        A table with a window gets blocks only for a part of a long prompt, at least for one step: call
        `reserve` again for the rest. Blocks that have left a window are freed, and idle blocks are evicted
        as needed. If it returns None, no sequence has lost a block that it needs. Each returned pair is a
        changed entry in a table of the sequence.
        """
        device, size, books = self._device, self.block_size, self._sequences.get(seq_id)
        if books is None or books.host_tables is not None:
            raise self._not_resident(seq_id)
        table_len = -(-num_tokens // size)
        if table_len > self._longest_table:
            return None
        if self._sliding:
            self._slide(books, num_computed)
        first = num_computed // size  # later blocks are never shared
        num_wanted = len(books.incoming)
        short: list[tuple[list[int], int]] = []  # tables, and the number of blocks that they lack
        shared: list[list[int]] = []
        for number, table in enumerate(books.tables):  # not `zip`, which is slower than the rest
            num_held = len(table)
            num_new = table_len - num_held
            if self._sliding:
                num_new = min(table_len, books.starts[number] + self._most_held[number]) - num_held
            if num_new > 0:
                num_wanted += num_new
                short.append((table, num_new))
            is_written = first < num_held and num_tokens > num_computed and table[first] >= 0
            if is_written and device.ref_count(table[first]) > 1:
                num_wanted += 1
                shared.append(table)
        if num_wanted > len(device.free) and not self._make_room(num_wanted):
            if not (shared and self._take_back([t[first] for t in shared], num_wanted - len(shared))):
                return None
            shared = []

        copies: list[BlockPair] = []
        for table in shared:
            source, (destination,) = table[first], device.take(1, seq_id)
            table[first] = destination
            device.drop([source], seq_id)
            copies.append((source, destination))
        for table, num_new in short:
            table += device.take(num_new, seq_id)
        if books.incoming:
            self._bring_in(books)
        if books.uncounted is not None:
            self.tree.record(*books.uncounted, books.num_from_host)
            books.uncounted = None
        return copies

    def _bring_in(self, books: SequenceBooks) -> None:
        """Allocate device blocks for a prefix found in host memory; the tree keeps the host copies."""
        blocks = self._device.take(len(books.incoming), books.seq_id)
        for (table, index, copy), block in zip(books.incoming, blocks, strict=True):
            books.tables[table][index] = block
            self.tree.moves.append(Transfer(SWAP_IN, copy, block))
        self._host.drop([copy for _, _, copy in books.incoming], books.seq_id)
        books.incoming = []

    def _slide(self, books: SequenceBooks, num_computed: int) -> None:
        """Free the blocks that no token from `num_computed` on can see."""
        for table, window in self._sliding:
            start, now = books.starts[table], max(num_computed - window + 1, 0) // self.block_size
            if now > start:
                blocks = books.tables[table]
                self._device.drop(blocks[start:now], books.seq_id)
                blocks[start:now] = [NO_BLOCK] * (now - start)
                books.starts[table] = now

    def commit(self, seq_id: int, tokens: Sequence[int], num_computed: int) -> int:
        """Add the full blocks of the first `num_computed` tokens to the prefix tree.

        These tokens can no longer be retracted. Returns the `num_computed` at which the next block is full.
        """
        size, books = self.block_size, self._sequences.get(seq_id)
        if books is None or books.host_tables is not None:
            raise self._not_resident(seq_id)
        tables = books.tables
        if num_computed > len(tables[0]) * size:
            raise EngineError(
                f"sequence {seq_id} commits {num_computed} tokens but has room for "
                f"{len(tables[0]) * size}; reserve comes before commit"
            )
        if not books.enters_tree:
            return NEVER
        stop = num_computed // size
        if stop > books.num_entered:
            books.cursor = self.tree.insert(tokens, tables, stop, books.salt, books.cursor)
            books.num_entered = stop
        return (books.num_entered + 1) * size

    def fork(self, parent_id: int, child_id: int, num_computed: int) -> None:
        """Enter a second sequence that shares the `num_computed` tokens of its parent.

        Call it only between steps: a parent with a launched write must commit it first. The first of the two
        to write copies the last block.
        """
        parent = self._resident(parent_id)
        child = self._enter(child_id, parent.salt)
        num_blocks = blocks_for(num_computed, self.block_size)
        child.tables = [table[:num_blocks] for table in parent.tables]
        child.starts = list(parent.starts)
        child.enters_tree = parent.enters_tree
        child.cursor, child.num_entered = parent.cursor, parent.num_entered
        self._device.share(child.holdings(), child_id)

    def release(self, seq_id: int) -> None:
        """Free all blocks of a sequence; does nothing if it is unknown, so abort is always possible."""
        books = self._sequences.pop(seq_id, None)
        if books is not None:
            self._device.drop(books.holdings(), seq_id)
            self._host.drop(books.host_holdings(), seq_id)

    def swap_out(self, seq_id: int, num_computed: int) -> list[BlockPair] | None:
        """Swap out a sequence's computed blocks; returns (device, host) pairs to copy, None: no room."""
        books = self._resident(seq_id)
        self._slide(books, num_computed)
        num_blocks = blocks_for(num_computed, self.block_size)
        sources = [
            block
            for table, start in zip(books.tables, books.starts, strict=True)
            for block in table[start:num_blocks]
        ]
        if not self._host.num_blocks or not self.tree.make_host_room(len(sources)):
            return None
        self._num_out += len(sources)
        targets = self._host.take(len(sources), seq_id)
        self._device.drop(books.holdings(), seq_id)
        left = iter(targets)
        books.host_tables = [
            [NO_BLOCK if index < start else next(left) for index in range(num_blocks)]
            for start in books.starts
        ]
        books.tables = [[] for _ in self.windows]
        books.starts = [0] * len(self.windows)
        books.cursor, books.num_entered = ROOT, 0
        return list(zip(sources, targets, strict=True))

    def swap_in(self, seq_id: int) -> list[BlockPair] | None:
        """Swap a sequence in; returns (host, device) pairs to copy, None: no room.

        The next commit adds its blocks to the tree again.
        """
        books = self._sequences.get(seq_id)
        if books is None or books.host_tables is None:
            raise EngineError(f"sequence {seq_id} is not swapped out; swap_out comes before swap_in")
        sources = books.host_holdings()
        if not self._make_room(len(sources)):
            return None
        self._num_in += len(sources)
        targets = self._device.take(len(sources), seq_id)
        left = iter(targets)
        books.starts = [table.count(NO_BLOCK) for table in books.host_tables]
        books.tables = [
            [NO_BLOCK if block < 0 else next(left) for block in table] for table in books.host_tables
        ]
        self._host.drop(sources, seq_id)
        books.host_tables = None
        return list(zip(sources, targets, strict=True))

    def keep_evicted(self, keeps: bool) -> None:
        """Set if evicted blocks leave copies in host memory."""
        self.tree.keeps_evicted = keeps and self.num_host_blocks > 0

    def host_tokens(self, seq_id: int) -> int:
        """Return the number of a sequence's tokens that were found in host memory."""
        return self._sequences[seq_id].num_from_host

    def take_moves(self) -> list[Transfer]:
        """Return the transfers of evicted and of cached blocks since the last call, in order."""
        moves = self.moves.copy()
        if moves:
            self.moves.clear()
            num_out = sum(kind == SWAP_OUT for kind, _, _ in moves)
            self._num_out, self._num_in = self._num_out + num_out, self._num_in + len(moves) - num_out
        return moves

    def reset_prefix_cache(self) -> int:
        """Evict all cached prefixes; returns the number of blocks.

        Sequences in the pool keep their blocks but no longer add any to the tree.
        """
        for books in self._sequences.values():
            books.cursor, books.num_entered = ROOT, 0
            books.enters_tree = False
        return self.tree.reset()

    def _count_unfilled(self, num_computed: Mapping[int, int]) -> int:
        """Return the number of unfilled slots in sequences' blocks."""
        size = self.block_size
        filled: dict[int, int] = {}  # filled slots by block, for blocks that are not full and may be shared
        for seq_id, books in self._sequences.items():
            count = num_computed.get(seq_id, 0)
            for table in books.tables:
                for index, block in enumerate(table[count // size :], count // size):
                    filled[block] = max(filled.get(block, 0), count - index * size, 0)
        # A sequence about to recompute the last token of a cached block counts it as unfilled: it is full.
        return sum(size - n for block, n in filled.items() if block not in self.tree)

    def usage(self, num_computed: Mapping[int, int] | None = None) -> PoolUsage:
        """Return the usage of the cache; with `num_computed` by sequence id, unfilled slots are counted."""
        num_unfilled = 0 if num_computed is None else self._count_unfilled(num_computed)
        num_used = self.num_blocks - self.num_free_blocks
        return PoolUsage(
            num_blocks=self.num_blocks,
            num_free=self._device.num_free,
            num_idle=self._device.num_idle,
            num_cached=self.tree.num_cached_blocks,
            num_used=num_used,
            num_unfilled_slots=num_unfilled,
            fragmentation=num_unfilled / (num_used * self.block_size) if num_used else 0.0,
            num_free_host_blocks=self._host.num_free,
            num_cached_host=self.tree.num_host_blocks,
            num_blocks_out=self._num_out,
            num_blocks_in=self._num_in,
            num_queried_tokens=self.tree.num_queried_tokens,
            num_hit_tokens=self.tree.num_hit_tokens,
            num_host_hit_tokens=self.tree.num_host_hit_tokens,
            num_evicted_blocks=self.tree.num_evicted_blocks,
        )

    @property
    def spare_blocks(self) -> tuple[Collection[int], Collection[int]]:
        """The free and the idle blocks: live, read-only views."""
        return self._device.free, self._device.idle

    @property
    def spare_host_blocks(self) -> tuple[Collection[int], Collection[int]]:
        """The free and the idle host blocks: live, read-only views."""
        return self._host.free, self._host.idle

    def tables_of_all(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """Yield every sequence's id, its device blocks and its host blocks, for pictures."""
        for seq_id, books in self._sequences.items():
            yield seq_id, books.holdings(), books.host_holdings()

    def holdings(self) -> dict[Owner, frozenset[int]]:
        """Return a copy of the device blocks of every sequence and of the prefix tree, for pictures."""
        return self._device.holdings()

    def audit_blocks(self) -> list[Leak]:
        """Return every block whose owner is neither the tree nor a sequence in the pool: a leak."""
        live_owners: set[Owner] = {PREFIX_TREE, *self._sequences}
        return self._device.audit_blocks(live_owners) + self._host.audit_blocks(live_owners)

    def _resident(self, seq_id: int) -> SequenceBooks:
        books = self._sequences.get(seq_id)
        if books is None or books.host_tables is not None:
            raise self._not_resident(seq_id)
        return books

    def _not_resident(self, seq_id: int) -> EngineError:
        if seq_id in self._sequences:
            return EngineError(f"sequence {seq_id} is swapped out; swap it in before using its blocks")
        return EngineError(f"sequence {seq_id} is not in the cache; match_prefix or fork enters it")

    def _enter(self, seq_id: int, salt: str | None) -> SequenceBooks:
        if seq_id in self._sequences:
            raise EngineError(f"sequence {seq_id} is already in the cache; release it first")
        books = self._sequences[seq_id] = SequenceBooks(
            seq_id=seq_id,
            salt=salt,
            enters_tree=self.caches_prefixes,
            tables=[[] for _ in self.windows],
            starts=[0] * len(self.windows),
        )
        return books

    def _make_room(self, count: int) -> bool:
        """Evict idle blocks until `count` blocks are free; False: there are too few."""
        device = self._device
        if count <= device.num_free:
            return True
        if count > device.num_free + device.num_idle:
            return False
        self.tree.evict(count - device.num_free)
        return True

    def _take_back(self, blocks: list[int], num_new: int) -> bool:
        """Remove blocks from the tree so that their sequence may write them without a copy; False: no room.

        Without this, a fully cached prompt as large as the cache could never start.
        """
        tree, device = self.tree, self._device
        if any(block not in tree or device.ref_count(block) > 2 for block in blocks):
            return False
        if not self._make_room(num_new):
            return False
        for block in blocks:
            if block in tree:  # not removed yet together with its group
                tree.forget(block)
        return True
