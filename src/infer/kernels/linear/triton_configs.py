"""Tile sizes of the Triton linears for few tokens: general rules, and measured tables.

The rules aim at one wave of programs that together keep enough bytes in flight: to saturate its memory, a GPU
needs about 26 KB per SM in flight at any time. If a shape was measured, the table of the device profile
(config/profiles) replaces the rule; `python -m benchmarks.kernels.linear_small --sweep --apply` writes it.
Nothing is tuned at run time.

Each number of tokens has its fastest tile, so the order of additions (`block_k`, `split_k` and the matrix
instruction of a `SkinnyConfig`) may differ between buckets of M, and with it a row's last digit;
`deterministic` requires a single order (`invariant_config`). Tiles of 64 rows and more use Hopper's wgmma,
which reads a tile of W from shared memory; narrower tiles, of which a small matrix has more than a GPU has
SMs, use the older mma instruction, through registers.

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

GEMV_MAX_M = 4  # most tokens for plain dot products; tensor cores above
MAX_SMALL_M = 128  # most tokens for our own kernels; cuBLAS above


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
        """The number of partial sums of squares for N outputs, one per tile."""
        return -(-N // self.block_n)

    @property
    def is_wide(self) -> bool:
        """True if this tile uses Hopper's wgmma."""
        return self.block_n >= 64 and self.num_warps % 4 == 0


Key = tuple[int, int, bool, int]  # N, K, gated, bucket of M
T = TypeVar("T")


def bucket(num_tokens: int) -> int:
    """The bucket of M: 1, 2, 4, then powers of two from 16; 8 would use a different matrix instruction."""
    size = next_power_of_two(num_tokens)
    return size if num_tokens <= GEMV_MAX_M else max(size, 16)


@cached_by_profile
def gemv_config(N: int, K: int, gated: bool, block_m: int, gpu: Gpu) -> GemvConfig | None:
    """The measured configuration, or the rule's; None: tensor cores are faster."""
    profile, num_weights = gpu.profile.linear, N * K * (2 if gated else 1)
    is_quick = block_m <= 2 or num_weights <= profile.few_weights
    config = default_gemv_config(N, K, gated, profile) if is_quick else None
    return by_bucket(GemvConfig, profile.gemv).get((N, K, gated, block_m), config)


@cached_by_profile
def skinny_config(
    N: int, K: int, gated: bool, block_m: int, gpu: Gpu, item_bytes: int = 2
) -> SkinnyConfig | None:
    """The measured configuration, or the rule's; None: cuBLAS was faster."""
    profile = gpu.profile.linear
    rule = default_skinny_config(N, K, gated, profile) if block_m <= profile.rule_tokens else None
    config = by_bucket(SkinnyConfig, profile.skinny).get((N, K, gated, block_m), rule)
    if config is None:
        return None
    config = replace(config, block_k=config.block_k * 2 // item_bytes)
    return fit_stages(config, block_m, gated, item_bytes, profile)


@cached_by_profile
def invariant_config(N: int, K: int, block_m: int, gpu: Gpu, item_bytes: int = 2) -> SkinnyConfig:
    """The configuration that adds in the same order for any number of tokens, even if cuBLAS is faster.

    It always uses the instruction of wide tiles, which many tokens use, too.
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
    """The configuration with its number of stages reduced to what fits shared memory."""
    stage_bytes = (config.block_n * (2 if gated else 1) + block_m) * config.block_k * item_bytes
    return replace(config, num_stages=max(1, min(config.num_stages, profile.stage_bytes // stage_bytes)))


def default_gemv_config(N: int, K: int, gated: bool, profile: LinearProfile = H200.linear) -> GemvConfig:
    """The rule of `gemv_kernel`: 16 bytes per thread and row, warps along K; fewer rows if N is small."""
    block_k = min(max(next_power_of_two(K), 256), 1024)
    rows = 4 if 4 * 4 * profile.enough_programs <= N else 2
    if gated:
        rows //= 2  # a program also takes the same rows of `up`
    return GemvConfig(block_n=rows, block_k=block_k, num_warps=block_k // 256)


def default_skinny_config(N: int, K: int, gated: bool, profile: LinearProfile = H200.linear) -> SkinnyConfig:
    """The rule of `skinny_kernel`: tiles of 64 rows, K halved until there are enough programs."""
    num_tiles, split_k = -(-N // 64), 1
    while num_tiles * split_k < profile.enough_programs and K // (2 * split_k) >= 256 and split_k < 8:
        split_k *= 2
    block_k = profile.gated_block_k if gated else profile.block_k
    return SkinnyConfig(64, block_k, split_k, num_warps=4, num_stages=profile.num_stages)


def by_bucket(tile: Callable[..., T], matrices: TileTable) -> dict[Key, T | None]:
    """A table of tiles by matrix (N, K, gated) and bucket of M, from a table with a line per matrix."""
    return {
        (*matrix, block_m): None if sizes is None else tile(*sizes)
        for matrix, tiles in matrices.items()
        for block_m, sizes in tiles.items()
    }
