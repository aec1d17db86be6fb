"""Runs a step that ran out of memory as two smaller steps and merges their results.

    A[5:6]  B[17:18]  C[0:8]          10 tokens, and an allocation failed
    A[5:6]  B[17:18]  C[0:3]           5 tokens: C samples nothing yet
                      C[3:8]           5 tokens: C samples

Orders are halved by their tokens, so long prompts are cut first, then the batch. A half that runs out of
memory is halved again, down to a single token, which is tried twice. The halves run one after the other, and
write the same values to the same places as the whole step.

This works because a second run overwrites everything that a failed order has written, except transfers of
blocks, which have already been made. Models with recurrent layers are different: a token cannot be added to a
state twice, so their step fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np
import torch

from infer.execution.device import StepResult
from infer.execution.order import EMPTY, PROMPT, StepMasks, StepOrder
from infer.sampling.params import RowLogprobs

logger = logging.getLogger(__name__)

MIN_PIECE = 16  # least tokens of a piece: a product of fewer takes hardly less time
MAX_PARTS = 8  # most parts of a step, whose ids are in flight together (rank_ring.py, runtime/gpu_way.py)

RunStep = Callable[[StepOrder, StepMasks], StepResult]


class SmallerSteps:
    """Runs an order whose step ran out of memory, in halves; logs this once."""

    def __init__(self, run: RunStep, *, can_repeat: bool) -> None:
        self._run = run  # runs a half; calls `SmallerSteps.run` again if the half does not fit either
        self._can_repeat = can_repeat  # True: a step may write its keys and values again
        self._has_spoken = False
        self._tries_again = False  # True: a step that cannot be halved is being repeated

    def run(self, order: StepOrder, masks: StepMasks, error: torch.OutOfMemoryError) -> StepResult:
        """Run the whole order without its transfers, which were made before; returns its result.

        `error`: the error of the whole step; raised if a step that cannot be halved fails twice.
        """
        error = error.with_traceback(None)  # the traceback's frames keep the step's tensors alive
        if not self._can_repeat:
            raise error
        if not self._has_spoken:
            self._has_spoken = True
            logger.warning(
                "step ran out of memory and is repeated in smaller steps; further ones are not logged, and a "
                "smaller max_num_batched_tokens or device_memory avoids them step=%d num_tokens=%d reason=%r",
                order.step, order.num_tokens, str(error).splitlines()[0],
            )  # fmt: skip
        at = where_to_cut(order)
        if at is None:
            return self._run_again(order, masks, error)
        return run_parts(zip((0, at[0]), order.cut(*at), strict=True), order.num_rows, masks, self._run)

    def _run_again(self, order: StepOrder, masks: StepMasks, error: torch.OutOfMemoryError) -> StepResult:
        if self._tries_again:
            raise error
        self._tries_again = True
        try:
            return self._run(order._replace(transfers=EMPTY.transfers), masks)
        finally:
            self._tries_again = False


def run_parts(
    parts: Iterable[tuple[int, StepOrder]], num_rows: int, masks: StepMasks, run: RunStep
) -> StepResult:
    """Run the parts of an order, each given with the number of its first row, and merge the results."""
    ids: list[tuple[int, ...]] = [()] * num_rows
    logprobs: list[tuple[RowLogprobs | None, ...]] = [()] * num_rows
    prompt_logprobs: dict[int, list[RowLogprobs]] = {}
    pooled: dict[int, np.ndarray] = {}
    is_whole = True
    for first, part in parts:
        result = run(part, masks.select(first, part.num_rows))
        for place in range(part.num_rows):
            if result.ids[place]:  # a row that was cut has ids in its last part only
                ids[first + place], logprobs[first + place] = result.ids[place], result.logprobs[place]
        for place, rows in result.prompt_logprobs.items():
            prompt_logprobs[first + place] = prompt_logprobs.get(first + place, []) + rows
        for place, states_D in result.pooled.items():  # a row that was cut has a sum in each part
            before = pooled.get(first + place)
            pooled[first + place] = states_D if before is None else before + states_D
        is_whole &= result.is_whole
    return StepResult(ids, logprobs, prompt_logprobs, is_whole, pooled)


def parts_of(order: StepOrder, count: int, *, cuts_rows: bool = True) -> list[tuple[int, StepOrder]]:
    """Split an order into at most `count` parts of about equal size, each with its first row's number.

    Together they compute the same as the order; the first has the changes of state. Prompts are cut only with
    `cuts_rows`.
    """
    if not order.num_rows:
        return []
    parts, first = list[tuple[int, StepOrder]](), 0
    for num_left in range(count, 1, -1):
        size = order.num_tokens // num_left
        at = where_to_cut(order, size, min_piece=MIN_PIECE if cuts_rows else order.num_tokens)
        if at is not None:
            part, order = order.cut(*at)
            parts.append((first, part))
            first += at[0]
    return [*parts, (first, order)]


def where_to_cut(order: StepOrder, size: int | None = None, *, min_piece: int = 1) -> tuple[int, int] | None:
    """Return where to cut an order after `size` tokens, by default half of them; None: it cannot be cut.

    The cut is a row's number and the number of its tokens before the cut. A row is not cut if a piece of it
    would be smaller than `min_piece`.
    """
    before = order.counts.cumsum() - order.counts
    half = order.num_tokens // 2 if size is None else size
    if not half:
        return None
    number = int(np.searchsorted(before, half, side="right")) - 1
    num_first = half - int(before[number])
    is_cut = min(num_first, int(order.counts[number]) - num_first) >= min_piece
    if num_first and (order.kinds[number] != PROMPT or not is_cut):  # drafts are verified together
        if number + 1 < order.num_rows:
            return number + 1, 0
        return (number, 0) if number else None
    return number, num_first
