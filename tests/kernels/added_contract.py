"""What two linears around an addition promise: together they are two products with `add_rms_norm` between.

    linear_add       into the residual stream, with the gain of the norm that reads it
    linear_of_sum    out of it, with what is left of the norm

Weights that are small integers make the product exact, whatever the order of its additions: then the sum has
to have the reference's bits.
"""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from infer.errors import ConfigError
from infer.kernels.attention.reference import attend_naive
from infer.kernels.elementwise.rms_norm import add_rms_norm_reference
from infer.kernels.linear import small as linear_small
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.linear.small import can_add, linear_add, linear_of_sum
from infer.kernels.linear.triton_configs import GemvConfig, SkinnyConfig
from infer.layers.bind import bind
from infer.layers.whole_sequence import WholeSequence
from infer.models.registry import get_family
from scripts.make_checkpoint import Sizes, raw_config
from tests.kernels.kernel_contract import FramedTensor, nan_in_fresh_memory
from tests.kernels.linear_contract import EPS, assert_near, gate

D, K, N = 70, 150, 90  # the stream, the inputs of the first matrix, the outputs of the second
DTYPES = [torch.float32, torch.bfloat16]


class AddedContract:
    """Subclass it with a `device` on which `use_triton` holds."""

    device: str

    @pytest.fixture(autouse=True)
    def seed(self) -> None:
        torch.manual_seed(0)

    @pytest.fixture(autouse=True)
    def tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tensor cores for any number of tokens, K in three pieces."""
        self.use(monkeypatch, SkinnyConfig(64, 64, split_k=3, num_warps=4, num_stages=2))

    def use(self, monkeypatch: pytest.MonkeyPatch, tile: SkinnyConfig) -> None:
        monkeypatch.setattr(linear_small, "gemv_config", lambda *_: None)
        monkeypatch.setattr(linear_small, "skinny_config", lambda *_: tile)

    def framed(self, *shape: int, dtype: torch.dtype) -> FramedTensor:
        return FramedTensor(shape, dtype, self.device)

    def integers(self, *shape: int, dtype: torch.dtype) -> FramedTensor:
        """Of which products of K are exact in every type: at most 4 of them are not 0."""
        framed = self.framed(*shape, dtype=dtype)
        framed.view.copy_(torch.randint(-3, 4, shape) * (torch.rand(shape) < 4 / shape[1]))
        framed.before = framed.frame.clone()
        return framed

    def vector(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(size, device=self.device).to(dtype)

    @pytest.mark.parametrize("offset", [0.0, 1.0])
    @pytest.mark.parametrize("num_tokens", [2, 3, 5, 8, 17, 33, 64])
    def test_the_pair_is_two_products_and_a_norm_between(self, num_tokens: int, offset: float) -> None:
        dtype = torch.float32
        x, w = self.framed(num_tokens, K, dtype=dtype), self.framed(D, K, dtype=dtype)
        residual, w2 = self.framed(num_tokens, D, dtype=dtype), self.framed(N, D, dtype=dtype)
        gain, bias, bias2 = (self.vector(size, dtype) for size in (D, D, N))
        assert can_add(x.view, w.view, w2.view, gated=False)
        with nan_in_fresh_memory():
            added = linear_add(ResidualInput(residual.view, gain, offset), x.view, w.view, bias)
            y = linear_of_sum(added, EPS, w2.view, bias2)
        total = x.view.double() @ w.view.double().T + bias.double() + residual.view.double()
        assert_near(added.sum_MN, total)
        normed = F.rms_norm(total, (D,), gain.double() + offset, EPS)
        assert_near(y, normed @ w2.view.double().T + bias2.double())
        for tensor in (x, w, residual, w2):
            tensor.assert_untouched()

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("num_tokens", [2, 7, 33])
    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    def test_an_exact_product_leaves_the_bits_of_the_reference(
        self, num_tokens: int, dtype: torch.dtype, activation: str
    ) -> None:
        x, w = self.integers(num_tokens, K, dtype=dtype), self.integers(D, K, dtype=dtype)
        residual, w2 = self.framed(num_tokens, D, dtype=dtype), self.framed(2 * N, D, dtype=dtype)
        w2.view.mul_(0.1)
        if self.device == "cpu" and dtype == torch.bfloat16:
            residual.view.round_()  # sums that fit: the interpreter cuts off what a GPU rounds
        gain = self.vector(D, dtype)
        with nan_in_fresh_memory():
            added = linear_add(ResidualInput(residual.view, gain, 0.0), x.view, w.view)
            y = linear_of_sum(added, EPS, w2.view, activation=activation)
        _, total = add_rms_norm_reference(F.linear(x.view, w.view), residual.view, gain, EPS, 0.0)
        assert torch.equal(added.sum_MN, total)
        unit = 2**-7 if dtype == torch.bfloat16 else 2**-22
        torch.testing.assert_close(added.scaled_MN, total * gain, rtol=unit, atol=0)
        normed = added.scaled_MN.double() / (total.double().square().mean(dim=1, keepdim=True) + EPS).sqrt()
        assert_near(y, gate(normed @ w2.view.double().T, activation))

    @pytest.mark.parametrize(
        "tile",
        [
            SkinnyConfig(16, 64, split_k=1, num_warps=1, num_stages=2),
            SkinnyConfig(32, 32, split_k=2, num_warps=2, num_stages=3),
            SkinnyConfig(128, 64, split_k=8, num_warps=8, num_stages=2),
        ],
        ids=lambda tile: f"{tile.block_n}-{tile.split_k}",
    )
    def test_tiles_of_any_height(self, tile: SkinnyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, tile)
        x, w = self.framed(5, K, dtype=torch.float32), self.framed(D, K, dtype=torch.float32)
        residual, w2 = self.framed(5, D, dtype=torch.float32), self.framed(N, D, dtype=torch.float32)
        gain = self.vector(D, torch.float32)
        with nan_in_fresh_memory():
            added = linear_add(ResidualInput(residual.view, gain, 0.0), x.view, w.view)
            y = linear_of_sum(added, EPS, w2.view)
        assert len(added.squares_PM) == -(-D // tile.block_n)
        total = x.view.double() @ w.view.double().T + residual.view.double()
        torch.testing.assert_close(added.squares_PM.sum(dim=0), total.square().sum(dim=1), rtol=1e-5, atol=0)
        assert_near(y, F.rms_norm(total, (D,), gain.double(), EPS) @ w2.view.double().T)

    def test_a_row_has_the_same_bits_in_every_batch_and_in_tiles_of_every_height(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes = (2, 5, 17, 40)
        x, residual = (torch.randn(40, size, device=self.device).bfloat16() for size in (K, D))
        w, w2 = ((torch.randn(*shape, device=self.device) * 0.1).bfloat16() for shape in ((D, K), (2 * N, D)))
        gain = self.vector(D, torch.bfloat16)

        def run(size: int) -> tuple[ResidualSum, torch.Tensor]:
            added = linear_add(ResidualInput(residual[:size], gain, 0.0), x[:size], w)
            return added, linear_of_sum(added, EPS, w2, activation="silu")

        whole, y = run(40)
        for size, block_n in zip(sizes, (64, 64, 128, 64), strict=True):
            self.use(monkeypatch, SkinnyConfig(block_n, 64, split_k=3, num_warps=4, num_stages=2))
            added, part = run(size)
            assert torch.equal(added.sum_MN, whole.sum_MN[:size]), size
            assert torch.equal(added.scaled_MN, whole.scaled_MN[:size]), size
            assert torch.equal(part, y[:size]), size

    def test_who_can_add(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x, w, w2 = (torch.zeros(*shape, device=self.device) for shape in ((5, K), (D, K), (2 * N, D)))
        assert can_add(x, w, w2, gated=True) and can_add(
            x.bfloat16(), w.bfloat16(), w2.bfloat16(), gated=False
        )
        assert not can_add(x.half(), w.half(), w2.half(), gated=True)  # r * gain may be too large
        assert not can_add(x[None], w, w2, gated=True)
        assert not can_add(torch.zeros(129, K, device=self.device), w, w2, gated=True)  # the library
        assert not can_add(x, w, w2.bfloat16(), gated=True)
        long, reader = torch.zeros(4160, K, device=self.device), torch.zeros(8, 4160, device=self.device)
        assert can_add(x, long, reader, gated=False)  # 65 tiles
        assert not can_add(torch.zeros(17, K, device=self.device), long, reader, gated=False)
        tile = SkinnyConfig(64, 64, split_k=1, num_warps=4, num_stages=2)
        for missing in ((D, K, False), (N, D, True)):  # either of them is the library's
            monkeypatch.setattr(
                linear_small,
                "skinny_config",
                lambda n, k, gated, *_, missing=missing: None if (n, k, gated) == missing else tile,
            )
            assert not can_add(x, w, w2, gated=True) and not can_add(x, w, w2, gated=(missing[0] == N))
        monkeypatch.setattr(linear_small, "skinny_config", lambda *_: tile)
        monkeypatch.setattr(linear_small, "gemv_config", lambda *_: GemvConfig(64, 64, num_warps=1))
        assert can_add(x, w, w2, gated=True) and not can_add(x[:4], w, w2, gated=True)  # dot products

    @pytest.mark.parametrize(
        ("family", "changes", "num_added"),
        [
            ("llama", {"attention_bias": True, "mlp_bias": True}, 3),  # both layers but the very end
            ("qwen3", {}, 3),
            ("mixtral", {}, 0),  # experts read and write the stream in their own ways
        ],
    )
    def test_a_model_is_the_same_whichever_kernel_adds(
        self, family: str, changes: dict[str, bool], num_added: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chosen = get_family(family)
        raw = raw_config(family, Sizes()) | changes
        with torch.device(self.device):
            model = chosen.build(chosen.read_config(raw)).eval()
        for parameter in model.parameters():
            parameter.data.normal_(std=0.2)
        tokens = torch.randint(0, model.config.vocab_size, (5,), device=self.device)
        add = Mock(side_effect=linear_add)
        monkeypatch.setattr("infer.quant.dense.linear_add", add)
        bind(model, torch.device(self.device), deterministic=False)()

        def run() -> torch.Tensor:
            step = WholeSequence(attend_naive, tokens.device)
            step.advance(5)
            hidden: torch.Tensor = model(tokens, step)
            return hidden

        with nan_in_fresh_memory():
            hidden = run()
        assert add.call_count == num_added
        monkeypatch.setattr("infer.quant.dense.writes_parts", lambda *_, **__: None)
        torch.testing.assert_close(hidden, run(), rtol=1e-4, atol=1e-4)
        assert add.call_count == num_added

    def test_an_unknown_activation_is_refused(self) -> None:
        x = torch.zeros(5, 8, device=self.device)
        with pytest.raises(ConfigError, match="silu, gelu_tanh, gelu"):
            linear_of_sum(ResidualSum(x, x, x), EPS, x, activation="swish")
