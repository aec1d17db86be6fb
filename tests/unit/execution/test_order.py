"""An order in a buffer: what is written is read, without a copy, and what is damaged is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from infer.engine.host_half import HostHalf
from infer.execution.device import StateShape
from infer.execution.order import (
    DECODE,
    EMPTY,
    ON_HOST,
    PROMPT,
    REPEATS,
    VERIFY,
    RowFacts,
    StepOrder,
    read,
    to_bytes,
)
from infer.kernels.sampling.sample_line import SampleLine
from infer.scheduling.batch_state import BatchState
from infer.scheduling.plan import Chunks, StepPlan
from infer.scheduling.request import Request
from infer.scheduling.sequence import Sequence, SequenceGroup
from infer.tools.order_replay import DeviceLimits, OrderCheck, wrong_number

LIMITS = DeviceLimits(
    shape=StateShape(num_rows=16, max_blocks=8, block_size=4),
    num_blocks=64,
    num_host_blocks=4,
    vocab_size=1000,
    max_tokens=64,
)


def make_order(seed: int = 0) -> StepOrder:
    """Rows of every kind, with tokens and slots."""
    rng = np.random.default_rng(seed)
    kinds = np.array([DECODE, PROMPT, VERIFY, DECODE, PROMPT], dtype=np.int8)
    counts = np.array([1, 6, 3, 1, 1], dtype=np.int32)
    num_given = int(counts[kinds != DECODE].sum())
    return EMPTY._replace(
        step=7 + seed,
        flags=ON_HOST,
        rows=rng.permutation(16)[:5].astype(np.int32),
        starts=np.array([9, 0, 4, 30, 2], dtype=np.int32),
        counts=counts,
        num_sampled=np.array([1, 1, 3, 1, 0], dtype=np.int16),
        num_draws=np.array([1, 1, 1, 1, 0], dtype=np.int16),
        adapters=np.zeros(5, dtype=np.int16),
        kinds=kinds,
        tokens=rng.integers(0, 1000, num_given).astype(np.uint32),
        slots=rng.integers(0, 256, (1, num_given)).astype(np.int32),
        next_tokens=rng.integers(0, 1000, 5).astype(np.uint32),
        known=rng.integers(0, 16, (3, 2)),
        table_changes=rng.integers(0, 8, (4, 3)).astype(np.int32),
        transfers=np.array([[0, 5, 6], [1, 6, 3], [2, 3, 9]], dtype=np.int32),
    )


def same(one: StepOrder, other: StepOrder) -> bool:
    pairs: list[tuple[Any, Any]] = [*zip(one, other, strict=True)]
    return all(np.array_equal(a, b) and np.shape(a) == np.shape(b) for a, b in pairs)


@pytest.mark.parametrize("order", [EMPTY, make_order(0), make_order(3)], ids=["empty", "0", "3"])
def test_what_is_written_is_read_without_a_copy(order: StepOrder) -> None:
    buffer = bytearray(to_bytes(order) + b"more")
    found = read(memoryview(buffer))
    assert same(found, order)
    if order.num_rows:
        assert np.shares_memory(found.rows, np.frombuffer(buffer, dtype=np.uint8))
        apart = order._replace(slots=np.asfortranarray(order.slots), starts=order.starts.repeat(2)[::2])
        assert to_bytes(apart) == to_bytes(order), "wherever its numbers lie"


def test_256_rows_that_decode_take_at_most_8_kilobytes() -> None:
    """Also in a step in which all of them get a block."""
    state = BatchState(512, 100, block_size=16)
    sequences = []
    for number in range(256):
        group = SequenceGroup(
            Request(request_id=str(number), prompt=(1, 2)), max_total=999, stop_ids=(), seed=number
        )
        seq = Sequence(number, group, 0, [1, 2, 3])
        seq.sort_key = (0.0, number)
        state.enter(seq)
        sequences.append(seq)
    host = HostHalf(state)
    ones = np.ones(256, dtype=np.int64)
    rows = np.array([seq.row for seq in sequences])
    chunks = Chunks(np.arange(256), 2 * ones, 3 * ones, ones, rows, sequences=sequences)
    first = host.order(StepPlan(1, chunks))
    assert first.has_begun and not first.flags & REPEATS
    changes = [number for row in rows.tolist() for number in (row, 1, 7)]
    again = chunks.at(3 * ones, 4 * ones, is_repeated=True)
    second = host.order(StepPlan(2, again, table_changes=changes))
    assert second.flags & REPEATS and not second.has_begun
    assert len(to_bytes(second)) <= 8192
    third = host.order(StepPlan(3, chunks.at(4 * ones, 5 * ones, is_repeated=True)))
    assert len(to_bytes(third)) <= 5200
    assert third.starts.tolist() == [4] * 256


def test_parts_of_an_order_compute_the_same() -> None:
    order = make_order()
    first, rest = order.cut(1, 2)
    assert (first.num_tokens, rest.num_tokens) == (3, 9)
    assert np.array_equal(np.concatenate([first.tokens, rest.tokens]), order.tokens)
    assert np.array_equal(np.concatenate([first.slots, rest.slots], axis=1), order.slots)
    assert first.counts.tolist() == [1, 2] and rest.counts.tolist() == [4, 3, 1, 1]
    assert rest.starts[0] == order.starts[1] + 2
    assert first.num_sampled.tolist() == [1, 0], "what a row samples comes with its last token"
    assert first.next_tokens[1] == order.tokens[2]
    assert len(first.table_changes) and not len(rest.table_changes), "differences of state are said once"
    assert not len(first.transfers) and not len(rest.transfers)
    whole, none = order.cut(3, 0)
    assert whole.num_rows == 3 and none.num_rows == 2


def test_a_buffer_that_is_cut_short_is_refused() -> None:
    buffer = to_bytes(make_order())
    for length in range(len(buffer)):
        with pytest.raises(ValueError, match=r"bytes|order"):
            read(memoryview(buffer)[:length])


def test_a_damaged_buffer_is_refused_or_says_something_impossible() -> None:
    """Whatever a file holds, no number beyond the device's state gets there."""
    rng, whole = random.Random(1), to_bytes(make_order())
    num_refused = 0
    for _ in range(3000):
        buffer = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            buffer[rng.randrange(len(buffer))] = rng.randrange(256)
        try:
            order = read(memoryview(buffer))
        except ValueError:
            num_refused += 1
            continue
        if wrong_number(order, LIMITS) is not None:
            num_refused += 1
            continue
        assert (
            order.rows.max() < 16 and order.slots.max(initial=0) < 256 and order.tokens.max(initial=0) < 1000
        )
        assert order.table_changes.max(initial=0) < 64 and order.stops.max() <= 32
    assert num_refused > 1500


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", [0, 1, 2, 3, 16]),
        ("rows", [0, 1, 2, 3, 3]),
        ("starts", [40, 0, 0, 0, 0]),
        ("counts", [2, 6, 3, 1, 1]),
        ("kinds", [0, 1, 2, 0, 3]),
        ("num_sampled", [1, 7, 3, 1, 0]),
        ("table_changes", [[0, 0, 64]]),
        ("transfers", [[1, 0, 4]]),
        ("transfers", [[3, 0, 0]]),
        ("known", [[0], [1000], [0]]),
    ],
)
def test_impossible_numbers_are_found(field: str, value: Any) -> None:
    order = make_order()
    assert wrong_number(order, LIMITS) is None
    changed: dict[str, Any] = {field: np.array(value, dtype=getattr(order, field).dtype)}
    assert wrong_number(order._replace(**changed), LIMITS) is not None


def begin(row: int, start: int, count: int, **facts: int) -> StepOrder:
    """The order with which a row begins: a prompt that draws its first id."""
    order = decode(row, start)
    known = {"num_prompt": start + count, "num_logprobs": -1, "prompt_logprobs": -1} | facts
    return order._replace(
        kinds=np.array([PROMPT], dtype=np.int8),
        counts=np.array([count], dtype=np.int32),
        tokens=np.arange(count, dtype=np.uint32),
        slots=np.arange(count, dtype=np.int32)[None],
        lines=np.frombuffer(bytearray(SampleLine(row).pack()), dtype=np.int64).reshape(1, -1),
        facts=np.array([RowFacts(**known)], dtype=np.int32),
    )


def decode(row: int, start: int, flags: int = 0) -> StepOrder:
    """The order of one row that decodes."""
    one = np.ones(1, dtype=np.int16)
    return EMPTY._replace(
        flags=flags,
        rows=np.array([row], dtype=np.int32),
        starts=np.array([start], dtype=np.int32),
        counts=np.ones(1, dtype=np.int32),
        num_sampled=one,
        num_draws=one,
        adapters=0 * one,
        kinds=np.zeros(1, dtype=np.int8),
        slots=np.empty((1, 0), dtype=np.int32),
    )


def test_rows_are_followed_from_order_to_order() -> None:
    check = OrderCheck(LIMITS)
    assert check(begin(3, 0, 4)) is None
    assert check(decode(3, 4)) is None
    assert check(decode(3, 5, REPEATS)) is None
    told = decode(3, 9)._replace(known=np.array([[3], [7], [9]]))
    assert check(told) is None, "the host may say where a row goes on"
    assert check(decode(3, 10)) is None


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (decode(3, 4), "position"),  # again: a device would go on, past the end of its table
        (decode(3, 7), "position"),
        (decode(5, 5), "begun"),
        (decode(5, 5, REPEATS), "repeats"),
        (begin(5, 0, 2, num_logprobs=-5), "logprobs"),
        (begin(5, 0, 2, prompt_logprobs=1 << 30), "logprobs"),
        (begin(5, 0, 2)._replace(num_draws=np.array([2], dtype=np.int16)), "not on the host"),
    ],
)
def test_an_order_that_does_not_follow_from_those_before_is_found(order: StepOrder, why: str) -> None:
    check = OrderCheck(LIMITS)
    assert check(begin(3, 0, 4)) is None and check(decode(3, 4)) is None
    assert why in (check(order) or "")
