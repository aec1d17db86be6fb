"""How `linear/wgmma.cu` cuts a matrix into blocks: what fits, and a rule for what is fast.

A block keeps as much of W under way as the shared memory of a multiprocessor holds, which is what the memory
needs to be busy. How many blocks there are:

    a layer's matrices    rows and the split of K so that about three quarters of the multiprocessors have a
                          block: the kernel behind loads its first weights on the others
    long rows             (of `down` in a large model) take their time; all multiprocessors help
    many rows             (of gate and up) so many to a block that one for each multiprocessor is enough: a
                          second round for a few of them would take as long as the first
    more than that        (a head) small blocks, two or three to a multiprocessor, round after round

Clusters of more than two blocks do not find room everywhere: of four, 30 run at once. Some dozens of cuts of
each matrix were tried in chains of layers of four models, with 16, 32 and 64 tokens; some with 80 to 128, in
steps of three models.

Shapes:  M tokens, N outputs (of the gate half when gated), K inputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from infer.kernels.linear.prepared import NUM_SMS

MAX_TOKENS = 128

_WIDTHS = (16, 32, 48, 64, 96, 128)  # tokens of a block: each of them is compiled once more
_CHUNK = 64  # columns of a stage
_RESIDENT = {1: 132, 2: 132, 3: 126, 4: 120, 8: 120}  # blocks that run at once in clusters of so many
_MOST_SMS = 112  # and enough are left for the kernel behind
_LONG = 128  # chunks of a row
_MIN_CHUNKS = 4  # for each block of a cluster
_MIN_TILES = 16
_MAX_NARROW = (
    64  # tokens; with more, x is as many bytes as 128 rows of W, and larger tiles read it less often
)
_SHARED_BYTES = 227 << 10  # of a multiprocessor, for all its blocks
_RESERVED_BYTES = 1 << 10  # of each block


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

    def num_blocks(self, N: int, *, gated: bool) -> int:
        """Of a launch."""
        return self.num_tiles(N, gated=gated) * self.split

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
    num_tiles = {rows: -(-N // (rows // 2 if gated else rows)) for rows in (64, 128, 192)}

    def split_of(rows: int, most: int) -> int:
        """Into as many as leave no more than `most` blocks."""
        fitting = [
            split
            for split, resident in _RESIDENT.items()
            if num_tiles[rows] * split <= min(most, resident)
            and num_chunks >= split * _MIN_CHUNKS
            and (split != 3 or num_chunks >= _LONG // 2)  # thirds of few chunks are uneven
        ]
        return max(fitting, default=1)

    rows = 128 if num_tiles[128] >= _MIN_TILES else 64
    if width > _MAX_NARROW and not gated and num_tiles[192] >= _MIN_TILES:
        rows = 192
    split, blocks = split_of(rows, _MOST_SMS), 1
    if num_chunks >= _LONG:
        splits = {rows: split_of(rows, NUM_SMS) for rows in (64, 128) if num_tiles[rows] <= NUM_SMS}
        rows = max(splits, key=lambda rows: num_tiles[rows] * splits[rows], default=rows)
        split = splits.get(rows, 1)
    if num_tiles[rows] > NUM_SMS:
        one_round = [rows for rows, tiles in num_tiles.items() if tiles <= NUM_SMS]
        if one_round:
            rows = min(one_round)
        else:
            rows, blocks = (64, 3) if width <= 32 else (128, 2 if width <= 64 else 1)
    stages = -(-num_chunks // split)
    room = _SHARED_BYTES // blocks - _RESERVED_BYTES
    while stages > 1 and WgmmaConfig(width, rows, stages, split, blocks).shared_bytes > room:
        stages -= 1
    return WgmmaConfig(width, rows, stages, split, blocks)
