"""A step that found no memory, run as two smaller ones whose results are put together again.

    A[5:6]  B[17:18]  C[0:8]          10 tokens, and an allocation failed
    A[5:6]  B[17:18]  C[0:3]           5 tokens: C samples nothing yet
                      C[3:8]           5 tokens: and what C samples

Chunks are halved by their tokens, so the long ones of prompts are cut first, then the batch. A half that
finds no memory is halved again, until a token is left, which is tried twice. The halves run one after the
other and write what the whole step would have written, where it would have written it: the plan and its books
stay as they are.

A runner promises that a launch which raises has changed nothing that a second one of the same tokens does
not write again; transfers of blocks, which are no such thing, have been made before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from infer.execution.runner import StepResult
from infer.sampling.params import RowLogprobs
from infer.scheduling.plan import Chunks, StepPlan

logger = logging.getLogger(__name__)

RunStep = Callable[[StepPlan], StepResult]


class SmallerSteps:
    """Runs what is left of a plan whose step found no memory, in halves; says so in the log once."""

    def __init__(self, run: RunStep) -> None:
        self._run = run  # which comes back here if a half does not fit either
        self._has_spoken = False
        self._tries_again = False  # a step that cannot be halved

    def run(self, plan: StepPlan, error: torch.OutOfMemoryError) -> StepResult:
        """The result of the whole plan; `error` is why it did not run at once.

        It is raised if a step that cannot be halved fails twice.
        """
        error = error.with_traceback(None)  # whose frames hold the tensors of the step
        if not self._has_spoken:
            self._has_spoken = True
            logger.warning(
                "step found no memory and is repeated in smaller ones; further ones are not logged, and a "
                "smaller max_num_batched_tokens or device_memory avoids them step=%d num_tokens=%d reason=%r",
                plan.step, plan.num_tokens, str(error).splitlines()[0],
            )  # fmt: skip
        numbers = split_numbers(plan.chunks)
        if numbers is None:
            return self._run_again(plan, error)
        ids: list[tuple[int, ...]] = [()] * len(plan.chunks)
        logprobs: list[tuple[RowLogprobs | None, ...]] = [()] * len(plan.chunks)
        prompt_logprobs: dict[int, list[RowLogprobs]] = {}
        pooled: dict[int, np.ndarray] = {}
        is_whole = True
        for part, half in halves(plan, numbers):
            result = self._run(half)
            for place, number in enumerate(part):
                if result.ids[place]:  # of a chunk that was cut, only the last part has any
                    ids[number], logprobs[number] = result.ids[place], result.logprobs[place]
            for seq_id, rows in result.prompt_logprobs.items():
                prompt_logprobs[seq_id] = prompt_logprobs.get(seq_id, []) + rows
            for seq_id, states_D in result.pooled.items():  # of a chunk that was cut, a sum of each part
                pooled[seq_id] = pooled[seq_id] + states_D if seq_id in pooled else states_D
            is_whole &= result.is_whole
        return StepResult(ids, logprobs, prompt_logprobs, is_whole, pooled)

    def _run_again(self, plan: StepPlan, error: torch.OutOfMemoryError) -> StepResult:
        if self._tries_again:
            raise error
        self._tries_again = True
        try:
            again = StepPlan(plan.step, plan.chunks, table_changes=plan.table_changes, masks=plan.masks)
            return self._run(again)
        finally:
            self._tries_again = False


def split_numbers(chunks: Chunks) -> tuple[int, int] | None:
    """Where a step is halved: a chunk's number, and how many of its tokens come first; None: it cannot be."""
    lens = chunks.stops - chunks.starts
    before = lens.cumsum() - lens
    half = int(lens.sum()) // 2
    if not half:
        return None
    number = int(np.searchsorted(before, half, side="right")) - 1
    num_first = half - int(before[number])
    if chunks.sequences[number].drafts:  # which are judged together
        if number + 1 < len(lens):
            return number + 1, 0
        return (number, 0) if number else None
    return number, num_first


def halves(plan: StepPlan, at: tuple[int, int]) -> list[tuple[list[int], StepPlan]]:
    """The two smaller plans, each with the numbers of its chunks in the whole one.

    What tables have got goes with the first of them; blocks that had to move have moved.
    """
    number, num_first = at
    first, second = list(range(number + (num_first > 0))), list(range(number, len(plan.chunks)))
    columns = plan.chunks
    early, late = columns.select(np.array(first, dtype=np.int64)), columns.select(np.array(second))
    if num_first:
        cut = int(columns.starts[number]) + num_first
        early.stops[-1] = late.starts[0] = cut
        early.num_samples[-1], early.draws[-1] = 0, False
    return [
        (first, StepPlan(plan.step, early, table_changes=plan.table_changes, masks=plan.masks)),
        (second, StepPlan(plan.step, late, masks=plan.masks)),
    ]
