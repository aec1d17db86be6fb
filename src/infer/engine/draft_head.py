"""An EAGLE-3 head that drafts: the turns of a draft model, without anything to catch up with.

The head follows every step of the model on the device (execution/head_model.py), so it has seen the text of
each row that has drawn an id since its sequence took it. A sequence that came back from host memory, or that
was forked a moment ago, has not drawn in its row: it gets drafts after its next step.

    turn    text known so far    given     draws
    0       t0 .. t9             t9        d10        from what the model made of t8
    1                            d10       d11        from what the head made of t9

It draws with the noise of the sequence, as a draft model does (draft_model.py).

Following takes time in every step, so steps in which rows only decode are left out where no draft will pay:

    requests    A        B        C  D  E  ..        a trial, one of several
    followed    ■■■■■■■  ■■■■■■■  ·  ·  ·            ■■■■■■■· · · ·
                drafts are kept   drafts do not pay  PATIENCE steps without a draft

A sequence that drew an id in such a step gets no drafts any more. Sequences that begin later may: all of them
while drafts pay at the mean rate, and else one now and then (`DraftLengths.is_tried`). Prompts are always
followed: any later sequence may begin with their blocks.
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
from infer.speculative.adaptive import DraftLengths

PATIENCE = 128  # steps without drafts after which steps are not followed


class DraftHead(DraftModel):
    """Drafts with a head that follows the sequences' own model. One engine thread owns it."""

    def __init__(
        self,
        device: DeviceHalf,
        state: BatchState,
        *,
        num_drafts: int,
        lengths: DraftLengths | None = None,
        target: GpuDevice | None = None,
    ) -> None:
        """`num_drafts`: the most of a sequence; `lengths` know what pays, None: all steps are followed.

        `target`: as in `DraftModel`.
        """
        super().__init__(device, state, 0, max_tokens=0, target=target)
        self._num_drafts, self._lengths = num_drafts, lengths
        self._drawn = np.full(len(state.tenancy), NOBODY, dtype=np.int64)  # last stay in which a row drew
        self._is_seen = np.zeros(len(state.tenancy), dtype=bool)  # True: the head has seen all it drew
        self._num_idle = 0  # steps since a row had drafts, or one began that may get some

    def note(self, plan: StepPlan) -> None:
        """Remember which rows draw, and the blocks that tables get: the head needs them before the model."""
        super().note(plan)
        self._changes = list(plan.table_changes)
        chunks, state, is_plain = plan.chunks, self._state, plan.chunks.is_repeated
        self._num_idle = 0 if state.num_drafts else self._num_idle + 1
        if not is_plain:
            is_plain = bool((chunks.stops - chunks.starts == 1).all() and chunks.draws.all())
            begins = chunks.draws & (self._drawn[chunks.rows] != state.tenancy[chunks.rows])
            for number in begins.nonzero()[0].tolist():
                if self._is_tried(chunks.sequences[number]):
                    self._num_idle = 0
            begun = chunks.rows[begins]
            self._drawn[begun], self._is_seen[begun] = state.tenancy[begun], self._follows
        state.is_unseen = is_plain and not self._follows
        if state.is_unseen:
            self._is_seen[chunks.rows] = False

    @property
    def _follows(self) -> bool:
        """True if it follows steps in which rows only decode."""
        return self._lengths is None or self._num_idle <= PATIENCE

    def _is_tried(self, seq: Sequence) -> bool:
        """True if steps are to be followed for a sequence that begins."""
        if self._lengths is None or seq.group.request.params.num_speculative_tokens == 0:
            return self._lengths is None
        return self._lengths.is_tried(len(self._state.sequences), self._num_drafts)

    def is_ready(self, seq: Sequence) -> bool:
        """True if the row of a sequence has drawn, and the head has seen all of it."""
        return bool(self._is_seen[seq.row] and self._drawn[seq.row] == self._state.tenancy[seq.row])

    def _catch_up(self, sequences: Seq[Sequence]) -> list[int]:
        """The position from which each text goes on: its last token, for the head has seen all others."""
        return [len(seq.tokens) - 1 for seq in sequences]

    def _note_text(self, seq: Sequence, drafts: list[int]) -> None:
        """Remember nothing: the next step is followed, whatever was drafted."""
