"""The pool's books about one sequence.

    position   0         4         8         12        16
    table      [ block 7 ][ block 3 ][ block 5 ][ block 9 ]      block_size 4
               |─ in the tree: 8 ─|
                                  cursor: node of block 3     the next to enter is block 5, when it is full

The layout decides the number of tables (cache/layout.py). In a table with a window, blocks outside the window
are NO_BLOCK, up to `starts`:

    table      [   ---   ][   ---   ][ block 5 ][ block 9 ]      starts: 2

The pool does not know how far a sequence is computed. The batch state counts this and passes it with every
call that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infer.cache.prefix_tree import ROOT, PrefixNode


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceBooks:
    """The blocks that one sequence holds, and the number of them that the prefix tree knows."""

    seq_id: int
    salt: str | None
    enters_tree: bool  # whether its full blocks are offered to other sequences
    tables: list[list[int]]  # blocks of its tokens, in order
    starts: list[int]  # the first index of each table that has a block
    num_entered: int = 0  # blocks of each table that are in the tree, up to the cursor
    cursor: int = ROOT  # the number of the node after which its next full block goes
    host_tables: list[list[int]] | None = None  # not None: swapped out
    uncounted: tuple[int, Sequence[PrefixNode], int] | None = None  # see `PrefixTree.record`, until admitted
    num_from_host: int = 0  # tokens that were found in host memory
    incoming: list[tuple[int, int, int]] = field(default_factory=list)
    """Cached blocks that are in host memory and have no block here yet: table, index, host block."""

    def holdings(self) -> list[int]:
        """Every device block the sequence holds, deepest first: the order in which they should idle."""
        if len(self.tables) == 1 and not self.starts[0] and not self.incoming:
            return self.tables[0][::-1]
        return [
            block
            for table, start in zip(self.tables, self.starts, strict=True)
            for block in reversed(table[start:])
            if block >= 0
        ]

    def host_holdings(self) -> list[int]:
        """Every host block the sequence holds."""
        swapped = [block for table in self.host_tables or () for block in table if block >= 0]
        return swapped + [block for _, _, block in self.incoming]
