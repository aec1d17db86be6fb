"""A small draft model: it runs the same orders on the same rows and block tables, on its own device half.

    turn    text known so far    computes                     draws
    0       t0 .. t9             the missed tokens: t8 t9     d10        t9 was sampled by the target model
    1                            d10                          d11        it continues from its own id
    2                            d11                          d12        drafts d10 d11 d12 are verified

Its KV store has as many blocks as the target model's, so one block table serves both and a sequence's blocks
are reserved once. It draws with the noise of the sequence (host_half.py): if the two models agree, they draw
the same id, at any temperature.

Its computed blocks may belong to another text: a draft was rejected, or the sequence found its prompt in the
prefix cache, was swapped in, or is a fork. So each full block remembers the text up to its end as a number (a
hash of the previous block and its ids). When a sequence begins to run, its blocks are compared with its text,
and the draft model catches up from the first block that does not match. Blocks that it never computed,
because drafts did not pay then, do not match either. Nothing is copied or swapped here.

On a CPU each turn is a separate order. On a GPU all turns are one graph (gpu/draft_device.py), which
first computes the last two tokens of a text: after a window the draft model never lacks more. It uses the
target model's block tables. The device accepts drafts before the host knows which, so the turns for the next
window begin at once (`go_on`), and their drafts are there when the host has read the window:

    device      verify 1 | turns 2 | verify 2 | turns 3 | ...
    host                 └ read 1, plan and launch verify 2, turns 3 ┘

If the turns take less time than the host, the step that verifies them is launched together with them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import torch

from infer.config.speculation import MAX_DRAFTS
from infer.engine.host_half import HostHalf
from infer.execution.device import DeviceHalf, PendingStep
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.draft_device import DraftDevice
from infer.execution.gpu.late_drafts import LateDrafts
from infer.execution.gpu.readback import PendingTensor
from infer.execution.order import StepOrder
from infer.scheduling.batch_state import BatchState
from infer.scheduling.plan import Chunk, Chunks, StepPlan
from infer.scheduling.sequence import Sequence

MOST_CHANGES = 3 * 4096  # limit of pending table changes, at three numbers each
NO_TEXT = 0  # text number of a block that was never computed


class _DraftedText(NamedTuple):
    """The draft model's progress with the text of a row."""

    tenancy: int  # tenancy of the row
    num_known: int  # known tokens of the text, all of them computed
    drafts: Seq[int]  # drafts computed after the known tokens
    num_full: int  # blocks that are full of known tokens
    last_text: int  # text number of the last full block
    step: int  # step that verifies the drafts


class _Drafted(NamedTuple):
    """Drafts that a GPU has made or is making: a column for each tenancy of a row."""

    stays: list[tuple[int, int]]
    counts: Seq[int]
    ids_KS: PendingTensor


NOTHING = _DraftedText(-1, 0, (), 0, NO_TEXT, -1)


class DraftModel:
    """Drafts with a second model next to the target model. One engine thread owns it."""

    def __init__(
        self,
        device: DeviceHalf,
        state: BatchState,
        num_blocks: int,
        *,
        max_tokens: int,
        target: GpuDevice | None = None,
    ) -> None:
        """`max_tokens`: the most tokens of one order, when it catches up with a text.

        `target` reads the drafts on the device: its step is launched before the host has read them.
        """
        self._device, self._state, self._max_tokens, self._target = device, state, max_tokens, target
        self._host = self._new_host()
        self._texts = [NO_TEXT] * num_blocks  # text number of each block
        self._rows = [NOTHING] * len(state.tenancy)
        self._changes: list[int] = []  # table changes since the last order
        self._step = self._judging = 0  # number of the last order, and step of the last plan
        self._context_len = device.model.config.context_len if isinstance(device, DraftDevice) else 0
        self._sequences: Seq[Sequence] = ()  # sequences that are being drafted for
        self._turns: list[tuple[np.ndarray, PendingStep]] = []  # indices into `_sequences`, and their step
        self._late: LateDrafts | None = None  # drafts of all turns at once, for the next step
        self._early: _Drafted | None = None  # drafts for the step after the next
        self._num_missed = 0  # tokens caught up with since `take_missed`
        self._most_behind = 2 if target is not None else MAX_DRAFTS  # missing tokens that turns can compute

    def _new_host(self) -> HostHalf:
        """Return a host half for which all rows are new."""
        return HostHalf(self._state, is_draft=True)

    @property
    def is_late(self) -> bool:
        """True if drafts may be read after the step that verifies them is launched."""
        return self._target is not None

    def note(self, plan: StepPlan) -> bool:
        """Record the table changes of a plan, and discard drafts of a plan that did not run: `Drafter`."""
        self._judging = plan.step
        if self._target is not None:
            self._target.expect(None)
            if not self._state.num_drafts:  # sequences continue without these drafts
                self._early = None
            self._changes = []  # the target applied the changes of all earlier plans
        self._changes += plan.table_changes
        if len(self._changes) > MOST_CHANGES:  # no drafts for long: rows start again, with whole tables
            self._changes, self._host = [], self._new_host()
        return False

    def is_ready(self, seq: Sequence) -> bool:
        """True if it can draft for a sequence now: always, because it can catch up with any text."""
        return True

    def num_missed(self, seq: Sequence) -> int:
        """Return the tokens of a text that it must catch up with; turns compute a few without delay."""
        num_missed = len(seq.tokens) - self._num_computed(seq)
        return num_missed if num_missed > MAX_DRAFTS + 1 else 0

    def take_missed(self) -> int:
        """Return the number of tokens that it has caught up with since the last call."""
        missed, self._num_missed = self._num_missed, 0
        return missed

    def begin(self, sequences: Seq[Sequence]) -> None:
        """Launch drafting for these sequences, a draft for each reserved place; `collect` returns them."""
        self._sequences = sequences
        if self._target is None:
            self._run_turns(sequences)
            return
        assert isinstance(self._device, DraftDevice)
        counts, stays = [len(seq.drafts) for seq in sequences], self._stays(sequences)
        early = self._early
        if early is None or self.fitted(sequences, counts) != counts or not set(stays) <= set(early.stays):
            self._enter(self._device, sequences)
            longest = max(counts)
            is_roomy = all(self._room(seq) > len(seq.tokens) + longest - 2 for seq in sequences)
            early = self._draft(sequences, [longest] * len(counts) if is_roomy else counts)
        self._early = None
        columns = [early.stays.index(stay) for stay in stays]
        for seq, column in zip(sequences, columns, strict=True):
            self._shape(seq, early.counts[column])
        self._late = LateDrafts(early.ids_KS, self._device.drafts_KS.shape[1], columns)
        self._target.expect(self._late)

    def _shape(self, seq: Sequence, num_drafted: int) -> None:
        """Set the tree shape of a sequence's drafts; a chain needs none."""

    def fitted(self, sequences: Seq[Sequence], counts: list[int]) -> list[int]:
        """Return the counts, limited to drafts already being made: more would restart at the first turn."""
        early, stays = self._early, self._stays(sequences)
        made = {} if early is None else dict(zip(early.stays, early.counts, strict=True))
        if not all(stay in made for stay, count in zip(stays, counts, strict=True) if count):
            return counts
        return [min(count, made.get(stay, 0)) for stay, count in zip(stays, counts, strict=True)]

    def go_on(self, sequences: Seq[Sequence], counts: Seq[int], *, verifies: bool) -> None:
        """Draft for the next window of these sequences while the step that verifies this window runs.

        Does nothing unless each sequence has drafts in that step, and room for any outcome. With `verifies`
        the step after that is launched as well: the batch has no other sequence.
        """
        self._early = None
        if self._target is None or not self._target.windows.has_judged or not sequences:
            return
        longest, has_all = max(counts), set(self._stays(sequences)) <= set(self._stays(self._sequences))
        if has_all and all(self._room(seq) > seq.num_tokens + longest for seq in sequences):
            with suppress(torch.OutOfMemoryError):  # the drafts are then made after the step is read
                self._early = self._draft(sequences, [longest] * len(sequences))
        if verifies and self._early is not None:
            rows = np.array([seq.row for seq in sequences])
            self._target.windows.verify_early(rows, np.array(counts), self._early.ids_KS)

    def collect(self) -> list[list[int]]:
        """Return the drafts that `begin` launched, sequence by sequence."""
        counts = [len(seq.drafts) for seq in self._sequences]
        drafts = self._read_turns() if self._late is None else self._late.collect(counts)
        for seq, found in zip(self._sequences, drafts, strict=True):
            self._note_text(seq, found)
        self._sequences, self._turns, self._late = (), [], None
        return drafts

    def _read_turns(self) -> list[list[int]]:
        """Wait for turns that were launched one by one; returns their ids, sequence by sequence."""
        drafts: list[list[int]] = [[] for _ in self._sequences]
        for numbers, step in self._turns:
            for number, ids in zip(numbers.tolist(), step.wait().ids, strict=True):
                drafts[number] += ids
        return drafts

    def _draft(self, sequences: Seq[Sequence], counts: Seq[int]) -> _Drafted:
        """Launch the turns for sequences whose rows are set up on the device."""
        assert isinstance(self._device, DraftDevice)
        rows, are_trees = np.array([(seq.row, self._is_tree(seq)) for seq in sequences]).T
        ids_KS = self._device.draft(rows, np.array(counts), are_trees)
        return _Drafted(self._stays(sequences), counts, ids_KS)

    def _is_tree(self, seq: Sequence) -> bool:
        """True if it drafts trees for a sequence."""
        return False

    def _stays(self, sequences: Seq[Sequence]) -> list[tuple[int, int]]:
        """Return the row of each sequence and the row's tenancy."""
        rows = [seq.row for seq in sequences]
        return [*zip(rows, self._state.tenancy[rows].tolist(), strict=True)]

    def _room(self, seq: Sequence) -> int:
        """Return the text length up to which turns may compute."""
        return min(seq.num_reserved, self._context_len)

    def _enter(self, device: DraftDevice, sequences: Seq[Sequence]) -> None:
        """Set up the rows of these sequences on a GPU; turns begin from there."""
        self._catch_up(sequences)
        known = np.array([len(seq.tokens) for seq in sequences])
        with self._order(self._chunks(sequences).at(known - 1, known, is_repeated=False)) as order:
            device.enter(order, np.array([seq.tokens[-2] for seq in sequences]))

    def _run_turns(self, sequences: Seq[Sequence]) -> None:
        """Launch the turns one by one, each for the sequences that need more drafts."""
        starts, counts = np.array(self._catch_up(sequences)), np.array([len(seq.drafts) for seq in sequences])
        known = np.array([len(seq.tokens) for seq in sequences])
        chunks, numbers = self._chunks(sequences), np.arange(len(sequences))
        self._turns = []
        for turn in range(int(counts.max())):
            has_all = int(counts[numbers].min()) > turn  # True: the same rows as in the last turn
            if not has_all:
                numbers = numbers[counts[numbers] > turn]
                chunks = self._chunks([sequences[number] for number in numbers.tolist()])
            stops = known[numbers] + turn
            begins = stops - 1 if turn else starts
            is_same = has_all and turn > 0
            self._turns.append((numbers, self._run(chunks.at(begins, stops, is_repeated=is_same))))

    def _chunks(self, sequences: Seq[Sequence]) -> Chunks:
        """Return chunks of these sequences that draw one id each; their positions are set later."""
        seq_ids, rows = np.array([(seq.seq_id, seq.row) for seq in sequences]).T
        ones = np.ones(len(rows), dtype=np.int64)
        return Chunks(seq_ids, ones, ones, ones, rows, sequences=list(sequences))

    def _run(self, chunks: Chunks) -> PendingStep:
        with self._order(chunks) as order:
            return self._device.run(order)

    @contextmanager
    def _order(self, chunks: Chunks) -> Iterator[StepOrder]:
        """Make the order of some chunks; if it fails, their rows start again."""
        self._step += 1
        changes, self._changes = self._changes, []
        plan = StepPlan(self._step, chunks, table_changes=changes)
        try:
            yield self._host.order(plan)
        except BaseException:
            self._host.forget(plan)
            for seq in chunks.sequences:
                self._rows[seq.row] = NOTHING
            raise

    # -- progress ---------------------------------------------------------------------------------

    def _catch_up(self, sequences: Seq[Sequence]) -> list[int]:
        """Compute the missing tokens of texts, except the last few; returns the position each reached."""
        starts = [self._num_computed(seq) for seq in sequences]
        while True:
            budget, chunks, chosen = self._max_tokens, list[Chunk](), list[Sequence]()
            for number, seq in enumerate(sequences):
                start, stop = starts[number], min(len(seq.tokens) - 1, starts[number] + budget)
                if len(seq.tokens) - start > self._most_behind and stop > start:
                    chunks.append(Chunk(seq.seq_id, start, stop, 0))
                    chosen.append(seq)
                    budget -= stop - start
                    starts[number] = stop
            if not chunks:
                return starts
            for seq, chunk in zip(chosen, chunks, strict=True):
                self._rows[seq.row] = self._rows[seq.row]._replace(num_known=chunk.stop, drafts=())
            self._num_missed += self._max_tokens - budget
            self._run(Chunks.of(chunks, chosen)).wait()

    def _num_computed(self, seq: Sequence) -> int:
        """Return the number of a text's tokens in the draft model's cache, never counting the last token."""
        row = self._rows[seq.row]
        if row.tenancy != self._state.tenancy[seq.row]:
            row = self._rows[seq.row] = self._recognise(seq)
        if self._target is not None and row.step == self._judging - 1:  # every accepted token was computed
            return len(seq.tokens) - 1
        num_right = 0
        for draft, token_id in zip(row.drafts, seq.tokens[row.num_known :], strict=False):
            if draft != token_id:
                break
            num_right += 1
        return min(row.num_known + num_right, len(seq.tokens) - 1)

    def _recognise(self, seq: Sequence) -> _DraftedText:
        """Return the part of a text that is computed when its sequence begins to run: its matching blocks."""
        num_full, last_text = 0, NO_TEXT
        for block, text in zip(self._blocks(seq), self._texts_of(seq.tokens, 0, NO_TEXT), strict=False):
            if self._texts[block] != text:
                break
            num_full, last_text = num_full + 1, text
        tenancy = int(self._state.tenancy[seq.row])
        return _DraftedText(tenancy, num_full * self._state.block_size, (), num_full, last_text, -1)

    def _note_text(self, seq: Sequence, drafts: list[int]) -> None:
        """Record that all known tokens of a text are computed, and all drafts but the last."""
        row, blocks, num_full = self._rows[seq.row], self._blocks(seq), self._rows[seq.row].num_full
        last_text = row.last_text
        for text in self._texts_of(seq.tokens, num_full, last_text):
            self._texts[blocks[num_full]] = last_text = text
            num_full += 1
        for block in blocks[num_full:]:  # partly filled blocks, or blocks with drafts
            self._texts[block] = NO_TEXT
        self._rows[seq.row] = _DraftedText(
            row.tenancy, len(seq.tokens), drafts[:-1], num_full, last_text, self._judging
        )

    def _texts_of(self, tokens: array[int], num_full: int, text: int) -> Iterator[int]:
        """Yield the text numbers of full blocks after the first `num_full`, the last of which has `text`."""
        size = self._state.block_size
        for start in range(num_full * size, len(tokens) - size + 1, size):
            text = hash((text, tokens[start : start + size].tobytes()))
            yield text

    def _blocks(self, seq: Sequence) -> list[int]:
        """Return the blocks of a sequence in the first table, which the draft model uses."""
        num_blocks = seq.num_reserved // self._state.block_size
        blocks: list[int] = self._state.tables[0, seq.row, :num_blocks].tolist()
        return blocks
