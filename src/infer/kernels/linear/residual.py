"""The data passed between two kernels when one matrix adds to the residual stream and the next reads it.

    linear_add  ──►  ResidualSum: the sum, the sum times the norm's gain, its squares  ──►  linear_of_sum

Any kernel may write a `ResidualSum` and any other may read it: its contents do not depend on the writer.

Shapes:  M tokens, N hidden size, P parts: one per tile of the writing kernel, which sums its squares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class ResidualSum(NamedTuple):
    """The residual stream after an addition, half normalised: rms_norm(sum) = scaled / rms(sum)."""

    sum_MN: torch.Tensor
    scaled_MN: torch.Tensor  # sum * (weight + offset)
    squares_PM: torch.Tensor  # sums of squares of `sum_MN`, float64; one part per tile of the writer


class ResidualInput(NamedTuple):
    """The residual stream before an addition, and the gain of the norm that reads the sum."""

    residual_MN: torch.Tensor
    norm_weight_N: torch.Tensor
    offset: float


class LowRankTerm(NamedTuple):
    """The products of LoRA adapters that a kernel adds to its own product (low_rank.py)."""

    b_NC: torch.Tensor  # columns of all slots
    parts: list[int]  # rows of each part of the matrix
    used: torch.Tensor  # bits of the chunks of columns in which some adapter has weights
    h_TC: torch.Tensor  # products with A, part by part
    columns: int  # columns of h per part
    active: torch.Tensor  # bits of the chunks with the adapters of this step's rows


class Epilogue(NamedTuple):
    """The work of a kernel besides its product: bias, gate, and reads and writes of the residual stream."""

    bias_N: torch.Tensor | None = None
    activation: str = ""  # activation of a gated matrix
    add: tuple[ResidualInput, ResidualSum] | None = None  # the stream to add to; memory of the sum
    prologue: ResidualSum | None = None  # the sum whose `scaled_MN` is x, with its norm to be finished
    eps: float = 0.0  # epsilon of that norm
    low_rank: LowRankTerm | None = None  # products of adapters to be added
