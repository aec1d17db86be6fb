"""Linears of few tokens through `linear_ahead.cu`, which holds its weights before the one ahead has finished.

`linear_small.py` allocates what it fills and says what stands before and behind the product, as for its own
kernels; an `Added` of one may be read by the other, for what it holds does not depend on who made it.

It is for bfloat16 on Hopper, up to `AHEAD_MAX_M` tokens, and models whose residual stream is narrow: with
wider ones the time is that of reading, which both kernels do alike, and with more tokens Triton's tiles read
x more cheaply. And it is for whole models: what a kernel loads before its wait is hidden behind the
kernel before, and one of Triton's between two of these hides nothing and is slower than either kind alone. So
`prepare` compiles all variants that a model's layers can ask for, side by side, before the first step, and
`ready_config` knows those alone. Where one cannot be had, or no compiler, all of them stay Triton's.

Shapes:  M tokens, N outputs, F outputs of a gated layer (W has 2F rows), K inputs, P parts.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from infer.kernels import dispatch
from infer.kernels.cuda import build
from infer.kernels.cuda.ahead_configs import AheadConfig, choose_config, token_tiles
from infer.kernels.linear_stream import Added, Stream

logger = logging.getLogger(__name__)

ENABLED = True  # for tests and benchmarks that want Triton's kernels of a model that was prepared
AHEAD_MAX_M = 8
SOURCE = Path(__file__).with_name("linear_ahead.cu")

Defines = tuple[tuple[str, int], ...]

_MAX_STREAM = 2048  # one side of every matrix of a layer is the residual stream's width
_MAX_BYTES = 128 << 20  # of a matrix
_MAX_COMPILERS = 8
_ACTIVATIONS = {"": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
_TYPES = (
    *(ctypes.c_void_p,) * 8,
    ctypes.c_longlong,
    ctypes.c_longlong,
    *(ctypes.c_int,) * 2,
    *(ctypes.c_float,) * 2,
)

Shape = tuple[int, int, int, int, bool]  # device, tiles of tokens, N, K, gated

_ready: dict[Shape, AheadConfig] = {}


class Matrix(NamedTuple):
    """A matrix of a model's layers, and what may be asked of it besides the plain product."""

    N: int
    K: int
    activation: str = ""  # of a gated one; N counts the gate's rows
    bias: bool = False
    reads: bool = False  # the residual stream: `launch_added`
    writes: bool = False  # into it: `launch_into`


def ready_config(x_MX: torch.Tensor, w: torch.Tensor, N: int, K: int, *, gated: bool) -> AheadConfig | None:
    """How a matrix that was prepared is cut; None: this product is not for the kernel here."""
    M = x_MX.shape[0]
    if M > AHEAD_MAX_M or not (_ready and ENABLED):
        return None
    config = _ready.get((x_MX.get_device(), token_tiles(M), N, K, gated))
    return config if config and _are_pieces(x_MX, w) else None


def _are_pieces(x_MX: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether every row is one of bfloat16, without gaps, at an address of 16 bytes."""
    return (
        x_MX.dtype is torch.bfloat16
        and w.is_contiguous()
        and x_MX.stride(1) == 1
        and not (x_MX.stride(0) % 8 or x_MX.data_ptr() % 16 or w.data_ptr() % 16)
    )


def prepare(matrices: Sequence[Matrix], device: torch.device) -> bool:
    """Compile and load all that these matrices can ask for; False, and why in the log: they are Triton's."""
    if not matrices or not _is_for(device) or not all(_is_small(matrix) for matrix in matrices):
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    chosen: dict[Shape, AheadConfig] = {}
    variants: dict[Defines, None] = {}  # in order, each once
    for tiles in dict.fromkeys(token_tiles(M) for M in range(1, AHEAD_MAX_M + 1)):
        for matrix in matrices:
            gated = bool(matrix.activation)
            config = choose_config(8 * tiles, matrix.N, matrix.K, gated=gated)
            if config is None:
                return False
            chosen[index, tiles, matrix.N, matrix.K, gated] = config
            variants |= dict.fromkeys(_variants_of(matrix, config, tiles))
    try:
        with ThreadPoolExecutor(min(_MAX_COMPILERS, os.cpu_count() or 1)) as pool:
            list(pool.map(_cubin, variants))
        for defines in variants:
            _load(defines, index, dispatch.PDL)
    except build.BuildError as error:
        logger.info("Triton computes all linears: %s is to be compiled and %s", SOURCE.name, error)
        return False
    _ready.update(chosen)
    return True


def _variants_of(matrix: Matrix, config: AheadConfig, tiles: int) -> Iterator[Defines]:
    N, K, activation, bias, reads, writes = matrix
    for adds, parts in ((False, False), (False, True), (True, False)):
        if (reads or not parts) and (writes or not adds):
            yield defines_of(
                config, tiles=tiles, N=N, K=K, activation=activation, bias=bias, adds=adds, parts=parts
            )


def _is_small(matrix: Matrix) -> bool:
    num_rows = matrix.N * (2 if matrix.activation else 1)
    return min(matrix.N, matrix.K) <= _MAX_STREAM and num_rows * matrix.K * 2 <= _MAX_BYTES


def _is_for(device: torch.device) -> bool:
    """Hopper: clusters, the launch ahead of time, and what was measured."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


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
        ("CLUSTER", config.cluster),
        ("DEPTH", config.depth),
        ("AHEAD", config.ahead),
        ("BIAS", int(bias)),
        ("ACTIVATION", _ACTIVATIONS[activation]),
        ("ADDS", int(adds)),
        ("PARTS", int(parts)),
    )


def launch(
    config: AheadConfig,
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
    assert x_MK.dtype == w.dtype and x_MK.stride(1) == 1 and x_MK.stride(0) % 8 == 0, x_MK.stride()
    assert x_MK.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0, "pieces of 16 bytes"
    kernel = _kernel(
        config, x_MK.dtype, token_tiles(M), N, K, activation, bias_N is not None, into is not None,
        added is not None, x_MK.get_device(), dispatch.PDL,
    )  # fmt: skip
    residual, gain, total, offset = x_MK, w, y_MN, 0.0
    squares = y_MN if added is None else added.squares_PM
    if into is not None:
        (residual, gain, offset), (total, _, squares) = into
        assert residual.stride(0) % 2 == 0 and gain.dtype == x_MK.dtype, (residual.stride(), gain.dtype)
    kernel(
        -(-N // config.rows) * config.cluster,
        x_MK.data_ptr(), w.data_ptr(), 0 if bias_N is None else bias_N.data_ptr(), y_MN.data_ptr(),
        residual.data_ptr(), gain.data_ptr(), total.data_ptr(), squares.data_ptr(),
        x_MK.stride(0) * 2, residual.stride(0) * 2, M, 0 if added is None else len(squares), eps, offset,
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
        kernels = build.LoadedKernels(_cubin(defines))
        num_threads = 32 * dict(defines)["WARPS"]
        return kernels.prepare("linear_ahead", num_threads, _TYPES, starts_early=starts_early)


@functools.cache
def _cubin(defines: Defines) -> bytes:
    return build.make_cubin(SOURCE, "sm_90", dict(defines))
