"""The first product of LoRA adapters for few rows, in CUDA C++ (shrink.cu): h = A x, one launch for a matrix.

A cluster of blocks has a tile of 8 rows with one adapter, and 16 ranks. Every warp holds its share of A in
registers before it waits for x, so K decides how many blocks there are: `_TURNS` chunks for each warp. Blocks
of more warps would stand in the way of the next kernel's. The matrix's own kernel adds B h (wgmma.py).

Shapes:  T rows, K columns of x, C columns of h.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from infer.kernels.linear.cuda import Defines, cubin
from infer.kernels.linear.low_rank import LowRankStack, RowSlots
from infer.kernels.linear.pdl import PdlKernel
from infer.kernels.linear.residual import LowRankTerm
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime import dispatch
from infer.kernels.runtime.dispatch import compiles_only

SOURCE = Path(__file__).with_name("shrink.cu")
ARCH = "sm_90a"
WARPS = 4

_CHUNK = 64  # columns
_TURNS = 4  # chunks of a warp
_MAX_TURNS = 8  # more would not fit into registers
_MAX_SPLIT = 8  # blocks of a cluster
_TYPES = (*(ctypes.c_void_p,) * 5, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_int)


def split_of(K: int) -> int | None:
    """The blocks of a cluster, which share the columns of A; None: this kernel is not for it."""
    split = min(_MAX_SPLIT, -(-K // _CHUNK // (WARPS * _TURNS)))
    return split if K % _CHUNK == 0 and _CHUNK * WARPS * split * _MAX_TURNS >= K else None


def defines_of(stack: LowRankStack) -> Defines:
    """The constants that the kernel of a matrix is compiled with."""
    K, split = stack.a.shape[-1], split_of(stack.a.shape[-1])
    assert split is not None, f"rows of {K}"
    is_bfloat16 = int(stack.a.dtype is torch.bfloat16)
    names = ("IS_BFLOAT16", "K", "PARTS", "RANK", "WARPS", "SPLIT")
    return tuple(zip(names, (is_bfloat16, K, len(stack.parts), stack.rank, WARPS, split), strict=True))


def takes(stack: LowRankStack) -> bool:
    """Return True if this kernel can multiply with the A of a matrix, and the matrix's own with B."""
    return (
        stack.a.dtype is torch.bfloat16 and stack.has_few_chunks and split_of(stack.a.shape[-1]) is not None
    )


class Shrink(PdlKernel):
    """The kernels of a model's matrices."""

    source, arch = SOURCE, ARCH

    def __init__(self) -> None:
        self._wanted: dict[Defines, None] = {}

    def want(self, stack: LowRankStack) -> None:
        """Note a matrix of the model."""
        self._wanted[defines_of(stack)] = None

    def defines(self) -> list[Defines]:
        """The constants of all matrices; many share a kernel."""
        return list(self._wanted)

    def load_variant(self, defines: Defines, device: int, with_pdl: bool) -> build.PreparedLaunch:
        """Load one variant, once."""
        return _load(defines, device, with_pdl)


@functools.cache
def _load(defines: Defines, device: int, with_pdl: bool) -> build.PreparedLaunch:
    with torch.cuda.device(device):
        kernels = build.LoadedKernels(cubin(SOURCE, ARCH, defines))
        return kernels.prepare("shrink", 32 * WARPS, _TYPES, pdl=with_pdl)


def shrink(x_TK: torch.Tensor, rows: RowSlots, stack: LowRankStack) -> LowRankTerm:
    """Compute h, and say where a kernel finds all that it needs to add B h."""
    tiles = rows.tiles(stack.num_slots, stack.rank)
    term = LowRankTerm(stack.b, stack.parts, stack.used, tiles.h_TC, tiles.columns, tiles.table)
    if compiles_only():
        return term
    defines = defines_of(stack)
    num_blocks = tiles.num_tiles * len(stack.parts) * stack.rank // 16 * dict(defines)["SPLIT"]
    _load(defines, x_TK.get_device(), dispatch.PDL)(
        num_blocks,
        *(each.data_ptr() for each in (x_TK, stack.a, tiles.table, stack.used, tiles.h_TC)),
        x_TK.stride(0) * 2, tiles.h_TC.stride(0) * 2, tiles.columns,
    )  # fmt: skip
    return term
