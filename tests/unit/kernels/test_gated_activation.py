"""The activations that run on the CPU, against their definitions in Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from infer.errors import ConfigError
from infer.kernels.elementwise.gated_activation import activate, gated_activation

DEFINITIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
}


@pytest.mark.parametrize("activation", DEFINITIONS)
def test_an_activation_follows_its_definition(activation: str) -> None:
    x = torch.linspace(-8, 8, 101)
    expected = torch.tensor([DEFINITIONS[activation](value) for value in x.tolist()])
    torch.testing.assert_close(activate(x, activation), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", DEFINITIONS)
def test_the_first_half_is_the_gate_and_the_second_half_passes_it(activation: str) -> None:
    gate, up = [0.5, -1.0, 2.0], [3.0, 5.0, -7.0]
    y = gated_activation(torch.tensor([gate + up]), activation=activation)
    expected = [DEFINITIONS[activation](g) * u for g, u in zip(gate, up, strict=True)]
    torch.testing.assert_close(y, torch.tensor([expected]))


def test_the_dtype_is_kept() -> None:
    gate_up = torch.randn(2, 6).bfloat16()
    assert gated_activation(gate_up, activation="silu").dtype == torch.bfloat16


def test_an_unknown_activation_is_an_error_that_names_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'gelu_tan' is not one of silu, gelu_tanh, gelu; did you mean"):
        gated_activation(torch.zeros(1, 2), activation="gelu_tan")
    with pytest.raises(ConfigError, match="'relu'"):
        activate(torch.zeros(1), "relu")
