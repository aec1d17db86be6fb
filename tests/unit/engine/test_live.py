"""What a page is shown of an engine: the states of its blocks, its last steps, and why requests wait.

The engine is real, its model is the token oracle, and the clock belongs to the test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from infer.cache.block_allocator import BlockAllocator
from infer.cache.prefix_tree import NO_BRANCH, Branch, PrefixTree
from infer.engine.live import (
    CACHED,
    FIRST_LISTED,
    FREE,
    HELD,
    MAX_CELLS,
    MAX_SHARE,
    MAX_STEPS,
    MAX_WAITING,
    MIN_INTERVAL_S,
    SHARED,
    STEP_COLUMNS,
    UNLISTED,
    WATCH_S,
    LiveSnapshot,
    LiveView,
    _cells,
    _codes,
)
from infer.execution.device import StepResult
from infer.execution.order import StepMasks, StepOrder
from tests.support.oracle import OracleWorld, prompt_of
from tests.support.oracle_drafts import speculation_of


class Clock:
    """Seconds that pass when the test says so, and `tick` of them at every reading."""

    def __init__(self) -> None:
        self.now = 100.0
        self.tick = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def make_world(**knobs: Any) -> tuple[OracleWorld, Clock]:
    world, clock = OracleWorld(**knobs), Clock()
    world.engine._live, world.engine._clock = LiveView(world.scheduler, clock), clock
    return world, clock


def look(world: OracleWorld, clock: Clock) -> LiveSnapshot:
    """A new snapshot."""
    clock.now += 10 * MIN_INTERVAL_S
    return world.engine.look()


def unrolled(runs: list[int]) -> list[int]:
    """The cells that run lengths stand for."""
    return [code for code, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]


def rows_of(snapshot: LiveSnapshot) -> list[dict[str, int]]:
    """The steps of a snapshot by the names of their columns."""
    rows = np.frombuffer(snapshot.steps, np.int64).reshape(-1, len(STEP_COLUMNS)).tolist()
    return [dict(zip(STEP_COLUMNS, row, strict=True)) for row in rows]


def check_blocks(world: OracleWorld, snapshot: LiveSnapshot) -> None:
    """Raise unless a snapshot says of every block what the pool says, asked one block at a time."""
    pool, listed = world.pool, [request.request_id for request in snapshot.requests]
    sequences = {seq.seq_id: seq.request_id for seq in world.scheduler.sequences()}
    usage = pool.usage()
    assert sum(snapshot.counts) == snapshot.num_blocks == pool.num_blocks
    assert snapshot.counts[:2] == (usage.num_free, usage.num_idle)
    cells, free = unrolled(snapshot.cells), set(pool.spare_blocks[0])
    assert len(cells) == pool.num_blocks
    for block, code in enumerate(cells):
        owners = [owner for owner in pool._device.owners_of(block) if owner in sequences]
        if code in (FREE, CACHED):
            assert not owners and (block in free) == (code == FREE)
        elif code == SHARED:
            assert len(owners) > 1
        else:
            assert [listed[code - FIRST_LISTED]] == [sequences[owner] for owner in owners]
    host = unrolled(snapshot.host_cells)
    assert len(host) == pool.num_host_blocks
    assert host.count(FREE) == usage.num_free_host_blocks
    assert sum(r.num_host_blocks for r in snapshot.requests) == len(host) - usage.num_free_host_blocks
    assert snapshot.num_unlisted == 0
    assert sum(r.num_blocks for r in snapshot.requests) == sum(
        len(held) for _, held, _ in pool.tables_of_all()
    )


@pytest.mark.parametrize("seed", range(6))
def test_every_block_is_in_one_state_after_every_step(seed: int) -> None:
    rng = random.Random(seed)
    world, clock = make_world(
        num_blocks=24 + 8 * (seed % 2),
        max_batch_size=5,
        num_host_blocks=12,
        prefill_chunk_size=5,
        preemption=rng.choice(["swap", "recompute"]),
        steps_ahead=rng.choice([0, 2]),
        placement_seed=seed,
    )
    seen, num_kinds = set[str](), [0] * 4
    for number in range(14):
        params: dict[str, Any] = {"max_tokens": rng.randint(1, 12)}
        if rng.random() < 0.2:
            params["n"] = 3
        elif rng.random() < 0.15:
            params |= {"use_beam_search": True, "temperature": 0.0, "n": 2}
        world.add(f"r{number}", prompt_of(rng.randint(1, 30), start=rng.choice([1, 2])), **params)
        for _ in range(rng.randint(0, 4)):
            world.step()
            snapshot = look(world, clock)
            check_blocks(world, snapshot)
            assert snapshot.num_running == len(world.scheduler.running)
            seen |= {request.state for request in snapshot.requests}
            num_kinds = [a + b for a, b in zip(num_kinds, snapshot.counts, strict=True)]
        if rng.random() < 0.2:
            world.abort(rng.choice([f"r{i}" for i in range(number + 1)]))
    while world.engine.has_work:
        world.step()
        check_blocks(world, look(world, clock))
    assert seen >= {"prefill", "decode"} and all(num_kinds)
    rows = rows_of(look(world, clock))
    assert sum(row["forks"] for row in rows) == world.scheduler.num_forks
    assert sum(row["preemptions"] for row in rows) == world.scheduler.num_preemptions


def test_a_step_says_what_was_in_it() -> None:
    world, clock = make_world(num_blocks=64, prefill_chunk_size=6, max_batch_size=4)
    world.add("a", prompt_of(6), max_tokens=9)
    world.engine.look()
    world.step()
    world.add("b", prompt_of(20, start=2), max_tokens=2)
    clock.now += 0.25
    world.step()
    first, second = rows_of(look(world, clock))
    assert (first["decode_rows"], first["prompt_rows"], first["prompt_tokens"]) == (0, 1, 6)
    assert (second["decode_rows"], second["prompt_rows"], second["prompt_tokens"]) == (1, 1, 6)
    assert [first["step"], second["step"]] == [1, 2] and not first["in_graph"]
    world.run()
    assert [row["step"] for row in rows_of(look(world, clock))] == list(range(1, len(world.plans) + 1))


def slow_down(world: OracleWorld, clock: Clock, seconds_of: Callable[[StepOrder], float]) -> None:
    """Let the device take its time for a step."""
    compute = world.runner.compute

    def slow(order: StepOrder, masks: StepMasks) -> StepResult:
        clock.now += seconds_of(order)
        return compute(order, masks)

    world.runner.compute = slow  # type: ignore[method-assign]  # a device of its own for one method


def test_the_time_of_a_step_is_that_of_the_device_and_not_of_the_idle_time_before() -> None:
    world, clock = make_world()
    slow_down(world, clock, lambda order: 0.002)
    world.engine.look()
    world.add("a", prompt_of(4), max_tokens=3)
    clock.now += 1.0  # idle
    world.step()
    (row,) = rows_of(look(world, clock))
    assert row["microseconds"] == 2000


def test_the_pace_of_prompts_and_of_rows_is_told_apart_while_sequences_end() -> None:
    world, clock = make_world(num_blocks=64)
    world.engine.watch_prefixes()
    slow_down(world, clock, lambda order: 0.001 * order.num_tokens if order.num_tokens > 4 else 0.5)
    for number in range(20):
        world.add(f"r{number}", prompt_of(8, start=number), max_tokens=1 + number % 3)
        world.step()
    world.run()
    stats = world.engine.stats()
    assert 0.0005 < stats.token_s < 0.1, "prompts of a thousandth of a second for each token"
    assert stats.row_s > 0.1, "rows that decode"


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_drafts_are_counted_with_those_that_were_kept(share: float) -> None:
    make = speculation_of("drafter", share=share, is_adaptive=False)
    world, clock = make_world(num_blocks=64, speculation=make)
    world.engine.look()
    world.add("a", prompt_of(8), max_tokens=30)
    world.run()
    rows, totals = rows_of(look(world, clock)), world.engine.stats()
    assert sum(row["drafts"] for row in rows) == totals.num_draft_tokens > 0
    assert sum(row["accepted"] for row in rows) == totals.num_accepted_tokens
    assert all(row["decode_rows"] == 1 for row in rows[1:])


def test_nothing_is_written_down_while_nobody_looks() -> None:
    world, clock = make_world()
    view = world.engine._live
    world.add("a", prompt_of(4), max_tokens=40)
    world.step()
    assert not view.is_on and not len(view._rows)
    world.engine.look()
    world.step()
    clock.now += WATCH_S + 0.1  # the page has vanished
    world.step()
    assert not view.is_on and view._last is None
    world.step()
    assert [row["step"] for row in rows_of(world.engine.look())] == []  # what was missed is not made up
    world.step()
    assert [row["step"] for row in rows_of(look(world, clock))] == [5]


def test_the_ring_holds_the_last_steps() -> None:
    world, clock = make_world(num_blocks=400, context_len=1500)
    world.engine.look()
    world.add("a", prompt_of(4), max_tokens=MAX_STEPS + 88)
    world.run()
    steps = [row["step"] for row in rows_of(look(world, clock))]
    assert steps == list(range(89, 89 + MAX_STEPS))


def test_who_asks_early_gets_the_last_snapshot_again() -> None:
    world, clock = make_world()
    first = world.engine.look()
    clock.now += MIN_INTERVAL_S / 2
    assert world.engine.look() is first
    clock.now += MIN_INTERVAL_S
    assert world.engine.look().number == first.number + 1


def test_a_snapshot_that_takes_long_makes_the_next_come_later() -> None:
    world, clock = make_world()
    clock.tick = 0.02
    snapshot = world.engine.look()
    assert snapshot.interval_s == pytest.approx(0.02 / MAX_SHARE)
    clock.now += 0.9 * snapshot.interval_s
    assert world.engine.look() is snapshot


def test_a_page_that_comes_back_after_its_time_finds_an_empty_ring() -> None:
    world, clock = make_world()
    world.engine.look()
    world.add("a", prompt_of(4), max_tokens=5)
    world.run()
    clock.now += WATCH_S + 1
    assert rows_of(world.engine.look()) == []


# -- the queue ------------------------------------------------------------------------------------


def waits(world: OracleWorld, clock: Clock) -> dict[str, str]:
    return {request.request_id: request.waits_for for request in look(world, clock).requests}


def test_a_request_waits_for_a_place_in_the_batch() -> None:
    world, clock = make_world(max_batch_size=1, num_blocks=64)
    for name in "abc":
        world.add(name, prompt_of(4), max_tokens=30)
    world.step()
    assert waits(world, clock) == {"a": "", "b": "place", "c": "place"}


def test_a_request_waits_for_blocks_and_others_for_their_turn() -> None:
    world, clock = make_world(num_blocks=8, use_prefix_caching=False)
    world.add("a", prompt_of(20), max_tokens=10)
    world.step()
    world.add("b", prompt_of(20, start=2), max_tokens=8)
    world.add("c", prompt_of(2, start=3), max_tokens=2)
    world.step()
    assert waits(world, clock) == {"a": "", "b": "blocks", "c": "turn"}


def test_a_request_waits_for_the_token_budget() -> None:
    world, clock = make_world(num_blocks=64, max_num_batched_tokens=8, prefill_chunk_size=8)
    world.add("a", prompt_of(30), max_tokens=4)
    world.add("b", prompt_of(30, start=2), max_tokens=4)
    world.step()
    assert waits(world, clock) == {"a": "", "b": "budget"}


def test_a_request_waits_for_the_compiler() -> None:
    world, clock = make_world()
    request = SimpleNamespace(request_id="g", prompt=(1, 2, 3))
    clock.now += 1
    snapshot = world.engine._live.look([SimpleNamespace(request=request)])  # type: ignore[list-item]
    assert [(r.request_id, r.waits_for, r.num_prompt) for r in snapshot.requests] == [("g", "compile", 3)]
    assert snapshot.num_waiting == 1 and snapshot.num_unlisted == 0


def test_a_long_queue_is_listed_in_part() -> None:
    world, clock = make_world(max_batch_size=2, num_blocks=400, max_queue=None)
    for number in range(1000):
        world.add(f"r{number:04}", prompt_of(4), max_tokens=2)
    world.step()
    snapshot = look(world, clock)
    waiting = [request.request_id for request in snapshot.requests if request.state == "waiting"]
    assert waiting == [f"r{number:04}" for number in range(2, 2 + MAX_WAITING)]
    assert snapshot.num_waiting == 998 and snapshot.num_unlisted == 898
    assert len(msgspec.json.encode(snapshot.requests)) < 10_000


# -- cells ----------------------------------------------------------------------------------------


def test_many_blocks_are_summed_up_by_cell() -> None:
    num_blocks = 100_000
    free = list(range(60_000, num_blocks))
    held = [(4, list(range(30_000))), (5, list(range(29_990, 50_000)))]
    idle = range(50_000, 60_000)
    codes = _codes(held, num_blocks, free, idle)
    assert codes.tolist() == _codes(held, num_blocks, free, [*idle, *free]).tolist()  # by those that are free
    assert np.bincount(np.minimum(codes, HELD)).tolist() == [40_000, 10_000, 10, 49_990]
    per_cell, runs = _cells(codes)
    cells = unrolled(runs)
    assert per_cell == 25 and len(cells) == 4000 <= MAX_CELLS
    assert cells == [4] * 1200 + [5] * 800 + [CACHED] * 400 + [FREE] * 1600


@pytest.mark.parametrize(
    ("blocks", "shown"),
    [
        ([FREE, FREE, 7], FREE),
        ([FREE, 7, 8], 7),
        ([FREE, SHARED, CACHED], SHARED),
        ([FREE, CACHED, CACHED], CACHED),
        ([FREE, SHARED, UNLISTED], UNLISTED),
    ],
)
def test_a_cell_shows_what_most_of_its_blocks_are(blocks: list[int], shown: int) -> None:
    codes = np.full(2 * MAX_CELLS + 1, FREE)
    codes[3:6] = blocks
    per_cell, runs = _cells(codes)
    assert per_cell == 3 and unrolled(runs)[:3] == [FREE, shown, FREE]


def test_no_blocks_are_no_cells() -> None:
    assert _cells(_codes([], 0, (), ())) == (1, [])


# -- the prefix tree ------------------------------------------------------------------------------


def test_branches_are_runs_of_blocks_that_the_same_prompts_hit() -> None:
    allocator = BlockAllocator(64)
    tree = PrefixTree(allocator, 2)

    def insert(tokens: list[int], owner: int) -> None:
        tree.insert(tokens, [allocator.take(len(tokens) // 2, owner)], len(tokens) // 2)

    start = list(range(8))  # four blocks that all share
    insert([*start, 10, 11, 12, 13], 1)
    insert([*start, 20, 21], 2)
    insert([30, 31], 3)
    insert([40, 41], 4)
    for tokens in ([*start, 10, 11, 12, 13], [*start, 20, 21], [*start, 20, 21], start, [30, 31]):
        path = tree.match(tokens)
        tree.record(len(tokens), path, 2 * len(path))
    assert tree.hottest(8) == [
        Branch(NO_BRANCH, 0, 4, 4, 2),
        Branch(0, 4, 5, 2, 0),
        Branch(0, 4, 6, 1, 0),
        Branch(NO_BRANCH, 0, 1, 1, 0),
    ]
    assert tree.hottest(2) == tree.hottest(8)[:2]


def test_hits_are_counted_for_admitted_prompts() -> None:
    world, clock = make_world(num_blocks=64)
    for number in range(3):
        world.add(f"r{number}", [*prompt_of(12), 500 + number], max_tokens=2)
        world.run()
    (branch,) = look(world, clock).branches
    assert branch[:4] == (NO_BRANCH, 0, 3, 2)


def test_the_host_s_memory_is_in_the_snapshot() -> None:
    world, clock = make_world()
    total, used, free = look(world, clock).host_bytes
    assert 0 < used <= total and 0 < free <= total
