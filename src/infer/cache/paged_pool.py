"""The pools: block tables, the prefix tree and host memory, kept in agreement.

    BlockAllocator   device and host: what owns which block, and how many owners it has
    PrefixTree       which blocks hold the start of this prompt; one more owner of each
    SequenceBooks    of every sequence: its table, and how much of it the tree knows

**A decode step asks nothing**, as long as no block boundary is crossed: the batch state knows up to where a
sequence may write (`reserve`) and when its next block is full (`commit`).

**Room is made in this order:** free blocks; cached ones that no sequence uses, least recently used first; the
duplicates that sequences hold of cached blocks. To preempt a sequence is the scheduler's decision.

Two pools share this code. The paged one has many small blocks. The slotted one is the contiguous
layout of old: one block of `max_seq_len` tokens per sequence, nothing cached between requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infer.cache.block_allocator import PREFIX_TREE, BlockAllocator, Leak, Owner
from infer.cache.kv_pool import NEVER, BlockPair, PoolUsage, blocks_for
from infer.cache.prefix_tree import PrefixTree
from infer.cache.sequence_books import SequenceBooks
from infer.errors import ConfigError, EngineError


class PagedKVCachePool:
    """Many small blocks, shared where prompts start alike, copied when written; one thread uses it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        use_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        max_blocks_per_sequence: int | None = None,
        placement_seed: int | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1 or num_host_blocks < 0:
            raise ConfigError(
                f"the cache needs at least one block of one token, got num_blocks={num_blocks}, "
                f"block_size={block_size}, num_host_blocks={num_host_blocks}"
            )
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._use_prefix_caching = use_prefix_caching
        self._max_blocks = min(num_blocks, max_blocks_per_sequence or num_blocks)
        self._device = BlockAllocator(num_blocks, placement_seed=placement_seed)
        self._host = BlockAllocator(num_host_blocks, place="host", placement_seed=placement_seed)
        self._tree = PrefixTree(self._device, block_size)
        self._sequences: dict[int, SequenceBooks] = {}

    @property
    def num_free_blocks(self) -> int:
        """Free and idle blocks; `reserve` may find a few more by giving up duplicates."""
        return self._device.num_free + self._device.num_idle

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether one sequence of this length fits when it has the cache to itself."""
        return blocks_for(num_tokens, self.block_size) <= self._max_blocks

    def block_table(self, seq_id: int) -> list[int]:
        """The sequence's blocks in order; the live list, to be read and not changed."""
        books = self._sequences.get(seq_id) or self._books(seq_id)
        return books.blocks

    def match_prefix(self, seq_id: int, tokens: Sequence[int], salt: str | None = None) -> int:
        """Enter a sequence and share the cached blocks of its prompt, at least one token short of all."""
        books = self._enter(seq_id, salt)
        if not self._use_prefix_caching:
            return 0
        size = self.block_size
        blocks = self._tree.match(tokens, salt)
        # A model must run at least one token to have something to sample from. When every token is
        # cached the last block stays attached, and `reserve` copies it for that one token to be written.
        num_cached = max(0, min(len(blocks) * size, len(tokens) - 1))
        del blocks[blocks_for(num_cached, size) :]
        self._device.share(blocks, seq_id)
        num_full = num_cached // size
        books.blocks += blocks
        books.num_entered = num_full
        books.cursor = blocks[num_full - 1] if num_full else None
        books.uncounted = (len(tokens), num_cached)
        return num_cached

    def reserve(self, seq_id: int, num_tokens: int, num_computed: int) -> list[BlockPair] | None:
        """Take blocks for tokens without a slot, and a private copy of a shared one about to be written."""
        device, size, books = self._device, self.block_size, self._sequences.get(seq_id)
        if books is None or books.host_blocks is not None:
            raise self._not_resident(seq_id)
        blocks = books.blocks
        num_held = len(blocks)
        num_new = -(-num_tokens // size) - num_held
        if num_new < 0:
            num_new = 0
        elif num_held + num_new > self._max_blocks:
            return None
        first = num_computed // size  # no block after this one is ever shared
        must_copy = first < num_held and num_tokens > num_computed and device.ref_count(blocks[first]) > 1
        num_wanted = num_new + must_copy
        if num_wanted > len(device.free) and not self._make_room(num_wanted):
            if not (must_copy and self._take_back(blocks[first], num_new)):
                return None
            must_copy = False

        copies: list[BlockPair] = []
        if must_copy:
            source, (destination,) = blocks[first], device.take(1, seq_id)
            blocks[first] = destination
            device.drop([source], seq_id)
            copies.append((source, destination))
        if num_new:
            blocks += device.take(num_new, seq_id)
        if books.uncounted is not None:
            self._tree.record(*books.uncounted)
            books.uncounted = None
        return copies

    def commit(self, seq_id: int, tokens: Sequence[int], num_computed: int) -> int:
        """Enter the blocks filled since the last commit into the tree, and only those."""
        size, books = self.block_size, self._sequences.get(seq_id)
        if books is None or books.host_blocks is not None:
            raise self._not_resident(seq_id)
        blocks = books.blocks
        if num_computed > len(blocks) * size:
            raise EngineError(
                f"sequence {seq_id} commits {num_computed} tokens but has room for "
                f"{len(blocks) * size}; reserve comes before commit"
            )
        if not books.enters_tree:
            return NEVER
        start, stop = books.num_entered, num_computed // size
        if stop > start:
            filled = blocks[start:stop]
            entered = self._tree.insert(tokens, filled, seq_id, books.salt, books.cursor)
            books.cursor, books.num_entered = entered.cursor, start + entered.num_entered
            if entered.twins:
                books.twins += entered.twins
            if entered.num_entered < stop - start:  # a fork shares a block that neither had entered
                books.enters_tree = False
                return NEVER
            start = stop
        return (start + 1) * size

    def fork(self, parent_id: int, child_id: int, num_computed: int) -> None:
        """Share the parent's computed blocks; the first of the two to write copies the last one."""
        parent = self._resident(parent_id)
        child = self._enter(child_id, parent.salt)
        child.blocks = parent.blocks[: blocks_for(num_computed, self.block_size)]
        child.twins = list(parent.twins)
        child.enters_tree = parent.enters_tree
        child.cursor, child.num_entered = parent.cursor, parent.num_entered
        self._device.share(child.holdings(), child_id)

    def release(self, seq_id: int) -> None:
        """Drop the sequence's references; what the tree holds as well stays cached."""
        books = self._sequences.pop(seq_id, None)
        if books is not None:
            self._device.drop(books.holdings(), seq_id)
            self._host.drop(books.host_blocks or (), seq_id)

    def swap_out(self, seq_id: int, num_computed: int) -> list[BlockPair] | None:
        """Take a host block for every block with computed tokens, and let go of all device blocks."""
        books = self._resident(seq_id)
        filled = books.blocks[: blocks_for(num_computed, self.block_size)]
        if not self._host.num_blocks or len(filled) > self._host.num_free:
            return None
        books.host_blocks = self._host.take(len(filled), seq_id)
        self._device.drop(books.holdings(), seq_id)
        books.blocks, books.twins = [], []
        books.cursor, books.num_entered = None, 0
        return list(zip(filled, books.host_blocks, strict=True))

    def swap_in(self, seq_id: int) -> list[BlockPair] | None:
        """Take fresh device blocks and give back the host ones; the next commit enters the tree anew."""
        books = self._books(seq_id)
        host_blocks = books.host_blocks
        if host_blocks is None:
            raise EngineError(f"sequence {seq_id} is not swapped out; swap_out comes before swap_in")
        if not self._make_room(len(host_blocks)):
            return None
        books.blocks = self._device.take(len(host_blocks), seq_id)
        self._host.drop(host_blocks, seq_id)
        books.host_blocks = None
        return list(zip(host_blocks, books.blocks, strict=True))

    def reset_prefix_cache(self) -> int:
        """Empty the tree. Sequences in the pool keep their blocks but enter nothing any more."""
        for books in self._sequences.values():
            self._device.drop([cached for _, cached in books.twins], books.seq_id)
            books.twins = []
            books.cursor, books.num_entered = None, 0
            books.enters_tree = False
        return self._tree.reset()

    def _count_unfilled(self, num_computed: Mapping[int, int]) -> int:
        """Slots of sequences' blocks that nothing is in yet."""
        size = self.block_size
        filled: dict[int, int] = {}  # of the blocks that are not full: two sequences may share one
        for seq_id, books in self._sequences.items():
            count = num_computed.get(seq_id, 0)
            for index, block in enumerate(books.blocks[count // size :], count // size):
                filled[block] = max(filled.get(block, 0), count - index * size, 0)
        # A sequence that will compute the last token of a cached block sees it unfilled: it is not.
        return sum(size - n for block, n in filled.items() if block not in self._tree)

    def usage(self, num_computed: Mapping[int, int] | None = None) -> PoolUsage:
        """Count what the allocators and the tree hold, and the slots that nothing is in yet."""
        num_unfilled = 0 if num_computed is None else self._count_unfilled(num_computed)
        num_used = self.num_blocks - self.num_free_blocks
        return PoolUsage(
            num_blocks=self.num_blocks,
            num_free=self._device.num_free,
            num_idle=self._device.num_idle,
            num_cached=self._tree.num_cached_blocks,
            num_used=num_used,
            num_unfilled_slots=num_unfilled,
            fragmentation=num_unfilled / (num_used * self.block_size) if num_used else 0.0,
            num_free_host_blocks=self._host.num_free,
            num_queried_tokens=self._tree.num_queried_tokens,
            num_hit_tokens=self._tree.num_hit_tokens,
            num_evicted_blocks=self._tree.num_evicted_blocks,
        )

    def audit_blocks(self) -> list[Leak]:
        """Name every block whose owner is neither the tree nor a sequence in the pool."""
        live_owners: set[Owner] = {PREFIX_TREE, *self._sequences}
        return self._device.audit_blocks(live_owners) + self._host.audit_blocks(live_owners)

    def is_shared(self, seq_id: int, start: int, stop: int) -> bool:
        """Whether a block that holds one of the tokens `start` to `stop` has another owner as well."""
        size = self.block_size
        blocks = self._books(seq_id).blocks[start // size : blocks_for(stop, size)]
        return any(self._device.ref_count(block) > 1 for block in blocks)

    def check(self) -> None:
        """Raise EngineError unless every book agrees with every other; walks over everything."""
        self._device.check()
        self._host.check()
        self._tree.check()
        for books in self._sequences.values():
            books.check(self._device, self._host, self._tree)

    def _books(self, seq_id: int) -> SequenceBooks:
        books = self._sequences.get(seq_id)
        if books is None:
            raise self._not_resident(seq_id)
        return books

    def _resident(self, seq_id: int) -> SequenceBooks:
        books = self._sequences.get(seq_id)
        if books is None or books.host_blocks is not None:
            raise self._not_resident(seq_id)
        return books

    def _not_resident(self, seq_id: int) -> EngineError:
        if seq_id in self._sequences:
            return EngineError(f"sequence {seq_id} is swapped out; swap it in before using its blocks")
        return EngineError(f"sequence {seq_id} is not in the cache; match_prefix or fork enters it")

    def _enter(self, seq_id: int, salt: str | None) -> SequenceBooks:
        if seq_id in self._sequences:
            raise EngineError(f"sequence {seq_id} is in the cache already; release it first")
        books = self._sequences[seq_id] = SequenceBooks(
            seq_id=seq_id, salt=salt, enters_tree=self._use_prefix_caching
        )
        return books

    def _make_room(self, count: int) -> bool:
        """Free `count` blocks at the cache's cost alone; False: there are not so many."""
        device = self._device
        if count <= device.num_free:
            return True
        if count > device.num_free + device.num_idle:
            self._shed_twins()
            if count > device.num_free + device.num_idle:
                return False
        self._tree.evict(count - device.num_free)
        return True

    def _take_back(self, block: int, num_new: int) -> bool:
        """When there is no room for a copy: write in place if only the tree shares the block.

        Without this a fully cached prompt as large as the cache could never start. The room was one
        block short, so making room for the rest evicts every idle block and leaves this one a leaf.
        """
        if block not in self._tree or self._device.ref_count(block) > 2 or not self._make_room(num_new):
            return False
        self._tree.forget(block)
        return True

    def _shed_twins(self) -> None:
        """Let go of cached duplicates: the last resort before a sequence has to be preempted."""
        for books in self._sequences.values():
            kept: list[tuple[int, int]] = []
            for block, cached in reversed(books.twins):
                if cached == books.cursor:  # nothing of ours hangs below it: step back to its parent
                    books.cursor = self._tree.parent(cached)
                    books.num_entered -= 1
                elif self._device.ref_count(cached) == 2 and self._device.ref_count(block) == 1:
                    # Only the tree and we hold the cached one, only we hold ours: it takes its place.
                    self._tree.exchange(cached, block)
                else:
                    kept.append((block, cached))
                    continue
                self._device.drop([cached], books.seq_id)
            books.twins = kept[::-1]


class SlottedKVCachePool(PagedKVCachePool):
    """The contiguous layout: each sequence gets one block of `max_seq_len` tokens, or has to wait."""

    def __init__(
        self,
        num_sequences: int,
        max_seq_len: int,
        *,
        num_host_sequences: int = 0,
        placement_seed: int | None = None,
    ) -> None:
        super().__init__(
            num_sequences,
            max_seq_len,
            use_prefix_caching=False,
            num_host_blocks=num_host_sequences,
            max_blocks_per_sequence=1,
            placement_seed=placement_seed,
        )
