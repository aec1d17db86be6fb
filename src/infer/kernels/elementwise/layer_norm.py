"""LayerNorm, together with the residual addition before it.

    r = x + residual;  y = (r - mean(r)) / sqrt(var(r) + eps) * weight + bias;  both are returned

GPT-2 uses it instead of the RMS norm of later models (rms_norm.py). The sum is rounded to the input type
before it is normalised, fused or not. On a GPU, PyTorch computes it, in two kernels.

Shapes:  T tokens, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from infer.kernels.cpu import operations
from infer.kernels.runtime.dispatch import use_c


def add_layer_norm_reference(
    x_TD: torch.Tensor, residual_TD: torch.Tensor | None, weight_D: torch.Tensor, bias_D: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The specification of `add_layer_norm`, and its path on a GPU."""
    sum_TD = x_TD if residual_TD is None else x_TD + residual_TD
    return F.layer_norm(sum_TD, weight_D.shape, weight_D, bias_D, eps), sum_TD


def add_layer_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor | None, weight_D: torch.Tensor, bias_D: torch.Tensor, *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the normalised sum and the sum; with no residual, `x_TD` is the sum."""
    has_rows = x_TD.dim() == 2 and (residual_TD is None or residual_TD.stride(1) == 1)
    if has_rows and (c := use_c(x_TD)):
        return operations.layer_norm(c, x_TD, residual_TD, weight_D, bias_D, eps)
    return add_layer_norm_reference(x_TD, residual_TD, weight_D, bias_D, eps)
