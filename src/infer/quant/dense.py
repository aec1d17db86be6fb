"""Weights as they are: one number each, in the dtype of the model."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from infer.kernels.linear.invariant import linear_invariant
from infer.kernels.linear.small import linear


class Dense:
    """Keeps nothing of its own: the layer's parameter is the weight."""

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x Wᵀ + b; few rows on a GPU have kernels of their own."""
        return linear(x, weight, bias) if x.dim() == 2 else F.linear(x, weight, bias)


class InvariantDense:
    """The same weights, multiplied so that a row's bits do not depend on the other rows."""

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x Wᵀ + b."""
        return linear_invariant(x, weight, bias)


DENSE = Dense()
INVARIANT = InvariantDense()
