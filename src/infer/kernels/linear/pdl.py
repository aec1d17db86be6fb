"""Linears of up to 8 tokens of small models, in CUDA C++ (pdl.cu), for programmatic dependent launch (PDL).

A kernel that is launched so starts while the one before it still runs, and holds its weights in registers
before it waits for its input. `small.py` allocates what it fills and says what its prologue and epilogue are,
as for its own kernels.

It is for bfloat16 on Hopper, up to `PDL_MAX_M` tokens, and models whose residual stream is narrow: with
wider ones the time is that of reading, which all kernels do alike, and with more tokens x is read more
cheaply through shared memory (wgmma.py).

How a matrix is cut into blocks decides how much of W is on its way before the wait. The rule:

    rows        16 to a block, or 32, so that N has no more blocks than the GPU has SMs: all of them load at
                once, and each leaves room for a block of the next kernel, which loads already
    warps       so many that each has two chunks of K, both in registers before the wait; 16 at most
    many rows   of a wider model's gate and up are more than fits at once: small blocks of 4 warps, several
                to an SM, and the next ones load while these compute

In a chain of layers of two models, 1 and 8 tokens, a sweep over some fifty cuts found nothing faster by more
than 2.5 %: clusters of blocks that share K were as good, and nothing was gained by asking L2 for more.

Shapes:  M tokens, N outputs (of the gate half when gated), F outputs of a gated layer (W has 2F rows),
K inputs, P parts.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infer.kernels.linear.cuda import (
    NUM_SMS,
    CudaLinear,
    Defines,
    Matrix,
    cubin,
    outer_arguments,
    outer_defines,
)
from infer.kernels.linear.residual import Epilogue
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime import dispatch
from infer.kernels.runtime.launch_mode import compiles_only

PDL_MAX_M = 8
MAX_TOKENS = 64  # that the kernel can be compiled for

_CHUNK = 64  # columns
_DEPTHS = (4, 3, 2, 1)
_MAX_REGISTERS = 212  # as estimated; with more, addresses spill
_REGISTERS_PER_SM = 65536
_SHARED_BYTES = 48 << 10  # that a block may have without asking

SOURCE = Path(__file__).with_name("pdl.cu")
_ARCH = "sm_90"
_MAX_STREAM = 2048  # one side of every matrix of a layer is the residual stream's width
_MAX_BYTES = 128 << 20  # of a matrix
_TYPES = (
    *(ctypes.c_void_p,) * 8,
    ctypes.c_longlong,
    ctypes.c_longlong,
    *(ctypes.c_int,) * 2,
    *(ctypes.c_float,) * 2,
)


@dataclass(frozen=True, slots=True)
class PdlConfig:
    """How a matrix is cut into blocks, and what of its share a warp holds before its wait."""

    rows_tiles: int  # of 16 rows each, per block; of a gated layer as many again
    warps: int
    depth: int = 2  # chunks of 64 columns in registers

    @property
    def rows(self) -> int:
        """Outputs of a block."""
        return 16 * self.rows_tiles

    def num_parts(self, N: int) -> int:
        """How many partial sums of squares a matrix with N outputs leaves: one for each block."""
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
def choose_config(M: int, N: int, K: int, *, gated: bool) -> PdlConfig | None:
    """What the rule says, and with fewer warps where that would not fit; None: this matrix is not for us."""
    for config in _by_preference(N, K):
        if can_launch(config, M, N, K, gated=gated, adds=not gated):
            return config
    return None


def _by_preference(N: int, K: int) -> Iterator[PdlConfig]:
    num_chunks = K // _CHUNK
    rows_tiles, warps = (1 if N <= 16 * NUM_SMS else 2), 16
    if N > 32 * NUM_SMS:
        rows_tiles, warps = 1, 4
    while warps > 4 and warps >= num_chunks:  # two chunks for each, if K has them
        warps //= 2
    while warps >= 1:
        turns = PdlConfig(rows_tiles, warps).num_turns(K)
        depths = [depth for depth in _DEPTHS if depth <= turns]
        depths.sort(key=lambda depth: depth == 1 or turns % depth != 0)  # as many as come out even
        yield from (PdlConfig(rows_tiles, warps, depth=depth) for depth in depths)
        warps //= 2


def registers_of(config: PdlConfig, M: int, K: int, *, gated: bool) -> int:
    """About how many a thread needs: its share of W, of x and of the sums, and some for addresses."""
    tiles, num_token_tiles = config.rows_tiles * (2 if gated else 1), token_tiles(M)
    turns = config.num_turns(K)
    held_x = min(turns, 4 if num_token_tiles == 1 else 2 if num_token_tiles < 8 else 1)
    return 16 * tiles * min(config.depth, turns) + (4 * tiles + 8 * held_x) * num_token_tiles + 40


def can_launch(config: PdlConfig, M: int, N: int, K: int, *, gated: bool, adds: bool = False) -> bool:
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


def defines_of(
    config: PdlConfig,
    dtype: torch.dtype,
    tiles: int,
    N: int,
    K: int,
    activation: str = "",
    bias: bool = False,
    adds: bool = False,
    parts: bool = False,
) -> Defines:
    """The constants one matrix's kernel is compiled with."""
    assert dtype in (torch.bfloat16, torch.float16), f"{dtype} has no matrix instruction here"
    assert K % 64 == 0 and N % 8 == 0, f"{N} rows of {K} are not whole chunks"
    return (
        ("IS_BFLOAT16", int(dtype is torch.bfloat16)),
        ("N", N),
        ("K", K),
        ("MT", tiles),
        ("RT", config.rows_tiles),
        ("WARPS", config.warps),
        ("DEPTH", config.depth),
        *outer_defines(activation, bias, adds, parts),
    )


def launch(
    config: PdlConfig, x_MK: torch.Tensor, w: torch.Tensor, y_MN: torch.Tensor, epilogue: Epilogue
) -> None:
    """Fill `y_MN` and what `epilogue.add` is to receive, all of it allocated by `small.py`."""
    (M, K), N = x_MK.shape, y_MN.shape[1]
    outer = outer_arguments(x_MK, w, y_MN, epilogue)
    if compiles_only():  # compilers are at work on it already
        return
    kernel = _kernel(
        x_MK.get_device(), dispatch.PDL, config, x_MK.dtype, token_tiles(M), N, K, epilogue.activation,
        epilogue.bias_N is not None, epilogue.add is not None, epilogue.prologue is not None,
    )  # fmt: skip
    kernel(
        config.num_parts(N),
        x_MK.data_ptr(), w.data_ptr(), *outer.addresses,
        x_MK.stride(0) * 2, outer.residual_bytes, M, outer.num_parts, epilogue.eps, outer.offset,
    )  # fmt: skip


@functools.cache
def _kernel(device: int, with_pdl: bool, *variant: Any) -> build.PreparedLaunch:
    """Found by numbers that are quick to compare; what was not prepared is compiled on its first call."""
    return _load(defines_of(*variant), device, with_pdl)


@functools.cache
def _load(defines: Defines, device: int, with_pdl: bool) -> build.PreparedLaunch:
    with torch.cuda.device(device):
        kernels = build.LoadedKernels(cubin(SOURCE, _ARCH, defines))
        num_threads = 32 * dict(defines)["WARPS"]
        return kernels.prepare("linear_pdl", num_threads, _TYPES, pdl=with_pdl)


def _choose(num_tokens: int, matrix: Matrix) -> PdlConfig | None:
    N, K, activation, *_ = matrix
    num_rows = N * (2 if activation else 1)
    is_small = min(N, K) <= _MAX_STREAM and num_rows * K * 2 <= _MAX_BYTES
    return choose_config(num_tokens, N, K, gated=bool(activation)) if is_small else None


def _defines(config: PdlConfig, matrix: Matrix, tiles: int, adds: bool, parts: bool) -> Defines:
    N, K, activation, bias, *_ = matrix
    return defines_of(config, torch.bfloat16, tiles, N, K, activation, bias, adds, parts)


def make_kernel() -> CudaLinear[PdlConfig]:
    """The kernel, compiled for no matrix yet."""
    return CudaLinear(
        SOURCE, _ARCH, range(1, PDL_MAX_M + 1), token_tiles, _choose, _defines,
        lambda *variant: _load(*variant),
    )  # fmt: skip
