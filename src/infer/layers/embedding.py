"""A table of vectors, one row per token id (or, in GPT-2, per position).

Gemma multiplies the rows by sqrt(D). It was trained with that number rounded to the dtype of the
weights (in bfloat16 sqrt(1152) = 33.94 becomes 34), so the factor is rounded before it is used.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """Look rows up by id, and multiply them by `scale` if there is one."""

    def __init__(self, num_rows: int, size: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(num_rows, size), requires_grad=False)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return [T, D]."""
        x_TD = F.embedding(ids_T, self.weight)
        return x_TD if self.scale is None else x_TD * round_to(self.scale, self.weight.dtype)

    def extra_repr(self) -> str:
        """Shape and factor, for print(model)."""
        num_rows, size = self.weight.shape
        return f"{num_rows} x {size}" + ("" if self.scale is None else f", scale={self.scale:.4g}")


@functools.cache
def round_to(value: float, dtype: torch.dtype) -> float:
    """The number of `dtype` nearest to `value`."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()
