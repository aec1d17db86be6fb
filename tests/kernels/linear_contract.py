"""What the linears of few tokens promise, wherever they run: under Triton's interpreter and on a GPU.

The traps are those of `kernel_contract.py`: inputs framed by NaN, outputs that start as NaN. Sums over K
are compared with float64, so that a float32 kernel has to be right to the last few bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from infer.errors import ConfigError
from infer.kernels.elementwise.gated_activation import ACTIVATIONS
from infer.kernels.elementwise.rms_norm import rms_norm, rms_norm_reference
from infer.kernels.linear import (
    invariant as linear_invariant,
)
from infer.kernels.linear import (
    small as linear_small,
)
from infer.kernels.linear import (
    triton_configs as linear_configs,
)
from infer.kernels.linear.small import (
    linear,
    norm_linear,
    split_linear,
)
from infer.kernels.linear.triton_configs import GemvConfig, SkinnyConfig
from infer.kernels.runtime.dispatch import use_triton
from infer.kernels.runtime.profiles import device_profile, using_profile
from tests.kernels.kernel_contract import FramedTensor, nan_in_fresh_memory

# Of the result, relative to its largest element: one rounding for y, and for bfloat16 another of r * weight.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
EPS = 1e-5
N, K = 70, 150  # multiples of no block
TOKENS = [1, 2, 3, 5, 8, 17, 33]
FOLDED_TOKENS = [3, 5]  # the last one is normalised by a launch of its own


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the tolerance of the type, of the largest element: an element may be small by cancellation."""
    assert actual.is_contiguous() and actual.shape == expected.shape
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[actual.dtype], f"{error:.1e}"  # NaN fails, too


def gate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """The gate in the type of its argument."""
    first, second = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](first) * second


class LinearContract:
    """Subclass it with a `device` on which `use_triton` holds."""

    device: str

    @pytest.fixture(autouse=True)
    def seed(self) -> None:
        torch.manual_seed(0)

    @pytest.fixture(autouse=True)
    def configs(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Tiles so small that N and K take several of them and that K is split."""
        gemv = GemvConfig(64, 64, num_warps=4)  # one warp would spill registers, and compile for a minute
        skinny = SkinnyConfig(64, 64, split_k=3, num_warps=4, num_stages=2)
        monkeypatch.setattr(linear_small, "gemv_config", lambda *_: gemv)
        monkeypatch.setattr(linear_small, "skinny_config", lambda *_: skinny)
        monkeypatch.setattr(linear_invariant, "invariant_config", lambda *_: skinny)
        own = device_profile(torch.device(self.device))
        with using_profile(replace(own, linear=replace(own.linear, fold_norm_tokens=4))):
            yield

    def framed(self, *shape: int, dtype: torch.dtype) -> FramedTensor:
        return FramedTensor(shape, dtype, self.device)

    def vector(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(size, device=self.device).to(dtype)

    def test_the_kernels_and_not_the_references_are_under_test(self) -> None:
        x = torch.zeros(1, 8, device=self.device)
        assert use_triton(x) and linear_small._plan(x, x, gated=False) is not None

    @pytest.mark.parametrize("num_tokens", TOKENS)
    def test_linear(self, num_tokens: int) -> None:
        x, w = self.framed(num_tokens, K, dtype=torch.float32), self.framed(N, K, dtype=torch.float32)
        with nan_in_fresh_memory():
            y = linear(x.view, w.view)
        assert_near(y, x.view.double() @ w.view.double().T)
        x.assert_untouched()
        w.assert_untouched()

    @pytest.mark.parametrize("num_tokens", [2, 6])
    def test_linear_in_the_tiles_that_the_rules_choose(
        self, num_tokens: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(linear_small, "gemv_config", linear_configs.gemv_config)
        monkeypatch.setattr(linear_small, "skinny_config", linear_configs.skinny_config)
        x, w = self.framed(num_tokens, 515, dtype=torch.float32), self.framed(9, 515, dtype=torch.float32)
        assert_near(linear(x.view, w.view), x.view.double() @ w.view.double().T)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("num_tokens", [4, 6])
    def test_linear_with_a_bias_in_half_precision(self, num_tokens: int, dtype: torch.dtype) -> None:
        x, w = self.framed(num_tokens, K, dtype=dtype), self.framed(N, K, dtype=dtype)
        bias = self.vector(N, dtype) * 20
        y = linear(x.view, w.view, bias)
        assert y.dtype == dtype
        assert_near(y, x.view.double() @ w.view.double().T + bias.double())

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("num_tokens", [2, 7])
    def test_gated_linear(self, num_tokens: int, activation: str) -> None:
        x, w = self.framed(num_tokens, K, dtype=torch.float32), self.framed(2 * N, K, dtype=torch.float32)
        w.view.mul_(0.1)  # gates around 1
        with nan_in_fresh_memory():
            y = linear(x.view, w.view, activation=activation)
        assert_near(y, gate(x.view.double() @ w.view.double().T, activation))

    @pytest.mark.parametrize("offset", [0.0, 1.0])
    @pytest.mark.parametrize("num_tokens", FOLDED_TOKENS)
    def test_norm_linear(self, num_tokens: int, offset: float) -> None:
        x, residual = (self.framed(num_tokens, K, dtype=torch.float32) for _ in range(2))
        w, gain = self.framed(N, K, dtype=torch.float32), self.vector(K, torch.float32)
        bias = self.vector(N, torch.float32)
        with nan_in_fresh_memory():
            y, total = norm_linear(x.view, residual.view, gain, EPS, offset, w.view, bias)
        assert torch.equal(total, x.view + residual.view)
        normed = rms_norm_reference(total.double(), gain.double(), EPS, 0.0)
        if offset:
            normed += rms_norm_reference(total.double(), torch.ones_like(gain).double(), EPS, 0.0)
        assert_near(y, normed @ w.view.double().T + bias.double())
        x.assert_untouched()
        residual.assert_untouched()

    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("num_tokens", [2, 8])
    def test_norm_gated_linear(self, num_tokens: int, dtype: torch.dtype) -> None:
        x, residual = (self.framed(num_tokens, K, dtype=dtype) for _ in range(2))
        w, gain = self.framed(2 * N, K, dtype=dtype), self.vector(K, dtype)
        w.view.mul_(0.1)
        with nan_in_fresh_memory():
            y, total = norm_linear(x.view, residual.view, gain, EPS, 0.0, w.view, activation="silu")
        assert_near(total, (x.view + residual.view).double())
        normed = rms_norm_reference(total.double(), gain.double(), EPS, 0.0)
        assert_near(y, gate(normed @ w.view.double().T, "silu"))

    @pytest.mark.parametrize("num_tokens", FOLDED_TOKENS)
    def test_without_a_residual_the_input_itself_is_normalised(self, num_tokens: int) -> None:
        x, w = self.framed(num_tokens, K, dtype=torch.float32), self.framed(N, K, dtype=torch.float32)
        gain = self.vector(K, torch.float32)
        y, total = norm_linear(x.view, None, gain, EPS, 0.0, w.view)
        assert_near(y, rms_norm_reference(x.view.double(), gain.double(), EPS, 0.0) @ w.view.double().T)
        assert torch.equal(total, x.view)
        x.assert_untouched()

    @pytest.mark.parametrize(("sizes", "norm"), [((1, 3, 4), True), ((5, 11, 33), False)], ids=str)
    def test_a_row_has_the_same_bits_in_every_batch_of_its_kernel(
        self, sizes: tuple[int, ...], norm: bool
    ) -> None:
        x = torch.randn(max(sizes), K, device=self.device).bfloat16()
        w = torch.randn(2 * N, K, device=self.device).bfloat16() * 0.1
        gain = self.vector(K, torch.bfloat16)

        def run(rows: torch.Tensor) -> torch.Tensor:
            if norm:
                return norm_linear(rows, rows, gain, EPS, 0.0, w, activation="silu")[0]
            return linear(rows, w, activation="silu")

        whole = run(x)
        for size in sizes:
            assert torch.equal(run(x[:size]), whole[:size]), size

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_invariant_rows_have_the_same_bits_wherever_they_stand(self, dtype: torch.dtype) -> None:
        x, w = self.framed(150, K, dtype=dtype), self.framed(N, K, dtype=dtype)
        bias = self.vector(N, dtype)
        with nan_in_fresh_memory():
            whole = linear_invariant.linear_invariant(x.view, w.view, bias)
        assert_near(whole, x.view.double() @ w.view.double().T + bias.double())
        for first, last in ((0, 1), (127, 130), (149, 150), (3, 20), (100, 150)):
            part = linear_invariant.linear_invariant(x.view[first:last], w.view, bias)
            assert torch.equal(part, whole[first:last]), (first, last)

    def test_the_counters_of_a_split_are_back_at_zero(self) -> None:
        x, w = torch.randn(6, K, device=self.device), torch.randn(N, K, device=self.device)
        first = linear(x, w)
        assert torch.equal(linear(x, w), first)
        assert not linear_small._counters(x.device).any()

    def test_an_unknown_activation_is_refused(self) -> None:
        x = torch.zeros(1, 8, device=self.device)
        with pytest.raises(ConfigError, match="silu, gelu_tanh, gelu"):
            linear(x, x.expand(2, 8), activation="swish")
        with pytest.raises(ConfigError, match="silu, gelu_tanh, gelu"):
            norm_linear(x, None, x[0], EPS, 0.0, x.expand(2, 8), activation="swish")

    def test_few_tokens_go_to_the_tensor_cores_where_they_are_faster(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(linear_small, "gemv_config", lambda *_: None)
        x, w = self.framed(3, K, dtype=torch.float32), self.framed(N, K, dtype=torch.float32)
        wide = self.framed(9, K, dtype=torch.float32)
        wide.view[:3] = x.view
        y = linear(x.view, w.view)
        assert_near(y, x.view.double() @ w.view.double().T)
        assert torch.equal(y, linear(wide.view, w.view)[:3])

    @pytest.mark.parametrize("num_tokens", [0, 130])
    def test_no_token_and_many_tokens_are_left_to_the_library(self, num_tokens: int) -> None:
        x, w = torch.randn(num_tokens, 8, device=self.device), torch.randn(6, 8, device=self.device)
        y, total = norm_linear(x, x, w[0], EPS, 0.0, w, activation="silu")
        assert y.shape == (num_tokens, 3) and torch.equal(total, x + x)
        assert linear(x, w).shape == (num_tokens, 6)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_a_product_in_parts_that_the_next_norm_adds_up(self, dtype: torch.dtype) -> None:
        """65 outputs of 4,096 inputs would leave a GPU idle; with 33 tokens a kernel of ours is there."""
        T, D, F_in = 130, 65, 4096
        x, w, w2 = (torch.randn(s, device=self.device).to(dtype) for s in ((T, F_in), (D, F_in), (2 * D, D)))
        residual, gain = torch.randn(T, D, device=self.device).to(dtype), self.vector(D, dtype)
        parts = split_linear(x, w)
        assert parts is not None and parts.dtype == torch.float32
        assert parts.shape[0] > 1 and parts.shape[1:] == (T, D)
        pieces = [
            a.double() @ b.double().T for a, b in zip(*(v.chunk(len(parts), 1) for v in (x, w)), strict=True)
        ]
        torch.testing.assert_close(parts.double(), torch.stack(pieces), rtol=1e-4, atol=1e-3)
        y, total = norm_linear(parts, residual, gain, EPS, 0.0, w2)
        gated, same_total = norm_linear(parts, residual, gain, EPS, 0.0, w2, activation="silu")
        exact = sum(pieces) + residual.double()
        assert_near(total, exact)
        assert torch.equal(total, same_total)
        products = rms_norm_reference(total.double(), gain.double(), EPS, 0.0) @ w2.double().T
        assert_near(y, products)
        assert_near(gated, gate(F.linear(rms_norm(total, gain, eps=EPS), w2).double(), "silu"))

    def test_what_is_not_cut_into_parts(self) -> None:
        x, w = torch.zeros(130, 4096, device=self.device), torch.zeros(64, 4096, device=self.device)
        assert split_linear(x, w) is None  # float32 is not multiplied by matrix units
        x, w = x.bfloat16(), w.bfloat16()
        assert split_linear(x[:33], w) is None  # a kernel of ours
        assert split_linear(x[:, :96], w[:, :96]) is None  # not whole pieces
        assert split_linear(x[None], w) is None
