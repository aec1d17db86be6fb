"""The linear that holds its weights early, emulated: its index maps, its sums across warps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from infer.kernels.elementwise.rms_norm import add_rms_norm_reference
from infer.kernels.linear import cuda as linear_cuda
from infer.kernels.linear import pdl as linear_pdl
from infer.kernels.linear import small as linear_small
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.pdl import PdlConfig
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.linear.small import (
    can_add,
    launch,
    launch_add,
    launch_of_sum,
    linear,
    linear_add,
    linear_of_sum,
)
from tests.kernels.emulated_linear import EmulatedLaunch
from tests.kernels.kernel_contract import nan_in_fresh_memory
from tests.kernels.linear_contract import EPS, assert_near, gate
from tests.unit.kernels.test_linear_coded import Filled

TWO_WARPS = PdlConfig(2, 2, depth=2)
FOUR_WARPS = PdlConfig(2, 4, depth=1)
MANY_WARPS = PdlConfig(1, 16, depth=4)
K = 640  # ten chunks: not a multiple of most numbers of warps


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(linear_cuda, "load_variant", EmulatedLaunch)
    linear_pdl._kernel.cache_clear()
    with nan_in_fresh_memory():
        yield
    linear_pdl._kernel.cache_clear()


def integers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype)


@pytest.mark.parametrize(("config", "tokens"), [(TWO_WARPS, 13), (FOUR_WARPS, 7), (MANY_WARPS, 5)])
def test_each_product_finds_its_place(config: PdlConfig, tokens: int) -> None:
    """Small integers: exact in any order, so that a wrong index shows in every bit."""
    w, x = integers(72, K), integers(tokens, K + 64)[:, :K]  # 72: no multiple of 16
    for size in (1, tokens):
        assert torch.equal(launch(config, x[:size], w), F.linear(x[:size].float(), w.float()).bfloat16())


@pytest.mark.parametrize(
    ("config", "activation", "dtype"),
    [
        (TWO_WARPS, "silu", torch.bfloat16),
        (FOUR_WARPS, "gelu_tanh", torch.float16),
        (MANY_WARPS, "gelu", torch.bfloat16),
    ],
)
def test_the_gate(config: PdlConfig, activation: str, dtype: torch.dtype) -> None:
    x, w = random(5, K, dtype=dtype), random(2 * 40, K, dtype=dtype, scale=0.05)
    expected = gate(F.linear(x.double(), w.double()), activation)
    assert_near(launch(config, x, w, activation=activation), expected)


def test_the_bias() -> None:
    x, w, bias = random(5, K), random(40, K, scale=0.05), random(40)
    assert_near(launch(FOUR_WARPS, x, w, bias_N=bias), F.linear(x.double(), w.double(), bias.double()))


@pytest.mark.parametrize(("config", "num_tokens"), [(TWO_WARPS, 20), (MANY_WARPS, 6)])
def test_a_pair_around_the_residual_stream(config: PdlConfig, num_tokens: int) -> None:
    D, N, gain = 192, 40, random(192)
    x, first, second = integers(num_tokens, K), integers(D, K), random(2 * N, D, scale=0.05)
    residual = random(num_tokens, 2 * D)[:, :D]
    added = launch_add(config, ResidualInput(residual, gain, 1.0), x, first)
    y = F.linear(x.float(), first.float())
    total = (y + residual.float()).bfloat16()
    assert torch.equal(added.sum_MN, total)
    assert torch.equal(added.scaled_MN, (total.float() * (gain.float() + 1.0)).bfloat16())
    assert torch.allclose(added.squares_PM.sum(0), total.double().square().sum(1), rtol=1e-6)
    normed, _ = add_rms_norm_reference(
        total.double(), torch.zeros_like(total).double(), gain.double(), EPS, 1.0
    )
    expected = normed @ second.double().T
    assert_near(launch_of_sum(config, added, second, eps=EPS), expected)
    assert_near(launch_of_sum(config, added, second, eps=EPS, activation="silu"), gate(expected, "silu"))


CODED = {
    "fp8-blocks": PdlConfig(2, 4, depth=2),
    "int8": PdlConfig(2, 1, depth=2, by_words=True),
    "int8-32": PdlConfig(1, 4, depth=1),
    "int4-128": PdlConfig(1, 2, depth=4),
}


@pytest.mark.parametrize("name", CODED)
def test_coded_weights(name: str) -> None:
    """Around the residual stream: tiles of a band and of its halves, columns that no cell divides."""
    first, second = Filled(name, 72, 576), Filled(name, 2 * 64, 320)
    config, num_tokens = replace(CODED[name], form=first.weights.form), 13 if name == "int4-128" else 5
    x, residual, gain = random(num_tokens, 640)[:, :576], random(num_tokens, 72), random(72)
    product = x.double() @ first.numbers.double().T
    added = launch_add(config, ResidualInput(residual, gain, 1.0), x, first.weights)
    assert_near(added.sum_MN, product + residual.double())
    assert torch.allclose(added.squares_PM.sum(0), added.sum_MN.double().square().sum(1), rtol=1e-6)
    normed = random(3, 320)
    total = ResidualSum(normed, normed, normed.double().square().sum(1)[None])
    expected = F.rms_norm(normed.double(), (320,), None, EPS) @ second.numbers.double().T
    gated = launch_of_sum(config, total, second.weights, eps=EPS, activation="silu")
    assert_near(gated, gate(expected, "silu"))


def test_the_linears_of_a_model_that_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the functions that layers call: one token, of which the others would fold the norm in."""
    D = 192
    x, residual, gain = random(1, K), random(1, D), random(D)
    first, second, third = random(D, K, scale=0.05), random(2 * 40, D, scale=0.05), random(40, D, scale=0.05)
    shapes = [(D, K, False), (40, D, True), (40, D, False)]
    compiled = CompiledLinears(x.device)
    compiled.pdl.ready.update({(1, *shape, None): FOUR_WARPS for shape in shapes})
    monkeypatch.setattr(linear_small, "use_triton", lambda _: True)
    assert_near(linear(x, first, compiled=compiled), F.linear(x.double(), first.double()))
    assert can_add(x, first, second, gated=True, compiled=compiled) and can_add(
        x, first, third, gated=False, compiled=compiled
    )
    added = linear_add(ResidualInput(residual, gain, 0.0), x, first, compiled=compiled)
    assert_near(added.sum_MN, x.double() @ first.double().T + residual.double())
    normed = F.rms_norm(added.sum_MN.double(), (D,), gain.double(), EPS)
    assert_near(linear_of_sum(added, EPS, third, compiled=compiled), normed @ third.double().T)
    assert_near(
        linear_of_sum(added, EPS, second, activation="silu", compiled=compiled),
        gate(normed @ second.double().T, "silu"),
    )
