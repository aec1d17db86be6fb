"""Root-mean-square norm, alone and fused with the residual addition before it.

    rms_norm       y = x / sqrt(mean(x^2) + eps) * (weight + offset)
    add_rms_norm   r = x + residual;  y = rms_norm(r);  both are returned

Statistics are taken in float32 whatever the input type, and the result is rounded once, at the end. `offset`
is 1 for Gemma, which stores its weights centred on zero, and 0 for every other family. The sum r is rounded
to the input type *before* it is normalised, so the numbers are the same, fused or not. x may come in parts,
[P, T, D], that are added up. The sum of parts in float32 (linear/split.py) is not rounded; the sum of parts
in the type of the residual (a mixture's choices) is rounded to that type.

Memory-bound: each element is read once and written once, so the target is the bandwidth of a copy
(benchmarks/kernels/rms_norm.py prints the share of it we reach). A program takes a tile of whole rows: one
row of a hidden state, or several short rows, like the heads of a QK-norm. In a decode step, the launch takes
longer than the bytes, so the weights are loaded while the input is still being computed (PDL,
`dispatch.py`).

Shapes:  T tokens, N heads, D the normalised dimension (hidden size, or head size for a QK-norm), P parts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from infer.kernels.cpu import operations
from infer.kernels.runtime.dispatch import jit, launch_options, next_power_of_two, tl, use_c, use_triton
from infer.kernels.runtime.launch import launch_triton


def rms_norm_reference(x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """The specification of the kernel, which also runs on the CPU."""
    if offset == 0.0 and weight_D.dtype == x.dtype:
        return F.rms_norm(x, weight_D.shape, weight_D, eps)  # float32 inside, rounded once
    weight = weight_D.float() + offset
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def add_rms_norm_reference(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of the fused form: add, then normalise the rounded sum."""
    if x_TD.dim() == 3:
        total_TD = x_TD.float().sum(0).to(x_TD.dtype)
        new_residual_TD = (total_TD.float() + residual_TD.float()).to(residual_TD.dtype)
    else:
        new_residual_TD = x_TD + residual_TD
    return rms_norm_reference(new_residual_TD, weight_D, eps, offset), new_residual_TD


@jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, x_token_stride, x_head_stride, part_stride,
    residual_stride, y_token_stride, num_rows, N, D, eps, offset,
    NUM_PARTS: tl.constexpr,  # parts of x, each with all rows, added to the residual; 0: no residual
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,  # next power of two >= D: whole rows in one block
    PDL: tl.constexpr,
):  # fmt: skip
    # int64: T * N * D passes 2^31 on long prefills
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_D)
    in_tile = (rows < num_rows)[:, None] & (cols < D)[None, :]
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    at = x_ptr + (rows // N * x_token_stride + rows % N * x_head_stride)[:, None] + cols[None, :]
    out = rows[:, None] * D + cols[None, :]
    x = tl.load(at, mask=in_tile, other=0.0).to(tl.float32)
    if NUM_PARTS > 0:
        for part in tl.static_range(1, NUM_PARTS):
            x += tl.load(at + part * part_stride, mask=in_tile, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
        residual_at = rows[:, None] * residual_stride + cols[None, :]
        residual = tl.load(residual_ptr + residual_at, mask=in_tile, other=0.0)
        total = (x + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + out, total, mask=in_tile)
        x = total.to(tl.float32)
    inv_rms = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)  # lanes outside the row are 0: the sum is exact
    y = x * inv_rms[:, None] * (weight + offset)[None, :]
    y_at = (rows // N * y_token_stride + rows % N * D)[:, None] + cols[None, :]
    tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=in_tile)


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, *, eps: float, offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Normalise the last dimension of `x`, which is [T, D] or [T, N, D] and may be a strided view.

    `out` may be `x` itself; the heads of a token must be contiguous in it.
    """
    if not use_triton(x):
        if (c := use_c(x)) and weight_D.dtype is x.dtype and x.dim() in (2, 3):
            return operations.rms_norm(c, x, weight_D, eps, offset, out)
        y = rms_norm_reference(x, weight_D, eps, offset)
        return y if out is None else out.copy_(y)
    assert x.stride(-1) == 1, f"the last dimension must be contiguous, got strides {x.stride()}"
    T, N, D = (x.shape[0], 1, x.shape[1]) if x.dim() == 2 else x.shape
    head_stride = 0 if x.dim() == 2 else x.stride(1)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    strides = x.stride(0), head_stride, 0, 0, y.stride(0)
    _launch((x, x, weight_D, y, y), strides, T * N, N, D, eps, offset)
    return y


def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x_TD`, or parts of it, to the residual stream; return the normalised sum and the sum itself."""
    if not use_triton(x_TD):
        if x_TD.dim() == 2 and (c := use_c(x_TD)) and use_c(residual_TD) and weight_D.dtype is x_TD.dtype:
            return operations.add_rms_norm(c, x_TD, residual_TD, weight_D, eps, offset)
        return add_rms_norm_reference(x_TD, residual_TD, weight_D, eps, offset)
    T, D = residual_TD.shape
    num_parts = x_TD.shape[0] if x_TD.dim() == 3 else 1
    assert x_TD.shape[-2:] == residual_TD.shape, f"{x_TD.shape} cannot be added to {residual_TD.shape}"
    if x_TD.dim() == 3:
        assert x_TD.dtype in (torch.float32, residual_TD.dtype), f"parts in {x_TD.dtype}"
    else:
        assert x_TD.dtype == residual_TD.dtype, f"{x_TD.dtype} cannot be added to {residual_TD.dtype}"
    assert x_TD.stride(-1) == residual_TD.stride(1) == 1, "columns must be contiguous"
    y_TD = torch.empty((T, D), dtype=residual_TD.dtype, device=x_TD.device)
    sum_TD = torch.empty_like(y_TD)
    tensors = x_TD, residual_TD, weight_D, y_TD, sum_TD
    part_stride = x_TD.stride(0) if x_TD.dim() == 3 else 0
    strides = x_TD.stride(-2), 0, part_stride, residual_TD.stride(0), D
    _launch(tensors, strides, T, 1, D, eps, offset, num_parts=num_parts)
    return y_TD, sum_TD


def _launch(
    tensors: tuple[torch.Tensor, ...], strides: tuple[int, ...], num_rows: int, N: int, D: int,
    eps: float, offset: float, *, num_parts: int = 0,
) -> None:  # fmt: skip
    """Launch programs that take one long row each, or short rows with about 1024 elements in total."""
    block_d = next_power_of_two(D)
    block_rows = max(1, 1024 // block_d)
    launch_triton(
        _rms_norm_kernel, (-(-num_rows // block_rows),), tensors, (*strides, num_rows, N, D, eps, offset),
        NUM_PARTS=num_parts, BLOCK_ROWS=block_rows, BLOCK_D=block_d,
        num_warps=min(max(block_rows * block_d // 256, 4), 16),  # 8 elements per thread
        **launch_options(tensors[0].device),
    )  # fmt: skip
