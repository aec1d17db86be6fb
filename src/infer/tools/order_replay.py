"""Replay the orders of a record on a device half, without a scheduler, requests or a tokenizer.

    record   order 1   masks 1   step 1   order 2   ...
               │         │         │
    device     run       sample    wait, and compare the ids

A device in another process works the same way: it receives orders and nothing else (execution/order.py). The
ids must be the same, except ids that the engine rejected because a guided sequence continued differently.

Orders in a file are not trusted, and kernels do not check if a row or a slot exists. So every order is
checked against the sizes of the device's state before it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from infer.engine.device_build import shape_of
from infer.engine.engine import Engine
from infer.errors import ConfigError
from infer.execution.device import DeviceHalf, PendingStep, StateShape
from infer.execution.order import (
    AWAITS_MASKS,
    DECODE,
    DRAWS_BEST,
    EMPTY,
    NONE,
    ON_HOST,
    PADDING,
    POOLINGS,
    PROMPT,
    REPEATS,
    TRANSFERS,
    VERIFY,
    RowFacts,
    StepOrder,
)
from infer.kernels.sampling.sample_line import NUM_FIELDS, SampleLine
from infer.kernels.sampling.sample_state import MAX_BIASED
from infer.tools.record import Masked, Ordered, Ran, Record

UNKNOWN = -1  # position of a row whose next token comes from the host
MAX_ALTERNATIVES = 2048  # most logprobs of an id: beams request one for each stop id besides their own


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """The largest numbers that an order may contain."""

    shape: StateShape
    num_blocks: int  # blocks on the device
    num_host_blocks: int  # blocks in host memory
    vocab_size: int
    max_tokens: int  # tokens of a step


def limits_of(engine: Engine) -> DeviceLimits:
    """Return the limits of an engine's device."""
    pool, config = engine.scheduler.pool, engine.scheduler.config
    return DeviceLimits(
        shape=shape_of(engine.scheduler.state),
        num_blocks=pool.num_blocks,
        num_host_blocks=pool.num_host_blocks,
        vocab_size=engine.vocab_size,
        max_tokens=config.max_num_batched_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderReport:
    """The result of a replay from orders."""

    num_steps: int
    num_tokens: int
    difference: str | None  # "step 12: ..." or None
    num_left: int = 0  # last orders, whose steps are not in the record


def replay_orders(
    record: Record, device: DeviceHalf, limits: DeviceLimits, *, until: int | None = None, check: bool = True
) -> OrderReport:
    """Run every order of a record, or those up to step `until`; without `check`, ids are not compared."""
    if not record.has_orders:
        raise ConfigError(
            f"{record.path} has no orders, or was cut off before the first; "
            "record a run with 'infer generate --record FILE --orders'"
        )
    pending, check_order = deque[tuple[StepOrder, PendingStep]](), OrderCheck(limits)
    num_steps = num_tokens = 0
    difference: str | None = None
    awaiting: int | None = None  # the step that awaits masks
    for event in record.events():
        if until is not None and event.step > until:
            break
        if isinstance(event, Ordered):
            order = event.order
            wrong = check_order(order) if awaiting is None else f"step {awaiting} still awaits its masks"
            if pending and order.step <= pending[-1][0].step:
                wrong = f"it comes after the order of step {pending[-1][0].step}"
            if wrong is not None:
                raise ConfigError(f"{record.path}, order of step {order.step}: {wrong}")
            pending.append((order, device.run(order)))
            awaiting = order.step if order.flags & AWAITS_MASKS else None
        elif isinstance(event, Masked):
            if event.step != awaiting:
                raise ConfigError(f"{record.path}: masks of step {event.step} belong to no order")
            _sample(event, *pending[-1], limits)
            awaiting = None
        elif isinstance(event, Ran):
            if not pending or pending[0][0].step != event.step or event.step == awaiting:
                raise ConfigError(f"{record.path} has no order, or no masks, of step {event.step}")
            order, step = pending.popleft()
            ids = step.wait().ids
            num_steps, num_tokens = num_steps + 1, num_tokens + sum(map(len, event.ids))
            difference = _difference(order, event.ids, ids) if check else None
            if difference is not None:
                break
    return OrderReport(
        num_steps=num_steps, num_tokens=num_tokens, difference=difference, num_left=len(pending)
    )


def _difference(order: StepOrder, before: Seq[Seq[int]], now: Seq[Seq[int]]) -> str | None:
    """Describe where the ids of a step differ from the record's; None: nowhere.

    An id that was dropped because the grammar of a guided sequence forced another is not in the record.
    """
    if len(before) != len(now):
        return f"step {order.step}: {len(before)} rows in the record, now {len(now)}"
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        may_be_dropped = not old and order.flags & AWAITS_MASKS
        if old != new and not may_be_dropped:
            return f"step {order.step}: row {number}: in the record {list(old)}, now {list(new)}"
    return None


def _sample(event: Masked, order: StepOrder, step: PendingStep, limits: DeviceLimits) -> None:
    """Sample a step with the masks of a record."""
    lines, num_words = event.lines, -(-limits.vocab_size // 32)
    if len(lines) and lines.shape[1] != num_words:
        raise ConfigError(f"masks of step {event.step} have {lines.shape[1]} words, not {num_words}")
    if any(not 0 <= number < order.num_rows for number in event.numbers):
        raise ConfigError(f"masks of step {event.step} do not belong to rows of its order")
    places = zip(event.numbers, event.positions, strict=True)
    if any(not 0 <= order.stops[number] - place < order.num_sampled[number] for number, place in places):
        raise ConfigError(f"masks of step {event.step} are at positions that it does not sample")
    if not order.flags & ON_HOST and len(set(event.numbers)) != len(event.numbers):
        raise ConfigError(f"masks of step {event.step} are several for one row")
    step.masks(len(lines)).reshape(lines.shape)[:] = lines  # lines of 0 words, if there are none
    step.sample(event.numbers, event.positions)


class OrderCheck:
    """Tracks the rows of a device through orders, and reports an order that it cannot execute.

    A device decodes at the position it has reached, regardless of the order, so positions are tracked too.
    """

    def __init__(self, limits: DeviceLimits) -> None:
        self._limits = limits
        self._has_begun = np.zeros(limits.shape.num_rows, dtype=bool)
        self._position = np.full(limits.shape.num_rows, UNKNOWN)  # position of the token drawn last
        self._repeatable = EMPTY.rows  # rows of the last order, if they may be repeated

    def __call__(self, order: StepOrder) -> str | None:
        """Return the reason why the next order is impossible; None: it is possible, and is now tracked."""
        if wrong := wrong_number(order, self._limits):
            return wrong
        rows, is_decode = order.rows, order.kinds == DECODE
        if order.flags & REPEATS and (order.has_begun or not np.array_equal(rows, self._repeatable)):
            return "it repeats the rows of the order before it, but names other rows"
        self._has_begun[_begun(order)] = True
        if not (self._has_begun[rows].all() and self._has_begun[order.known[0]].all()):
            return "a row computes before it has begun"
        self._position[order.known[0]] = order.known[2]
        if (self._position[rows[is_decode]] != order.starts[is_decode]).any():
            return "a row decodes at another position than it has come to"
        is_told = (order.num_sampled == 1) & ((order.flags & ON_HOST) == 0)
        self._position[rows] = np.where(is_told, order.stops, UNKNOWN)
        self._repeatable = rows.copy() if is_told.all() and is_decode.all() else EMPTY.rows
        return None


def wrong_number(order: StepOrder, limits: DeviceLimits) -> str | None:
    """Describe the part of an order that a device of this size cannot execute; None: it can execute all."""
    shape, stops = limits.shape, order.stops
    max_len = shape.max_blocks * shape.block_size
    num_slots = limits.num_blocks * shape.block_size
    given = order.kinds != DECODE
    if order.num_tokens > limits.max_tokens or not _within(order.rows, shape.num_rows):
        return f"it has {order.num_tokens} tokens, or rows beyond {shape.num_rows}"
    if (
        len(np.unique(order.rows)) != order.num_rows
        or not np.isin(order.kinds, (DECODE, PROMPT, VERIFY)).all()
    ):
        return "a row is named twice, or is of no known kind"
    if (order.counts < 1).any() or (order.starts < 0).any() or (stops > max_len).any():
        return f"positions are not within {max_len}"
    if (order.counts[~given] != 1).any() or order.counts[given].sum() != len(order.tokens):
        return "the number of its tokens does not match its rows"
    if (
        (order.num_sampled > order.counts).any()
        or (order.num_sampled < 0).any()
        or (order.num_draws < 0).any()
    ):
        return "more positions are sampled than computed"
    draws_more = (order.num_sampled > 1) | (order.num_draws > 1)
    if (draws_more | (order.kinds == VERIFY)).any() and not order.flags & ON_HOST:
        return "several ids of a row are drawn, but not on the host"
    if order.flags & DRAWS_BEST or not _are_trees(order, given):
        return "it is of a model that drafts, or parents of tokens are not in their windows"
    if order.slots.shape != (shape.num_tables, len(order.tokens)) or not _within(order.slots, num_slots):
        return f"slots are not within {num_slots}"
    if len(order.next_tokens) not in (0, order.num_rows):
        return "the number of its following tokens does not match its rows"
    ids = (order.tokens, order.next_tokens, order.known[1])
    if not all(_within(part, limits.vocab_size) for part in ids):
        return f"tokens are not within {limits.vocab_size}"
    if not (_within(order.known[0], shape.num_rows) and _within(order.known[2], max_len)):
        return "known tokens are not of its rows"
    rows, indices, blocks = order.table_changes[order.table_changes[:, 0] != PADDING].T
    sizes = (
        (rows, shape.num_rows * shape.num_tables),
        (indices, shape.max_blocks),
        (blocks, limits.num_blocks),
    )
    if not all(_within(*each) for each in sizes):
        return "blocks of tables are not within the cache"
    return _wrong_transfer(order, limits) or _wrong_arrival(order, limits)


def _are_trees(order: StepOrder, given: np.ndarray) -> bool:
    """Return True if every token's parent precedes it in its row, and only drafts skip back further."""
    if not len(order.backs):
        return True
    counts, can_branch = order.counts[given], (order.kinds[given] == VERIFY) & (order.counts[given] <= 64)
    if len(order.backs) != counts.sum() or not given.all():
        return False
    places = np.arange(len(order.backs)) - (counts.cumsum() - counts).repeat(counts)
    is_branch = order.backs != 1
    return bool(
        ((order.backs >= 1) & (order.backs <= np.maximum(places, 1))).all()
        and can_branch.repeat(counts)[is_branch].all()
    )


def _within(numbers: np.ndarray, end: int) -> bool:
    return not len(numbers) or not numbers.size or bool(numbers.min() >= 0 and numbers.max() < end)


def _wrong_transfer(order: StepOrder, limits: DeviceLimits) -> str | None:
    here, there = limits.num_blocks, limits.num_host_blocks
    ends = dict(zip(TRANSFERS, ((here, here), (here, there), (there, here)), strict=True))
    for kind, source, to in order.transfers.tolist():
        if not 0 <= kind < len(TRANSFERS):
            return f"a transfer is of kind {kind}"
        first, second = ends[TRANSFERS[kind]]
        if not (0 <= source < first and 0 <= to < second):
            return f"a transfer goes from block {source} to {to}"
    return None


def _wrong_arrival(order: StepOrder, limits: DeviceLimits) -> str | None:
    arrived = len(order.facts)
    wanted = (arrived, NUM_FIELDS), len(RowFacts._fields)
    if arrived and (order.lines.shape, order.facts.shape[1]) != wanted:
        return "rows that begin lack facts"
    end = 0  # end of the lists so far
    for line_F, numbers in zip(order.lines, order.facts.tolist(), strict=False):
        line, facts = SampleLine.unpack(line_F.tobytes()), RowFacts(*numbers)
        counts = facts.num_tokens, facts.num_banned, line.num_biased
        if not 0 <= line.row < limits.shape.num_rows or min(counts) < 0 or line.num_biased > MAX_BIASED:
            return "a row that begins is not within the state"
        asked = facts.num_logprobs, facts.prompt_logprobs
        if not all(NONE <= count <= min(limits.vocab_size, MAX_ALTERNATIVES) for count in asked):
            return f"logprobs of {asked} alternatives are asked for"
        if not 0 <= facts.pooling < len(POOLINGS) or not facts.num_prompt > 0:
            return "a row that begins has impossible facts"
        ids = order.extras[end : end + sum(counts)]
        if len(ids) != sum(counts) or not _within(ids, limits.vocab_size):
            return f"ids of a row that begins are not within {limits.vocab_size}"
        end += sum(counts) + line.num_biased
    if end != len(order.extras):
        return "lists of rows that begin are too long or too short"
    return None if len(np.unique(_begun(order))) == arrived else "a row begins twice"


def _begun(order: StepOrder) -> np.ndarray:
    """Return the rows that begin with an order: the first field of their lines."""
    rows: np.ndarray = order.lines[:, SampleLine._fields.index("row")] if order.has_begun else EMPTY.rows
    return rows
