"""Norms, of a tensor or of the residual stream.

    normed = norm(x)            normalises each row of [T, D], or each head of [T, N, H]
    normed = norm(stream)       the norm of the stream's sum, computed by the projection that reads it

`normalize` adds a sub-layer's output to the stream and normalises the sum in one pass. A projection may fuse
more into one launch (quant/residual.py).

Shapes:  T tokens, D hidden size, N heads, H head size.
"""

from __future__ import annotations

import torch
from torch import nn

from infer.kernels.elementwise.layer_norm import add_layer_norm
from infer.kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from infer.quant.residual import NormedInput, PendingUpdate, ResidualStream, as_tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; `offset` is 1 if weights are centred on zero."""

    def __init__(self, size: int, *, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: torch.Tensor | PendingUpdate | ResidualStream) -> torch.Tensor | NormedInput:
        """Normalise a tensor now; the residual stream is normalised when it is read."""
        if isinstance(x, ResidualStream):
            return NormedInput(self, x)
        return rms_norm(as_tensor(x), self.weight, eps=self.eps, offset=self.offset)

    def normalize(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised sum and the sum; with no residual yet, `x_TD` starts the stream."""
        if residual_TD is None:
            return rms_norm(x_TD, self.weight, eps=self.eps, offset=self.offset), x_TD
        return add_rms_norm(x_TD, residual_TD, self.weight, eps=self.eps, offset=self.offset)

    def extra_repr(self) -> str:
        """Size and constants, for print(model)."""
        return f"{self.weight.numel()}, eps={self.eps}, offset={self.offset}"


class LayerNorm(nn.Module):
    """GPT-2's norm: subtract the mean, divide by the standard deviation, scale, shift (not in Cohere 2)."""

    offset = 0.0
    bias: torch.Tensor

    def __init__(self, size: int, *, eps: float, has_bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        # without a bias: zeros that are not a parameter, because checkpoints do not have them
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if has_bias else torch.zeros(size)

    def forward(self, x: torch.Tensor | ResidualStream) -> torch.Tensor:
        """Normalise a tensor or the stream immediately: no kernel has this norm in its prologue."""
        if isinstance(x, ResidualStream):
            return NormedInput(self, x).tensor()
        return self.normalize(x, None)[0]

    def normalize(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised sum and the sum; with no residual yet, `x_TD` starts the stream."""
        return add_layer_norm(x_TD, residual_TD, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        """Size and constant, for print(model)."""
        return f"{self.weight.numel()}, eps={self.eps}"
