"""Rotary positions: turn each pair of a head's channels by an angle that grows with the position.

Pair i of a head (channel i and channel i + H/2) turns by  position * frequency_i  with

    frequency_i = theta ** (-2i / H)         fast for small i, slow for large i

The dot product of a turned query and a turned key then depends only on their distance. Sines and
cosines of all positions are computed once, as two float32 tables that the layers share; the turning is
part of what attention does to its heads (kernels/elementwise/heads.py).

A model can be stretched beyond the context it was trained on by slowing its frequencies down:

    linear    every frequency / factor
    llama3    a pair that turns fully many times within the trained context keeps its frequency, one that
              turns hardly once is divided by `factor`, and in between the two are blended

                 turns within the trained context
                 ├───── low ─────┼──── blend ────┼──── high ──────►
                  / factor                          unchanged

Shapes:  H head size, P positions, R = H/2 pairs.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from infer.kernels.runtime.dispatch import device_kind


def frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """The angle in radians by which each of the R pairs turns from one position to the next."""
    device = torch.get_default_device()
    if device_kind(device) == "meta":  # they are few: they have numbers even where a model has only shapes
        device = torch.device("cpu")
    # float32 spelt out: the default dtype is the model's while it is being built
    exponents_R = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / theta**exponents_R


def stretch_llama3(
    frequencies_R: torch.Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context_len: int,
) -> torch.Tensor:
    """Slow down the pairs that do not complete enough turns within the trained context."""
    turns_R = original_context_len * frequencies_R / (2 * math.pi)
    keep_R = (turns_R - low_freq_factor) / (high_freq_factor - low_freq_factor)
    keep_R = keep_R.clamp(0.0, 1.0)  # 0: fully stretched, 1: untouched
    return frequencies_R * (keep_R + (1 - keep_R) / factor)


class Rotary(nn.Module):
    """The tables of one set of frequencies, for positions 0 .. context_len - 1."""

    cos_PR: torch.Tensor
    sin_PR: torch.Tensor

    def __init__(self, frequencies_R: torch.Tensor, context_len: int) -> None:
        super().__init__()
        cos_PR, sin_PR = _tables(frequencies_R.float(), context_len)
        self.register_buffer("cos_PR", cos_PR, persistent=False)
        self.register_buffer("sin_PR", sin_PR, persistent=False)

    def extra_repr(self) -> str:
        """Table size, for print(model)."""
        return f"{self.cos_PR.shape[0]} positions, {self.cos_PR.shape[1]} pairs"


def _tables(frequencies_R: torch.Tensor, context_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of all angles; of a model that is built without memory, tables of that size."""
    if torch.get_default_device().type == "meta":
        # to compute on the meta device, were it `empty_like`, would import PyTorch's compiler: a second
        shape = (context_len, frequencies_R.shape[0])
        return torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.float32)
    positions_P = torch.arange(context_len, dtype=torch.float32)
    angles_PR = positions_P[:, None] * frequencies_R
    return angles_PR.cos(), angles_PR.sin()
