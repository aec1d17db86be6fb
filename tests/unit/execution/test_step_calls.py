"""A row that decodes costs no Python call of its own: what it needs is done by loops over all rows.

Time cannot be tested on a machine that others use; calls can be counted. Counted are Python functions that
are entered, generators that go on included, in steps of the real engine over a device that does nothing.

Nor does it leave anything for the garbage collector: what a step made is gone when its outputs are, and what
stays (blocks in the prefix tree) is nothing that the collector has to walk through ever after.
"""

from __future__ import annotations

import functools
import gc
import sys
from types import FrameType

import pytest

from benchmarks import engine_cpu
from infer.engine.engine import Engine

ROUND = engine_cpu.BLOCK_SIZE  # steps in which every row fills one block and gets the next
CALLS_TO_CROSS = 10  # of one row: give a full block to the prefix tree, take another, tell the device


@functools.cache
def calls_per_round(num_rows: int) -> int:
    engine = engine_cpu.make_engine(num_rows)
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        for _ in range(ROUND):
            engine.step()
    finally:
        sys.setprofile(None)
    return num_calls


def test_rows_cost_calls_only_where_they_cross_a_block() -> None:
    per_row = (calls_per_round(64) - calls_per_round(16)) / 48
    # less than one more: what other tests left behind may come to its end meanwhile
    assert per_row < CALLS_TO_CROSS + 1, f"{per_row:.1f} calls per row in {ROUND} steps"


def test_a_step_of_one_row_costs_few_calls() -> None:
    per_step = calls_per_round(1) / ROUND
    assert per_step <= 58, f"{per_step:.1f} calls per step"


def left_by_a_round(engine: Engine) -> tuple[int, int]:
    """How many objects only the collector can free after a round, and how many more it walks through."""
    gc.collect()
    num_tracked = len(gc.get_objects())
    gc.disable()
    try:
        for _ in range(ROUND):
            engine.step()
        num_in_circles = gc.collect()
    finally:
        gc.enable()
    return num_in_circles, len(gc.get_objects()) - num_tracked


@pytest.mark.usefixtures("real_freezing")
def test_steps_leave_nothing_to_the_garbage_collector() -> None:
    engine = engine_cpu.make_engine(64)
    num_cached = engine.stats().num_cached_blocks
    gc.collect()
    gc.freeze()  # all that other tests have loaded: to walk through it takes longer than the steps
    rounds = [left_by_a_round(engine) for _ in range(4)]
    assert engine.stats().num_cached_blocks - num_cached == 4 * 64
    # the least of all rounds: what other tests left behind ends in some of them, what steps leave is in each
    assert min(num_in_circles for num_in_circles, _ in rounds) == 0, rounds
    assert min(num_more for _, num_more in rounds) < 32, rounds
