"""How `linear/pdl.cu` cuts a matrix into blocks: what fits, and a rule for what is fast.

A cut decides how much of W is on its way before the kernel ahead has finished. The rule in three sentences:

    rows        16 to a block, or 32, so that N has no more blocks than the GPU has multiprocessors: all of
                them load at once, and each leaves room for a block of the next kernel, which loads already
    warps       so many that each has two chunks of K, both in registers before the wait; 16 at most
    many rows   of a wider model's gate and up are more than fits at once: small blocks of 4 warps, several
                to a multiprocessor, and the next ones load while these compute

In a chain of layers of two models, 1 and 8 tokens, a sweep over some fifty cuts found nothing faster by more
than 2.5 %: clusters of blocks that share K were as good, and nothing was gained by asking L2 for more.

Shapes:  M tokens, N outputs (of the gate half when gated), K inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from infer.kernels.linear.prepared import NUM_SMS

MAX_TOKENS = 64  # that the kernel can be compiled for

_CHUNK = 64  # columns
_DEPTHS = (4, 3, 2, 1)
_MAX_REGISTERS = 212  # as estimated; with more, addresses spill
_REGISTERS_PER_SM = 65536
_SHARED_BYTES = 48 << 10  # that a block may have without asking


@dataclass(frozen=True, slots=True)
class AheadConfig:
    """How a matrix is cut into blocks, and what of its share a warp holds before the kernel ahead is done."""

    rows_tiles: int  # of 16 rows each, per block; of a gated layer as many again
    warps: int
    depth: int = 2  # chunks of 64 columns in registers

    @property
    def rows(self) -> int:
        """Outputs of a block."""
        return 16 * self.rows_tiles

    def num_parts(self, N: int) -> int:
        """Of the sums of squares that it leaves: one for each block."""
        return -(-N // self.rows)

    def num_turns(self, K: int) -> int:
        """How many chunks a warp takes, one after the other."""
        return -(-K // _CHUNK // self.warps)


def token_tiles(num_tokens: int) -> int:
    """1, 2, 4 or 8 tiles of 8 tokens: each of them is compiled once more."""
    tiles = 1
    while 8 * tiles < num_tokens:
        tiles *= 2
    return tiles


@functools.lru_cache(maxsize=1024)
def choose_config(M: int, N: int, K: int, *, gated: bool) -> AheadConfig | None:
    """What the rule says, and with fewer warps where that would not fit; None: this matrix is not for us."""
    for config in _by_preference(N, K):
        if can_launch(config, M, N, K, gated=gated, adds=not gated):
            return config
    return None


def _by_preference(N: int, K: int) -> Iterator[AheadConfig]:
    num_chunks = K // _CHUNK
    rows_tiles, warps = (1 if N <= 16 * NUM_SMS else 2), 16
    if N > 32 * NUM_SMS:
        rows_tiles, warps = 1, 4
    while warps > 4 and warps >= num_chunks:  # two chunks for each, if K has them
        warps //= 2
    while warps >= 1:
        turns = AheadConfig(rows_tiles, warps).num_turns(K)
        depths = [depth for depth in _DEPTHS if depth <= turns]
        depths.sort(key=lambda depth: depth == 1 or turns % depth != 0)  # as many as come out even
        yield from (AheadConfig(rows_tiles, warps, depth=depth) for depth in depths)
        warps //= 2


def registers_of(config: AheadConfig, M: int, K: int, *, gated: bool) -> int:
    """About how many a thread needs: its share of W, of x and of the sums, and some for addresses."""
    tiles, num_token_tiles = config.rows_tiles * (2 if gated else 1), token_tiles(M)
    turns = config.num_turns(K)
    held_x = min(turns, 4 if num_token_tiles == 1 else 2 if num_token_tiles < 8 else 1)
    return 16 * tiles * min(config.depth, turns) + (4 * tiles + 8 * held_x) * num_token_tiles + 40


def can_launch(config: AheadConfig, M: int, N: int, K: int, *, gated: bool, adds: bool = False) -> bool:
    """Whether the kernel can be compiled for that, without spilling registers or shared memory."""
    tiles = config.rows_tiles * (2 if gated else 1)
    tokens = 8 * token_tiles(M)
    registers = registers_of(config, M, K, gated=gated)
    shared = config.warps * tokens * ((16 * tiles + 4) * 4 + 8)
    pairs = config.rows // 2
    return (
        0 < M <= MAX_TOKENS
        and K % _CHUNK == 0
        and N % 8 == 0
        and config.warps <= K // _CHUNK  # else some warps have nothing to do
        and (not adds or (pairs & (pairs - 1) == 0 and pairs <= 32))
        and 32 * config.warps >= tokens
        and registers <= _MAX_REGISTERS
        and registers * 32 * config.warps <= _REGISTERS_PER_SM
        and shared <= _SHARED_BYTES
    )
