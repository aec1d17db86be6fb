"""Rows of state: whatever the host notes, after a flush the device has it, and nothing is sent twice."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
import torch

from infer.execution.gpu import rows as device_rows
from infer.execution.gpu.rows import LONG_RUN, NO_POSITION, DeviceRows, send_together
from infer.kernels.elementwise.step_state import apply_table_diffs
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from infer.scheduling.sequence import Sequence, SequenceGroup

CPU = torch.device("cpu")
MAX_BLOCKS = 3 * LONG_RUN


def make_rows(max_rows: int = 4) -> DeviceRows:
    return DeviceRows(max_rows, MAX_BLOCKS, CPU)


def make_seq(seq_id: int, params: SamplingParams | None = None) -> Sequence:
    request = Request(request_id=str(seq_id), prompt=(1, 2), params=params or SamplingParams())
    return Sequence(seq_id, SequenceGroup(request, max_total=99, stop_ids=(), seed=0), 0, [1, 2])


def sent_diffs(rows: DeviceRows) -> list[list[int]]:
    """What a flush says about tables; [] when it says nothing."""
    sent: list[list[int]] = []

    def spy(tables_RB: torch.Tensor, diffs_K3: torch.Tensor) -> None:
        assert len(diffs_K3).bit_count() == 1, "any number of programs, and every launch is a new one"
        sent.extend(diffs_K3[diffs_K3[:, 0] >= 0].tolist())
        apply_table_diffs(tables_RB, diffs_K3)

    with mock.patch.object(device_rows, "apply_table_diffs", spy):
        rows.flush()
    return sent


def test_a_table_is_sent_once_and_then_only_where_it_changes() -> None:
    rows = make_rows()
    row = rows.enter(make_seq(1), seed=0)
    other = rows.enter(make_seq(2), seed=0)
    rows.sync_table(row, [7, 8, 9], 0)
    rows.sync_table(other, [5], 0)
    assert sent_diffs(rows) == [[row, 0, 7], [row, 1, 8], [row, 2, 9], [other, 0, 5]]
    rows.sync_table(row, [7, 8, 9], 0)
    assert sent_diffs(rows) == []
    rows.sync_table(row, [7, 6, 9, 4, 3], 1)  # a private copy of the second, and two more
    assert sent_diffs(rows) == [[row, 1, 6], [row, 3, 4], [row, 4, 3]]
    assert rows.tables_RB[row, :5].tolist() == [7, 6, 9, 4, 3]


def test_a_caller_may_look_further_on_than_the_device_knows() -> None:
    rows = make_rows()
    row = rows.enter(make_seq(1), seed=0)
    rows.sync_table(row, [1], 0)
    rows.sync_table(row, [1, 2, 3, 4], 3)
    assert sent_diffs(rows) == [[row, 0, 1], [row, 1, 2], [row, 2, 3], [row, 3, 4]]


def test_the_list_that_was_noted_may_change_before_it_is_sent() -> None:
    rows = make_rows()
    row = rows.enter(make_seq(1), seed=0)
    blocks = [*range(100, 100 + LONG_RUN)]
    rows.sync_table(row, blocks, 0)
    blocks += [3]
    assert sent_diffs(rows) == [[row, place, 100 + place] for place in range(LONG_RUN)]


@pytest.mark.parametrize("seed", range(5))
def test_tables_follow_whatever_happens_to_them(seed: int) -> None:
    """Growing, shrinking, changing tables and sequences that come and go, against plain lists."""
    source, rows = random.Random(seed), make_rows()
    tables: dict[int, list[int]] = {}
    noted: set[int] = set()  # a step notes a table once
    for number in range(200):
        seq_id = source.randrange(4)
        if seq_id not in tables:
            rows.enter(make_seq(seq_id), seed=0)
            tables[seq_id] = []
        elif source.random() < 0.1:
            rows.forget(seq_id)
            del tables[seq_id]
            noted.discard(seq_id)
            continue
        if seq_id in noted:
            rows.flush()
            noted.clear()
        table = tables[seq_id]
        first = source.randrange(len(table) + 1)  # all before is as it was
        length = source.randrange(first, MAX_BLOCKS + 1)
        changed = [source.choice([number, *table[place : place + 1]]) for place in range(first, length)]
        tables[seq_id] = table[:first] + changed
        rows.sync_table(rows.by_seq[seq_id], tables[seq_id], first)
        noted.add(seq_id)
    rows.flush()
    for seq_id, table in tables.items():
        assert rows.tables_RB[rows.by_seq[seq_id], : len(table)].tolist() == table


def test_rows_are_sampled_as_their_sequences_ask() -> None:
    asked = [
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.1, top_p=1e-9),
    ]
    rows = make_rows()
    for number, params in enumerate(asked):
        assert rows.enter(make_seq(number, params), seed=2**63 + number) == number
        if number == 0:
            rows.flush()
    rows.flush()
    state = rows.sampling
    torch.testing.assert_close(state.temperature_R, torch.tensor([0.7, 0.0, 1.1, 0.0]), rtol=0, atol=0)
    assert state.top_k_R.tolist() == [40, 0, 0, 0]
    assert state.top_p_R.tolist() == [0.9, 1.0, 1e-9, 1.0] and state.min_p_R.tolist() == [0.1, 0.0, 0.0, 0.0]
    assert state.seed_R.tolist() == [-(2**63), 1 - 2**63, 2 - 2**63, 0]


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_tokens_arrive_with_their_positions(num_tokens: int) -> None:
    rows = make_rows()
    for number in range(num_tokens):
        rows.send_token(number, 100 + number, 10 + number)
    rows.flush()
    assert rows.last_token_R.tolist() == [100, 101, 102][:num_tokens] + [0] * (4 - num_tokens)
    assert rows.position_R.tolist() == [10, 11, 12][:num_tokens] + [0] * (4 - num_tokens)
    assert rows.next_token == [10, 11, 12][:num_tokens] + [NO_POSITION] * (4 - num_tokens)


def test_rows_that_decode_go_on_by_a_token_however_they_are_counted() -> None:
    source, rows, expected = random.Random(1), make_rows(), [NO_POSITION] * 4
    for number in range(4):
        expected[number] = 10 * number
        rows.send_token(number, 1, expected[number])
    rows.flush()
    decoding = [0, 1]
    for number in range(200):
        if source.random() < 0.3:
            decoding = source.sample(range(4), 2)  # another list, and sometimes the same rows
        rows.decode(decoding)
        for row in decoding:
            expected[row] += 1
            assert rows.is_decoding(row, expected[row])
            assert not rows.is_decoding(row, expected[row] + 1)
        if source.random() < 0.2:
            rows.send_token(3, 1, number)
            rows.flush()
            expected[3] = number
        if source.random() < 0.2:
            assert rows.next_token == expected
    assert rows.next_token == expected


@pytest.mark.parametrize("num_blocks", [2, LONG_RUN])
def test_nothing_of_a_row_that_left_before_the_flush_is_sent(num_blocks: int) -> None:
    rows = make_rows()
    row = rows.enter(make_seq(1, SamplingParams(temperature=0.5)), seed=3)
    rows.sync_table(row, [4] * num_blocks, 0)
    rows.send_token(row, 9, 1)
    rows.forget(1)
    assert sent_diffs(rows) == []
    assert not rows.tables_RB.any() and not rows.last_token_R.any() and not rows.sampling.seed_R.any()


def test_all_that_an_arriving_row_needs_travels_as_one() -> None:
    rows = make_rows()
    row = rows.enter(make_seq(1), seed=3)
    rows.sync_table(row, [4, 5], 0)
    rows.send_token(row, 9, 1)
    with mock.patch.object(device_rows, "send", wraps=device_rows.send) as send:
        rows.flush()
        rows.flush()
    assert send.call_count == 1
    assert rows.tables_RB[row, :2].tolist() == [4, 5] and rows.last_token_R[row] == 9


def test_arrays_that_travel_together_begin_at_multiples_of_16_bytes() -> None:
    arrays: list[np.ndarray] = [
        np.arange(9, dtype=np.int32).reshape(3, 3), np.arange(6).reshape(1, 6), np.arange(7, 8)
    ]  # fmt: skip
    sent = send_together(arrays, CPU)
    for array, tensor in zip(arrays, sent, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array)) and tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == sent[0].data_ptr() % 16
