"""Where a sequence's tokens lie in the cache.

The blocks of a sequence in order. They say for each of its tokens which *slot*, among all the
`num_blocks * block_size` of the cache, keeps the token's key and value:

    block_size 4, blocks [7, 3, 5]          position 6 is the third token of the second block:
                                            slot = blocks[6 // 4] * 4 + 6 % 4 = 3 * 4 + 2 = 14

A table grows at its end. The only entry that ever changes is the one about to be written while
somebody else still reads it: it is exchanged for a private copy (copy-on-write).
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockTable:
    """A sequence's blocks in order. It counts no references: that is the allocator's job."""

    __slots__ = ("block_size", "blocks")

    def __init__(self, block_size: int, blocks: Iterable[int] = ()) -> None:
        self.block_size = block_size
        self.blocks = list(blocks)

    @property
    def num_blocks(self) -> int:
        """How many blocks the sequence has."""
        return len(self.blocks)

    @property
    def num_slots(self) -> int:
        """How many tokens the blocks have room for."""
        return len(self.blocks) * self.block_size

    def extend(self, blocks: Iterable[int]) -> None:
        """Put more blocks at the end."""
        self.blocks.extend(blocks)

    def exchange(self, index: int, block: int) -> int:
        """Put another block at this index and return the one that was there."""
        replaced = self.blocks[index]
        self.blocks[index] = block
        return replaced

    def fork(self, num_tokens: int) -> BlockTable:
        """A second table over the same blocks, as far as they hold the first `num_tokens` tokens."""
        return BlockTable(self.block_size, self.blocks[: blocks_for(num_tokens, self.block_size)])


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks it takes to hold this many tokens."""
    return -(-num_tokens // block_size)
