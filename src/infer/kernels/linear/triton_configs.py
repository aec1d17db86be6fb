"""The cuts of the linears of few tokens into programs: rules that hold anywhere, and measured cuts.

The rules aim at one wave of programs that together keep enough bytes in flight: a GPU needs about 26 KB per
SM under way all the time to use its memory fully. Where a shape was measured, the table of the device profile
(config/profiles) replaces the rule; `python -m benchmarks.kernels.linear_small --sweep --apply` writes it.
Nothing is tuned while the program runs.

Each number of tokens has the tile that is fastest for it, so what decides the order of additions
(`block_k`, `split_k` and the matrix instruction of a `SkinnyConfig`) may differ between buckets of M, and a
row's last digit with it; `deterministic` asks for one order (`invariant_config`). Tiles of 64
rows and more take Hopper's own instruction, which reads a tile of W from shared memory; narrower ones, of
which a small matrix has more than a GPU has SMs, take the older one, through registers.

Shapes:  M tokens, N outputs (of the gate half when gated), K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from infer.config.profiles.find import Gpu
from infer.config.profiles.hopper_h200 import H200
from infer.config.profiles.profile import LinearProfile, TileTable
from infer.kernels.runtime.dispatch import next_power_of_two
from infer.kernels.runtime.profiles import cached_by_profile

GEMV_MAX_M = 4  # up to here there are plain dot products; tensor cores above
MAX_SMALL_M = 128  # up to here there are kernels of ours; cuBLAS above


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """The tile of one program of `gemv_kernel`."""

    block_n: int
    block_k: int
    num_warps: int
    unroll: int = 1


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """The tile of one program of `skinny_kernel`, and the number of programs that split K."""

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int

    def num_parts(self, N: int) -> int:
        """The number of partial sums of squares that a matrix with N outputs leaves: one for each tile."""
        return -(-N // self.block_n)

    @property
    def is_wide(self) -> bool:
        """True if Hopper's own matrix instruction takes this tile."""
        return self.block_n >= 64 and self.num_warps % 4 == 0


Key = tuple[int, int, bool, int]  # N, K, gated, bucket of M
T = TypeVar("T")


def bucket(num_tokens: int) -> int:
    """1, 2, 4, then the next power of two from 16 on: with 8, Triton takes another matrix instruction."""
    size = next_power_of_two(num_tokens)
    return size if num_tokens <= GEMV_MAX_M else max(size, 16)


@cached_by_profile
def gemv_config(N: int, K: int, gated: bool, block_m: int, gpu: Gpu) -> GemvConfig | None:
    """The measured configuration, or the rule's; None where tensor cores are faster."""
    profile, num_weights = gpu.profile.linear, N * K * (2 if gated else 1)
    is_quick = block_m <= 2 or num_weights <= profile.few_weights
    config = default_gemv_config(N, K, gated, profile) if is_quick else None
    return by_bucket(GemvConfig, profile.gemv).get((N, K, gated, block_m), config)


@cached_by_profile
def skinny_config(
    N: int, K: int, gated: bool, block_m: int, gpu: Gpu, item_bytes: int = 2
) -> SkinnyConfig | None:
    """The measured configuration, or the rule's; None where cuBLAS was faster."""
    profile = gpu.profile.linear
    rule = default_skinny_config(N, K, gated, profile) if block_m <= profile.rule_tokens else None
    config = by_bucket(SkinnyConfig, profile.skinny).get((N, K, gated, block_m), rule)
    if config is None:
        return None
    config = replace(config, block_k=config.block_k * 2 // item_bytes)
    return fit_stages(config, block_m, gated, item_bytes, profile)


@cached_by_profile
def invariant_config(N: int, K: int, block_m: int, gpu: Gpu, item_bytes: int = 2) -> SkinnyConfig:
    """The cut that adds in the same order for every number of tokens, even where cuBLAS would be faster.

    It always uses the instruction of wide tiles, which is the one for many tokens.
    """
    profile = gpu.profile.linear
    for size in (16, 32, 64, MAX_SMALL_M):
        if config := skinny_config(N, K, False, size, gpu, item_bytes):
            if not config.is_wide:
                config = replace(config, block_n=64, num_warps=4)
            return fit_stages(config, block_m, False, item_bytes, profile)
    config = default_skinny_config(N, K, False, profile)
    config = replace(config, block_k=config.block_k * 2 // item_bytes)
    return fit_stages(config, block_m, False, item_bytes, profile)


def fit_stages(
    config: SkinnyConfig, block_m: int, gated: bool, item_bytes: int = 2, profile: LinearProfile = H200.linear
) -> SkinnyConfig:
    """The cut with as many stages as fit the shared memory, at most those asked for."""
    stage_bytes = (config.block_n * (2 if gated else 1) + block_m) * config.block_k * item_bytes
    return replace(config, num_stages=max(1, min(config.num_stages, profile.stage_bytes // stage_bytes)))


def default_gemv_config(N: int, K: int, gated: bool, profile: LinearProfile = H200.linear) -> GemvConfig:
    """16 bytes per thread and row, all warps side by side along K; fewer rows where N is small."""
    block_k = min(max(next_power_of_two(K), 256), 1024)
    rows = 4 if 4 * 4 * profile.enough_programs <= N else 2
    if gated:
        rows //= 2  # a program takes as many rows of `up` again
    return GemvConfig(block_n=rows, block_k=block_k, num_warps=block_k // 256)


def default_skinny_config(N: int, K: int, gated: bool, profile: LinearProfile = H200.linear) -> SkinnyConfig:
    """Tiles of 64 rows; K is halved until there are enough programs or a piece has 256 columns."""
    num_tiles, split_k = -(-N // 64), 1
    while num_tiles * split_k < profile.enough_programs and K // (2 * split_k) >= 256 and split_k < 8:
        split_k *= 2
    block_k = profile.gated_block_k if gated else profile.block_k
    return SkinnyConfig(64, block_k, split_k, num_warps=4, num_stages=profile.num_stages)


def by_bucket(tile: Callable[..., T], matrices: TileTable) -> dict[Key, T | None]:
    """A table of tiles by matrix (N, K, gated) and bucket of M, from one that has a line for each matrix."""
    return {
        (*matrix, block_m): None if sizes is None else tile(*sizes)
        for matrix, tiles in matrices.items()
        for block_m, sizes in tiles.items()
    }
