"""Weights of 8 or 4 bits on a GPU: the layout and the kernels of kernels/linear/coded.py as a projection.

A scheme on top of this says which form it keeps (`coded_form`) and fills it while it loads (`matrices`).
"""

from __future__ import annotations

import torch

from infer.kernels.linear.coded import CodedForm, CodedWeights
from infer.kernels.linear.coded_linear import FEW_TOKENS, INT8_TOKENS, coded_linear, expand, look_up, plan_of
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.cuda import Matrix
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.linear.small import launch_add, launch_of_sum
from infer.kernels.runtime.dispatch import use_triton
from infer.quant.projection import Neighbours, Projection, WeightSpec
from infer.quant.residual import ResidualNorm


class Coded(Projection):
    """A projection in codes and scales, one `CodedWeights` for each expert."""

    compiled: CompiledLinears | None = None

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

    @property
    def weights(self) -> CodedWeights:
        """The matrix, where there is one."""
        return self.matrices[0]

    def scratch_bytes(self, num_tokens: int) -> int:
        """All of W in the dtype, once it is unpacked, or its codes and sums of 32 bits; experts never are."""
        spec = self.spec
        if num_tokens <= FEW_TOKENS or spec.num_experts is not None:
            return 0
        sums = min(num_tokens, INT8_TOKENS) * (4 * spec.num_rows + spec.size) if spec.int8_tokens else 0
        return max(spec.num_weights * spec.dtype.itemsize, spec.num_weights + sums)

    def prepare(self, compiled: CompiledLinears, neighbours: Neighbours) -> None:
        """Ask for the kernels in CUDA C++, and fuse where there are kernels to do it."""
        spec, (reads, writes, activation, is_head) = self.spec, neighbours
        if spec.num_experts is not None:
            return
        self.compiled = compiled
        self.can_add = writes and use_triton(self.weights.cells)
        if spec.dtype is torch.bfloat16:
            has_bias = self.bias is not None
            activation = "" if has_bias else activation
            N, form = spec.num_rows // 2 if activation else spec.num_rows, self.weights.form
            compiled.want(Matrix(N, spec.size, activation, has_bias, reads, writes, form), is_head=is_head)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b."""
        return self.project_rows(x, "")

    def project_rows(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Multiply, with the gate in the same launch where one kernel does both."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        y = coded_linear(
            rows, self.weights, self.bias, activation=activation, compiled=self.compiled,
            int8_tokens=self.spec.int8_tokens,
        )  # fmt: skip
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

    def project_sum(self, total: ResidualSum, eps: float, activation: str) -> torch.Tensor:
        """Finish the norm and multiply in one launch."""
        plan = plan_of(total.scaled_MN, self.weights, gated=bool(activation), compiled=self.compiled)
        assert plan is not None, "`reads_sum` said that there is a kernel"
        return launch_of_sum(plan, total, self.weights, eps=eps, bias_N=self.bias, activation=activation)

    def reads_sum(self, x: torch.Tensor, num_parts: int, activation: str) -> bool:
        """Whether the kernel of this matrix can finish the norm of a sum for as many tokens as `x` has."""
        if activation and self.bias is not None:
            return False
        return plan_of(x, self.weights, gated=bool(activation), compiled=self.compiled) is not None

    def add_to(
        self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm, reader: Projection, activation: str
    ) -> torch.Tensor | ResidualSum:
        """Multiply and add in one launch, where the reader can read the sum."""
        plan = plan_of(x, self.weights, gated=False, compiled=self.compiled)
        if plan is not None and reader.reads_sum(x, plan.num_parts(self.spec.num_rows), activation):
            stream = ResidualInput(residual, norm.weight, norm.offset)
            return launch_add(plan, stream, x, self.weights, self.bias)
        return self.multiply(x)

    def dequantized(self) -> torch.Tensor:
        """W as float32."""
        if use_triton(self.weights.cells):
            return expand(self.weights, torch.float32)
        return self.weights.dequantized()

    def lookup(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of W for a tied embedding."""
        return look_up(self.weights, ids_T, self.spec.dtype)

    def make_expert(self, number: int, spec: WeightSpec) -> Projection:
        """The projection of one expert from its matrix."""
        return type(self)(spec, [self.matrices[number]])
