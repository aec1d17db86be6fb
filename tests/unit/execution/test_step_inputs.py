"""What the host knows about a step: where the tokens of prompts lie, and which of each row is its last."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infer.cache.paged_pool import PagedKVCachePool
from infer.execution.gpu.step_inputs import DeviceInputs, Prompts
from infer.scheduling.plan import Chunk
from infer.scheduling.request import Request
from infer.scheduling.sequence import Sequence, SequenceGroup
from tests.support.running import Running


def make_sequences(count: int) -> Running:
    running = Running(PagedKVCachePool(num_blocks=4 * count, block_size=4))
    for seq_id in range(count):
        prompt = tuple(range(100 * seq_id, 100 * seq_id + 9))
        group = SequenceGroup(
            Request(request_id=str(seq_id), prompt=prompt), max_total=99, stop_ids=(), seed=0
        )
        running.enter(Sequence(seq_id, group, 0, list(prompt)), 9)
    return running


@pytest.mark.parametrize("first", [2, 8])
def test_prompts_and_rows_that_decode_may_come_in_any_order(first: int) -> None:
    running = make_sequences(5)
    chunks = (Chunk(0, 2, 5, 0), Chunk(1, 8, 9, 1), Chunk(2, 0, 9, 1), Chunk(3, 8, 9, 1), Chunk(4, 7, 9, 1))
    prompts = Prompts(running.order(*chunks), first=first)
    begin = first
    assert prompts.decoding.tolist() == [1, 3]
    assert prompts.numbers.tolist() == [0, 2, 4]
    assert prompts.last_places.tolist() == [begin + 2, 0, begin + 11, 1, begin + 13]
    assert [chunk.row for chunk in prompts.chunks] == [0, 2, 4]
    assert prompts.num_tokens == 14
    tokens, positions, slots = prompts.table_XP.tolist()
    last = running.pool.block_tables(4)[0]
    assert slots[-2:] == [last[1] * 4 + 3, last[2] * 4]
    assert tokens == [2, 3, 4, *range(200, 209), 407, 408]
    assert positions == [2, 3, 4, *range(9), 7, 8]


def test_samples_stand_where_they_are_told_among_padding() -> None:
    inputs = DeviceInputs(8, 64, 16, 16, torch.device("cpu"), max_chunks=16)
    where, places = np.array([0, 1, 4]), np.array([5, 6, 7])
    inputs.send_samples(where, places, np.array([20, 21, 22]), np.array([30, 31, 32]), 6)
    assert inputs.samples_3C[:, :6].tolist() == [
        [5, 6, 0, 0, 7, 0],
        [20, 21, -1, -1, 22, -1],
        [30, 31, -1, -1, 32, -1],
    ]
    none = np.array([], dtype=np.int64)
    inputs.send_samples(none, none, none, none, 6)
    assert inputs.samples_3C[:, :6].tolist() == [[0] * 6, [-1] * 6, [-1] * 6]
