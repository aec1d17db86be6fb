from __future__ import annotations

import pytest
import torch
from torch import nn

from infer.layers.norm import LayerNorm, RMSNorm
from infer.quant.residual import ResidualStream


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


def test_the_norm_of_the_stream_is_the_norm_of_its_sum() -> None:
    norm = RMSNorm(12, eps=1e-6, offset=1.0)
    norm.weight.data = random(12)
    x, update = random(5, 12, seed=1), random(5, 12, seed=2)
    stream = ResidualStream(x)
    stream.add(update)

    y = norm(stream).tensor()

    torch.testing.assert_close(stream.settle(), x + update)
    torch.testing.assert_close(y, norm(x + update))


def test_the_stream_starts_with_its_first_tensor() -> None:
    norm = RMSNorm(12, eps=1e-6)
    norm.weight.data = random(12)
    x = random(5, 12, seed=1)
    stream = ResidualStream(x)

    torch.testing.assert_close(norm(stream).tensor(), norm(x))
    assert stream.settle() is x


def test_layer_norm_matches_its_formula() -> None:
    norm = LayerNorm(12, eps=1e-2)
    norm.weight.data, norm.bias.data = random(12), random(12, seed=3)
    x, residual = random(5, 12, seed=1), random(5, 12, seed=2)

    def formula(rows: torch.Tensor) -> torch.Tensor:
        centred = rows - rows.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight + norm.bias

    stream = ResidualStream(residual)
    stream.add(x)
    y = norm(stream)
    assert torch.equal(stream.settle(), x + residual)
    torch.testing.assert_close(y, formula(x + residual))
    torch.testing.assert_close(norm(x), formula(x))
