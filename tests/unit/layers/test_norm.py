from __future__ import annotations

import pytest
import torch
from torch import nn

from infer.layers.norm import AddLayerNorm, AddNorm, RMSNorm


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_matches_torch(offset: float) -> None:
    norm = RMSNorm(12, eps=1e-3, offset=offset)
    norm.weight.data = random(12)
    expected = nn.RMSNorm(12, eps=1e-3)
    expected.weight.data = random(12) + offset
    x = random(5, 3, 12, seed=1)

    torch.testing.assert_close(norm(x), expected(x).detach())


def test_add_norm_is_the_sum_and_the_norm_of_the_sum() -> None:
    norm, alone = AddNorm(12, eps=1e-6, offset=1.0), RMSNorm(12, eps=1e-6, offset=1.0)
    norm.weight.data = alone.weight.data = random(12)
    x, residual = random(5, 12, seed=1), random(5, 12, seed=2)

    y, total = norm(x, residual)

    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, alone(x + residual))


def test_without_a_residual_the_input_starts_the_stream() -> None:
    norm, alone = AddNorm(12, eps=1e-6), RMSNorm(12, eps=1e-6)
    norm.weight.data = alone.weight.data = random(12)
    x = random(5, 12, seed=1)

    y, total = norm(x, None)

    assert total is x
    torch.testing.assert_close(y, alone(x))


def test_layer_norm_matches_its_formula() -> None:
    norm = AddLayerNorm(12, eps=1e-2)
    norm.weight.data, norm.bias.data = random(12), random(12, seed=3)
    x, residual = random(5, 12, seed=1), random(5, 12, seed=2)

    def formula(rows: torch.Tensor) -> torch.Tensor:
        centred = rows - rows.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight + norm.bias

    y, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(y, formula(x + residual))

    y, total = norm(x, None)
    assert total is x
    torch.testing.assert_close(y, formula(x))
