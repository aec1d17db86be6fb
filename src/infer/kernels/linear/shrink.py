"""The first product of LoRA adapters for few rows, in CUDA C++ (shrink.cu): h = A x, one launch per matrix.

A cluster of blocks computes 16 ranks of a tile of 8 rows with one adapter. Every warp holds its share of A in
registers before it waits for x, so K decides the number of blocks: `_TURNS` chunks per warp. Blocks of more
warps would leave no room for the next kernel's blocks. The matrix's own kernel adds B h (wgmma.py).

Shapes:  T rows, K columns of x, C columns of h.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from infer.kernels.linear import cuda
from infer.kernels.linear.cuda import OtherKernel, Variant
from infer.kernels.linear.low_rank import LowRankStack, RowSlots
from infer.kernels.linear.residual import LowRankTerm
from infer.kernels.runtime import dispatch
from infer.kernels.runtime.dispatch import compiles_only

SOURCE = Path(__file__).with_name("shrink.cu")
ARCH = "sm_90a"
WARPS = 4

_CHUNK = 64  # columns
_TURNS = 4  # chunks per warp
_MAX_TURNS = 8  # most chunks that fit the registers of a warp
_MAX_SPLIT = 8  # most blocks of a cluster
_TYPES = (*(ctypes.c_void_p,) * 5, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_int)


def split_of(K: int) -> int | None:
    """The number of blocks that split the columns of A, a cluster; None: K is not supported."""
    split = min(_MAX_SPLIT, -(-K // _CHUNK // (WARPS * _TURNS)))
    return split if K % _CHUNK == 0 and _CHUNK * WARPS * split * _MAX_TURNS >= K else None


def variant_of(stack: LowRankStack) -> Variant:
    """The variant for a matrix."""
    K, split = stack.a.shape[-1], split_of(stack.a.shape[-1])
    assert split is not None, f"rows of {K}"
    is_bfloat16 = int(stack.a.dtype is torch.bfloat16)
    names = ("IS_BFLOAT16", "K", "PARTS", "RANK", "WARPS", "SPLIT")
    values = (is_bfloat16, K, len(stack.parts), stack.rank, WARPS, split)
    defines = tuple(zip(names, values, strict=True))
    return Variant(SOURCE, ARCH, defines, "shrink", 32 * WARPS, _TYPES)


def takes(stack: LowRankStack) -> bool:
    """Return True if this kernel supports the A of a matrix, and the matrix's own kernel its B."""
    return (
        stack.a.dtype is torch.bfloat16 and stack.has_few_chunks and split_of(stack.a.shape[-1]) is not None
    )


class Shrink(OtherKernel):
    """The shrink kernels for the matrices of a model."""

    def __init__(self) -> None:
        self._wanted: dict[Variant, None] = {}

    def want(self, stack: LowRankStack) -> None:
        """Register a matrix of the model."""
        self._wanted[variant_of(stack)] = None

    def variants(self) -> list[Variant]:
        """The variants for all matrices; many matrices share one."""
        return list(self._wanted)


def shrink(x_TK: torch.Tensor, rows: RowSlots, stack: LowRankStack) -> LowRankTerm:
    """Compute h, and return everything that a kernel needs to add B h."""
    tiles = rows.tiles(stack.num_slots, stack.rank)
    term = LowRankTerm(stack.b, stack.parts, stack.used, tiles.h_TC, tiles.columns, tiles.table)
    if compiles_only():
        return term
    variant = variant_of(stack)
    num_blocks = tiles.num_tiles * len(stack.parts) * stack.rank // 16 * dict(variant.defines)["SPLIT"]
    cuda.load_variant(variant, x_TK.get_device(), dispatch.PDL)(
        num_blocks,
        *(each.data_ptr() for each in (x_TK, stack.a, tiles.table, stack.used, tiles.h_TC)),
        x_TK.stride(0) * 2, tiles.h_TC.stride(0) * 2, tiles.columns,
    )  # fmt: skip
    return term
