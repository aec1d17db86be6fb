"""The time of a step by its number of tokens, measured with the device itself before the first request.

A row of state that no sequence has yet computes windows of 1, 2, 4, ... tokens, in blocks that hold nothing
yet. The engine decides by these seconds how many drafts pay (speculative/adaptive.py), so they are written
down with a recorded run: equal queues must give equal plans. Where steps overlap, as on a GPU, some are
launched behind each other: one takes what it adds to the time of the others, and the rest is the host's.

Other programs can slow a start, above all on a CPU, and windows would stay short for as long as the engine
lives. So a server's engine that is idle measures again, one step at a time, and keeps the shortest time of
each window. A run that is recorded or repeated keeps the seconds it began with.

    start  [1 2 4 .. 128]   idle 1 s  [1] [2] [4] .. [128]   idle 10 s  [1] [2] ..   idle 60 s ..
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from infer.config.speculation import WINDOW_TOKENS
from infer.execution.device import DeviceHalf, StateShape
from infer.execution.gpu.device import GpuDevice
from infer.execution.order import DECODE, DRAWS_BEST, EMPTY, VERIFY, RowFacts, StepOrder
from infer.execution.torch_device import TorchDevice
from infer.kernels.sampling.sample_line import NUM_FIELDS, SampleLine
from infer.speculative.adaptive import StepCosts
from infer.speculative.tree import WIDTH, turns_of

NUM_PROBES = 3  # runs of each window, of which the fastest counts
DRAFT_PROBES = 4  # drafts that are timed together
MOST_SECONDS = 2.0  # time for all windows: costs that are not measured by then follow the last two
IDLE_WAITS_S = (10.0, 60.0, 600.0, None)  # pauses after measuring all windows again; None: no more


def measure_step_costs(
    device: DeviceHalf,
    shape: StateShape,
    *,
    max_tokens: int,
    vocab_size: int,
    weight_bytes: int,
    kv_bytes_per_token: int,
    gap_s: float = 0.0,
    row_gap_s: float = 0.0,
    drafter: DeviceHalf | None = None,
    draft_start: int = 0,
    has_trees: bool = False,
) -> StepCosts:
    """Return what steps of a device take; the gaps are the host's where it overlaps other steps.

    `max_tokens`: tokens of a text that models can see and the cache can hold; a table may have room for more.
    `draft_start`: the position of the first token that the drafter can compute; a head can compute none at 0.
    A step of one token is the time to read the weights, so keys and values take as much for each byte.
    """
    size, room = 1, min(WINDOW_TOKENS, max_tokens)
    for count in (1, min(16, room)) if has_trees and isinstance(device, GpuDevice) else ():
        device.run(_window(shape, vocab_size, count)).wait()  # Triton compiles, which is not counted
    pairs, began = [], time.perf_counter()
    while size <= room:
        alone, behind = _fastest_of(device, _window(shape, vocab_size, size), overlaps=gap_s > 0)
        pairs.append((size, behind))
        if size == 1:  # what the host takes for a step, and for the plan of the next
            gap_s += alone - behind
        if len(pairs) > 1 and time.perf_counter() - began > MOST_SECONDS:
            break
        size *= 2
    draft_s = draft_row_s = 0.0
    num_rows = min(32, -(-shape.num_rows // 2))  # half are for sequences that begin before others end
    if isinstance(drafter, GpuDevice):
        draft_s, many = (_turn_seconds(drafter, shape, count, has_trees) for count in (1, num_rows))
        draft_row_s = max(many - draft_s, 0.0) / num_rows
    elif drafter is not None and has_trees:
        few, many = (
            _fastest(drafter, _best(_window(shape, vocab_size, size))) for size in (8, min(64, room))
        )
        draft_s, draft_row_s = few, max(many - few, 0.0) / 8
    elif drafter is not None:
        draft_s = _draft_seconds(drafter, shape, draft_start)
        few, many = (_fastest(drafter, _turn(shape, count, draft_start)) for count in (1, num_rows))
        draft_row_s = max(many - few, 0.0) / num_rows
    return StepCosts.measured(
        pairs,
        gap_s=gap_s,
        row_gap_s=row_gap_s,
        draft_s=draft_s,
        draft_row_s=draft_row_s,
        seen_s=kv_bytes_per_token * pairs[0][1] / weight_bytes,
        is_ahead=isinstance(drafter, GpuDevice),
    )


def measure_again(
    device: TorchDevice, shape: StateShape, vocab_size: int, costs: StepCosts
) -> Iterator[tuple[StepCosts, float | None]]:
    """Time windows again, one step at each turn; yields the costs so far and the idle seconds until the next.

    The blocks in which a window is computed get their contents back.
    """
    for wait_s in IDLE_WAITS_S:
        for turn in range(NUM_PROBES):
            for place, (num_tokens, _) in enumerate(costs.pairs):
                order = _window(shape, vocab_size, num_tokens)
                with device.store.kept(-(-num_tokens // shape.block_size)):
                    start = time.perf_counter()
                    device.run(order).wait()
                    seconds = time.perf_counter() - start
                if seconds < costs.pairs[place][1]:
                    costs = _faster(costs, place, seconds)
                is_last = turn == NUM_PROBES - 1 and num_tokens == costs.pairs[-1][0]
                yield costs, wait_s if is_last else 0.0


def _faster(costs: StepCosts, place: int, seconds: float) -> StepCosts:
    """Return costs with a shorter time of one window; what is attended to follows a step of one token."""
    pairs = [*costs.pairs]
    pairs[place] = pairs[place][0], seconds
    repaired = StepCosts.measured(pairs).pairs
    return replace(costs, pairs=repaired, seen_s=costs.seen_s * repaired[0][1] / costs.pairs[0][1])


def _draft_seconds(device: DeviceHalf, shape: StateShape, start: int) -> float:
    """Return what one more draft takes: steps that go on from their own ids, launched one after another."""
    first, best = _turn(shape, 1, start), float("inf")
    turns = [
        first._replace(
            starts=np.array([place], dtype=np.int32),
            **{name: getattr(EMPTY, name) for name in ("table_changes", "lines", "facts", "known")},
        )
        for place in range(start + 1, min(start + 1 + DRAFT_PROBES, shape.block_size))
    ]
    if not turns:
        return _fastest(device, first)
    for _ in range(1 + NUM_PROBES):  # the first one compiles, captures and allocates
        device.run(first).wait()
        began = time.perf_counter()
        for step in [device.run(turn) for turn in turns]:
            step.wait()
        best = min(best, time.perf_counter() - began)
    return best / len(turns)


def _turn_seconds(device: GpuDevice, shape: StateShape, num_rows: int, are_trees: bool) -> float:
    """Return what a turn takes in a graph of several."""
    device.enter(_turn(shape, num_rows, 1), np.zeros(num_rows))  # the token before has a place
    num_drafts, rows, best = min(DRAFT_PROBES, len(device.drafts_KS)), np.arange(num_rows), float("inf")
    for _ in range(1 + NUM_PROBES):  # the first one compiles, captures and allocates
        began = time.perf_counter()
        device.draft(rows, np.full(num_rows, num_drafts), np.full(num_rows, are_trees)).wait()
        best = min(best, time.perf_counter() - began)
    return best / (turns_of(num_drafts) if are_trees else num_drafts)


def _fastest(device: DeviceHalf, order: StepOrder) -> float:
    """Return the shortest time of a step."""
    return _fastest_of(device, order, overlaps=False)[0]


def _fastest_of(device: DeviceHalf, order: StepOrder, *, overlaps: bool) -> tuple[float, float]:
    """Return the shortest time of a step alone, and of one that is launched while another runs."""
    device.run(order).wait()  # the first one compiles, captures and allocates
    alone, both = (
        min(_seconds(device, order, count) for _ in range(NUM_PROBES)) for count in (1, 1 + overlaps)
    )
    return alone, max(min(both - alone, alone), 1e-6) if overlaps else alone


def _seconds(device: DeviceHalf, order: StepOrder, count: int) -> float:
    """Return the time of a step that is launched this many times at once, until all have been read."""
    start = time.perf_counter()
    for step in [device.run(order) for _ in range(count)]:
        step.wait()
    return time.perf_counter() - start


def _window(shape: StateShape, vocab_size: int, num_tokens: int) -> StepOrder:
    """Return an order that computes `num_tokens` tokens of row 0 and draws next to each."""
    num_blocks = -(-num_tokens // shape.block_size)
    tables = np.arange(shape.num_tables)[:, None] * np.array([[shape.num_rows]])
    changes_KB3 = np.zeros((shape.num_tables, num_blocks, 3), dtype=np.int32)
    changes_KB3[..., 0] = tables
    changes_KB3[..., 1] = changes_KB3[..., 2] = np.arange(num_blocks)
    tokens = (np.arange(num_tokens) * 7919 + 1) % vocab_size
    return EMPTY._replace(
        rows=np.zeros(1, dtype=np.int32),
        starts=np.zeros(1, dtype=np.int32),
        counts=np.array([num_tokens], dtype=np.int32),
        num_sampled=np.array([num_tokens], dtype=np.int16),
        num_draws=np.ones(1, dtype=np.int16),
        adapters=np.zeros(1, dtype=np.int16),
        kinds=np.array([VERIFY], dtype=np.int8),
        tokens=tokens.astype(np.uint32),
        slots=np.tile(np.arange(num_tokens, dtype=np.int32), (shape.num_tables, 1)),
        table_changes=changes_KB3.reshape(-1, 3),
        lines=np.frombuffer(SampleLine(0).pack(), dtype=np.int64).reshape(1, NUM_FIELDS),
        facts=np.array([RowFacts(num_prompt=1)], dtype=np.int32),
    )


def _best(order: StepOrder) -> StepOrder:
    """Return an order that draws the best ids of each position, as a turn of a model that drafts trees."""
    drawn = SampleLine(0, temperature=1.0, top_p=0.9).pack()  # the kind that takes longest
    lines = np.frombuffer(drawn, dtype=np.int64).reshape(1, NUM_FIELDS)
    return order._replace(flags=DRAWS_BEST, num_draws=WIDTH * order.num_draws, lines=lines)


def _turn(shape: StateShape, num_rows: int, start: int) -> StepOrder:
    """Return an order in which rows that begin decode a token at `start`, all of them in the same block."""
    rows, ones = np.arange(num_rows, dtype=np.int32), np.ones(num_rows, dtype=np.int16)
    lines = b"".join(SampleLine(row).pack() for row in range(num_rows))
    changes_KR3 = np.zeros((shape.num_tables, num_rows, 3), dtype=np.int32)
    changes_KR3[..., 0] = rows + shape.num_rows * np.arange(shape.num_tables)[:, None]
    return EMPTY._replace(
        rows=rows,
        starts=np.full(num_rows, start, dtype=np.int32),
        counts=ones.astype(np.int32),
        num_sampled=ones,
        num_draws=ones,
        adapters=0 * ones,
        kinds=np.full(num_rows, DECODE, dtype=np.int8),
        slots=np.empty((shape.num_tables, 0), dtype=np.int32),
        known=np.array([rows, 0 * rows + 1, 0 * rows + start], dtype=np.int64),
        table_changes=changes_KR3.reshape(-1, 3),
        lines=np.frombuffer(lines, dtype=np.int64).reshape(num_rows, NUM_FIELDS),
        facts=np.array([RowFacts(num_prompt=1)] * num_rows, dtype=np.int32),
    )
