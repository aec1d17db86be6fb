"""What passes between two linears with the residual stream between them (small.py).

    linear_into  ──►  Added: the sum, the sum times the gain, its squares  ──►  added_linear

Shapes:  M tokens, N hidden size, P parts: whoever adds sums up the squares of a few outputs in each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Added(NamedTuple):
    """The residual stream after an addition, half normalised: rms_norm(sum) = scaled / rms(sum)."""

    sum_MN: torch.Tensor
    scaled_MN: torch.Tensor  # sum * (weight + offset)
    squares_PM: torch.Tensor  # of the sum, in float64: one part per tile of the kernel that added


class Stream(NamedTuple):
    """The residual stream before an addition, and the norm that reads the sum."""

    residual_MN: torch.Tensor
    norm_weight_N: torch.Tensor
    offset: float


class Around(NamedTuple):
    """What stands before and behind a product."""

    bias_N: torch.Tensor | None = None
    activation: str = ""  # of a gated matrix
    into: tuple[Stream, Added] | None = None  # what the result is added to, and where the sum goes
    added: Added | None = None  # whose `scaled_MN` x is: its norm is to be finished
    eps: float = 0.0  # of that norm
