"""Linears of 2 to 128 tokens through `linear/wgmma.cu`: Hopper's copy engine and matrix unit.

`small.py` allocates what it fills and says what stands before and behind the product, as for its own
kernels; an `Added` of one may be read by the other. It is for bfloat16 on Hopper and matrices of any size: up
to 8 tokens pdl.py holds the weights of small models in registers. Above 64 tokens the library is as
fast where attention reads the result; gates, whose activation it leaves to another kernel, and matrices that
write into the residual stream are still multiplied here.

Shapes:  M tokens, N outputs, K inputs.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from infer.kernels.linear.prepared import (
    ACTIVATIONS,
    Defines,
    Matrix,
    PreparedLinears,
    cubin,
    outer_arguments,
)
from infer.kernels.linear.residual import Around
from infer.kernels.linear.wgmma_configs import MAX_TOKENS, WgmmaConfig, choose_config, token_width
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime import dispatch
from infer.kernels.runtime.tensor_map import Boxes, TensorMap, encoder

SOURCE = Path(__file__).with_name("wgmma.cu")

_ARCH = "sm_90a"  # a: what Hopper has and its successors have not, such as this matrix unit
_MIN_M = 2  # one token needs no tensor cores
_MAX_M = 64
_TYPES = (
    TensorMap,
    TensorMap,
    *(ctypes.c_void_p,) * 6,
    ctypes.c_longlong,
    *(ctypes.c_int,) * 4,
    *(ctypes.c_float,) * 2,
)


def defines_of(
    config: WgmmaConfig,
    dtype: torch.dtype = torch.bfloat16,
    *,
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
        ("BIAS", int(bias)),
        ("ACTIVATION", ACTIVATIONS[activation]),
        ("ADDS", int(adds)),
        ("PARTS", int(parts)),
    )


def launch(
    config: WgmmaConfig, x_MK: torch.Tensor, w: torch.Tensor, y_MN: torch.Tensor, around: Around
) -> None:
    """Fill `y_MN` and what `around.into` is to receive, all of it allocated by `small.py`."""
    (M, K), N, gated = x_MK.shape, y_MN.shape[1], bool(around.activation)
    assert config.width >= M, f"{M} tokens with {config}"
    outer = outer_arguments(x_MK, w, y_MN, around)
    kernel = _kernel(
        config, x_MK.dtype, around.activation, around.bias_N is not None,
        around.into is not None, around.added is not None, x_MK.get_device(), dispatch.PDL,
    )  # fmt: skip
    kernel(
        config.num_blocks(N, gated=gated),
        Boxes(w.data_ptr(), w.dtype, len(w), K, K * 2, config.box_rows(gated=gated)),
        Boxes(x_MK.data_ptr(), x_MK.dtype, M, K, x_MK.stride(0) * 2, config.width),
        *outer.addresses, outer.residual_bytes, M, N, K, outer.num_parts, around.eps, outer.offset,
    )  # fmt: skip


@functools.cache
def _kernel(
    config: WgmmaConfig,
    dtype: torch.dtype,
    activation: str,
    bias: bool,
    adds: bool,
    parts: bool,
    device: int,
    starts_early: bool,
) -> build.PreparedLaunch:
    """Found by numbers that are quick to compare; what was not prepared is compiled on its first call."""
    defines = defines_of(config, dtype, activation=activation, bias=bias, adds=adds, parts=parts)
    return _load(defines, device, starts_early)


@functools.cache
def _load(defines: Defines, device: int, starts_early: bool) -> build.PreparedLaunch:
    encoder()  # without one, nothing of this can be launched
    known = dict(defines)
    config = WgmmaConfig(*(known[name] for name in ("TOKENS", "ROWS", "STAGES", "SPLIT", "BLOCKS")))
    with torch.cuda.device(device):
        kernels = build.LoadedKernels(cubin(SOURCE, _ARCH, defines))
        return kernels.prepare(
            "linear_wgmma", config.num_threads, _TYPES,
            pdl=starts_early, shared_bytes=config.shared_bytes,
        )  # fmt: skip


def _choose(num_tokens: int, matrix: Matrix) -> WgmmaConfig | None:
    return choose_config(num_tokens, matrix.N, matrix.K, gated=bool(matrix.activation))


def _defines(config: WgmmaConfig, matrix: Matrix, width: int, adds: bool, parts: bool) -> Defines:
    return defines_of(config, activation=matrix.activation, bias=matrix.bias, adds=adds, parts=parts)


def _kernels(tokens: range) -> PreparedLinears[WgmmaConfig]:
    return PreparedLinears(
        SOURCE, _ARCH, tokens, token_width, _choose, _defines, lambda *variant: _load(*variant)
    )


WGMMA = _kernels(range(_MIN_M, _MAX_M + 1))  # all matrices of a model
WGMMA_MORE = _kernels(range(_MAX_M + 1, MAX_TOKENS + 1))  # gates and what writes into the stream
