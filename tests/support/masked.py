"""Steps that are sampled under masks, without the library that would make them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from infer.engine.engine import Engine
from infer.execution.runner import StepResult
from infer.scheduling.plan import StepPlan

Allow = Callable[[str, int], Collection[int] | None]
"""Which ids a request may have at a position of its output; None: any."""


def mask_steps(engine: Engine, allow: Allow) -> list[int]:
    """Let an engine's runner sample under masks; returns, as they are launched, how many each step has."""
    runner: Any = engine._runner
    launch, counts = runner.launch, list[int]()

    def launch_masked(plan: StepPlan) -> Callable[[], StepResult]:
        if plan.masks:  # a half of a step
            return launch(plan)  # type: ignore[no-any-return]
        wanted = {
            number: ids
            for number, (chunk, seq) in enumerate(zip(plan.chunks, plan.chunks.sequences, strict=True))
            if chunk.num_samples
            and (ids := allow(seq.group.request.request_id, chunk.stop - seq.num_prompt)) is not None
        }
        counts.append(len(wanted))
        if not wanted:
            return launch(plan)  # type: ignore[no-any-return]
        step = runner.begin(plan)
        fill(step.masks(len(wanted)), wanted.values())
        return step.sample(list(wanted))  # type: ignore[no-any-return]

    runner.launch = launch_masked
    return counts


def fill(lines_KW: np.ndarray, allowed: Collection[Collection[int]]) -> None:
    """Write masks that allow these ids."""
    lines_KW[:] = 0
    for line_W, ids in zip(lines_KW.view(np.uint32), allowed, strict=True):
        for token_id in ids:
            line_W[token_id // 32] |= np.uint32(1 << token_id % 32)
