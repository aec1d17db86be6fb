"""How `linear_wgmma.cu` cuts a matrix into blocks: what fits, and a rule for what is fast.

    rows      64 to a block; 128 where that is still a block for every multiprocessor
    split     of K, so that all blocks run at once and most multiprocessors have one; clusters of more than
              two blocks do not find room everywhere, and a few multiprocessors are left over
    stages    as much of W under way as the shared memory of a multiprocessor holds, which is what the memory
              needs to be busy; half of it for each of two blocks where a matrix has more blocks than
              there are multiprocessors

Shapes:  M tokens, N outputs (of the gate half when gated), K inputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

MAX_TOKENS = 64

_WIDTHS = (16, 32, 48, 64)  # tokens of a block: each of them is compiled once more
_CHUNK = 64  # columns of a stage
_NUM_SMS = 132  # multiprocessors of an H100 or H200
_RESIDENT = {1: 132, 2: 130, 4: 116, 8: 104}  # blocks that run at once in clusters of this many, one to each
_SHARED_BYTES = 227 << 10  # of a multiprocessor, for all its blocks
_RESERVED_BYTES = 1 << 10  # of each block
_MIN_CHUNKS = 4  # for each block of a cluster


@dataclass(frozen=True, slots=True)
class WgmmaConfig:
    """How a matrix is cut into blocks, for this many tokens."""

    width: int  # tokens, at most
    rows: int  # of W, per block: of a gated layer half of them the gate's
    stages: int
    split: int = 1  # blocks that split K
    blocks: int = 1  # that a multiprocessor holds

    def num_tiles(self, N: int, *, gated: bool) -> int:
        """Of the outputs of a matrix."""
        return -(-N // self.box_rows(gated=gated))

    def num_parts(self, N: int) -> int:
        """Of the sums of squares that it leaves: one for each tile."""
        return self.num_tiles(N, gated=False)

    def box_rows(self, *, gated: bool) -> int:
        """Of W, that are copied at once: of a gated layer first the gate's, then those of `up`."""
        return self.rows // 2 if gated else self.rows

    @property
    def num_threads(self) -> int:
        """Four warps for each 64 rows, one that loads, three that add up squares."""
        return 2 * self.rows + 128

    @property
    def shared_bytes(self) -> int:
        """Of a block, with what it takes to begin at a multiple of 1,024."""
        stages = self.stages * (self.rows + self.width) * _CHUNK * 2
        sums = self.width * (self.rows + 4) * 4
        barriers, squares = 16 * self.stages, 3 * 8 * -(-self.width // self.split)
        return max(stages, sums) + barriers + squares + 2 * 1024


def token_width(num_tokens: int) -> int:
    """The tokens of a block that multiplies this many."""
    return next(width for width in _WIDTHS if num_tokens <= width)


@functools.lru_cache(maxsize=1024)
def choose_config(M: int, N: int, K: int, *, gated: bool) -> WgmmaConfig | None:
    """What the rule says; None: this matrix is not for us."""
    if not 0 < M <= MAX_TOKENS or N % 8 or K % 8:
        return None
    width, num_chunks = token_width(M), -(-K // _CHUNK)
    rows = 64
    if WgmmaConfig(width, 128, 1).num_tiles(N, gated=gated) >= 96 or width == 64:
        rows = 128
    num_tiles = WgmmaConfig(width, rows, 1).num_tiles(N, gated=gated)
    blocks = 1 if num_tiles <= _NUM_SMS else 2
    split = max(
        split
        for split, resident in _RESIDENT.items()
        if split == 1 or (num_tiles * split <= resident and num_chunks >= split * _MIN_CHUNKS)
    )
    room = _SHARED_BYTES // blocks - _RESERVED_BYTES
    stages = -(-num_chunks // split)
    while stages > 1 and WgmmaConfig(width, rows, stages, split, blocks).shared_bytes > room:
        stages -= 1
    return WgmmaConfig(width, rows, stages, split, blocks)
