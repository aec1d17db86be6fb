"""The feed-forward half of a transformer block.

    gated    down( act(gate x) * up x )      Llama, Mistral, Qwen, Gemma; gate and up are one fused matrix
    plain    down( act(up x) )               GPT-2

Shapes:  T tokens, D hidden size, F intermediate size.
"""

from __future__ import annotations

import torch
from torch import nn

from infer.layers.linear import Linear
from infer.quant.projection import PendingProduct
from infer.quant.residual import NormedInput, as_tensor


class GatedMLP(nn.Module):
    """down(act(gate x) * up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: str, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up = Linear(
            hidden_size,
            2 * intermediate_size,
            bias=bias,
            parts={"gate": intermediate_size, "up": intermediate_size},
        )
        self.down = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_TD: torch.Tensor | NormedInput) -> torch.Tensor | PendingProduct:
        """Return [T, D]."""
        y_TD: torch.Tensor | PendingProduct = self.down(self.gate_up.gated(x_TD, self.activation))
        return y_TD


class MLP(nn.Module):
    """down(act(up x)), both with a bias."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.up = Linear(hidden_size, intermediate_size, bias=True)
        self.down = Linear(intermediate_size, hidden_size, bias=True)

    def forward(self, x_TD: torch.Tensor | NormedInput) -> torch.Tensor | PendingProduct:
        """Return [T, D]."""
        up_TF = self.up.projection.activate(as_tensor(self.up(x_TD)), self.activation)
        y_TD: torch.Tensor | PendingProduct = self.down(up_TF)
        return y_TD
