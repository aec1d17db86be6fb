"""The experts that the tokens of a step chose, as one product, for few tokens on a GPU (kernels/moe/few.py).

A mixture of experts is a product like any other once the router has chosen: from the gated results of a
token's choices, [T, C F], to the residual stream, [T, D]. So it can be left pending, and be added to the
stream by the kernel that computes it.

Shapes:  T tokens, E experts, C choices per token, D hidden size, F intermediate size of one expert, H = C F.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.moe.few import FewExperts
from infer.quant.projection import Projection
from infer.quant.residual import NormedInput, ResidualNorm, as_tensor


class ChosenExperts(Projection):
    """The product with `down` of each token's experts; its weights are those of the layer."""

    can_add = True

    def __init__(
        self, few: FewExperts, gate_up: Projection, down: Projection, logits_TE: torch.Tensor
    ) -> None:
        size = few.shape.num_choices * few.shape.size
        super().__init__(replace(down.spec, size=size, num_experts=None), {})
        self.few, self.gate_up, self.down, self.logits_TE = few, gate_up, down, logits_TE

    def gated(self, x_TD: torch.Tensor | NormedInput) -> torch.Tensor:
        """Gate and up of every choice, gated, times its weight: [T, H]."""
        stack = self.gate_up.stacked
        assert stack is not None
        if isinstance(x_TD, NormedInput) and x_TD.begun is not None:
            return self.few.gated(x_TD.begun, x_TD.norm.eps, self.logits_TE, stack)
        return self.few.gated(as_tensor(x_TD), 0.0, self.logits_TE, stack)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's experts, [T, D]."""
        y = self._down(x, None)
        assert isinstance(y, torch.Tensor)
        return y

    def add_to(
        self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm, reader: Projection, activation: str
    ) -> torch.Tensor | ResidualSum:
        """Add the sum to the residual stream in the same launch, where the reader can read it."""
        if reader.reads_sum(x, self.few.num_parts(len(x)), activation):
            return self._down(x, ResidualInput(residual, norm.weight, norm.offset))
        return self.multiply(x)

    def _down(self, x_TH: torch.Tensor, stream: ResidualInput | None) -> torch.Tensor | ResidualSum:
        stack = self.down.stacked
        assert stack is not None
        return self.few.down(x_TH, self.logits_TE, stack, stream)
