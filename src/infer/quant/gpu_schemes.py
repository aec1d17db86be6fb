"""Weights of 8 or 4 bits on a GPU: the file's own codes, or codes rounded while the weights are loaded.

A matrix is read from the disk some rows at a time, converted on the device and put into place. So loading
needs memory for a few rows besides the weights (`LOADING_BYTES`), never a second copy.
kernels/linear/coded.py defines the layout and the products.
"""

from __future__ import annotations

import torch

from infer.kernels.linear.coded import CodedForm, CodedWeights
from infer.kernels.linear.coded_linear import INT8_TOKENS, coded_linear, expand, look_up, plan_of
from infer.kernels.linear.coded_triton import gather_columns
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.cuda import Matrix
from infer.kernels.linear.invariant import linear_invariant
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.linear.small import launch_add, launch_of_sum
from infer.kernels.moe.biased import biased_experts_mlp, coded_products
from infer.kernels.moe.coded_cuda import MAX_ROWS, GroupedLinear
from infer.kernels.moe.coded_grouped import coded_expert_rows
from infer.kernels.moe.many import ManyRows
from infer.kernels.runtime.dispatch import moment, use_triton
from infer.kernels.runtime.profiles import device_profile
from infer.quant.chosen import SumOfChoices
from infer.quant.coded import CodedRows
from infer.quant.projection import Choices, Neighbours, PendingProduct, Projection, WeightSpec
from infer.quant.residual import ResidualNorm
from infer.quant.rounding import BLOCK_ROWS, fit_rows, round_rows

# code bits -> numbers at a time: with fewer, launches dominate; int4 needs a dozen float32 per number
_CHUNK_NUMBERS = {8: 1 << 24, 4: 1 << 23}
_MOST_CHOICES = 16  # most experts per token: `scratch_bytes` is not told their number
LOADING_BYTES = 256 << 20  # memory besides the weights during the load; 240 MiB were measured


class GPUWeights(Projection):
    """A matrix, or one for each expert, in the form that its spec names."""

    compiled: CompiledLinears | None = None
    grouped: GroupedLinear | None = None  # kernels for experts in CUDA C++

    def __init__(
        self,
        spec: WeightSpec,
        matrices: list[CodedWeights] | None = None,
        stack: CodedWeights | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        assert spec.form is not None, spec
        self.form: CodedForm = spec.form
        self.scheme = spec.form.codes
        self.matrices, self.stack = matrices or [], stack  # each expert's matrix, and all in one stack
        self.order = order  # act-order: the column of x for each stored column
        super().__init__(spec)

    # -- what it stores ---------------------------------------------------------------------------------

    def allocate(self) -> dict[str, torch.Tensor]:
        """Allocate codes, scales and minima; experts' matrices are views of one stack for one launch."""
        spec, count = self.spec, self.spec.num_experts
        if not self.matrices and count is None:
            sizes = spec.num_rows, spec.size, *self.form, spec.num_outliers
            self.matrices = [CodedWeights.empty(*sizes, device=spec.device)]
        if spec.has_order and self.order is None:
            self.order = torch.arange(spec.size, dtype=torch.int32, device=spec.device)
        if self.matrices or count is None:
            kept = (self.stack or self.weights).tensors()
            return kept if self.order is None else {**kept, "order": self.order}
        one = CodedWeights.empty(spec.num_rows, spec.size, *self.form, device="meta")
        stacks = {
            name: torch.zeros((count, *tensor.shape), dtype=tensor.dtype, device=spec.device)
            for name, tensor in one.tensors().items()
        }
        self.stack = one.with_tensors(stacks)
        self.matrices = [
            one.with_tensors({name: stack[number] for name, stack in stacks.items()})
            for number in range(count)
        ]
        return stacks

    def fill(self, rows: CodedRows | torch.Tensor, first: int, expert: int) -> None:
        """Put a file's codes into place if they fit the form; otherwise round the numbers they stand for."""
        device = self.spec.device
        begin = moment(device)
        if self.order is not None and isinstance(rows, CodedRows):
            rows, order = rows.in_order()
            self.order.copy_(order)
        fitted = fit_rows(rows, self.form) if isinstance(rows, CodedRows) else None
        is_fitted = fitted is not None
        if fitted is None:
            fitted = round_rows(rows.numbers() if isinstance(rows, CodedRows) else rows, self.form)
        self.matrices[expert].fill(first, *fitted)
        if isinstance(rows, CodedRows) and rows.outliers is not None and is_fitted:
            sparse, added = self.matrices[expert].outliers, rows.outliers
            assert sparse is not None, self.spec
            at = added.rows(), added.columns, added.values
            sparse.fill(first, len(rows.codes), *at, self.spec.size)
        if not isinstance(rows, CodedRows):  # codes of a file need not be cached
            self._made.append((begin, moment(device)))

    def num_rows_at_once(self) -> int:
        """The number of rows, in whole blocks, that keeps a GPU busy."""
        return max(1, _CHUNK_NUMBERS[self.form.bits] // self.spec.size // BLOCK_ROWS) * BLOCK_ROWS

    @property
    def weights(self) -> CodedWeights:
        """The matrix, if there is only one."""
        return self.matrices[0]

    def scratch_bytes(self, num_tokens: int) -> int:
        """The bytes of W unpacked to the dtype, or of its codes and 32-bit sums.

        With act-order, also the bytes of the tokens with reordered columns.
        """
        spec = self.spec
        few = device_profile(self.matrices[0].cells.device).linear.few_coded_tokens
        if spec.num_experts is not None:  # a token has at least one expert
            many = num_tokens > MAX_ROWS * spec.num_experts // _MOST_CHOICES
            is_unpacked = many and self.bias is None and not self.batch_invariant
            return spec.num_weights * spec.dtype.itemsize if is_unpacked else 0
        if num_tokens <= few:
            return 0
        sums = min(num_tokens, INT8_TOKENS) * (4 * spec.num_rows + spec.size) if spec.int8_tokens else 0
        gathered = 0 if self.order is None else num_tokens * spec.size * spec.dtype.itemsize
        return gathered + max(spec.num_weights * spec.dtype.itemsize, spec.num_weights + sums)

    # -- how it multiplies ------------------------------------------------------------------------------

    def invariant(self) -> Projection | None:
        """A projection with these codes in which a row's bits do not depend on the other rows."""
        projection = InvariantGPUWeights(self.spec, self.matrices, self.stack, self.order)
        projection.bias = self.bias
        return projection

    def prepare(self, compiled: CompiledLinears, neighbours: Neighbours) -> None:
        """Request the kernels in CUDA C++, and enable the fusion that they support."""
        spec, (reads, writes, activation, is_head) = self.spec, neighbours
        if spec.num_experts is not None:
            return
        self.compiled = compiled
        self.can_add = writes and use_triton(self.weights.cells) and self.weights.outliers is None
        if spec.dtype is torch.bfloat16:
            has_bias, has_outliers = self.bias is not None, self.weights.outliers is not None
            activation = "" if has_bias or has_outliers else activation
            N, form = spec.num_rows // 2 if activation else spec.num_rows, self.weights.form
            reads, writes = reads and self.order is None and not has_outliers, writes and not has_outliers
            compiled.want(Matrix(N, spec.size, activation, has_bias, reads, writes, form), is_head=is_head)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b."""
        return self.project_rows(x, "")

    def project_rows(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Multiply, with the gate in the same launch if there is a kernel for it."""
        rows = self._ordered(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
        y = coded_linear(
            rows, self.weights, self.bias, activation=activation, compiled=self.compiled,
            int8_tokens=self.spec.int8_tokens,
        )  # fmt: skip
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.order is None else gather_columns(x, self.order)

    def _restored(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of W with the columns in the order of x."""
        return rows if self.order is None else rows[..., self.order.argsort()]

    def project_sum(self, total: ResidualSum, eps: float, activation: str) -> torch.Tensor:
        """Finish the norm and multiply in one launch."""
        plan = plan_of(total.scaled_MN, self.weights, gated=bool(activation), compiled=self.compiled)
        assert plan is not None, "`reads_sum` returned True"
        return launch_of_sum(plan, total, self.weights, eps=eps, bias_N=self.bias, activation=activation)

    def reads_sum(self, x: torch.Tensor, num_parts: int, activation: str) -> bool:
        """Return True if this matrix's kernel can finish the norm of a sum for as many tokens as `x` has."""
        if self.order is not None or self.weights.outliers is not None:
            return False
        if activation and self.bias is not None:
            return False
        return plan_of(x, self.weights, gated=bool(activation), compiled=self.compiled) is not None

    def add_to(
        self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm, reader: Projection, activation: str
    ) -> torch.Tensor | ResidualSum:
        """Multiply and add in one launch, if the reader can read the sum."""
        plan = plan_of(x, self.weights, gated=False, compiled=self.compiled)
        if plan is not None and reader.reads_sum(x, plan.num_parts(self.spec.num_rows), activation):
            stream = ResidualInput(residual, norm.weight, norm.offset)
            return launch_add(plan, stream, self._ordered(x), self.weights, self.bias)
        return self.multiply(x)

    def dequantized(self) -> torch.Tensor:
        """W as float32."""
        if use_triton(self.weights.cells):
            return self._restored(expand(self.weights, torch.float32))
        return self._restored(self.weights.dequantized())

    def lookup(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of W for a tied embedding."""
        return self._restored(look_up(self.weights, ids_T, self.spec.dtype))

    # -- experts ----------------------------------------------------------------------------------------

    @property
    def stacked(self) -> CodedWeights | None:
        """The codes of all experts, if GPU kernels can read them."""
        return self.stack if self.spec.dtype is torch.bfloat16 else None

    def prepare_experts(self, compiled: CompiledLinears, activation: str) -> None:
        """Request the kernels for rows that are grouped by expert."""
        stack, rows = self.stacked, self.spec.num_rows
        if stack is not None:
            self.grouped = GroupedLinear(
                stack.form, rows // 2 if activation else rows, self.spec.size, activation
            )
            compiled.use(self.grouped)
            self.many = ManyRows.of(compiled, rows, self.spec.size, activation)

    def make_expert(self, number: int, spec: WeightSpec) -> Projection:
        """Make the projection of one expert from its matrix."""
        return type(self)(spec, [self.matrices[number]])

    def experts_mlp(
        self, x_TD: torch.Tensor, choices: Choices, down: Projection, activation: str
    ) -> torch.Tensor | PendingProduct:
        """Send each token through its experts, with a few launches for all of them if there are kernels."""
        both = self.stack, down.stack if isinstance(down, GPUWeights) else None
        if not use_triton(x_TD) or both[0] is None or both[1] is None:
            return super().experts_mlp(x_TD, choices, down, activation)
        if self.bias is not None and down.bias is not None:
            products = coded_products(both[0], both[1], invariant=self.batch_invariant)
            return biased_experts_mlp(x_TD, *choices, products, self.bias, down.bias, activation=activation)
        outputs_TCD = coded_expert_rows(
            x_TD, *choices, both[0], both[1], activation=activation,
            compiled=(self.grouped, down.grouped if isinstance(down, GPUWeights) else None),
            invariant=self.batch_invariant, many=(self.many, down.many),
        )  # fmt: skip
        return SumOfChoices.pending(outputs_TCD, down)


class InvariantGPUWeights(GPUWeights):
    """The same weights, unpacked for every product, so that a row's bits do not depend on the other rows."""

    batch_invariant = True
    prepare, invariant = Projection.prepare, Projection.invariant
    prepare_experts = Projection.prepare_experts
    project_rows, reads_sum = Projection.project_rows, Projection.reads_sum

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b, each row as if it were the only one."""
        codes = self.weights
        weight = expand(codes, x.dtype) if use_triton(x) else codes.dequantized().to(x.dtype)
        return linear_invariant(x if self.order is None else x[..., self.order], weight, self.bias)
