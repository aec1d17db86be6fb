"""What the kernel of coded experts promises, under Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from infer.kernels.elementwise.gated_activation import CLAMPED, gated_activation_reference
from infer.kernels.linear.coded import CodedForm, CodedWeights
from infer.kernels.moe.biased import biased_experts_mlp, coded_products, dense_products
from infer.kernels.moe.coded_grouped import coded_expert_rows
from infer.kernels.moe.grouped import by_expert, experts_mlp_reference, sum_choices

FORMS = {
    "fp8": CodedForm("fp8"),
    "fp8-blocks": CodedForm("fp8", 128, False, 128),
    "int8-32": CodedForm("int8", 32),
    "int4-minima": CodedForm("int4", 32, True),
    "int4-64": CodedForm("int4", 64),
    "mxfp4": CodedForm("mxfp4", 32),
    "nf4": CodedForm("nf4", 64),
    "lut4": CodedForm("lut4"),
}
D, SIZE = 96, 80  # not whole bands of gate and up, nor whole tiles along K
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2}  # weights, gate and outputs are rounded


TOKENS = (1, 5, 33)
# Each form once, types and numbers of tokens in turns; what is left is slow.
CASES = [
    pytest.param(name, num_tokens, dtype, marks=[pytest.mark.slow] * ((i + j + k) % 3 > 0 or (i + k) % 2))
    for i, name in enumerate(FORMS)
    for j, num_tokens in enumerate(TOKENS)
    for k, dtype in enumerate(TOLERANCE)
]


class CodedMoeContract:
    """Subclass it with a `device` on which `use_triton` holds."""

    device: str

    def stack(self, form: CodedForm, num_experts: int, num_rows: int, size: int) -> CodedWeights:
        """Random codes of all experts."""
        one = CodedWeights.empty(num_rows, size, *form, device="meta")
        stacks = {
            name: torch.zeros((num_experts, *tensor.shape), dtype=tensor.dtype, device=self.device)
            for name, tensor in one.tensors().items()
        }
        num_groups, table = -(-size // (form.group or size)), torch.randn(1, 16)
        for number in range(num_experts):
            codes = torch.randint(0, 16, (num_rows, size), dtype=torch.uint8)
            if form.bits == 8:
                codes = (codes.float() - 7.5).to(torch.float8_e4m3fn if form.codes == "fp8" else torch.int8)
            scales = torch.rand(1 if form.scale_rows > 1 else num_rows, num_groups) * 0.1 + 0.01
            scales = scales.expand(num_rows, -1).contiguous()
            minima = -torch.rand(num_rows, num_groups) if form.has_minima else None
            zeros = 8 if form.codes == "int4" and minima is None else 0
            matrix = one.with_tensors({name: stack[number] for name, stack in stacks.items()})
            own = {"nf4": table, "lut4": torch.randn(num_rows, 16)}.get(form.codes)
            matrix.fill(0, codes, scales, minima, zeros, own)
        return one.with_tensors(stacks)

    def numbers(self, stack: CodedWeights) -> torch.Tensor:
        return torch.stack(
            [
                stack.with_tensors({name: t[number] for name, t in stack.tensors().items()}).dequantized()
                for number in range(len(stack.cells))
            ]
        )

    @pytest.mark.parametrize(("name", "num_tokens", "dtype"), CASES)
    def test_it_equals_the_reference_with_its_numbers(
        self, name: str, num_tokens: int, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(num_tokens)
        gate_up, down = self.stack(FORMS[name], 4, 2 * SIZE, D), self.stack(FORMS[name], 4, D, SIZE)
        x = (torch.randn(num_tokens, D) * 0.3).to(self.device, dtype)
        experts = torch.stack([torch.randperm(4)[:2] for _ in range(num_tokens)]).int().to(self.device)
        shares = torch.rand(num_tokens, 2).to(self.device)
        for invariant in (False, True):
            rows = coded_expert_rows(
                x, experts, shares, gate_up, down, activation="silu", invariant=invariant
            )
            y = sum_choices(rows)
            numbers = self.numbers(gate_up).double(), self.numbers(down).double()
            expected = experts_mlp_reference(x.double(), experts, shares.double(), *numbers, "silu")
            error = (y.double() - expected).abs().max() / expected.abs().max()
            assert error < TOLERANCE[dtype], float(error)

    @pytest.mark.parametrize("name", ["mxfp4", "int8-32"])
    def test_biases_and_the_clamped_gate_of_gpt_oss(self, name: str) -> None:
        torch.manual_seed(0)
        gate_up, down = self.stack(FORMS[name], 4, 2 * SIZE, D), self.stack(FORMS[name], 4, D, SIZE)
        numbers = self.numbers(gate_up), self.numbers(down)
        biases = torch.randn(4, 2 * SIZE).to(self.device), torch.randn(4, D).to(self.device)
        x = 2 * torch.randn(5, D).to(self.device)  # some gates are clamped
        experts = torch.stack([torch.randperm(4)[:2] for _ in range(5)]).int().to(self.device)
        shares = torch.rand(5, 2).to(self.device)

        def one_expert(expert: int, rows: torch.Tensor) -> torch.Tensor:
            both = F.linear(rows, numbers[0][expert].double(), biases[0][expert].double())
            gated = gated_activation_reference(both, CLAMPED)
            return F.linear(gated, numbers[1][expert].double(), biases[1][expert].double())

        expected = by_expert(x.double(), experts, shares.double(), one_expert)
        for products in (
            coded_products(gate_up, down, invariant=False),
            coded_products(gate_up, down, invariant=True),
            dense_products(*(each.contiguous() for each in numbers), invariant=False),
        ):
            y = biased_experts_mlp(x, experts, shares, products, *biases, activation=CLAMPED)
            error = (y.double() - expected).abs().max() / expected.abs().max()
            assert error < TOLERANCE[torch.float32], float(error)

    def test_no_tokens(self) -> None:
        stacks = self.stack(FORMS["fp8"], 4, 2 * SIZE, D), self.stack(FORMS["fp8"], 4, D, SIZE)
        experts, shares = torch.empty((0, 2), dtype=torch.int32), torch.empty((0, 2))
        x = torch.empty((0, D), device=self.device)
        y = coded_expert_rows(x, experts.to(self.device), shares.to(self.device), *stacks, activation="silu")
        assert y.shape == (0, 2, D) and sum_choices(y).shape == (0, D)
