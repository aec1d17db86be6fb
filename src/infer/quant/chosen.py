"""The last operation of a mixture of experts on a GPU, left pending until the stream's reader is known.

With few tokens (kernels/moe/few.py) it is a product like any other: from the gated results of a token's
choices, [T, C F], to the residual stream, [T, D]. The kernel that computes it also adds it to the stream.
With more tokens it is the sum over a token's choices: the norm that reads the stream adds them up as parts.

Shapes:  T tokens, E experts, C choices per token, D hidden size, F intermediate size of one expert, H = C F.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.moe.few import FewExperts
from infer.kernels.moe.grouped import sum_choices
from infer.quant.projection import PendingProduct, Projection
from infer.quant.residual import NormedInput, ResidualNorm, as_tensor


class ChosenExperts(Projection):
    """The product with `down` of each token's experts; the layer keeps the weights."""

    can_add = True

    def __init__(
        self, few: FewExperts, gate_up: Projection, down: Projection, logits_TE: torch.Tensor
    ) -> None:
        size = few.shape.num_choices * few.shape.size
        super().__init__(replace(down.spec, size=size, num_experts=None), {})
        self.few, self.gate_up, self.down, self.logits_TE = few, gate_up, down, logits_TE

    def gated(self, x_TD: torch.Tensor | NormedInput) -> torch.Tensor:
        """Compute gate and up of every choice, gated, times the router's weight: [T, H]."""
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
        """Add the sum to the residual stream in the same launch, if the reader can read the result."""
        if reader.reads_sum(x, self.few.num_parts(len(x)), activation):
            return self._down(x, ResidualInput(residual, norm.weight, norm.offset))
        return self.multiply(x)

    def _down(self, x_TH: torch.Tensor, stream: ResidualInput | None) -> torch.Tensor | ResidualSum:
        stack = self.down.stacked
        assert stack is not None
        return self.few.down(x_TH, self.logits_TE, stack, stream)


class SumOfChoices(Projection):
    """The sum of each token's results, [T, C, D], which the next norm takes as parts."""

    can_add = True

    @classmethod
    def pending(cls, outputs_TCD: torch.Tensor, down: Projection) -> PendingProduct:
        """Return the sum of these outputs of `down` as a pending product."""
        return PendingProduct(cls(replace(down.spec, num_experts=None), {}), outputs_TCD)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums, [T, D]."""
        return sum_choices(x)

    def add_to(
        self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm, reader: Projection, activation: str
    ) -> torch.Tensor:
        """Return the parts, [C, T, D]."""
        return x.transpose(0, 1)
