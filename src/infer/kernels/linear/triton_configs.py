"""How the linears of few tokens are cut into programs: rules that hold anywhere, and what was measured.

The rules aim at one wave of programs that together keep enough bytes in flight: a GPU needs about 26 KB per
SM under way all the time to use its memory fully. Where a shape was measured on Hopper, the table
at the end replaces the rule; `python -m benchmarks.kernels.linear_small --sweep --apply` writes it.
Nothing is tuned while the program runs.

Each number of tokens has the tile that is fastest for it, so what decides the order of additions (`order`:
`block_k`, `split_k` and the matrix instruction of a `SkinnyConfig`) may differ between buckets of M, and a
row's last digit with it; `deterministic` asks for one order (`invariant_config`). Tiles of 64
rows and more take Hopper's own instruction, which reads a tile of W from shared memory; narrower ones, of
which a small matrix has more than a GPU has SMs, take the older one, through registers.

Shapes:  M tokens, N outputs (of the gate half when gated), K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import torch

from infer.kernels.runtime.dispatch import is_gpu, is_hopper, next_power_of_two

GEMV_MAX_M = 4  # up to here plain dot products may be faster; tensor cores above
MAX_SMALL_M = 128  # up to here our kernels may be faster; cuBLAS above
_RULE_MAX_M = 64  # up to here they are for shapes that were not measured
_FEW_WEIGHTS = 1 << 22  # of a matrix that three or four tokens are quick to pass over without tensor cores
_ENOUGH_PROGRAMS = 264  # two for each SM of an H200
_STAGE_BYTES = 200 << 10  # of the 227 KB of shared memory a Hopper block may have


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """The tile of one program of `gemv_kernel`."""

    block_n: int
    block_k: int
    num_warps: int
    unroll: int = 1


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """The tile of one program of `skinny_kernel`, and among how many programs K is split."""

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int

    @property
    def order(self) -> tuple[int, int, bool]:
        """What decides in which order, and by which instruction, products are added."""
        return self.block_k, self.split_k, self.is_wide

    def num_parts(self, N: int) -> int:
        """How many partial sums of squares a matrix with N outputs leaves: one for each tile."""
        return -(-N // self.block_n)

    @property
    def is_wide(self) -> bool:
        """Whether Hopper's own matrix instruction takes this tile."""
        return self.block_n >= 64 and self.num_warps % 4 == 0


Key = tuple[int, int, bool, int]  # N, K, gated, bucket of M
T = TypeVar("T")


def bucket(num_tokens: int) -> int:
    """1, 2, 4, then the next power of two from 16 on: with 8, Triton takes another matrix instruction."""
    size = next_power_of_two(num_tokens)
    return size if num_tokens <= GEMV_MAX_M else max(size, 16)


@lru_cache(maxsize=1024)
def gemv_config(N: int, K: int, gated: bool, block_m: int, device: torch.device) -> GemvConfig | None:
    """The measured configuration, or the rule's; None where tensor cores are faster."""
    num_weights = N * K * (2 if gated else 1)
    config = default_gemv_config(N, K, gated) if block_m <= 2 or num_weights <= _FEW_WEIGHTS else None
    return HOPPER_GEMV.get((N, K, gated, block_m), config) if _is_hopper(device) else config


@lru_cache(maxsize=1024)
def skinny_config(
    N: int, K: int, gated: bool, block_m: int, device: torch.device, item_bytes: int = 2
) -> SkinnyConfig | None:
    """The measured configuration, or the rule's; None where cuBLAS was faster."""
    config = default_skinny_config(N, K, gated)
    if _is_hopper(device):
        measured = HOPPER_SKINNY.get((N, K, gated, block_m), config if block_m <= _RULE_MAX_M else None)
        if measured is None:
            return None
        config = measured
    elif is_gpu(device):
        config = replace(config, block_k=64, num_stages=3)  # fits the 99 KB of smaller GPUs
    return fit_stages(replace(config, block_k=config.block_k * 2 // item_bytes), block_m, gated, item_bytes)


@lru_cache(maxsize=1024)
def invariant_config(N: int, K: int, block_m: int, device: torch.device, item_bytes: int = 2) -> SkinnyConfig:
    """What adds in the same order for every number of tokens, also where cuBLAS would be faster.

    Always by the instruction of wide tiles, which is the one for many tokens.
    """
    for size in (16, 32, 64, MAX_SMALL_M):
        if config := skinny_config(N, K, False, size, device, item_bytes):
            if not config.is_wide:
                config = replace(config, block_n=64, num_warps=4)
            return fit_stages(config, block_m, False, item_bytes)
    config = default_skinny_config(N, K, gated=False)
    config = replace(config, block_k=config.block_k * 2 // item_bytes)
    return fit_stages(config, block_m, False, item_bytes)


def fit_stages(config: SkinnyConfig, block_m: int, gated: bool, item_bytes: int = 2) -> SkinnyConfig:
    """As many stages as fit the shared memory, at most those asked for."""
    stage_bytes = (config.block_n * (2 if gated else 1) + block_m) * config.block_k * item_bytes
    return replace(config, num_stages=max(1, min(config.num_stages, _STAGE_BYTES // stage_bytes)))


def default_gemv_config(N: int, K: int, gated: bool) -> GemvConfig:
    """16 bytes per thread and row, all warps side by side along K; fewer rows where N is small."""
    block_k = min(max(next_power_of_two(K), 256), 1024)
    rows = 4 if N >= 4 * 4 * _ENOUGH_PROGRAMS else 2
    if gated:
        rows //= 2  # a program takes as many rows of `up` again
    return GemvConfig(block_n=rows, block_k=block_k, num_warps=block_k // 256)


def default_skinny_config(N: int, K: int, gated: bool) -> SkinnyConfig:
    """Tiles of 64 rows; K is halved until there are enough programs or a piece has 256 columns."""
    num_tiles, split_k = -(-N // 64), 1
    while num_tiles * split_k < _ENOUGH_PROGRAMS and K // (2 * split_k) >= 256 and split_k < 8:
        split_k *= 2
    return SkinnyConfig(block_n=64, block_k=64 if gated else 128, split_k=split_k, num_warps=4, num_stages=4)


@lru_cache(maxsize=16)
def _is_hopper(device: torch.device) -> bool:
    return is_hopper(device)


def by_bucket(
    tile: Callable[..., T], matrices: Mapping[tuple[int, int, bool], Mapping[int, tuple[int, ...] | None]]
) -> dict[Key, T | None]:
    """A table of tiles by matrix (N, K, gated) and bucket of M, from one that has a line for each matrix."""
    return {
        (*matrix, block_m): None if sizes is None else tile(*sizes)
        for matrix, tiles in matrices.items()
        for block_m, sizes in tiles.items()
    }


# Measured on Hopper; rewritten by `python -m benchmarks.kernels.linear_small --sweep --apply`.
# table: begin
# fmt: off
HOPPER_GEMV: dict[Key, GemvConfig | None] = by_bucket(GemvConfig, {
    (1024, 2048, False): {1: (1,1024,4,1), 2: None, 4: (4,1024,4,1)},
    (1024, 3072, False): {1: (1,1024,4,1), 2: (1,1024,4,1), 4: None},
    (2048, 2048, False): {1: (2,1024,4,2), 2: (4,1024,4,1), 4: None},
    (2048, 8192, False): {1: (2,1024,4,2), 2: None, 4: None},
    (3072, 1024, True): {1: (4,512,2,1), 2: None, 4: None},
    (3072, 2048, False): {1: (4,512,2,1), 2: (4,512,2,1), 4: None},
    (4096, 1024, False): {1: (4,512,2,1), 2: (4,512,2,1), 4: None},
    (4096, 4096, False): {1: (1,1024,4,1), 2: (4,1024,4,1), 4: None},
    (4096, 12288, False): {1: (1,1024,4,1), 2: (4,1024,4,1), 4: None},
    (6144, 4096, False): {1: (8,512,2,1), 2: (4,512,2,1), 4: (8,512,2,1)},
    (8192, 2048, True): {1: (4,512,2,1), 2: None, 4: None},
    (12288, 4096, True): {1: (4,1024,4,1), 2: (2,1024,4,1), 4: None},
    (128256, 2048, False): {1: (8,512,2,1), 2: (4,512,2,1), 4: None},
    (151936, 1024, False): {1: (8,512,2,1), 2: (8,512,2,1), 4: None},
    (151936, 4096, False): {1: (8,512,2,1), 2: (4,512,2,1), 4: None},
})
HOPPER_SKINNY: dict[Key, SkinnyConfig | None] = by_bucket(SkinnyConfig, {
    (1024, 2048, False): {16: (64,256,4,4,3), 32: (16,256,1,2,4), 64: (16,256,1,4,4), 128: None},
    (1024, 3072, False): {16: (64,256,4,4,3), 32: (64,256,4,4,3), 64: (64,128,4,4,4), 128: None},
    (2048, 2048, False): {16: (64,256,4,4,3), 32: (64,256,4,4,3), 64: None, 128: None},
    (2048, 8192, False): {16: (64,256,4,4,3), 32: (64,256,4,4,3), 64: (64,256,4,4,3), 128: None},
    (3072, 1024, True): {16: (64,128,1,4,4), 32: (64,128,1,4,4), 64: (64,128,1,4,4), 128: None},
    (3072, 2048, False): {16: (64,256,2,4,3), 32: (64,256,2,4,3), 64: (64,128,2,4,4), 128: None},
    (4096, 1024, False): {16: (64,256,1,4,3), 32: (64,256,1,4,3), 64: (64,256,1,4,3), 128: None},
    (4096, 4096, False): {16: (64,256,2,4,3), 32: (64,256,2,4,3), 64: None, 128: None},
    (4096, 12288, False): {16: (64,256,2,4,3), 32: (64,256,2,4,3), 64: (64,256,2,4,3), 128: None},
    (6144, 4096, False): {16: (64,256,1,4,3), 32: (64,256,1,4,3), 64: None, 128: None},
    (8192, 2048, True): {16: (64,128,1,4,4), 32: (64,128,1,4,4), 64: (64,64,1,4,6), 128: (64,128,1,4,4)},
    (12288, 4096, True): {16: (64,128,1,4,4), 32: (64,128,1,4,4), 64: (64,128,1,4,4), 128: None},
    (128256, 2048, False): {16: (64,64,1,4,6), 32: (128,64,1,4,4), 64: (128,64,1,4,4), 128: None},
    (151936, 1024, False): {16: (64,128,1,4,4), 32: (64,128,1,4,4), 64: (128,128,1,8,4), 128: None},
    (151936, 4096, False): {16: (64,128,1,4,4), 32: (64,128,1,4,4), 64: (128,128,1,8,4), 128: None},
})
# fmt: on
# table: end
