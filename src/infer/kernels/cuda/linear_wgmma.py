"""Linears of 9 to 256 tokens through `linear_wgmma.cu`: Hopper's copy engine and matrix unit."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from infer.kernels import dispatch
from infer.kernels.cuda import build
from infer.kernels.cuda.tensor_map import Boxes, TensorMap
from infer.kernels.cuda.wgmma_configs import WgmmaConfig
from infer.kernels.linear_stream import Added, Stream

SOURCE = Path(__file__).with_name("linear_wgmma.cu")

Defines = tuple[tuple[str, int], ...]

_ACTIVATIONS = {"": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
_TYPES = (
    TensorMap, TensorMap,
    *(ctypes.c_void_p,) * 6,
    ctypes.c_longlong,
    *(ctypes.c_int,) * 4,
    *(ctypes.c_float,) * 2,
)  # fmt: skip


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
        ("ACTIVATION", _ACTIVATIONS[activation]),
        ("ADDS", int(adds)),
        ("PARTS", int(parts)),
    )


def launch(
    config: WgmmaConfig,
    x_MK: torch.Tensor,
    w: torch.Tensor,
    y_MN: torch.Tensor,
    *,
    bias_N: torch.Tensor | None = None,
    activation: str = "",
    into: tuple[Stream, Added] | None = None,
    added: Added | None = None,
    eps: float = 0.0,
) -> None:
    """Fill `y_MN` and what `into` is to receive, all of it allocated by `linear_small.py`."""
    (M, K), N = x_MK.shape, y_MN.shape[1]
    assert w.shape[1] == K and w.is_contiguous(), f"{w.shape} with strides {w.stride()}"
    kernel = _kernel(
        config, x_MK.dtype, activation, bias_N is not None, into is not None,
        added is not None, x_MK.get_device(), dispatch.PDL,
    )  # fmt: skip
    residual, gain, total, offset = x_MK, w, y_MN, 0.0
    squares = y_MN if added is None else added.squares_PM
    if into is not None:
        (residual, gain, offset), (total, _, squares) = into
    gated = bool(activation)
    kernel(
        config.num_tiles(N, gated=gated) * config.split,
        Boxes(w.data_ptr(), w.dtype, len(w), K, K * 2, config.box_rows(gated=gated)),
        Boxes(x_MK.data_ptr(), x_MK.dtype, M, K, x_MK.stride(0) * 2, config.width),
        0 if bias_N is None else bias_N.data_ptr(), y_MN.data_ptr(),
        residual.data_ptr(), gain.data_ptr(), total.data_ptr(), squares.data_ptr(),
        residual.stride(0) * 2, M, N, K, 0 if added is None else len(squares), eps, offset,
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
    defines = defines_of(config, dtype, activation=activation, bias=bias, adds=adds, parts=parts)
    with torch.cuda.device(device):
        kernels = build.LoadedKernels(_cubin(defines))
        return kernels.prepare(
            "linear_wgmma", config.num_threads, _TYPES,
            starts_early=starts_early, shared_bytes=config.shared_bytes,
        )  # fmt: skip


@functools.cache
def _cubin(defines: Defines) -> bytes:
    return build.make_cubin(SOURCE, "sm_90a", dict(defines))
