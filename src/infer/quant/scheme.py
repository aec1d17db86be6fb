"""What a linear layer asks of its number format.

    y = x Wᵀ + b        x is [..., in] in the dtype of the activations, y is [..., out] in the same

`weight` and `bias` are the layer's own parameters. A scheme that keeps the weights in its own form
does not look at `weight`, which is then an empty shell of the right shape (on PyTorch's meta device).
"""

from __future__ import annotations

from typing import Protocol

import torch


class Scheme(Protocol):
    """How one layer's weights are stored and multiplied with."""

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x Wᵀ + b."""
        ...
