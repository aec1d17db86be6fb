"""Linear layers of few tokens: what decoding spends its time in.

    linear              y = x WT + bias
    gated_linear        y = act(x WgT) * (x WuT)                 W stacks the gate's rows on up's rows
    norm_linear         r = x + residual;  y = linear(rms_norm(r));  both are returned
    norm_gated_linear   r = x + residual;  y = gated_linear(rms_norm(r));  both are returned

A step that decodes M sequences reads every weight once to use it M times. For small M the time of a
layer is the time to read its weights, and the target is the bandwidth of a read; a general matrix
product is built for large M and reaches a third of it on small models.

    M = 1       dot products, the norm folded in                   linear_kernels.gemv_kernel
    M <= 4      the same without the norm where that is faster, or
    M <= 128    tensor cores, W on the left, K split in order      linear_kernels.skinny_kernel
    above       the library (F.linear), then `gated_activation`

Which of them a number of tokens gets is looked up for each shape of W (linear_configs.py). With two tokens
already, every program's own norm costs more than one launch for all of them.

Fused or not, sums are taken in float32. The fused forms round less often: gate, up and their product stay in
float32 until y, and the norm's scale is applied to the finished sum. r alone is rounded to the type
of x before it is used, because the next layer adds to what is stored.

Within one kernel a row's bits do not depend on M. Between the two kernels, and above, they may.

`linear` may be captured into a CUDA graph once it has been called with the same shapes outside of one.
Calls on one device are expected to follow each other on one stream: programs that split K among them
meet at counters that belong to the device (a ring of them, so that neighbouring calls do not share).

Shapes:  M tokens, N outputs, F outputs of a gated layer (W has 2F rows), K inputs.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F

from infer.kernels.dispatch import INTERPRETED, launch_options, use_triton
from infer.kernels.gated_activation import _known, gated_activation, gated_activation_reference
from infer.kernels.linear_configs import (
    GEMV_MAX_M,
    MAX_SMALL_M,
    GemvConfig,
    SkinnyConfig,
    bucket,
    gemv_config,
    skinny_config,
)
from infer.kernels.linear_kernels import gemv_kernel, skinny_kernel
from infer.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

FOLD_NORM_MAX_M = 1

_MAX_TILES = 1024  # of a layer whose K is split: with more tiles than this there is no need to
_NUM_COUNTER_SLOTS = 64
_next_call = count()


def linear_reference(x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """The specification: what the kernels must equal, what runs on the CPU and for many tokens."""
    return F.linear(x_MK, w_NK, bias_N)


def gated_linear_reference(x_MK: torch.Tensor, w_2FK: torch.Tensor, activation: str) -> torch.Tensor:
    """The specification of the gated form."""
    return gated_activation_reference(F.linear(x_MK, w_2FK), activation)


def norm_reference(
    x_MK: torch.Tensor,
    residual_MK: torch.Tensor | None,
    norm_weight_K: torch.Tensor,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of what the norm forms do before the product: rms_norm(r) and r."""
    if residual_MK is None:
        return rms_norm_reference(x_MK, norm_weight_K, eps, offset), x_MK
    return add_rms_norm_reference(x_MK, residual_MK, norm_weight_K, eps, offset)


def linear(x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """The product of every row of `x_MK` with every row of `w_NK`."""
    plan = _plan(x_MK, w_NK, gated=False)
    if plan is None:
        return F.linear(x_MK, w_NK, bias_N)
    return launch(plan, x_MK, w_NK, bias_N=bias_N)


def gated_linear(x_MK: torch.Tensor, w_2FK: torch.Tensor, activation: str) -> torch.Tensor:
    """The first half of a gated MLP, where `w_2FK` has the rows of the gate and then those of `up`."""
    _known(activation)
    plan = _plan(x_MK, w_2FK, gated=True)
    if plan is None:
        return gated_activation(F.linear(x_MK, w_2FK), activation=activation)
    return launch(plan, x_MK, w_2FK, activation=activation)


def norm_linear(
    x_MK: torch.Tensor,
    residual_MK: torch.Tensor | None,
    norm_weight_K: torch.Tensor,
    eps: float,
    offset: float,
    w_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear` of the normalised sum of `x_MK` and the residual stream; and the sum, or `x_MK` itself."""
    plan = _plan_with_norm(x_MK, w_NK, gated=False)
    if plan is None:
        normed_MK, new_residual_MK = _norm(x_MK, residual_MK, norm_weight_K, eps, offset)
        return linear(normed_MK, w_NK, bias_N), new_residual_MK
    norm = _Norm(x_MK, residual_MK, norm_weight_K, eps, offset)
    return launch(plan, x_MK, w_NK, bias_N=bias_N, norm=norm), norm.new_residual


def norm_gated_linear(
    x_MK: torch.Tensor,
    residual_MK: torch.Tensor | None,
    norm_weight_K: torch.Tensor,
    eps: float,
    offset: float,
    w_2FK: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_linear` of the normalised sum of `x_MK` and the residual stream; and the sum."""
    _known(activation)
    plan = _plan_with_norm(x_MK, w_2FK, gated=True)
    if plan is None:
        normed_MK, new_residual_MK = _norm(x_MK, residual_MK, norm_weight_K, eps, offset)
        return gated_linear(normed_MK, w_2FK, activation), new_residual_MK
    norm = _Norm(x_MK, residual_MK, norm_weight_K, eps, offset)
    return launch(plan, x_MK, w_2FK, activation=activation, norm=norm), norm.new_residual


class _Norm:
    """The norm that a launch folds in, and the memory for the sum it leaves behind."""

    def __init__(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
    ) -> None:
        self.residual, self.weight, self.eps, self.offset = residual, weight, eps, offset
        self.new_residual = x
        if residual is not None:
            assert x.shape == residual.shape, f"{x.shape} cannot be added to {residual.shape}"
            assert x.dtype == residual.dtype, f"{x.dtype} cannot be added to {residual.dtype}"
            assert residual.stride(1) == 1, f"columns must be contiguous, got strides {residual.stride()}"
            self.new_residual = torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _norm(
    x_MK: torch.Tensor,
    residual_MK: torch.Tensor | None,
    norm_weight_K: torch.Tensor,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm as a launch of its own."""
    if residual_MK is None:
        return rms_norm(x_MK, norm_weight_K, eps=eps, offset=offset), x_MK
    return add_rms_norm(x_MK, residual_MK, norm_weight_K, eps=eps, offset=offset)


def _plan_with_norm(x_MK: torch.Tensor, w: torch.Tensor, *, gated: bool) -> GemvConfig | SkinnyConfig | None:
    """Which kernel folds the norm in; None for a launch of its own.

    r * weight, unscaled, may be too large for tensor cores in float16.
    """
    plan = _plan(x_MK, w, gated=gated) if x_MK.shape[0] <= FOLD_NORM_MAX_M else None
    return None if isinstance(plan, SkinnyConfig) and x_MK.dtype == torch.float16 else plan


def _plan(x_MK: torch.Tensor, w: torch.Tensor, *, gated: bool) -> GemvConfig | SkinnyConfig | None:
    """Which kernel computes this, and how; None for the library."""
    M, K = x_MK.shape
    if not use_triton(x_MK) or not 0 < M <= MAX_SMALL_M or x_MK.dtype != w.dtype:
        return None
    N = w.shape[0] // 2 if gated else w.shape[0]
    dots = gemv_config(N, K, gated, bucket(M), x_MK.device) if M <= GEMV_MAX_M else None
    return dots or skinny_config(N, K, gated, max(bucket(M), 16), x_MK.device, x_MK.element_size())


def launch(
    plan: GemvConfig | SkinnyConfig,
    x_MK: torch.Tensor,
    w: torch.Tensor,
    *,
    bias_N: torch.Tensor | None = None,
    activation: str = "",
    norm: _Norm | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the kernel that `plan` is for."""
    M, K = x_MK.shape
    N = w.shape[0] // 2 if activation else w.shape[0]
    assert w.shape[1] == K, f"rows of {K} cannot be multiplied with rows of {w.shape[1]}"
    assert x_MK.stride(1) == w.stride(1) == 1, f"columns must be contiguous: {x_MK.stride()}, {w.stride()}"
    y_MN = torch.empty((M, N), dtype=x_MK.dtype, device=x_MK.device) if out is None else out
    residual = x_MK if norm is None or norm.residual is None else norm.residual
    tensors = (
        x_MK, residual, x_MK if norm is None else norm.weight, w, x_MK if bias_N is None else bias_N, y_MN,
        x_MK if norm is None else norm.new_residual,
    )  # fmt: skip
    strides = (x_MK.stride(0), residual.stride(0), w.stride(0))
    eps, offset = (0.0, 0.0) if norm is None else (norm.eps, norm.offset)
    options: dict[str, Any] = {
        "BLOCK_M": bucket(M) if isinstance(plan, GemvConfig) else max(bucket(M), 16),
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "NORM": norm is not None,
        "RESIDUAL": norm is not None and norm.residual is not None,
        "BIAS": bias_N is not None,
        "ACTIVATION": activation,
        "num_warps": plan.num_warps,
    } | launch_options(x_MK.device)
    num_tiles = -(-N // plan.block_n)
    if isinstance(plan, GemvConfig):
        gemv_kernel[(num_tiles,)](
            *tensors, *strides, M, N, K, eps, offset,
            VECTOR=16 // x_MK.element_size(), UNROLL=plan.unroll, **options,
        )  # fmt: skip
        return y_MN

    split_len = -(-K // plan.block_k // plan.split_k) * plan.block_k
    num_splits = -(-K // split_len)  # the last ones would have nothing to do
    partial, counters = _workspace(x_MK.device, num_tiles, num_splits, options)
    skinny_kernel[(num_tiles, num_splits)](
        *tensors, partial, counters, *strides, M, N, K, split_len, num_splits, eps, offset,
        SPLIT=num_splits > 1, WIDEN=INTERPRETED, num_stages=plan.num_stages, **options,
    )  # fmt: skip
    return y_MN


def _workspace(
    device: torch.device, num_tiles: int, num_splits: int, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the partial sums of one call, and the counters at which its programs meet."""
    counters = _counters(device)  # made by the first call, split or not: before any graph is captured
    if num_splits == 1:
        return counters, counters
    assert num_tiles <= _MAX_TILES, f"K is split although there are {num_tiles} tiles"
    tile_len = options["BLOCK_N"] * options["BLOCK_M"] * (2 if options["ACTIVATION"] else 1)
    partial_len = num_tiles * num_splits * (tile_len + options["BLOCK_M"])
    partial = torch.empty(partial_len, dtype=torch.float32, device=device)
    return partial, counters[next(_next_call) % _NUM_COUNTER_SLOTS]


@lru_cache(maxsize=16)
def _counters(device: torch.device) -> torch.Tensor:
    """One zero per tile; each call finds them zero and leaves them zero."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("call the linear once before it is captured into a graph")
    return torch.zeros((_NUM_COUNTER_SLOTS, _MAX_TILES), dtype=torch.int32, device=device)
