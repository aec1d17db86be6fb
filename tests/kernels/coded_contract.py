"""What every way to multiply with coded weights has to give: the numbers that the codes stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from infer.kernels.elementwise.gated_activation import gated_activation_reference
from infer.kernels.linear import coded_linear as coded_linear_module
from infer.kernels.linear.coded_linear import (
    coded_linear,
    expand,
    look_up,
    multiply_in_int8,
    quantize_blocks,
)
from infer.kernels.linear.coded_triton import gather_columns, gather_columns_reference, quantize_rows
from infer.kernels.linear.outliers import SparseRows
from tests.unit.kernels.test_linear_coded import FORMS, Filled


class CodedContract:
    """Run by the interpreter on a CPU, and on a GPU."""

    device: str
    sizes = [(72, 200)]
    tokens = [17]

    @pytest.mark.parametrize("name", FORMS)
    def test_rows_are_unpacked_and_looked_up(self, name: str) -> None:
        for sizes in self.sizes:
            filled = Filled(name, *sizes, device=self.device)
            expected = filled.weights.dequantized()
            torch.testing.assert_close(expand(filled.weights, torch.float32), expected, rtol=1e-6, atol=1e-7)
            ids = torch.tensor([sizes[0] - 1, 0, 9, 9], device=self.device)
            rows = look_up(filled.weights, ids, torch.float32)
            torch.testing.assert_close(rows, expected[ids], rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("name", FORMS)
    def test_products(self, name: str) -> None:
        for num_rows, size in self.sizes:
            filled = Filled(name, num_rows, size, device=self.device)
            for num_tokens in self.tokens:
                x = torch.randn(num_tokens, 2 * size, device=self.device).bfloat16()[:, :size] * 0.1
                check_products(filled, x, torch.randn(num_rows, device=self.device).bfloat16())

    @pytest.mark.parametrize("name", ["lut4", "int4-32"])
    def test_outliers(self, name: str) -> None:
        """Rows come in any order; one has none, one has many, and some elements have two."""
        for num_rows, size in self.sizes:
            filled = Filled(name, num_rows, size, device=self.device)
            rows = torch.cat((torch.randint(0, num_rows, (200,)), torch.full((70,), 5))).sort().values
            rows = rows[rows != 7]
            columns = torch.randint(0, size, (len(rows),))
            columns[1:3] = columns[0]
            values = torch.randn(len(rows)).bfloat16().float()
            sparse = SparseRows.empty(num_rows, len(rows), self.device)
            half = num_rows // 2
            for first, last in ((half, num_rows), (0, half)):
                inside = (rows >= first) & (rows < last)
                where = rows[inside] - first, columns[inside]
                sparse.fill(first, last - first, *where, values[inside], size)
            filled.numbers = filled.numbers.index_put((rows, columns), values, accumulate=True)
            filled.weights = replace(filled.weights, outliers=sparse)
            torch.testing.assert_close(
                filled.weights.dequantized().cpu(), filled.numbers, rtol=1e-5, atol=1e-6
            )
            unpacked = expand(filled.weights, torch.float32).cpu()
            torch.testing.assert_close(unpacked, filled.numbers, rtol=1e-5, atol=1e-6)
            for num_tokens in {1, *self.tokens}:  # the product is rounded before and after they are added
                x = torch.randn(num_tokens, 2 * size, device=self.device).bfloat16()[:, :size] * 0.1
                bias = torch.randn(num_rows, device=self.device).bfloat16()
                check_products(filled, x, bias, tolerance=2**-6)

    @pytest.mark.parametrize(("has_bias", "is_split"), [(True, True), (False, False)])
    def test_products_of_tokens_in_int8(
        self, has_bias: bool, is_split: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tokens have the nearest codes, either one of a tie; integers are multiplied exactly."""
        monkeypatch.setattr(coded_linear_module, "INT8_TOKENS", 20 if is_split else 2048)
        filled = Filled("int8", 80, 208, device=self.device)
        x = torch.randn(36, 400, device=self.device).bfloat16()[:, :208]
        x[3] *= 100
        bias = torch.randn(80, device=self.device).bfloat16() if has_bias else None
        codes, scales = quantize_rows(x, torch.int8)
        torch.testing.assert_close(scales, x.float().abs().amax(1, keepdim=True) / 127)
        assert ((x.float() / scales - codes.float()).abs() < 0.5001).all()
        expected = codes.float() * scales @ filled.numbers.to(self.device).T
        expected += 0 if bias is None else bias.float()
        found = multiply_in_int8(x, filled.weights, bias)
        torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2e-3)
        x[5, 7] = torch.nan
        lost = multiply_in_int8(x, filled.weights, bias).isnan().all(1)
        assert lost.nonzero().flatten().tolist() == [5]

    def test_columns_in_another_order(self) -> None:
        x = torch.randn(7, 2100, device=self.device).bfloat16()[:, :1500]
        order = torch.randperm(1500, device=self.device).int()
        assert torch.equal(gather_columns(x, order), x[:, order])
        assert torch.equal(gather_columns_reference(x, order), x[:, order])

    def test_tokens_in_fp8(self) -> None:
        """The largest number has the largest code; a NaN is in the scale that multiplies its product."""
        x = torch.randn(3, 512, device=self.device).bfloat16()
        for quantize, columns in ((quantize_rows, 512), (quantize_blocks, 128)):
            expected = x.float().view(3, -1, columns).abs().amax(2) / 448
            torch.testing.assert_close(quantize(x)[1][:3], expected)
            broken = x.clone()
            broken[1, 300] = torch.nan
            lost = quantize(broken)[1][:3].isnan().repeat_interleave(columns, 1)
            assert bool(lost[1, 300]) and int(lost.sum()) == columns

    def test_a_scale_of_each_token_errs_no_more_than_one_of_a_file(self) -> None:
        """Against float64; the file's scale is that of the loudest activation of half of the tokens."""
        torch.manual_seed(0)
        filled = Filled("fp8", 96, 512, device=self.device)
        x = torch.randn(48, 512, device=self.device) * torch.randn(48, 1, device=self.device).mul(1.5).exp()
        x[:, ::61] *= 20
        static = x[:24].bfloat16().float().abs().max() / 448
        quiet, loud = 40, 41
        x[quiet] *= static * 0.02 / x[quiet].abs().max()
        x[loud] *= static * 4480 / x[loud].abs().max()
        x = x.bfloat16()
        scales = quantize_rows(x)[1]
        w = filled.numbers.to(self.device).double()
        exact = x.double() @ w.T
        own, shared = (
            ((x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale @ w.T - exact)
            .norm(dim=1)
            .div(exact.norm(dim=1))
            for scale in (scales, static)
        )
        assert own.max() < 0.06 and own.mean() < shared[:quiet].mean()
        assert shared[quiet] > 3 * own[quiet] and shared[loud] > 10 * own[loud]

    def test_tokens_in_the_order_of_cells(self) -> None:
        """Four neighbours are the columns that a lane has of W: 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16."""
        x = torch.randn(3, 384, device=self.device).bfloat16()
        codes, scales = quantize_rows(x)
        in_order, same_scales = quantize_rows(x, as_cells=True)
        columns = [16 * i + 2 * t + c for i in range(24) for t in range(4) for c in (0, 1, 8, 9)]
        assert torch.equal(in_order.view(torch.uint8), codes.view(torch.uint8)[:, columns])
        assert torch.equal(same_scales, scales)


def check_products(filled: Filled, x: torch.Tensor, bias: torch.Tensor, tolerance: float = 2**-7) -> None:
    """Plain, with a bias, and gated; an error is measured by the sum of what was added."""
    numbers = filled.numbers.to(x.device)
    expected = F.linear(x.float(), numbers)
    bound = tolerance * F.linear(x.float().abs(), numbers.abs()) + 1e-3
    assert ((coded_linear(x, filled.weights).float() - expected).abs() <= bound).all()
    biased = coded_linear(x, filled.weights, bias).float()
    assert ((biased - expected - bias.float()).abs() <= bound + tolerance * bias.float().abs()).all()
    if len(numbers) % 2 == 0:
        gated = coded_linear(x, filled.weights, activation="silu").float()
        expected = gated_activation_reference(expected, "silu")
        assert torch.isclose(gated, expected, rtol=0.05, atol=0.05 * expected.abs().max().item()).all()
