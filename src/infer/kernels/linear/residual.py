"""The data between two kernels when one matrix adds to the residual stream and the next one reads it.

    linear_add  ──►  ResidualSum: the sum, the sum times the norm's gain, its squares  ──►  linear_of_sum

Any kernel may write a `ResidualSum` and any other may read it: its contents do not depend on the writer.

Shapes:  M tokens, N hidden size, P parts: each tile of the writing kernel sums up the squares of its outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class ResidualSum(NamedTuple):
    """The residual stream after an addition, half normalised: rms_norm(sum) = scaled / rms(sum)."""

    sum_MN: torch.Tensor
    scaled_MN: torch.Tensor  # sum * (weight + offset)
    squares_PM: torch.Tensor  # squares of the sum, in float64: one part per tile of the kernel that added


class ResidualInput(NamedTuple):
    """The residual stream before an addition, and the gain of the norm that reads the sum."""

    residual_MN: torch.Tensor
    norm_weight_N: torch.Tensor
    offset: float


class LowRankTerm(NamedTuple):
    """The products of LoRA adapters that a kernel adds to its own (low_rank.py)."""

    b_NC: torch.Tensor  # columns of all slots
    parts: list[int]  # rows of each part of the matrix
    used: torch.Tensor  # bits of the chunks of columns that some adapter has weights in
    h_TC: torch.Tensor  # part by part
    columns: int  # columns of h that a part has
    active: torch.Tensor  # bits of the chunks that rows of the step have their adapters in


class Epilogue(NamedTuple):
    """The work of a kernel besides its product: bias, gate, and its two ends of the residual stream."""

    bias_N: torch.Tensor | None = None
    activation: str = ""  # activation of a gated matrix
    add: tuple[ResidualInput, ResidualSum] | None = None  # what the result is added to; where the sum goes
    prologue: ResidualSum | None = None  # the sum whose `scaled_MN` is x: its norm is to be finished
    eps: float = 0.0  # epsilon of that norm
    low_rank: LowRankTerm | None = None  # what adapters add to the product
