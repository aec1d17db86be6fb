from __future__ import annotations

import pytest

from infer.cache.block_table import BlockTable, blocks_for


def test_a_table_grows_at_its_end_and_exchanges_one_entry() -> None:
    table = BlockTable(4, [7])
    table.extend([3, 5])
    assert table.exchange(1, 9) == 3
    assert (table.blocks, table.num_blocks, table.num_slots) == ([7, 9, 5], 3, 12)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, []), (1, [7]), (4, [7]), (5, [7, 3]), (12, [7, 3, 5])]
)
def test_a_fork_has_the_blocks_of_its_tokens_and_a_list_of_its_own(
    num_tokens: int, expected: list[int]
) -> None:
    table = BlockTable(4, [7, 3, 5])
    fork = table.fork(num_tokens)
    assert fork.blocks == expected
    fork.extend([8])
    assert table.blocks == [7, 3, 5]


def test_blocks_are_counted_upwards() -> None:
    assert [blocks_for(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
