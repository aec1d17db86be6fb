"""What the pool writes down about one sequence.

    position   0         4         8         12        16
    table      [ block 7 ][ block 3 ][ block 5 ][ block 9 ]      block_size 4
               |── computed: 10 tokens ──|       |
               |── reserved: 16, may be written without asking ──|
               |─ in the tree: 8 ─|
                                  cursor: block 3        next_commit: 12, when block 5 is full

The picture holds for most sequences. One that computed the same tokens as another at the same time has
*twins*: its path through the tree leads over the other's block, which it holds beside its own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Final

from infer.cache.block_allocator import BlockAllocator
from infer.cache.block_table import BlockTable, blocks_for
from infer.cache.prefix_tree import PrefixTree
from infer.errors import EngineError

NEVER: Final = sys.maxsize  # a num_computed that no sequence reaches


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceBooks:
    """Where one sequence's tokens lie, and how far they are computed, writable and cached."""

    seq_id: int
    salt: str | None
    table: BlockTable
    enters_tree: bool  # whether its full blocks are offered to other sequences
    next_commit: int  # the num_computed at which `commit` has work to do
    num_computed: int = 0
    num_reserved: int = 0  # tokens below this may be written without asking
    cursor: int | None = None  # the cached block after which its next full one goes; None: the root
    twins: list[tuple[int, int]] = field(default_factory=list)  # (own block, cached duplicate), root first
    host_blocks: list[int] | None = None  # not None: swapped out
    uncounted: tuple[int, int] | None = None  # (prompt tokens, hit tokens), until it is admitted

    def holdings(self) -> list[int]:
        """Every device block the sequence holds, deepest first: the order in which they should idle."""
        deepest_first = self.table.blocks[::-1]
        if not self.twins:
            return deepest_first
        held: list[int] = []
        start = 0
        for block, cached in reversed(self.twins):  # few as a rule, with long runs between them
            stop = deepest_first.index(block, start) + 1
            held += (*deepest_first[start:stop], cached)
            start = stop
        return held + deepest_first[start:]

    def check(self, device: BlockAllocator, host: BlockAllocator, tree: PrefixTree) -> None:
        """Raise EngineError unless these books agree with the allocators and the tree."""
        table, size, holdings = self.table, self.table.block_size, self.holdings()
        is_resident = self.host_blocks is None
        may_write = self.num_reserved > self.num_computed
        num_blocks = blocks_for(self.num_reserved, size)
        writable = table.blocks[self.num_computed // size : num_blocks] if may_write else []
        own = {cached: block for block, cached in self.twins}
        path = [own.get(block, block) for block in _path(tree, self.cursor)]
        claims = {
            "it holds its table and its twins, each once": len(holdings) == len(set(holdings)),
            "it holds nothing else": device.blocks_of(self.seq_id) == frozenset(holdings),
            "its host blocks are in its name": host.blocks_of(self.seq_id)
            == frozenset(self.host_blocks or ()),
            "its computed tokens have a place": self.num_computed
            <= (table.num_slots if is_resident else len(self.host_blocks or ()) * size),
            "nobody else holds a block it may write": all(device.ref_count(b) == 1 for b in writable),
            "its path through the tree is its table, twins aside": path == table.blocks[: len(path)],
            "its full blocks have been entered": not (is_resident and self.enters_tree)
            or self.next_commit == (len(path) + 1) * size,
        }
        for claim, is_true in claims.items():
            if not is_true:
                raise EngineError(f"the books of sequence {self.seq_id} are wrong: not so that {claim}")


def _path(tree: PrefixTree, cursor: int | None) -> list[int]:
    path: list[int] = []
    while cursor is not None:
        path.append(cursor)
        cursor = tree.parent(cursor)
    return path[::-1]
