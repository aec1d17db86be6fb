"""The product that a kernel of this package is asked for: numbers alone, so that it can be asked anywhere."""

from __future__ import annotations

from typing import NamedTuple

import torch

from infer.config.profiles.find import Gpu
from infer.kernels.linear.coded import CodedForm


class LinearProblem(NamedTuple):
    """A product of some tokens with a matrix on a GPU."""

    num_tokens: int
    N: int  # outputs; of the gate half when gated
    K: int
    gated: bool
    dtype: torch.dtype  # type of the tokens
    gpu: Gpu
    form: CodedForm | None = None  # form of coded weights
    adds: bool = False  # the next norm adds the result to the residual stream, and may get it in parts
    int8_tokens: bool = False  # coded weights: the file means tokens to be rounded to 8 bits, too
    is_aligned: bool = True  # rows are bfloat16 and start at multiples of 16 bytes

    @property
    def num_rows(self) -> int:
        """Rows of the matrix: in a gated layer, the rows of gate and up."""
        return self.N * 2 if self.gated else self.N


class SplitConfig(NamedTuple):
    """A product that the library computes in parts (split.py)."""

    parts: int
