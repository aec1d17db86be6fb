"""Weights of 8 or 4 bits on a GPU: the layout and the kernels of kernels/linear/coded.py as a projection.

A scheme on top of this says which form it keeps (`coded_form`) and fills it while it loads (`matrices`).
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from infer.kernels.linear.coded import CodedForm, CodedWeights
from infer.quant.projection import Projection, WeightSpec


class Coded(Projection):
    """A projection in codes and scales, one `CodedWeights` for each expert."""

    def __init__(self, spec: WeightSpec, matrices: list[CodedWeights] | None = None) -> None:
        self.matrices = matrices or []
        super().__init__(spec)

    def coded_form(self) -> CodedForm:
        """How this matrix is kept."""
        raise NotImplementedError

    def allocate(self) -> dict[str, torch.Tensor]:
        """Codes, scales and minima of all experts; on the meta device without memory."""
        spec = self.spec
        if not self.matrices:
            codes, group, has_minima, scale_rows = self.coded_form()
            self.matrices = [
                CodedWeights.empty(
                    spec.num_rows, spec.size, codes, group, has_minima, scale_rows, spec.device
                )
                for _ in range(spec.num_experts or 1)
            ]
        return {
            f"{name}_{number}": tensor
            for number, matrix in enumerate(self.matrices)
            for name, tensor in matrix.tensors().items()
        }

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b."""
        y = F.linear(x.float(), self.matrices[0].dequantized())
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def dequantized(self) -> torch.Tensor:
        """W as float32."""
        return self.matrices[0].dequantized()

    def lookup(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of W for a tied embedding."""
        return self.dequantized()[ids_T].to(self.spec.dtype)

    def make_expert(self, number: int, spec: WeightSpec) -> Projection:
        """The projection of one expert from its matrix."""
        return type(self)(spec, [self.matrices[number]])
