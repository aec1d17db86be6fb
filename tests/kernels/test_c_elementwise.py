"""Norms, gates, rotations and cache writes in C, against their references."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from infer.kernels.cpu import operations
from infer.kernels.cpu.library import Library
from infer.kernels.elementwise.embedding import (
    added,
    added_reference,
    embed,
    embed_reference,
    scaled,
    scaled_reference,
)
from infer.kernels.elementwise.gated_activation import (
    ACTIVATIONS,
    activate,
    gated_activation,
    gated_activation_reference,
)
from infer.kernels.elementwise.layer_norm import add_layer_norm, add_layer_norm_reference
from infer.kernels.elementwise.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from infer.kernels.elementwise.rope import rope, rope_reference
from tests.kernels.c_builds import BUILDS, c_library
from tests.support.c_library import use_library

SHAPES = [(1, 16), (3, 45), (7, 576), (2, 1)]
assert_close = functools.partial(torch.testing.assert_close, rtol=2e-5, atol=2e-6)


@pytest.fixture(params=BUILDS)
def c(request: pytest.FixtureRequest) -> Iterator[Library]:
    with use_library(c_library(request.param)):
        yield c_library(request.param)


@pytest.mark.parametrize("shape", [*SHAPES, (3, 5, 20)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(c: Library, shape: tuple[int, ...], offset: float) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    expected = rms_norm_reference(x, weight, 1e-5, offset)
    assert_close(rms_norm(x, weight, eps=1e-5, offset=offset), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(c: Library, shape: tuple[int, int]) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    y, total = add_rms_norm(x, residual, weight, eps=1e-6, offset=0.0)
    expected_y, expected_total = add_rms_norm_reference(x, residual, weight, 1e-6, 0.0)
    assert torch.equal(total, expected_total)
    assert_close(y, expected_y)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [0.0, 1000.0])  # far from 0: mean(x^2) - mean^2 would have no digit left
@pytest.mark.parametrize("has_residual", [False, True])
def test_layer_norm(c: Library, shape: tuple[int, int], mean: float, has_residual: bool) -> None:
    x, weight, bias = torch.randn(shape) + mean, torch.randn(shape[1]), torch.randn(shape[1])
    wide = torch.randn(shape[0], shape[1] + 3)
    residual = wide[:, : shape[1]] if has_residual else None
    y, total = add_layer_norm(x, residual, weight, bias, eps=1e-5)
    expected_y, expected_total = add_layer_norm_reference(
        x.double(), None if residual is None else residual.double(), weight.double(), bias.double(), 1e-5
    )
    assert torch.equal(total, expected_total.float())
    torch.testing.assert_close(y, expected_y.float(), rtol=2e-5, atol=1e-3 if mean else 2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_scaled_rows_are_pytorch_s_to_the_last_bit(c: Library, shape: tuple[int, int]) -> None:
    x = torch.randn(shape[0], shape[1] + 3)[:, : shape[1]]
    assert torch.equal(scaled(x, 1152**0.5), scaled_reference(x, 1152**0.5))
    assert torch.equal(added(x, 3 * x[:, :]), added_reference(x, 3 * x))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [1, 16, 45, 1500])
def test_ungated_activation(c: Library, activation: str, size: int) -> None:
    x = 20 * torch.randn(3, size + 2)[:, :size]
    x[0, 0] = -300.0  # far below what an exponential can represent
    torch.testing.assert_close(activate(x, activation), ACTIVATIONS[activation](x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [1, 16, 45, 1500])
def test_gated_activation(c: Library, activation: str, size: int) -> None:
    gate_up = 20 * torch.randn(3, 2 * size)
    gate_up[0, 0] = -300.0  # far below what an exponential can represent
    expected = gated_activation_reference(gate_up, activation)
    torch.testing.assert_close(
        gated_activation(gate_up, activation=activation), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("head_dim", [2, 20, 64, 96])
def test_rope_of_views_of_a_fused_projection(c: Library, head_dim: int) -> None:
    qkv = torch.randn(5, 7 * head_dim)
    qkv_heads = qkv.view(5, 7, head_dim)
    q, k = qkv_heads[:, :3], qkv_heads[:, 3:5]
    cos, sin = torch.randn(30, head_dim // 2), torch.randn(30, head_dim // 2)
    positions = torch.tensor([0, 29, 7, 7, 3])
    for ours, expected in zip(
        rope(q, k, cos, sin, positions), rope_reference(q, k, cos, sin, positions), strict=True
    ):
        assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embedding_rows_are_converted_exactly(c: Library, dtype: torch.dtype) -> None:
    table = (torch.randn(11, 37) * torch.tensor([1e-7, 1e-3, 1.0]).repeat(13)[:37]).to(dtype)
    ids = torch.tensor([10, 0, 3, 3])
    assert torch.equal(embed(ids, table, torch.float32), embed_reference(ids, table, torch.float32))


def test_the_cache_gets_keys_and_values_of_all_but_padding(c: Library) -> None:
    k, v = torch.randn(4, 2, 5), torch.randn(4, 4, 5)[:, 1:3]
    keys, values, slots = torch.zeros(6, 2, 5), torch.zeros(6, 2, 5), torch.tensor([5, 0, -1, 2])
    operations.write_cache(c, k, v, keys, values, slots)
    written = [0, 1, 3]
    assert torch.equal(keys[slots[written]], k[written]) and torch.equal(values[slots[written]], v[written])
    assert not keys[[1, 3, 4]].any() and not values[[1, 3, 4]].any()


def test_no_library_means_pytorch() -> None:
    x, weight = torch.randn(3, 45), torch.randn(45)
    with use_library(None):
        assert torch.equal(rms_norm(x, weight, eps=1e-5), rms_norm_reference(x, weight, 1e-5, 0.0))
