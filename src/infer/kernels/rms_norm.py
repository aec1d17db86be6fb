"""Root-mean-square norm, alone and fused with the residual addition before it.

    rms_norm       y = x / sqrt(mean(x^2) + eps) * (weight + offset)
    add_rms_norm   r = x + residual;  y = rms_norm(r);  both are returned

Statistics are taken in float32 whatever the input type, and the result is rounded once, at the end.
`offset` is 1 for Gemma, which stores its weights centred on zero, and 0 for everyone else.
The sum r is rounded to the input type *before* it is normalised: fused or not, the numbers agree.

Memory-bound: each element is read once and written once, so the target is the bandwidth of a copy
(benchmarks/kernels/rms_norm.py prints the share of it we reach). A program takes a tile of whole rows:
one row of a hidden state, or several rows where they are short, as the heads of a QK-norm are.

Shapes:  T tokens, N heads, D the normalised dimension (hidden size, or head size for a QK-norm).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_reference(x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """The specification: what the kernel must equal, and what runs on the CPU."""
    weight = weight_D.float() + offset if offset else weight_D.float()
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def add_rms_norm_reference(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of the fused form: add, then normalise the rounded sum."""
    new_residual_TD = x_TD + residual_TD
    return rms_norm_reference(new_residual_TD, weight_D, eps, offset), new_residual_TD


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, *, eps: float, offset: float = 0.0) -> torch.Tensor:
    """Normalise the last dimension of `x`, which is [T, D] or [T, N, D] and may be a strided view."""
    return rms_norm_reference(x, weight_D, eps, offset)


def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x_TD` to the residual stream; return the normalised sum and the sum itself."""
    return add_rms_norm_reference(x_TD, residual_TD, weight_D, eps, offset)
