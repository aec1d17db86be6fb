"""The pool's record of one sequence: its block tables, and its place in the prefix tree.

    position   0         4         8         12        16
    table      [ block 7 ][ block 3 ][ block 5 ][ block 9 ]      block_size 4
               |─ in the tree: 8 ─|
                                  cursor: node of block 3     block 5 enters next, when it is full

The layout decides the number of tables (cache/layout.py). In a table with a window, entries before `starts`
are NO_BLOCK: their blocks have left the window.

    table      [   ---   ][   ---   ][ block 5 ][ block 9 ]      starts: 2

The pool does not know how many tokens of a sequence are computed: the batch state passes this number with
every call that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infer.cache.prefix_tree import ROOT, PrefixNode


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceBooks:
    """The blocks that one sequence holds, and the number of them in the prefix tree."""

    seq_id: int
    salt: str | None
    enters_tree: bool  # True: its full blocks enter the prefix tree
    tables: list[list[int]]  # blocks of its tokens, in order
    starts: list[int]  # index of the first block of each table
    num_entered: int = 0  # number of leading blocks of each table that are in the tree
    cursor: int = ROOT  # number of the tree node after which its next full block goes
    host_tables: list[list[int]] | None = None  # host blocks of a swapped sequence; None: not swapped
    uncounted: tuple[int, Sequence[PrefixNode], int] | None = None  # see `PrefixTree.record`, until admitted
    num_from_host: int = 0  # tokens that were found in host memory
    incoming: list[tuple[int, int, int]] = field(default_factory=list)
    """Cached blocks in host memory that have no device block yet: table, index, host block."""

    def holdings(self) -> list[int]:
        """Return the sequence's device blocks, deepest first: the order in which they should become idle."""
        if len(self.tables) == 1 and not self.starts[0] and not self.incoming:
            return self.tables[0][::-1]
        return [
            block
            for table, start in zip(self.tables, self.starts, strict=True)
            for block in reversed(table[start:])
            if block >= 0
        ]

    def host_holdings(self) -> list[int]:
        """Return the sequence's host blocks."""
        swapped = [block for table in self.host_tables or () for block in table if block >= 0]
        return swapped + [block for _, _, block in self.incoming]
