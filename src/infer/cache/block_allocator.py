"""The owners of each block of the KV cache, by reference counts.

A *block* is the keys and values of `block_size` consecutive tokens, in the layers of one table
(cache/layout.py). This module counts references to blocks and records their owners. The prefix tree knows
their tokens; the tensors are in kv_store.py.

    free --take()--> held(1) --share()--> held(n) --drop()--> held(n-1) ... --drop()--> free
                                                        |
                                                        +--> idle: only the prefix tree is left

An owner is anything hashable: a sequence's id, or the name `PREFIX_TREE`. An owner holds a block at most
once, so a second drop is a bug and raises an error. A block that only the prefix tree holds is *idle*: it
costs nothing to keep and can be evicted at once. Idle blocks are queued in the order in which their last
sequence dropped them, so the head of the queue is the least recently used block.

Every operation costs O(1) per block. Tests check this invariant after every step:

    free + held == num_blocks,  and the owners' holdings add up to the reference counts
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from infer.errors import EngineError, OutOfBlocks

Owner = Hashable

PREFIX_TREE: Final = "prefix tree"  # the owner whose blocks may be evicted if no other owner holds them

_NOTHING: Final[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A block held by an owner that no longer exists."""

    place: str  # "device" or "host"
    block: int
    owner: Owner
    ref_count: int  # references to the block by all owners


class BlockAllocator:
    """Reference counts and owners of a fixed number of blocks; one engine thread uses it.

    Blocks are allocated in a fixed order, most recently freed first. With a `placement_seed` the order is
    random instead, so that tests can show that no result depends on block numbers.
    """

    def __init__(self, num_blocks: int, *, place: str = "device", placement_seed: int | None = None) -> None:
        assert num_blocks >= 0, f"num_blocks must not be negative, got {num_blocks}"
        self.num_blocks = num_blocks
        self.place = place
        self.free = list(range(num_blocks - 1, -1, -1))  # a stack with block 0 on top; others only read it
        self._ref_counts = [0] * num_blocks
        self._held: defaultdict[Owner, set[int]] = defaultdict(set)  # read with `get`, to make no empty sets
        self._idle: OrderedDict[int, None] = OrderedDict()  # a queue: longest idle first
        self._random = None if placement_seed is None else random.Random(placement_seed)

    @property
    def num_free(self) -> int:
        """The number of blocks without an owner."""
        return len(self.free)

    @property
    def idle(self) -> Collection[int]:
        """The blocks that only the prefix tree holds: a live, read-only view."""
        return self._idle.keys()

    @property
    def num_idle(self) -> int:
        """The number of blocks that only the prefix tree holds."""
        return len(self._idle)

    def ref_count(self, block: int) -> int:
        """Return the number of owners that hold this block."""
        return self._ref_counts[block]

    def is_idle(self, block: int) -> bool:
        """Return True if only the prefix tree holds this block."""
        return block in self._idle

    def blocks_of(self, owner: Owner) -> frozenset[int]:
        """Return a copy of the set of blocks that this owner holds, for audits and pictures."""
        return frozenset(self._held.get(owner, _NOTHING))

    def holdings(self) -> dict[Owner, frozenset[int]]:
        """Return a copy of the blocks of every owner, for pictures."""
        return {owner: frozenset(held) for owner, held in self._held.items()}

    def owners_of(self, block: int) -> list[Owner]:
        """Return the owners of this block; walks over all owners, for messages and pictures."""
        return [owner for owner, held in self._held.items() if block in held]

    def take(self, count: int, owner: Owner) -> list[int]:
        """Allocate `count` free blocks with one reference each; if there are too few, allocate none."""
        assert count >= 0, f"count must not be negative, got {count}"
        free = self.free
        if count > len(free):
            raise OutOfBlocks(
                f"need {count} {self.place} blocks, {len(free)} of {self.num_blocks} are free; "
                "evict cached blocks or preempt a sequence first"
            )
        if self._random is not None:
            _move_random_to_end(free, count, self._random)
        blocks = free[: -count - 1 : -1]  # the top of the stack
        del free[len(free) - count :]
        for block in blocks:
            self._ref_counts[block] = 1
        if blocks:
            self._held[owner].update(blocks)
        return blocks

    def adopt(self, block: int) -> None:
        """Add the prefix tree as an owner of a block that a sequence holds and the tree does not."""
        self._ref_counts[block] += 1
        self._held[PREFIX_TREE].add(block)

    def share(self, blocks: Sequence[int], owner: Owner) -> None:
        """Add `owner` as an owner of each block; each must have an owner, and not this one."""
        if not blocks:
            return
        counts, num_blocks, idle = self._ref_counts, self.num_blocks, self._idle
        held = self._held.get(owner, _NOTHING)
        for block in blocks:
            if block in held or not 0 <= block < num_blocks or not counts[block]:
                raise self._cannot_share(block, owner)
        if len(blocks) > 1 and len(set(blocks)) < len(blocks):
            raise self._cannot_share(next(b for i, b in enumerate(blocks) if b in blocks[:i]), owner)
        for block in blocks:
            counts[block] += 1
            if counts[block] == 2:
                idle.pop(block, None)
        self._held[owner].update(blocks)

    def drop(self, blocks: Sequence[int], owner: Owner) -> None:
        """Drop one reference of `owner` to each block; the last reference frees the block.

        All or nothing: a block that `owner` does not hold, or that is listed twice, raises an error.
        """
        if not blocks:
            return
        named = set(blocks)
        held = self._held.get(owner)
        if held is None or len(named) != len(blocks) or not named <= held:
            raise self._double_free(blocks, owner)
        if len(named) == len(held):
            del self._held[owner]
        else:
            held -= named
        cached = self._held.get(PREFIX_TREE, _NOTHING)
        counts, idle, free = self._ref_counts, self._idle, self.free
        for block in blocks:
            refs = counts[block] = counts[block] - 1
            if not refs:
                idle.pop(block, None)
                free.append(block)
            elif refs == 1 and block in cached:
                idle[block] = None

    def oldest_idle(self) -> int | None:
        """Return the block that has been idle for longest, or None."""
        return next(iter(self._idle), None)

    def requeue_idle(self, block: int) -> None:
        """Move an idle block to the end of the queue."""
        self._idle.move_to_end(block)

    def audit_blocks(self, live_owners: Collection[Owner]) -> list[Leak]:
        """Return every block held by an owner outside `live_owners`; empty if no block has leaked."""
        return [
            Leak(place=self.place, block=block, owner=owner, ref_count=self._ref_counts[block])
            for owner, held in self._held.items()
            if owner not in live_owners
            for block in sorted(held)
        ]

    def _cannot_share(self, block: int, owner: Owner) -> EngineError:
        if 0 <= block < self.num_blocks and self._ref_counts[block]:
            return EngineError(
                f"{owner!r} already holds {self.place} block {block}; it may hold it only once"
            )
        return EngineError(f"{owner!r} cannot share {self.place} block {block}: nothing holds it")

    def _double_free(self, blocks: Sequence[int], owner: Owner) -> EngineError:
        held = self._held.get(owner, _NOTHING)
        block = next(b for i, b in enumerate(blocks) if b not in held or b in blocks[:i])
        owners = ", ".join(repr(o) for o in self.owners_of(block)) or "no owner"
        return EngineError(
            f"{owner!r} drops {self.place} block {block} more often than it holds it; it is held by {owners}"
        )


def _move_random_to_end(blocks: list[int], count: int, rng: random.Random) -> None:
    """Choose `count` of the blocks at random and put them last: a shuffle that stops early."""
    for last in range(len(blocks) - 1, len(blocks) - 1 - count, -1):
        chosen = rng.randrange(last + 1)
        blocks[chosen], blocks[last] = blocks[last], blocks[chosen]
