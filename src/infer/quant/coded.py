"""Quantized rows in the common form to which the reader of every published format translates them.

A code means  w = (code - zero) * scale, with one zero and one scale for each group of columns of a row, or
w = code * scale + minimum (GGUF), or  w = table[code] * scale, with a table for each row or for all of them.
A group consists of neighbouring columns, or each column has a group index (act-order). An 8-bit float is a
code as well. The arithmetic is float32, in which a code times a 16-bit scale is exact: rounded to the scale's
dtype, it is the weight that each format's library computes.

Shapes:  R rows, K columns, G groups of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class StoredCodes(NamedTuple):
    """A description, from the headers of a file, of a matrix of evenly spaced codes."""

    kind: str  # the narrowest codes that hold them: one of FORMS (kernels/linear/coded.py)
    size: int  # columns
    group: int  # columns that share a scale; 0: groups of different sizes
    has_minima: bool = False
    scale_rows: int = 1  # rows that share a scale
    cpu_bits: int = 0  # bits per code on a CPU, if fewer than `kind` has
    order: str = ""  # a digest of `in_order`'s columns, if a group's columns are not neighbours
    num_outliers: int = 0  # count of numbers that are added to single elements


class Outliers(NamedTuple):
    """Numbers that are added to a few elements of some rows: a sparse matrix in rows (CSR)."""

    starts: torch.Tensor  # [R + 1]: start of each row in `columns` and `values`
    columns: torch.Tensor  # [number of outliers]
    values: torch.Tensor  # float32, [number of outliers]

    def rows(self) -> torch.Tensor:
        """The row of each outlier."""
        counts = self.starts.diff()
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)

    def pick(self, rows: torch.Tensor) -> Outliers:
        """The outliers of some rows, in their order."""
        counts = self.starts.diff()[rows]
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        inside = torch.arange(int(starts[-1]), device=rows.device)
        at = inside + (self.starts[rows] - starts[:-1]).repeat_interleave(counts)
        return Outliers(starts, self.columns[at], self.values[at])


class CodedRows(NamedTuple):
    """Rows of a quantized matrix as their file stores them."""

    codes: torch.Tensor  # [R, K]; uint8 of `bits` bits, int8, or a float of 8 bits
    bits: int  # bits per code
    scales: torch.Tensor  # float32, [R, G]
    zeros: torch.Tensor | int  # int16, [R, G], or one zero for all
    groups: torch.Tensor | int  # group of each column, [K]; or the number of columns in a group
    minima: torch.Tensor | None = None  # float32, [R, G]: added to each number; GGUF's zeros
    table: torch.Tensor | None = None  # float32, [R, 2^bits], or [1, 2^bits] for all rows
    outliers: Outliers | None = None

    def numbers(self) -> torch.Tensor:
        """The numbers that the codes stand for, in float32."""
        numbers = self._scaled()
        if self.outliers is not None:
            at = self.outliers.rows(), self.outliers.columns.long()
            numbers.index_put_(at, self.outliers.values, accumulate=True)
        return numbers

    def _scaled(self) -> torch.Tensor:
        if self.table is not None:
            wide = self.table.expand(len(self.codes), -1)
            return wide.gather(1, self.codes.long()).mul_(self.by_column(self.scales))
        numbers = self.codes.float()
        if isinstance(self.zeros, torch.Tensor):
            numbers -= self.by_column(self.zeros).float()
        elif self.zeros:
            numbers -= self.zeros
        if isinstance(self.groups, int) and numbers.shape[1] % self.groups == 0:  # need not be repeated
            grouped = numbers.contiguous().view(*self.scales.shape, self.groups).mul_(self.scales[:, :, None])
            grouped = grouped if self.minima is None else grouped.add_(self.minima[:, :, None])
            return grouped.view(numbers.shape)
        numbers.mul_(self.by_column(self.scales))
        return numbers if self.minima is None else numbers.add_(self.by_column(self.minima))

    def in_order(self) -> tuple[CodedRows, torch.Tensor]:
        """Return the rows with the columns of each group contiguous, and each column's index in the file.

        Groups must be of one size, except the last one.
        """
        assert isinstance(self.groups, torch.Tensor)
        order = self.groups.sort(stable=True).indices
        return self._replace(codes=self.codes[:, order], groups=int((self.groups == 0).sum())), order

    def by_column(self, parts: torch.Tensor) -> torch.Tensor:
        """Expand values per group, [R, G], to values per column, [R, K]."""
        size = self.codes.shape[1]
        if isinstance(self.groups, torch.Tensor):
            return parts[:, self.groups]
        if self.groups >= size:
            return parts  # one value for the whole row: broadcast
        return parts.repeat_interleave(self.groups, dim=1)[:, :size]
