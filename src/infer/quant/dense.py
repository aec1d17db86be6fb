"""Dense weights, in the dtype of the model.

On a GPU a kernel of kernels/linear computes the product, with prologue and epilogue where that is faster.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.cuda import Matrix
from infer.kernels.linear.invariant import linear_invariant
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.linear.small import (
    linear,
    linear_add,
    linear_of_sum,
    norm_linear,
    reads_parts,
    split_linear,
    writes_parts,
)
from infer.kernels.moe.biased import biased_experts_mlp, dense_products
from infer.kernels.moe.grouped import expert_rows
from infer.kernels.moe.many import ManyRows
from infer.kernels.runtime.dispatch import use_triton
from infer.quant.chosen import SumOfChoices
from infer.quant.projection import Choices, Neighbours, PendingProduct, Projection, Source
from infer.quant.residual import NormedInput, PendingUpdate, ResidualNorm


class Dense(Projection):
    """A plain matrix, multiplied by the fastest kernels."""

    scheme = "none"
    compiled: CompiledLinears | None = None

    def allocate(self) -> dict[str, torch.Tensor]:
        """Allocate the matrix, or the stack of all experts' matrices."""
        spec = self.spec
        stack = () if spec.num_experts is None else (spec.num_experts,)
        shape = (*stack, spec.num_rows, spec.size)
        return {"weight": torch.empty(shape, dtype=spec.dtype, device=spec.device)}

    def load(self, source: Source, *, part: str | None, expert: int | None, transposed: bool) -> None:
        """Copy a stored matrix straight into its rows."""
        rows = (self.weight if expert is None else self.weight[expert])[self.spec.part_rows(part)]
        source.copy_to(rows.T if transposed else rows)

    @property
    def weight(self) -> torch.Tensor:
        """The matrix, [N, K], or [E, N, K] for experts."""
        return self.tensors["weight"]

    def dequantized(self) -> torch.Tensor:
        """The matrix itself."""
        return self.weight

    def prepare(self, compiled: CompiledLinears, neighbours: Neighbours) -> None:
        """Request the kernels in CUDA C++, which need bfloat16, and enable the fusion that they support."""
        self.compiled = compiled
        self.can_add = neighbours.writes_sum and use_triton(self.weight)
        if (matrix := self.matrix(neighbours)) is not None:
            compiled.want(matrix, is_head=neighbours.is_head)

    def matrix(self, neighbours: Neighbours) -> Matrix | None:
        """The matrix as a description for kernels in CUDA C++; None: unsupported."""
        weight, (reads, writes, activation, _) = self.weight, neighbours
        if weight.dtype is not torch.bfloat16 or weight.dim() != 2:
            return None
        (N, K), activation = weight.shape, "" if self.bias is not None else activation
        return Matrix(N // 2 if activation else N, K, activation, self.bias is not None, reads, writes)

    def invariant(self) -> Projection | None:
        """A projection with this matrix in which a row's bits do not depend on the other rows."""
        projection = InvariantDense(self.spec, self.tensors)
        projection.bias = self.bias
        return projection

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b; a GPU has special kernels for few rows."""
        if x.dim() == 2:
            return linear(x, self.weight, self.bias, compiled=self.compiled)
        return F.linear(x, self.weight, self.bias)

    def project_rows(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Multiply, with the gate in the same launch if there is a kernel for it."""
        if x.dim() == 2:
            return linear(x, self.weight, self.bias, activation=activation, compiled=self.compiled)
        return super().project_rows(x, activation)

    def project_norm(self, x: NormedInput, activation: str) -> torch.Tensor:
        """Add, normalise and multiply, in one launch if there are few tokens."""
        norm, residual, update = x.norm, x.stream.residual_TD, x.stream.update
        if not use_triton(residual) or isinstance(update, PendingUpdate):
            return super().project_norm(x, activation)
        first, rest = (residual, None) if update is None else (update, residual)
        y, total = norm_linear(
            first, rest, norm.weight, norm.eps, norm.offset, self.weight, self.bias,
            activation=activation, compiled=self.compiled,
        )  # fmt: skip
        x.read(total)
        return y

    def project_sum(self, total: ResidualSum, eps: float, activation: str) -> torch.Tensor:
        """Finish the norm and multiply in one launch."""
        return linear_of_sum(
            total, eps, self.weight, self.bias, activation=activation, compiled=self.compiled
        )

    def reads_sum(self, x: torch.Tensor, num_parts: int, activation: str) -> bool:
        """Return True if this matrix's kernel can finish the norm of a sum for as many tokens as `x` has."""
        gated = bool(activation) and self.bias is None
        return reads_parts(x, self.weight, num_parts, gated=gated, compiled=self.compiled)

    def add_to(
        self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm, reader: Projection, activation: str
    ) -> torch.Tensor | ResidualSum:
        """Multiply and add in one launch, or return parts if that keeps more of the GPU busy."""
        num_parts = writes_parts(x, self.weight, compiled=self.compiled)
        if num_parts is not None and reader.reads_sum(x, num_parts, activation):
            stream = ResidualInput(residual, norm.weight, norm.offset)
            return linear_add(stream, x, self.weight, self.bias, compiled=self.compiled)
        parts = split_linear(x, self.weight, compiled=self.compiled) if self.bias is None else None
        return self.multiply(x) if parts is None else parts

    @property
    def stacked(self) -> torch.Tensor | None:
        """The stack of the experts' matrices, if GPU kernels can read it."""
        weight = self.weight
        return weight if weight.dim() == 3 and weight.dtype is torch.bfloat16 else None

    def prepare_experts(self, compiled: CompiledLinears, activation: str) -> None:
        """Request the kernel for many rows."""
        if self.stacked is not None:
            self.many = ManyRows.of(compiled, self.spec.num_rows, self.spec.size, activation)

    def experts_mlp(
        self, x_TD: torch.Tensor, choices: Choices, down: Projection, activation: str
    ) -> torch.Tensor | PendingProduct:
        """Send each token through its experts, with three launches for all of them if there are kernels."""
        if not (use_triton(x_TD) and isinstance(down, Dense)):
            return super().experts_mlp(x_TD, choices, down, activation)
        if self.bias is not None and down.bias is not None:
            products = dense_products(self.weight, down.weight, invariant=self.batch_invariant)
            return biased_experts_mlp(x_TD, *choices, products, self.bias, down.bias, activation=activation)
        outputs_TCD = expert_rows(
            x_TD, *choices, self.weight, down.weight,
            activation=activation, invariant=self.batch_invariant, many=(self.many, down.many),
        )  # fmt: skip
        return SumOfChoices.pending(outputs_TCD, down)


class InvariantDense(Dense):
    """A dense matrix, multiplied so that a row's bits do not depend on the other rows; nothing is fused."""

    batch_invariant = True
    prepare, invariant = Projection.prepare, Projection.invariant
    prepare_experts = Projection.prepare_experts
    project_rows, project_norm = Projection.project_rows, Projection.project_norm
    reads_sum = Projection.reads_sum

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b, each row as if it were the only one."""
        return linear_invariant(x, self.weight, self.bias)
