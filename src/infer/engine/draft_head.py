"""An EAGLE-3 head that drafts: the turns of a draft model, without anything to catch up with.

The head follows every step of the model on the device (execution/head_model.py), so it has seen the text of
each row that has drawn an id since its sequence took it. A sequence that came back from host memory, or that
was forked a moment ago, has not drawn in its row: it gets drafts after its next step.

    turn    text known so far    given     draws
    0       t0 .. t9             t9        d10        from what the model made of t8
    1                            d10       d11        from what the head made of t9

It draws with the noise of the sequence, as a draft model does (draft_model.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from infer.engine.draft_model import DraftModel
from infer.engine.host_half import NOBODY
from infer.execution.device import DeviceHalf
from infer.execution.gpu.device import GpuDevice
from infer.scheduling.batch_state import BatchState
from infer.scheduling.plan import StepPlan
from infer.scheduling.sequence import Sequence


class DraftHead(DraftModel):
    """Drafts with a head that follows the sequences' own model. One engine thread owns it."""

    def __init__(self, device: DeviceHalf, state: BatchState, *, target: GpuDevice | None = None) -> None:
        """`target`: as in `DraftModel`."""
        super().__init__(device, state, 0, max_tokens=0, target=target)
        self._drawn = np.full(len(state.tenancy), NOBODY, dtype=np.int64)  # last stay in which a row drew

    def note(self, plan: StepPlan) -> None:
        """Remember which rows draw, and the blocks that tables get: the head needs them before the model."""
        super().note(plan)
        self._changes = list(plan.table_changes)
        rows = plan.chunks.rows[plan.chunks.draws]
        self._drawn[rows] = self._state.tenancy[rows]

    def is_ready(self, seq: Sequence) -> bool:
        """True if the row of a sequence has drawn, so that there is something to draft from."""
        return bool(self._drawn[seq.row] == self._state.tenancy[seq.row])

    def _catch_up(self, sequences: Seq[Sequence]) -> list[int]:
        """The position from which each text goes on: its last token, for the head has seen all others."""
        return [len(seq.tokens) - 1 for seq in sequences]

    def _note_text(self, seq: Sequence, drafts: list[int]) -> None:
        """Remember nothing: the next step is followed, whatever was drafted."""
