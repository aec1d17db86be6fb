from __future__ import annotations

from collections.abc import Callable

import pytest

from infer.cache.paged_pool import PagedKVCachePool
from infer.errors import EngineError
from infer.scheduling.batch_state import BatchState
from tests.support.books import check_state


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda rows: rows.append(rows[0]), id="freed twice"),
        pytest.param(lambda rows: rows.pop(), id="lost"),
        pytest.param(lambda rows: rows.__setitem__(0, rows[1]), id="one lost and one freed twice"),
    ],
)
def test_a_row_that_is_lost_or_free_twice_is_found(damage: Callable[[list[int]], object]) -> None:
    pool = PagedKVCachePool(8, 4)
    state = BatchState(4, pool.num_blocks, block_size=4)
    check_state(state, pool)
    damage(state._free_rows)
    with pytest.raises(EngineError, match="in use twice, or lost"):
        check_state(state, pool)
