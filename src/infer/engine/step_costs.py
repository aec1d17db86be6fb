"""The time of a step by its number of tokens, measured with the device itself before the first request.

A row of state that no sequence has yet computes windows of 1, 2, 4, ... tokens, in blocks that hold nothing
yet. The engine decides by these seconds how many drafts pay (speculative/adaptive.py), so they are written
down with a recorded run: equal queues must give equal plans. Where steps overlap, as on a GPU, some are
launched behind each other: one takes what it adds to the time of the others, and the rest is the host's.
Rows that decode have kernels of their own there, and are timed as well. A step is padded to the next size
that is captured, so that 5 tokens take as long as 8. Not all sizes that are close to each other are timed:

    captured   1  2  4  8  12  16  24  32  40  48  56  64  80  96  112  128
    timed      1  2  4  8  12  16  24  32      48      64      96       128

A step of more than a millisecond is timed once, for a start waits for all of this.

Other programs can slow a start, above all on a CPU, and windows would stay short for as long as the engine
lives. So a server's engine that is idle measures again, one step at a time, and keeps the shortest time of
each window. A run that is recorded or repeated keeps the seconds it began with.

    start  [1 2 4 .. 128]   idle 1 s  [1] [2] [4] .. [128]   idle 10 s  [1] [2] ..   idle 60 s ..
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from infer.config.speculation import WINDOW_TOKENS
from infer.execution.device import DeviceHalf, PendingStep, StateShape
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.draft_device import DraftDevice
from infer.execution.gpu.readback import PendingTensor
from infer.execution.order import (
    DECODE,
    DRAWS_BEST,
    EMPTY,
    REPEATS,
    UNSEEN,
    VERIFY,
    RowFacts,
    StepOrder,
)
from infer.execution.torch_device import TorchDevice
from infer.kernels.sampling.sample_line import NUM_FIELDS, SampleLine
from infer.speculative.adaptive import StepCosts
from infer.speculative.tree import WIDTH, turns_of

NUM_PROBES = 3  # runs of each window, of which the fastest counts
LONG_STEP_S = 1e-3  # seconds of a step that is run once: disturbances on a GPU are short
NUM_BEHIND = 2  # steps that are launched behind another to be timed: a device has buffers for three
MOST_ROWS = 64  # rows of a step without drafts that is timed
DRAFT_PROBES = 4  # drafts that are timed together
MOST_SECONDS = 2.0  # time for the runs of a table: costs that are not measured by then follow the last two
BEGINNING = ("table_changes", "lines", "facts", "known")  # what an order says of rows that begin
IDLE_WAITS_S = (10.0, 60.0, 600.0, None)  # pauses after measuring all windows again; None: no more

Work = Callable[[], PendingStep | PendingTensor]  # what is timed: it launches something to wait for


def measure_step_costs(
    device: DeviceHalf,
    shape: StateShape,
    *,
    max_tokens: int,
    vocab_size: int,
    weight_bytes: int,
    kv_bytes_per_token: int,
    gap_s: float,
    row_gap_s: float,
    drafter: DeviceHalf | None,
    draft_start: int,
    has_trees: bool,
) -> StepCosts:
    """Return what steps of a device take; the gaps are the host's where it overlaps other steps.

    `max_tokens`: tokens of a text that models can see and the cache can hold; a table may have room for more.
    `draft_start`: the position of the first token that the drafter can compute; a head can compute none at 0.
    A step of one token is the time to read the weights, so keys and values take as much for each byte.
    """
    room, most_rows = min(WINDOW_TOKENS, max_tokens), -(-shape.num_rows // 2)  # others end as rows begin
    for count in (1, min(16, room)) if has_trees and isinstance(device, GpuDevice) else ():
        device.run(_window(shape, vocab_size, count)).wait()  # Triton compiles, which is not counted
    plain, overlaps = list[tuple[int, float]](), gap_s > 0
    graphs = device.graphs if isinstance(device, GpuDevice) else None

    def window(size: int, num_probes: int) -> tuple[float, float]:
        order = _window(shape, vocab_size, size)
        return _fastest_of(partial(device.run, order), overlaps=overlaps, num_probes=num_probes)

    padded = None if graphs is None else graphs.padded_window
    pairs, alone_s = _table(window, _stretches(room, padded), can_be_few=overlaps)
    gap_s += alone_s - pairs[0][1]  # what the host takes for a step, and for the plan of the next
    if isinstance(device, GpuDevice) and graphs is not None and overlaps:
        sizes = _stretches(min(most_rows, MOST_ROWS), graphs.padded_rows)
        plain, _ = _table(partial(_decode_seconds, device, shape), sizes, can_be_few=True)
    draft_s = draft_row_s = turns_s = 0.0
    num_rows = min(32, most_rows)
    if isinstance(drafter, DraftDevice):
        most = min(DRAFT_PROBES, len(drafter.drafts_KS))
        num_turns = turns_of(most) if has_trees else most
        (first, _), (all_s, launch_s), (many, _) = (
            _turn_seconds(drafter, shape, *asked, are_trees=has_trees)
            for asked in ((1, 1), (1, most), (num_rows, most))
        )
        draft_s = later_turn_seconds(first, all_s, num_turns)
        turns_s, draft_row_s = max(first - draft_s, 0.0), max(many - all_s, 0.0) / (num_turns * num_rows)
        gap_s += launch_s
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
        plain,
        gap_s=gap_s,
        row_gap_s=row_gap_s,
        draft_s=draft_s,
        draft_row_s=draft_row_s,
        turns_s=turns_s,
        seen_s=kv_bytes_per_token * pairs[0][1] / weight_bytes,
        is_ahead=isinstance(drafter, DraftDevice),
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
            **{name: getattr(EMPTY, name) for name in BEGINNING},
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


def _turn_seconds(
    device: DraftDevice, shape: StateShape, num_rows: int, num_drafts: int, *, are_trees: bool
) -> tuple[float, float]:
    """Return what all turns of a window take a device, and what it takes the host to launch them."""
    device.enter(_turn(shape, num_rows, 1), np.zeros(num_rows))  # the token before has a place
    rows, counts, trees = np.arange(num_rows), np.full(num_rows, num_drafts), np.full(num_rows, are_trees)
    _, behind = _fastest_of(lambda: device.draft(rows, counts, trees), overlaps=True)
    launches = []
    for _ in range(NUM_PROBES):
        start = time.perf_counter()
        pending = device.draft(rows, counts, trees)
        launches.append(time.perf_counter() - start)
        pending.wait()
    return behind, min(launches)


def later_turn_seconds(first_s: float, all_s: float, num_turns: int) -> float:
    """Return the time of a turn after the first, even if the first one was slowed down."""
    return (all_s - first_s) / (num_turns - 1) if num_turns > 1 and first_s < all_s else all_s / num_turns


def _decode_seconds(
    device: GpuDevice, shape: StateShape, num_rows: int, num_probes: int
) -> tuple[float, float]:
    """Return the times of a step without drafts that no head follows: alone, and launched after others."""
    first, nothing = _turn(shape, num_rows, 0), {name: getattr(EMPTY, name) for name in BEGINNING}
    again = first._replace(flags=REPEATS | UNSEEN, **nothing)  # rows go on from their own ids
    begin = lambda: device.run(first).wait()  # noqa: E731
    return _fastest_of(lambda: device.run(again), overlaps=True, begin=begin, num_probes=num_probes)


def _stretches(most: int, pad: Callable[[int], int] | None) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of counts that take as long, up to `most`; without padding 1, 2, 4, ..."""
    size = 0
    while (fewest := size + 1 if pad else max(2 * size, 1)) <= most:
        size = pad(fewest) if pad else fewest
        if size > most:
            return
        yield fewest, size


def _table(
    seconds_of: Callable[[int, int], tuple[float, float]],
    stretches: Iterator[tuple[int, int]],
    *,
    can_be_few: bool,
) -> tuple[list[tuple[int, float]], float]:
    """Return the seconds of counts, and the seconds of the first one alone.

    `seconds_of` is given a size and a number of runs. If these `can_be_few`, long steps run only once.
    """
    counts, timed, first_s, num_probes = [*stretches], list[tuple[int, float]](), 0.0, NUM_PROBES
    spent_s = 0.0
    for _, size in counts:
        is_close = bool(timed) and 3 * size < 4 * timed[-1][0] and size != counts[-1][1]
        if is_close or (len(timed) > 1 and spent_s > MOST_SECONDS):
            continue
        alone_s, behind_s = seconds_of(size, num_probes)
        spent_s += num_probes * alone_s * (2 + NUM_BEHIND if can_be_few else 1)
        first_s = first_s or alone_s
        num_probes = 1 if can_be_few and alone_s > LONG_STEP_S else NUM_PROBES
        timed.append((size, behind_s))
    costs, last, is_cut = StepCosts.measured(timed), timed[-1][0], timed[-1][0] < counts[-1][1]
    kept = [((size, size) if is_cut and size == last else (fewest, size)) for fewest, size in counts]
    # counts after the last that was timed follow the slope up to it
    return [
        (each, costs.seconds(size)) for few, size in kept if size <= last for each in {few, size}
    ], first_s


def _fastest(device: DeviceHalf, order: StepOrder) -> float:
    """Return the shortest time of a step."""
    return _fastest_of(lambda: device.run(order), overlaps=False)[0]


def _fastest_of(
    launch: Work,
    *,
    overlaps: bool,
    begin: Callable[[], object] = lambda: None,
    num_probes: int = NUM_PROBES,
) -> tuple[float, float]:
    """Return the shortest time of work alone, and the shortest of work launched while other work runs.

    `begin` comes before whatever is timed.
    """
    begin()
    launch().wait()  # the first one compiles, captures and allocates
    alone = min(_seconds(launch, 1, begin) for _ in range(num_probes))
    if not overlaps:
        return alone, alone
    all_s = min(_seconds(launch, 1 + NUM_BEHIND, begin) for _ in range(num_probes))
    return alone, max(min((all_s - alone) / NUM_BEHIND, alone), 1e-6)


def _seconds(launch: Work, count: int, begin: Callable[[], object]) -> float:
    """Return the time of work that is launched this many times at once, until all results are there."""
    begin()
    start = time.perf_counter()
    for pending in [launch() for _ in range(count)]:
        pending.wait()
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
