"""Linears of few tokens through `linear/pdl.cu`, which holds its weights before the one ahead has finished.

`small.py` allocates what it fills and says what stands before and behind the product, as for its own
kernels; an `Added` of one may be read by the other, for what it holds does not depend on who made it.

It is for bfloat16 on Hopper, up to `AHEAD_MAX_M` tokens, and models whose residual stream is narrow: with
wider ones the time is that of reading, which all kernels do alike, and with more tokens x is read more
cheaply through shared memory (linear/wgmma.py).

Shapes:  M tokens, N outputs, F outputs of a gated layer (W has 2F rows), K inputs, P parts.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from infer.kernels.linear.pdl_configs import AheadConfig, choose_config, token_tiles
from infer.kernels.linear.prepared import (
    ACTIVATIONS,
    Defines,
    Matrix,
    PreparedLinears,
    cubin,
    outer_arguments,
)
from infer.kernels.linear.residual import Around
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime import dispatch

AHEAD_MAX_M = 8
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


def defines_of(
    config: AheadConfig,
    dtype: torch.dtype = torch.bfloat16,
    *,
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
        ("BIAS", int(bias)),
        ("ACTIVATION", ACTIVATIONS[activation]),
        ("ADDS", int(adds)),
        ("PARTS", int(parts)),
    )


def launch(
    config: AheadConfig, x_MK: torch.Tensor, w: torch.Tensor, y_MN: torch.Tensor, around: Around
) -> None:
    """Fill `y_MN` and what `around.into` is to receive, all of it allocated by `small.py`."""
    (M, K), N = x_MK.shape, y_MN.shape[1]
    outer = outer_arguments(x_MK, w, y_MN, around)
    kernel = _kernel(
        config, x_MK.dtype, token_tiles(M), N, K, around.activation, around.bias_N is not None,
        around.into is not None, around.added is not None, x_MK.get_device(), dispatch.PDL,
    )  # fmt: skip
    kernel(
        config.num_parts(N),
        x_MK.data_ptr(), w.data_ptr(), *outer.addresses,
        x_MK.stride(0) * 2, outer.residual_bytes, M, outer.num_parts, around.eps, outer.offset,
    )  # fmt: skip


@functools.cache
def _kernel(
    config: AheadConfig,
    dtype: torch.dtype,
    tiles: int,
    N: int,
    K: int,
    activation: str,
    bias: bool,
    adds: bool,
    parts: bool,
    device: int,
    starts_early: bool,
) -> build.PreparedLaunch:
    """Found by numbers that are quick to compare; what was not prepared is compiled on its first call."""
    defines = defines_of(
        config, dtype, tiles=tiles, N=N, K=K, activation=activation, bias=bias, adds=adds, parts=parts
    )
    return _load(defines, device, starts_early)


@functools.cache
def _load(defines: Defines, device: int, starts_early: bool) -> build.PreparedLaunch:
    with torch.cuda.device(device):
        kernels = build.LoadedKernels(cubin(SOURCE, _ARCH, defines))
        num_threads = 32 * dict(defines)["WARPS"]
        return kernels.prepare("linear_ahead", num_threads, _TYPES, pdl=starts_early)


def _choose(num_tokens: int, matrix: Matrix) -> AheadConfig | None:
    N, K, activation, *_ = matrix
    num_rows = N * (2 if activation else 1)
    is_small = min(N, K) <= _MAX_STREAM and num_rows * K * 2 <= _MAX_BYTES
    return choose_config(num_tokens, N, K, gated=bool(activation)) if is_small else None


def _defines(config: AheadConfig, matrix: Matrix, tiles: int, adds: bool, parts: bool) -> Defines:
    N, K, activation, bias, *_ = matrix
    return defines_of(config, tiles=tiles, N=N, K=K, activation=activation, bias=bias, adds=adds, parts=parts)


AHEAD = PreparedLinears(
    SOURCE, _ARCH, range(1, AHEAD_MAX_M + 1), token_tiles, _choose, _defines,
    lambda *variant: _load(*variant),
)  # fmt: skip
