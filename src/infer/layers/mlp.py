"""The feed-forward half of a transformer block.

    gated    down( act(gate x) * up x )      Llama, Mistral, Qwen, Gemma; gate and up are one fused matrix
    plain    down( act(up x) )               GPT-2

Shapes:  T tokens, D hidden size, F intermediate size.
"""

from __future__ import annotations

import torch
from torch import nn

from infer.kernels.elementwise.gated_activation import activate, gated_activation
from infer.kernels.linear.residual import Added
from infer.layers.linear import Linear, Reader
from infer.layers.norm import AddNorm


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

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return [T, D]."""
        y_TD: torch.Tensor = self.down(gated_activation(self.gate_up(x_TD), activation=self.activation))
        return y_TD

    def reader(self, norm: AddNorm) -> Reader:
        """Who reads the stream when `after` is called with this norm."""
        return Reader(norm, self.gate_up, gated=self.gate_up.bias is None)

    def after(
        self,
        norm: AddNorm,
        x_TD: torch.Tensor | Added,
        residual_TD: torch.Tensor | None,
        reader: Reader | None = None,
    ) -> tuple[torch.Tensor | Added, torch.Tensor]:
        """Of the normalised sum of `x_TD` and the residual stream; returns [T, D] and the sum.

        If the next `reader` of the stream is known, [T, D] may have been added for it.
        """
        gated_TF, residual_TD = self.gate_up.gated_after(norm, x_TD, residual_TD, self.activation)
        return self.down.into(gated_TF, residual_TD, reader), residual_TD


class MLP(nn.Module):
    """down(act(up x)), both with a bias."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.up = Linear(hidden_size, intermediate_size, bias=True)
        self.down = Linear(intermediate_size, hidden_size, bias=True)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return [T, D]."""
        y_TD: torch.Tensor = self.down(activate(self.up(x_TD), self.activation))
        return y_TD
