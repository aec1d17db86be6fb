"""Normalisation, alone or together with the residual addition before it.

A pre-norm transformer alternates two memory-bound steps over the same data: add a block's output to
the residual stream, then normalise the sum for the next block. `AddNorm` does both in one pass, so a
model carries two tensors through its layers:

    x          the output of the last block, not yet added
    residual   the sum of everything before it

        x, residual = norm(x, residual)     # residual + x, and its normalised form

Where the block that made x has already added it, x is an `Added` (kernels/linear/small.py): the sum, and what
the matrix behind the next norm needs of it. No norm is then called.

Shapes:  T tokens, D hidden size, N heads, H head size.
"""

from __future__ import annotations

import torch
from torch import nn

from infer.kernels.elementwise.layer_norm import add_layer_norm
from infer.kernels.elementwise.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; `offset` is 1 where weights are centred on zero."""

    def __init__(self, size: int, *, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise each row of [T, D], or each head of [T, N, H]."""
        return rms_norm(x, self.weight, eps=self.eps, offset=self.offset)

    def extra_repr(self) -> str:
        """Size and constants, for print(model)."""
        return f"{self.weight.numel()}, eps={self.eps}, offset={self.offset}"


class AddNorm(nn.Module):
    """Add a block's output to the residual stream, then normalise the sum."""

    def __init__(self, size: int, *, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised sum and the sum; with no residual yet, `x_TD` starts the stream."""
        if residual_TD is None:
            return rms_norm(x_TD, self.weight, eps=self.eps, offset=self.offset), x_TD
        return add_rms_norm(x_TD, residual_TD, self.weight, eps=self.eps, offset=self.offset)

    def extra_repr(self) -> str:
        """Size and constants, for print(model)."""
        return f"{self.weight.numel()}, eps={self.eps}, offset={self.offset}"


class AddLayerNorm(nn.Module):
    """The same with GPT-2's norm: subtract the mean, divide by the standard deviation, scale and shift."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised sum and the sum; with no residual yet, `x_TD` starts the stream."""
        return add_layer_norm(x_TD, residual_TD, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        """Size and constant, for print(model)."""
        return f"{self.weight.numel()}, eps={self.eps}"
