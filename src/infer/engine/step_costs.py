"""Measures the time of a step by its number of tokens, on the device, before the first request.

An unused row of state computes windows of 1, 2, 4, ... tokens in empty blocks. From these seconds the engine
decides how many drafts pay (speculative/adaptive.py). A recorded run includes them, because equal queues must
give equal plans. Where steps overlap, as on a GPU, several are launched at once: the device time of a step is
what it adds to the total, and the rest is host time. Decoding rows have separate kernels on a GPU and are
timed too. A step is padded to the next captured size, so 5 tokens take as long as 8. Not all sizes close to
each other are timed:

    captured   1  2  4  8  12  16  24  32  40  48  56  64  80  96  112  128
    timed      1  2  4  8  12  16  24  32      48      64      96       128

A step of more than a millisecond is timed once, because the start waits for all of this.

Other programs can slow down the measurement, above all on a CPU, and windows would stay short for as long as
the engine runs. So the engine of a server measures again when it is idle, one step at a time, and keeps the
shortest time of each window. A recorded or repeated run keeps its first measurements.

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
    PROMPT,
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
LONG_STEP_S = 1e-3  # longer steps are run once: disturbances on a GPU are short
NUM_BEHIND = 2  # additional steps launched at once with a timed one: a device has buffers for three
MOST_ROWS = 64  # most rows of a timed step without drafts
DRAFT_PROBES = 4  # drafts that are timed together
MISSED_TOKENS = 512  # tokens of a timed prompt of a draft model; more take as long each
MOST_SECONDS = 2.0  # time limit for a table: later sizes are extrapolated
BEGINNING = ("table_changes", "lines", "facts", "known")  # fields of an order about rows that begin
IDLE_WAITS_S = (10.0, 60.0, 600.0, None)  # pauses after measuring all windows again; None: no more

Work = Callable[[], PendingStep | PendingTensor]  # launches the timed work; returns a handle to wait on


def measure_step_costs(
    device: DeviceHalf,
    shape: StateShape,
    *,
    max_tokens: int,
    vocab_size: int,
    weight_bytes: int,
    kv_bytes_per_token: int,
    draft_kv_bytes_per_token: int,
    gap_s: float,
    row_gap_s: float,
    drafter: DeviceHalf | None,
    draft_start: int,
    has_trees: bool,
) -> StepCosts:
    """Return the measured step costs of a device; the gaps are host seconds, 0 if steps do not overlap.

    `max_tokens`: most tokens of a text that the models can see and the cache can hold.
    `draft_start`: position of the first token that the drafter can compute; a head can compute none at 0.
    A step of one token takes the time to read the weights, so a byte of keys and values takes as long.
    """
    room, most_rows = min(WINDOW_TOKENS, max_tokens), -(-shape.num_rows // 2)  # half: others still end
    for count in (1, min(16, room)) if has_trees and isinstance(device, GpuDevice) else ():
        device.run(_window(shape, vocab_size, count)).wait()  # not counted: Triton compiles here
    plain, overlaps = list[tuple[int, float]](), gap_s > 0
    graphs = device.graphs if isinstance(device, GpuDevice) else None

    def window(size: int, num_probes: int) -> tuple[float, float]:
        order = _window(shape, vocab_size, size)
        return _fastest_of(partial(device.run, order), overlaps=overlaps, num_probes=num_probes)

    padded = None if graphs is None else graphs.padded_window
    pairs, alone_s = _table(window, _stretches(room, padded), can_be_few=overlaps)
    gap_s += alone_s - pairs[0][1]  # host seconds to launch and read a step
    if isinstance(device, GpuDevice) and graphs is not None and overlaps:
        sizes = _stretches(min(most_rows, MOST_ROWS), graphs.padded_rows)
        plain, _ = _table(partial(_decode_seconds, device, shape), sizes, can_be_few=True)
    draft_s = draft_row_s = turns_s = 0.0
    missed_token_s: float | None = None
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
        num_missed = min(MISSED_TOKENS, max_tokens) if drafter.launcher.max_tokens else 0
        if num_missed:
            missed_token_s = _fastest(drafter, _prompt(shape, vocab_size, num_missed)) / num_missed
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
        draft_seen_s=draft_kv_bytes_per_token * pairs[0][1] / weight_bytes,
        missed_token_s=missed_token_s,
        is_ahead=isinstance(drafter, DraftDevice),
    )


def measure_again(
    device: TorchDevice, shape: StateShape, vocab_size: int, costs: StepCosts
) -> Iterator[tuple[StepCosts, float | None]]:
    """Time windows again, one step per turn; yields the costs and the idle seconds until the next turn.

    The contents of the blocks in which a window is computed are restored.
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
    """Return the costs with a shorter time of one window; `seen_s` scales with a step of one token."""
    pairs = [*costs.pairs]
    pairs[place] = pairs[place][0], seconds
    repaired = StepCosts.measured(pairs).pairs
    return replace(costs, pairs=repaired, seen_s=costs.seen_s * repaired[0][1] / costs.pairs[0][1])


def _draft_seconds(device: DeviceHalf, shape: StateShape, start: int) -> float:
    """Return the seconds of one more draft: steps that continue from their own ids, launched at once."""
    first, best = _turn(shape, 1, start), float("inf")
    turns = [
        first._replace(
            starts=np.array([place], dtype=np.int32), **{name: getattr(EMPTY, name) for name in BEGINNING}
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
    """Return the device seconds of all turns of a window, and the host seconds to launch them."""
    device.enter(_turn(shape, num_rows, 1), np.zeros(num_rows))  # position 1, after a first token
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
    """Return the seconds of a turn after the first; if the first was disturbed, the average of all."""
    return (all_s - first_s) / (num_turns - 1) if num_turns > 1 and first_s < all_s else all_s / num_turns


def _decode_seconds(
    device: GpuDevice, shape: StateShape, num_rows: int, num_probes: int
) -> tuple[float, float]:
    """Return the seconds of a step without drafts and without a head: alone, and launched after others."""
    first, nothing = _turn(shape, num_rows, 0), {name: getattr(EMPTY, name) for name in BEGINNING}
    again = first._replace(flags=REPEATS | UNSEEN, **nothing)  # rows continue from their own ids
    begin = lambda: device.run(first).wait()  # noqa: E731
    return _fastest_of(lambda: device.run(again), overlaps=True, begin=begin, num_probes=num_probes)


def _stretches(most: int, pad: Callable[[int], int] | None) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last) of counts padded to the same size, up to `most`; unpadded 1, 2, 4, ..."""
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
    """Return the seconds by count, and the seconds of the smallest count alone.

    `seconds_of` takes a size and a number of runs. With `can_be_few`, long steps run only once.
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
    # larger counts are extrapolated with the last slope
    return [
        (each, costs.seconds(size)) for few, size in kept if size <= last for each in {few, size}
    ], first_s


def _fastest(device: DeviceHalf, order: StepOrder) -> float:
    """Return the seconds of the fastest run of a step."""
    return _fastest_of(lambda: device.run(order), overlaps=False)[0]


def _fastest_of(
    launch: Work, *, overlaps: bool, begin: Callable[[], object] = lambda: None, num_probes: int = NUM_PROBES
) -> tuple[float, float]:
    """Return the shortest time of work alone, and of work launched while other work runs.

    `begin` is called before each timed run.
    """
    begin()
    launch().wait()  # the first run compiles, captures and allocates
    alone = min(_seconds(launch, 1, begin) for _ in range(num_probes))
    if not overlaps:
        return alone, alone
    all_s = min(_seconds(launch, 1 + NUM_BEHIND, begin) for _ in range(num_probes))
    return alone, max(min((all_s - alone) / NUM_BEHIND, alone), 1e-6)


def _seconds(launch: Work, count: int, begin: Callable[[], object]) -> float:
    """Return the seconds until `count` launches at once have all finished."""
    begin()
    start = time.perf_counter()
    for pending in [launch() for _ in range(count)]:
        pending.wait()
    return time.perf_counter() - start


def _window(shape: StateShape, vocab_size: int, num_tokens: int) -> StepOrder:
    """Return an order that computes `num_tokens` tokens of row 0 and samples after each."""
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


def _prompt(shape: StateShape, vocab_size: int, num_tokens: int) -> StepOrder:
    """Return an order that computes `num_tokens` tokens of row 0 and samples after the last."""
    ones = np.ones(1, dtype=np.int16)
    window = _window(shape, vocab_size, num_tokens)
    return window._replace(num_sampled=ones, kinds=np.array([PROMPT], dtype=np.int8))


def _best(order: StepOrder) -> StepOrder:
    """Return the order with the best ids drawn at each position, like a turn of a tree-drafting model."""
    drawn = SampleLine(0, temperature=1.0, top_p=0.9).pack()  # the parameters that take longest
    lines = np.frombuffer(drawn, dtype=np.int64).reshape(1, NUM_FIELDS)
    return order._replace(flags=DRAWS_BEST, num_draws=WIDTH * order.num_draws, lines=lines)


def _turn(shape: StateShape, num_rows: int, start: int) -> StepOrder:
    """Return an order in which new rows decode a token at `start`, all in the same block."""
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
