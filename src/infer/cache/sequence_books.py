"""What the pool writes down about one sequence.

    position   0         4         8         12        16
    table      [ block 7 ][ block 3 ][ block 5 ][ block 9 ]      block_size 4
               |─ in the tree: 8 ─|
                                  cursor: block 3        the next to enter is block 5, when it is full

The picture holds for most sequences. One that computed the same tokens as another at the same time has
*twins*: its path through the tree leads over the other's block, which it holds beside its own.

How far a sequence is computed is no business of the pool's: the batch state counts that, and says so with
every call that depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from infer.cache.block_allocator import BlockAllocator
from infer.cache.prefix_tree import PrefixTree
from infer.errors import EngineError


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceBooks:
    """Which blocks one sequence holds, and how many of them the prefix tree knows."""

    seq_id: int
    salt: str | None
    enters_tree: bool  # whether its full blocks are offered to other sequences
    blocks: list[int] = field(default_factory=list)  # its table: where its tokens lie, in order
    num_entered: int = 0  # blocks of it that are in the tree, up to the cursor
    cursor: int | None = None  # the cached block after which its next full one goes; None: the root
    twins: list[tuple[int, int]] = field(default_factory=list)  # (own block, cached duplicate), root first
    host_blocks: list[int] | None = None  # not None: swapped out
    uncounted: tuple[int, int] | None = None  # (prompt tokens, hit tokens), until it is admitted

    def holdings(self) -> list[int]:
        """Every device block the sequence holds, deepest first: the order in which they should idle."""
        deepest_first = self.blocks[::-1]
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
        holdings = self.holdings()
        own = {cached: block for block, cached in self.twins}
        path = [own.get(block, block) for block in _path(tree, self.cursor)]
        claims = {
            "it holds its table and its twins, each once": len(holdings) == len(set(holdings)),
            "it holds nothing else": device.blocks_of(self.seq_id) == frozenset(holdings),
            "its host blocks are in its name": host.blocks_of(self.seq_id)
            == frozenset(self.host_blocks or ()),
            "its path through the tree is its table, twins aside": path == self.blocks[: self.num_entered],
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
