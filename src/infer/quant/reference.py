"""The readable reference of every scheme: the weights as plain numbers, multiplied by PyTorch.

Nothing is fused, and no kernel of this package runs. `mlp_backend=torch_ref` selects it for the feed-forward
layers, to compare it with the kernels of a scheme. Packed weights are unpacked at every call, which is slow
but takes no permanent memory.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from infer.kernels.elementwise.gated_activation import find_activation, gated_activation_reference
from infer.quant.projection import Projection, WeightSpec


class Reference(Projection):
    """Multiplies with the weights of another projection."""

    def __init__(self, stored: Projection) -> None:
        self._stored = stored
        super().__init__(stored.spec, stored.tensors)
        self.scheme, self.bias = stored.scheme, stored.bias

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b."""
        return F.linear(x, self._stored.dequantized().to(x.dtype), self.bias)

    def project_rows(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """`multiply`, and the reference of the gate after it."""
        y = self.multiply(x)
        return gated_activation_reference(y, activation) if activation else y

    def activate(self, y: torch.Tensor, activation: str) -> torch.Tensor:
        """The ungated activation, by PyTorch."""
        return find_activation(activation)(y)

    def make_expert(self, number: int, spec: WeightSpec) -> Projection:
        """The reference of one expert."""
        return Reference(self._stored.expert(number))
