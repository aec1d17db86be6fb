"""The description of a product, in numbers alone, so that a kernel can be chosen on any machine."""

from __future__ import annotations

from typing import NamedTuple

import torch

from infer.config.profiles.find import Gpu
from infer.kernels.linear.coded import CodedForm


class LinearProblem(NamedTuple):
    """A product of some tokens with a matrix on a GPU."""

    num_tokens: int
    N: int  # outputs, of the gate half when gated
    K: int
    gated: bool
    dtype: torch.dtype  # type of the tokens
    gpu: Gpu
    form: CodedForm | None = None  # form of coded weights
    adds: bool = False  # True: the next norm adds the result to the stream, and may take it in parts
    int8_tokens: bool = False  # True: the file of coded weights asks for 8-bit tokens, too
    is_aligned: bool = True  # True: rows are bfloat16 and start at multiples of 16 bytes

    @property
    def num_rows(self) -> int:
        """Rows of the matrix: in a gated layer, the rows of gate and up."""
        return self.N * 2 if self.gated else self.N


class SplitConfig(NamedTuple):
    """A product that the library computes in parts (split.py)."""

    parts: int
