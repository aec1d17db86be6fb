"""A table of vectors, one row per token id (or, in GPT-2, per position).

Gemma multiplies the rows by sqrt(D). It was trained with that number rounded to the dtype of the
weights (in bfloat16 sqrt(1152) = 33.94 becomes 34), so the factor is rounded before it is used.

The table may have fewer bits than the model computes in: the 16 bits of its checkpoint, or the quantized
weights of a tied head (`table`). Rows are converted when they are looked up.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from infer.kernels.elementwise.embedding import embed, scaled
from infer.quant.projection import Projection


class Share(Protocol):
    """One rank's range of a table; other ranks have the other rows (layers/parallel.py)."""

    def embed(self, embedding: Embedding, ids_T: torch.Tensor) -> torch.Tensor:
        """The rows of all ids, on whichever rank they are."""


class Embedding(nn.Module):
    """Look rows up by id, and multiply them by `scale` if there is one."""

    def __init__(self, num_rows: int, size: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(num_rows, size), requires_grad=False)
        self.dtype = self.weight.dtype  # type of the rows that `forward` returns
        self.factor = None if scale is None else round_to(scale, self.dtype)
        self.table: Projection | None = None
        self.share: Share | None = None  # brings in other ranks' rows; None: this rank has all rows

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return [T, D]."""
        x_TD = self.rows(ids_T) if self.share is None else self.share.embed(self, ids_T)
        return x_TD if self.factor is None else scaled(x_TD, self.factor)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's table."""
        return embed(ids_T, self.weight, self.dtype) if self.table is None else self.table.lookup(ids_T)

    def extra_repr(self) -> str:
        """Shape and factor, for print(model)."""
        num_rows, size = self.weight.shape
        return f"{num_rows} x {size}" + ("" if self.scale is None else f", scale={self.scale:.4g}")


def round_to(value: float, dtype: torch.dtype) -> float:
    """The number of `dtype` nearest to `value`."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()
