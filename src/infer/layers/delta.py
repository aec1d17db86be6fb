"""Linear attention by the gated delta rule: a layer whose past is a state of fixed size.

    x ──► projected ──┬─ q k v ──► step.recur: convolution, delta rule ──► norm ──► (x) ──► output
                      ├─ b a ─────────┘                                             │
                      └─ z ──────────────────────────────── silu ───────────────────┘

kernels/delta/reference.py defines the rule. The step stores the states, as it does keys and values
(attention.py).

Shapes:  T tokens of all sequences laid end to end, D hidden, C channels of q, k and v, W taps of the
convolution, V value heads, K key size, H value size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from infer.kernels.delta.reference import DeltaRule
from infer.kernels.elementwise.rms_norm import rms_norm
from infer.layers.attention import StepContext
from infer.layers.facts import DeltaConfig
from infer.layers.linear import Linear, Weights
from infer.quant.projection import PendingProduct
from infer.quant.residual import NormedInput, as_tensor


class DeltaAttention(nn.Module):
    """Gated delta-rule attention.

    `parts` are the checkpoint's matrices that form the projection. Its outputs are q, k, v, z, b, a of all
    heads, in this order; if a checkpoint groups them otherwise, `order` is the place of each output.
    """

    def __init__(
        self,
        hidden_size: int,
        layer: int,
        delta: DeltaConfig,
        *,
        eps: float,
        parts: Mapping[str, int],
        order: Sequence[int] | None,
    ) -> None:
        super().__init__()
        self.layer, self.delta, self.eps = layer, delta, eps
        num_heads, values = delta.num_value_heads, delta.num_value_heads * delta.value_dim
        self.sizes = [delta.num_channels, values, num_heads, num_heads]
        self.projected = Linear(hidden_size, sum(self.sizes), bias=False, parts=parts)
        self.conv = Weights(delta.num_channels, 1, delta.num_taps)
        self.decay = Weights(num_heads, dtype=torch.float32)
        self.dt_bias = Weights(num_heads, dtype=torch.float32)
        self.norm = Weights(delta.value_dim)
        self.output = Linear(values, hidden_size, bias=False)
        self.order: torch.Tensor | None
        self.register_buffer("order", None if order is None else torch.tensor(order), persistent=False)

    def forward(self, x_TD: torch.Tensor | NormedInput, step: StepContext) -> torch.Tensor | PendingProduct:
        """Let each token look at its sequence up to itself; returns [T, D]."""
        y_TX = as_tensor(self.projected(x_TD))
        if self.order is not None:
            y_TX = y_TX.index_select(-1, self.order)
        qkv_TC, z_TX, b_TV, a_TV = torch.split(y_TX, self.sizes, dim=-1)
        sizes = self.delta.num_key_heads, self.delta.key_dim, self.delta.value_dim
        rule = DeltaRule(self.conv.weight[:, 0], self.decay.weight, self.dt_bias.weight, *sizes)
        seen_TVH = step.recur(self.layer, rule, qkv_TC, b_TV, a_TV)
        gate_TVH = functional.silu(step.needed(z_TX).float()).view(seen_TVH.shape)
        normed_TVH = rms_norm(seen_TVH.contiguous(), self.norm.weight, eps=self.eps)
        y_TD: torch.Tensor | PendingProduct = self.output((normed_TVH * gate_TVH).to(y_TX.dtype).flatten(-2))
        return y_TD
