"""Steps that are sampled under masks, without the library that would make them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from infer.engine.engine import Engine
from infer.execution.device import PendingStep
from infer.execution.order import AWAITS_MASKS, StepOrder

Allow = Callable[[str, int], Collection[int] | None]
"""Which ids a request may have at a position of its output; None: any."""


def mask_steps(engine: Engine, allow: Allow) -> list[int]:
    """Let an engine's device half sample under masks; returns, as steps begin, how many each has."""
    device: Any = engine._device
    run, counts = device.run, list[int]()

    def run_masked(order: StepOrder) -> PendingStep:
        if order.flags & AWAITS_MASKS:  # a half of a step
            return run(order)  # type: ignore[no-any-return]
        by_row = {seq.row: seq for seq in engine.scheduler.state.sequences}
        wanted: dict[tuple[int, int], Collection[int]] = {}
        for number in order.num_sampled.nonzero()[0].tolist():
            seq, position = by_row[int(order.rows[number])], int(order.stops[number])
            ids = allow(seq.group.request.request_id, position - seq.num_prompt)
            if ids is not None:
                wanted[number, position] = ids
        counts.append(len(wanted))
        if not wanted:
            return run(order)  # type: ignore[no-any-return]
        step: PendingStep = run(order._replace(flags=order.flags | AWAITS_MASKS))
        fill(step.masks(len(wanted)), wanted.values())
        numbers, positions = zip(*wanted, strict=True)
        step.sample(numbers, positions)
        return step

    device.run = run_masked
    return counts


def fill(lines_KW: np.ndarray, allowed: Collection[Collection[int]]) -> None:
    """Write masks that allow these ids."""
    lines_KW[:] = 0
    for line_W, ids in zip(lines_KW.view(np.uint32), allowed, strict=True):
        for token_id in ids:
            line_W[token_id // 32] |= np.uint32(1 << token_id % 32)
