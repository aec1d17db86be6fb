"""A rank's share of a stored matrix is read by rows as the whole is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from infer.loader.placement import ShardedTensor
from infer.quant.coded import CodedRows

CPU = torch.device("cpu")


@dataclass
class StoredRows:
    """A stored matrix of 4-bit groups, or of plain numbers; transposed, its rows are columns on disk."""

    numbers: torch.Tensor
    packed: CodedRows | None = None
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    def rows(self, num_rows: int, device: torch.device) -> Iterator[tuple[slice, torch.Tensor | CodedRows]]:
        for first in range(0, len(self.numbers), num_rows):
            rows = slice(first, min(first + num_rows, len(self.numbers)))
            whole = slice(None)
            yield rows, self.numbers[rows] if self.packed is None else self.packed.cut(rows, whole)

    def transpose(self) -> StoredRows | None:
        return StoredRows(self.numbers.T.contiguous()) if self.is_transposed else None


def packed_matrix(group: int) -> StoredRows:
    torch.manual_seed(3)
    codes = torch.randint(0, 16, (10, 128), dtype=torch.uint8)
    scales = torch.rand(10, 128 // group).half().float()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.int16)
    spread_zeros, spread_scales = zeros.repeat_interleave(group, 1), scales.repeat_interleave(group, 1)
    return StoredRows(
        (codes.float() - spread_zeros) * spread_scales, CodedRows(codes, 4, scales, zeros, group)
    )


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("rows", [slice(None), slice(0, 5), slice(5, 10), slice(4, 7)])
@pytest.mark.parametrize("columns", [slice(None), slice(0, 64), slice(64, 128), slice(16, 48)])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_rows_of_a_share_are_those_of_the_matrix(
    is_packed: bool, rows: slice, columns: slice, group: int
) -> None:
    source: Any = packed_matrix(group)
    if not is_packed:
        source.packed = None
    share = ShardedTensor(source, (rows, columns))
    parts = list(share.rows(3, CPU))
    found = torch.full(share.shape, torch.nan)
    for place, part in parts:
        found[place] = part.numbers() if isinstance(part, CodedRows) else part
    assert torch.equal(found, source.numbers[rows, columns])
    has_integers = is_packed and (columns != slice(16, 48) or group == 128)
    for _, part in parts:
        assert isinstance(part, CodedRows) == is_packed
        integers = part.integers(4) if isinstance(part, CodedRows) else None
        assert (integers is not None) == has_integers


def test_a_share_of_a_matrix_that_is_stored_transposed() -> None:
    source: Any = StoredRows(torch.randn(6, 8), is_transposed=True)
    turned = ShardedTensor(source, (slice(0, 3), slice(4, 8))).transpose()
    assert turned is not None and turned.shape == (4, 3)
    rows = torch.cat([rows for _, rows in turned.rows(3, CPU) if isinstance(rows, torch.Tensor)])
    torch.testing.assert_close(rows, source.numbers[0:3, 4:8].T)
    source.is_transposed = False
    assert ShardedTensor(source, (slice(0, 3), slice(4, 8))).transpose() is None
