from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from infer.layers.mlp import MLP, GatedMLP

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def randomize(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(generator=generator)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gate_is_the_first_half(activation: str, bias: bool) -> None:
    mlp = GatedMLP(6, 10, activation=activation, bias=bias)
    randomize(mlp)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    gate, up = F.linear(x, mlp.gate_up.weight, mlp.gate_up.bias).chunk(2, dim=-1)

    expected = F.linear(ACTIVATIONS[activation](gate) * up, mlp.down.weight, mlp.down.bias)
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_plain_mlp_matches_its_formula(activation: str) -> None:
    mlp = MLP(6, 10, activation=activation)
    randomize(mlp)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))

    expected = F.linear(
        ACTIVATIONS[activation](F.linear(x, mlp.up.weight, mlp.up.bias)), mlp.down.weight, mlp.down.bias
    )
    torch.testing.assert_close(mlp(x), expected)
