"""Outliers of a coded matrix (SqueezeLLM): a sparse matrix of numbers added to single elements, by rows.

    y = x Wᵀ + x Sᵀ      few tokens: the product with codes, then programs that each add a few rows of S
    W + S                many tokens: W is unpacked for the library's product, and S is added to it there

Rows are filled in any order: `begins` and `ends` locate each row in `columns` and `values`. Tokens are
transposed first, so that a column of all tokens is read at once.

Shapes:  M tokens, N rows (outputs), K columns (inputs), C outliers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infer.kernels.runtime.dispatch import jit, jit_for_any, tl, use_triton
from infer.kernels.runtime.launch import launch_triton


@dataclass(frozen=True, slots=True)
class SparseRows:
    """S, [N, K], with capacity for C numbers."""

    begins: torch.Tensor  # int32, [N]
    ends: torch.Tensor  # int32, [N]
    columns: torch.Tensor  # int32, [C]
    values: torch.Tensor  # float32, [C]

    @classmethod
    def empty(cls, num_rows: int, count: int, device: torch.device | str) -> SparseRows:
        """A matrix of zeros, to be filled."""
        begins, ends = (torch.zeros(num_rows, dtype=torch.int32, device=device) for _ in range(2))
        columns = torch.zeros(count, dtype=torch.int32, device=device)
        return cls(begins, ends, columns, torch.zeros(count, device=device))

    def fill(self, first_row: int, num_rows: int, rows: torch.Tensor, columns: torch.Tensor,
             values: torch.Tensor, size: int) -> None:  # fmt: skip
        """Append the numbers of some rows; numbers for the same element are summed."""
        device = self.begins.device
        places, which = (rows.to(device) * size + columns.to(device)).unique(return_inverse=True)
        merged = torch.zeros(len(places), device=device).index_add_(0, which, values.to(device))
        rows, columns = places // size, places % size
        start, part = int(self.ends.max()), slice(first_row, first_row + num_rows)
        ends = start + torch.bincount(rows, minlength=num_rows).cumsum(0)
        assert start + len(rows) <= len(self.columns), (start, len(rows), len(self.columns))
        self.begins[part] = torch.cat((ends.new_tensor([start]), ends[:-1])).int()
        self.ends[part] = ends.int()
        inside = slice(start, start + len(rows))
        self.columns[inside], self.values[inside] = columns.int(), merged

    def add_to_matrix(self, w_NK: torch.Tensor) -> torch.Tensor:
        """Add S to a matrix in place."""
        N, K = w_NK.shape
        if use_triton(w_NK):
            parts = (self.begins, self.ends, self.columns, self.values, w_NK)
            launch_triton(add_to_matrix_kernel, (N,), parts, (K,), BLOCK=64, num_warps=1)
            return w_NK
        counts = (self.ends - self.begins).long()
        rows = torch.arange(N, device=w_NK.device).repeat_interleave(counts)
        offsets = torch.arange(len(rows), device=w_NK.device) - (counts.cumsum(0) - counts)[rows]
        at = self.begins.long()[rows] + offsets
        w_NK[rows, self.columns[at].long()] += self.values[at].to(w_NK.dtype)
        return w_NK

    def add_to_product(self, x_MK: torch.Tensor, y_MN: torch.Tensor) -> torch.Tensor:
        """Add x Sᵀ to a product of few tokens in place."""
        (M, N), block_m = y_MN.shape, 1 if len(x_MK) == 1 else 16
        x_KM = x_MK.t().contiguous()
        assert y_MN.is_contiguous(), y_MN.stride()
        parts = (self.begins, self.ends, self.columns, self.values, x_KM, y_MN)
        launch_triton(
            add_to_product_kernel, (-(-N // 4), -(-M // block_m)), parts, (N,), (M,),
            ROWS=4, BLOCK_M=block_m, BLOCK=32, num_warps=1 if M == 1 else 4,
        )  # fmt: skip
        return y_MN


@jit
def add_to_matrix_kernel(begins_ptr, ends_ptr, columns_ptr, values_ptr, w_ptr, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(ends_ptr + row)
    for first in range(tl.load(begins_ptr + row), end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        columns = tl.load(columns_ptr + at, mask=at < end, other=0)
        values = tl.load(values_ptr + at, mask=at < end, other=0.0)
        w_ptrs = w_ptr + row * K + columns
        w = tl.load(w_ptrs, mask=at < end, other=0.0).to(tl.float32)
        tl.store(w_ptrs, (w + values).to(w_ptr.dtype.element_ty), mask=at < end)


@jit_for_any("M")
def add_to_product_kernel(
    begins_ptr, ends_ptr, columns_ptr, values_ptr, x_ptr, y_ptr, M, N,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begins = tl.load(begins_ptr + rows, mask=rows < N, other=0)
    counts = tl.load(ends_ptr + rows, mask=rows < N, other=0) - begins
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    x_ptrs = x_ptr + tl.minimum(tokens, M - 1)[None, None, :]
    total = tl.zeros([ROWS, BLOCK, BLOCK_M], tl.float32)
    for first in range(0, tl.max(counts), BLOCK):
        number = first + tl.arange(0, BLOCK)[None, :]
        at, is_there = begins[:, None] + number, number < counts[:, None]
        columns = tl.load(columns_ptr + at, mask=is_there, other=0).to(tl.int64)
        values = tl.load(values_ptr + at, mask=is_there, other=0.0)
        total += tl.load(x_ptrs + (columns * M)[:, :, None]).to(tl.float32) * values[:, :, None]
    y_ptrs = y_ptr + tokens.to(tl.int64)[None, :] * N + rows[:, None]
    mask = (rows < N)[:, None] & (tokens < M)[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32) + tl.sum(total, 1)
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)
