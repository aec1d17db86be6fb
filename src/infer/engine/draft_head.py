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

Steps that are left out leave entries of the head's cache unwritten. A set has the blocks with such entries,
on the device and in host memory, and their copies. A sequence that begins with one of these blocks gets no
drafts: it has come back after a preemption, or its prompt goes on from an answer that was not followed.

    entries of a block      ■ ■ · ■      in the set: one was left out
                            ■ ■ · ·      no longer: a followed step has begun the block anew
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import compress

import numpy as np

from infer.cache.layout import SWAP_IN, SWAP_OUT, Transfer
from infer.engine.draft_model import DraftModel
from infer.engine.host_half import NOBODY
from infer.execution.device import DeviceHalf
from infer.execution.gpu.device import GpuDevice
from infer.scheduling.batch_state import BatchState
from infer.scheduling.plan import Chunks, StepPlan
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
        self._is_seen = np.zeros(len(state.tenancy), dtype=bool)  # True: the head has seen its text
        self._gaps = set[int]()  # blocks with entries that the head has not written; ~block: in host memory
        self._num_idle = 0  # steps since a row had drafts, or one began that may get some

    def note(self, plan: StepPlan) -> None:
        """Remember which rows draw, and the blocks that tables get: the head needs them before the model."""
        super().note(plan)
        self._changes = list(plan.table_changes)
        chunks, state, is_plain = plan.chunks, self._state, plan.chunks.is_repeated
        self._num_idle = 0 if state.num_drafts else self._num_idle + 1
        if plan.transfers:
            self._move(plan.transfers)
        if not is_plain:
            is_plain = bool((chunks.stops - chunks.starts == 1).all() and chunks.draws.all())
            begins = chunks.draws & (self._drawn[chunks.rows] != state.tenancy[chunks.rows])
            if numbers := begins.nonzero()[0].tolist():
                self._begin(chunks, numbers)
        state.is_unseen, size = is_plain and not self._follows, state.block_size
        if state.is_unseen:
            self._is_seen[chunks.rows] = False
            self._gaps.update(state.tables[0, chunks.rows, chunks.starts // size].tolist())
        elif self._gaps:
            firsts, stops = -(-chunks.starts // size), -(-chunks.stops // size)  # blocks that it begins
            for number in (firsts < stops).nonzero()[0].tolist():
                begun = state.tables[0, chunks.rows[number], firsts[number] : stops[number]]
                self._gaps.difference_update(begun.tolist())

    def _begin(self, chunks: Chunks, numbers: list[int]) -> None:
        """Find out which of the rows that draw for the first time in their stay may get drafts."""
        state, rows = self._state, chunks.rows[numbers]
        stops = -(-chunks.starts[numbers] // state.block_size)
        found = [state.tables[0, row, :stop].tolist() for row, stop in zip(rows, stops, strict=True)]
        can_draft = [self._gaps.isdisjoint(blocks) for blocks in found]
        for number in compress(numbers, can_draft):
            if self._is_tried(chunks.sequences[number]):
                self._num_idle = 0
        self._drawn[rows] = state.tenancy[rows]
        self._is_seen[rows] = self._follows & np.array(can_draft)

    def _move(self, transfers: Seq[Transfer]) -> None:
        """Let a block that is copied or swapped be in the set if its source is, and else not."""
        for kind, source, destination in transfers:
            has_gaps = (~source if kind == SWAP_IN else source) in self._gaps
            place = ~destination if kind == SWAP_OUT else destination
            (self._gaps.add if has_gaps else self._gaps.discard)(place)

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
