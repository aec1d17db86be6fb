"""A rank's share of a stored matrix is read by rows as the whole is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from infer.loader.placement import ShardedTensor
from infer.quant.projection import QuantizedRows


@dataclass
class StoredRows:
    """A stored matrix of 4-bit groups, or of plain numbers; transposed, its rows are columns on disk."""

    numbers: torch.Tensor
    packed: QuantizedRows | None = None
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    def chunks(self, num_rows: int, bits: int) -> Iterator[torch.Tensor | QuantizedRows]:
        assert bits == 4
        for first in range(0, len(self.numbers), num_rows):
            rows = slice(first, first + num_rows)
            if self.packed is None:
                yield self.numbers[rows]
            else:
                yield QuantizedRows(*(None if part is None else part[rows] for part in self.packed))  # type: ignore[arg-type]

    def transpose(self) -> StoredRows | None:
        return StoredRows(self.numbers.T.contiguous()) if self.is_transposed else None


def packed_matrix() -> StoredRows:
    torch.manual_seed(3)
    integers = torch.randint(0, 16, (10, 128), dtype=torch.int8)
    scales, minima = (torch.rand(10, 4).half() for _ in range(2))
    numbers = integers.float() * scales.float().repeat_interleave(32, 1)
    return StoredRows(
        numbers + minima.float().repeat_interleave(32, 1), QuantizedRows(integers, scales, minima)
    )


def numbers_of(chunk: torch.Tensor | QuantizedRows) -> torch.Tensor:
    if not isinstance(chunk, QuantizedRows):
        return chunk
    assert chunk.minima is not None
    numbers = chunk.integers.float() * chunk.scales.float().repeat_interleave(32, 1)
    return numbers + chunk.minima.float().repeat_interleave(32, 1)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("rows", [slice(None), slice(0, 5), slice(5, 10), slice(4, 7)])
@pytest.mark.parametrize("columns", [slice(None), slice(0, 64), slice(64, 128), slice(16, 48)])
def test_the_rows_of_a_share_are_those_of_the_matrix(is_packed: bool, rows: slice, columns: slice) -> None:
    source: Any = packed_matrix()
    if not is_packed:
        source.packed = None
    share = ShardedTensor(source, (rows, columns))
    chunks = list(share.chunks(3, 4))
    torch.testing.assert_close(torch.cat([*map(numbers_of, chunks)]), source.numbers[rows, columns])
    groups_are_whole = columns != slice(16, 48)
    assert all(isinstance(chunk, QuantizedRows) == (is_packed and groups_are_whole) for chunk in chunks)


def test_a_share_of_a_matrix_that_is_stored_transposed() -> None:
    source: Any = StoredRows(torch.randn(6, 8), is_transposed=True)
    turned = ShardedTensor(source, (slice(0, 3), slice(4, 8))).transpose()
    assert turned is not None and turned.shape == (4, 3)
    rows = torch.cat([chunk for chunk in turned.chunks(3, 4) if isinstance(chunk, torch.Tensor)])
    torch.testing.assert_close(rows, source.numbers[0:3, 4:8].T)
    source.is_transposed = False
    assert ShardedTensor(source, (slice(0, 3), slice(4, 8))).transpose() is None
