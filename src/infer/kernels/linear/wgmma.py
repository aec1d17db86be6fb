"""Linears of 2 to 128 tokens on Hopper, in CUDA C++ (wgmma.cu): TMA and wgmma.

`small.py` allocates what it fills and says what its prologue and epilogue are, as for its own kernels. It is
for bfloat16 and matrices of any size: up to 8 tokens pdl.py holds the weights of small models in registers.
Above 64 tokens cuBLAS is as fast where attention reads the result; gates, whose activation it leaves to
another kernel, and matrices that write into the residual stream are still multiplied here.

How a matrix is cut into blocks: a block keeps as much of W under way as the shared memory of an SM holds,
which is what the memory needs to be busy. How many blocks there are:

    a layer's matrices    rows and the split of K so that about three quarters of the SMs have a block: the
                          next kernel loads its first weights on the others
    long rows             (of `down` in a large model) take their time; all SMs help
    many rows             (of gate and up) so many to a block that one for each SM is enough: a second round
                          for a few of them would take as long as the first
    more than that        (a head) small blocks, two or three to an SM, round after round

Clusters of more than two blocks do not find room everywhere: of four, 30 run at once. Some dozens of cuts of
each matrix were tried in chains of layers of four models, with 16, 32 and 64 tokens; some with 80 to 128, in
steps of three models.

Shapes:  M tokens, N outputs (of the gate half when gated), K inputs.
"""

from __future__ import annotations

import ctypes
import functools
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
from infer.kernels.runtime.tensor_map import Boxes, TensorMap, encoder

MAX_TOKENS = 128

_WIDTHS = (16, 32, 48, 64, 96, 128)  # tokens of a block: each of them is compiled once more
_CHUNK = 64  # columns of a stage
_RESIDENT = {1: 132, 2: 132, 3: 126, 4: 120, 8: 120}  # blocks that run at once in clusters of so many
_MOST_SMS = 112  # and enough are left for the next kernel
_LONG = 128  # chunks of a row
_MIN_CHUNKS = 4  # for each block of a cluster
_MIN_TILES = 16
_MAX_NARROW = 64  # tokens; with more, x has the bytes of 128 rows of W, and larger tiles read it less often
_SHARED_BYTES = 227 << 10  # of an SM, for all its blocks
_RESERVED_BYTES = 1 << 10  # of each block

SOURCE = Path(__file__).with_name("wgmma.cu")
_ARCH = "sm_90a"  # a: what Hopper has and its successors have not, such as wgmma
TOKENS = range(2, 65)  # one token needs no tensor cores
MORE_TOKENS = range(65, MAX_TOKENS + 1)
_TYPES = (
    TensorMap,
    TensorMap,
    *(ctypes.c_void_p,) * 6,
    ctypes.c_longlong,
    *(ctypes.c_int,) * 4,
    *(ctypes.c_float,) * 2,
)


@dataclass(frozen=True, slots=True)
class WgmmaConfig:
    """How a matrix is cut into blocks, for this many tokens."""

    width: int  # tokens, at most
    rows: int  # of W, per block: of a gated layer half of them the gate's
    stages: int
    split: int = 1  # blocks that split K
    blocks: int = 1  # that an SM holds

    def num_tiles(self, N: int, *, gated: bool) -> int:
        """How many tiles the N outputs of a matrix are cut into."""
        return -(-N // self.box_rows(gated=gated))

    def num_parts(self, N: int) -> int:
        """How many partial sums of squares a matrix with N outputs leaves: one for each tile."""
        return self.num_tiles(N, gated=False)

    def box_rows(self, *, gated: bool) -> int:
        """The rows of W that are copied at once: of a gated layer first the gate's, then those of `up`."""
        return self.rows // 2 if gated else self.rows

    def num_blocks(self, N: int, *, gated: bool) -> int:
        """How many blocks a launch has."""
        return self.num_tiles(N, gated=gated) * self.split

    @property
    def num_threads(self) -> int:
        """Four warps for each 64 rows, one that loads, three that add up squares."""
        return 2 * self.rows + 128

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block, with what it takes to begin at a multiple of 1,024."""
        stages = self.stages * (self.rows + self.width) * _CHUNK * 2
        sums = self.width * (self.rows + 4) * 4
        barriers, squares = 16 * self.stages, 3 * 8 * -(-self.width // self.split)
        return max(stages, sums) + barriers + squares + 2 * 1024


def token_width(num_tokens: int) -> int:
    """The tokens of a block that multiplies this many."""
    return next(width for width in _WIDTHS if num_tokens <= width)


@functools.lru_cache(maxsize=1024)
def choose_config(M: int, N: int, K: int, *, gated: bool) -> WgmmaConfig | None:
    """The cut that the rule gives for a matrix; None: this kernel is not for it."""
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


def defines_of(
    config: WgmmaConfig,
    dtype: torch.dtype = torch.bfloat16,
    activation: str = "",
    bias: bool = False,
    adds: bool = False,
    parts: bool = False,
) -> Defines:
    """The constants a kernel is compiled with."""
    return (
        ("IS_BFLOAT16", int(dtype is torch.bfloat16)),
        ("TOKENS", config.width),
        ("ROWS", config.rows),
        ("STAGES", config.stages),
        ("SPLIT", config.split),
        ("BLOCKS", config.blocks),
        *outer_defines(activation, bias, adds, parts),
    )


def launch(
    config: WgmmaConfig, x_MK: torch.Tensor, w: torch.Tensor, y_MN: torch.Tensor, epilogue: Epilogue
) -> None:
    """Fill `y_MN` and what `epilogue.add` is to receive, all of it allocated by `small.py`."""
    (M, K), N, gated = x_MK.shape, y_MN.shape[1], bool(epilogue.activation)
    assert config.width >= M, f"{M} tokens with {config}"
    outer = outer_arguments(x_MK, w, y_MN, epilogue)
    kernel = _kernel(
        x_MK.get_device(), dispatch.PDL, config, x_MK.dtype, epilogue.activation,
        epilogue.bias_N is not None, epilogue.add is not None, epilogue.prologue is not None,
    )  # fmt: skip
    kernel(
        config.num_blocks(N, gated=gated),
        Boxes(w.data_ptr(), w.dtype, len(w), K, K * 2, config.box_rows(gated=gated)),
        Boxes(x_MK.data_ptr(), x_MK.dtype, M, K, x_MK.stride(0) * 2, config.width),
        *outer.addresses, outer.residual_bytes, M, N, K, outer.num_parts, epilogue.eps, outer.offset,
    )  # fmt: skip


@functools.cache
def _kernel(device: int, with_pdl: bool, *variant: Any) -> build.PreparedLaunch:
    """Found by numbers that are quick to compare; what was not prepared is compiled on its first call."""
    return _load(defines_of(*variant), device, with_pdl)


@functools.cache
def _load(defines: Defines, device: int, with_pdl: bool) -> build.PreparedLaunch:
    encoder()  # without one, nothing of this can be launched
    known = dict(defines)
    config = WgmmaConfig(*(known[name] for name in ("TOKENS", "ROWS", "STAGES", "SPLIT", "BLOCKS")))
    with torch.cuda.device(device):
        kernels = build.LoadedKernels(cubin(SOURCE, _ARCH, defines))
        return kernels.prepare(
            "linear_wgmma", config.num_threads, _TYPES,
            pdl=with_pdl, shared_bytes=config.shared_bytes,
        )  # fmt: skip


def _choose(num_tokens: int, matrix: Matrix) -> WgmmaConfig | None:
    return choose_config(num_tokens, matrix.N, matrix.K, gated=bool(matrix.activation))


def _defines(config: WgmmaConfig, matrix: Matrix, width: int, adds: bool, parts: bool) -> Defines:
    return defines_of(config, activation=matrix.activation, bias=matrix.bias, adds=adds, parts=parts)


def make_kernel(tokens: range) -> CudaLinear[WgmmaConfig]:
    """The kernel for these numbers of tokens, compiled for no matrix yet."""
    return CudaLinear(SOURCE, _ARCH, tokens, token_width, _choose, _defines, lambda *variant: _load(*variant))
