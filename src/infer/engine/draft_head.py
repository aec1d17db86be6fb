"""An EAGLE-3 head that drafts: the turns of a draft model, but it never has to catch up with a text.

The head runs after every step of the model on the device (execution/head_model.py), so it has seen the text
of each row that has sampled an id for its current sequence. A sequence that was just swapped in or forked has
not sampled in its row: it gets drafts after its next step.

    turn    text known so far    given     draws
    0       t0 .. t9             t9        d10        from the model's hidden state of t8
    1                            d10       d11        from the head's hidden state of t9

It draws with the noise of the sequence, as a draft model does (draft_model.py).

Running the head takes time in every step, so it skips steps in which rows only decode while drafts do not
pay. A step with the head is called *followed*:

    requests    A        B        C  D  E  ..        a trial, one of several
    followed    ■■■■■■■  ■■■■■■■  ·  ·  ·            ■■■■■■■· · · ·
                drafts accepted   drafts do not pay  PATIENCE steps without a draft

A sequence that sampled an id in a skipped step gets no more drafts. Later sequences may: all of them while
drafts pay at the average acceptance rate, otherwise one now and then (`DraftLengths.is_tried`). Prompts are
always followed, because any later sequence may share their blocks.

A skipped step leaves entries of the head's cache unwritten. `_gaps` is the set of blocks with such entries,
on the device and in host memory, and of their copies. A sequence that begins with one of these blocks gets no
drafts: it was preempted, or its prompt continues an answer that was not followed.

    entries of a block      ■ ■ · ■      in the set: an entry was skipped
                            ■ ■ · ·      removed: a followed step has started the block again
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

PATIENCE = 128  # steps without drafts after which the head skips steps


class DraftHead(DraftModel):
    """Drafts with a head on the hidden states of the target model. One engine thread owns it."""

    def __init__(
        self,
        device: DeviceHalf,
        state: BatchState,
        *,
        num_drafts: int,
        lengths: DraftLengths | None = None,
        target: GpuDevice | None = None,
    ) -> None:
        """`num_drafts`: the most drafts of a sequence; `target`: as in `DraftModel`.

        `lengths` estimates whether drafts pay; None: every step is followed.
        """
        super().__init__(device, state, 0, max_tokens=0, target=target)
        self._num_drafts, self._lengths = num_drafts, lengths
        self._drawn = np.full(len(state.tenancy), NOBODY, dtype=np.int64)  # tenancy in which a row last drew
        self._is_seen = np.zeros(len(state.tenancy), dtype=bool)  # True: the head has seen the row's text
        self._gaps = set[int]()  # blocks with entries that the head has not written; ~block: in host memory
        self._num_idle = 0  # steps since a row had drafts, or since a sequence began that may get some

    def note(self, plan: StepPlan) -> bool:
        """Record which rows sample, and the new blocks of tables; True: the head may skip the step."""
        super().note(plan)
        self._changes = list(plan.table_changes)  # the head needs them before the model
        chunks, state, is_plain = plan.chunks, self._state, plan.chunks.is_repeated
        self._num_idle = 0 if state.num_drafts else self._num_idle + 1
        self._move(plan.transfers)
        if not is_plain:
            is_plain = bool((chunks.stops - chunks.starts == 1).all() and chunks.draws.all())
            begins = chunks.draws & (self._drawn[chunks.rows] != state.tenancy[chunks.rows])
            if numbers := begins.nonzero()[0].tolist():
                self._begin(chunks, numbers)
        is_unseen, size = is_plain and not self._follows, state.block_size
        if is_unseen:
            self._is_seen[chunks.rows] = False
            self._gaps.update(state.tables[0, chunks.rows, chunks.starts // size].tolist())
        elif self._gaps:
            firsts, stops = -(-chunks.starts // size), -(-chunks.stops // size)  # blocks that the step begins
            for number in (firsts < stops).nonzero()[0].tolist():
                begun = state.tables[0, chunks.rows[number], firsts[number] : stops[number]]
                self._gaps.difference_update(begun.tolist())
        return is_unseen

    def _begin(self, chunks: Chunks, numbers: list[int]) -> None:
        """Find out which rows that sample for the first time in their tenancy may get drafts."""
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
        """Copy the gap mark of each copied or swapped block from its source to its destination."""
        for kind, source, destination in transfers:
            has_gaps = (~source if kind == SWAP_IN else source) in self._gaps
            place = ~destination if kind == SWAP_OUT else destination
            (self._gaps.add if has_gaps else self._gaps.discard)(place)

    @property
    def _follows(self) -> bool:
        """True if the head runs in steps in which rows only decode."""
        return self._lengths is None or self._num_idle <= PATIENCE

    def _is_tried(self, seq: Sequence) -> bool:
        """True if steps should be followed because of a sequence that begins."""
        if self._lengths is None or seq.group.request.params.num_speculative_tokens == 0:
            return self._lengths is None
        return self._lengths.is_tried(len(self._state.sequences), self._num_drafts)

    def is_ready(self, seq: Sequence) -> bool:
        """True if the row of a sequence has sampled, and the head has seen its whole text."""
        return bool(self._is_seen[seq.row] and self._drawn[seq.row] == self._state.tenancy[seq.row])

    def num_missed(self, seq: Sequence) -> int:
        """Return 0: it only drafts for a sequence whose whole text it has seen."""
        return 0

    def _catch_up(self, sequences: Seq[Sequence]) -> list[int]:
        """Return the position of each text's last token: the head has seen all tokens before it."""
        return [len(seq.tokens) - 1 for seq in sequences]

    def _note_text(self, seq: Sequence, drafts: list[int]) -> None:
        """Do nothing: the next step is followed, whatever was drafted."""
