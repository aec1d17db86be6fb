"""The batch as columns of integers: how far every running sequence has come, in one place.

A running sequence is a *column*. Columns stand in the order in which sequences are served, so a question
about the whole batch is one comparison of two lines, whatever the number of sequences:

    sequences       A     B     C              by sort key: the first is the most urgent
    num_tokens     21     6    40              tokens that have a place, known or still on the device
    num_computed   20     5     8              tokens whose keys and values are in the cache
    num_reserved   32     8    48              tokens the block tables have room for
    next_commit    32     8    16              the num_computed at which a block is full
    decode_len      1     1     1              tokens a decode step computes: 1, and more with drafts
    num_planned     1     1     6              tokens the step being planned computes
    row             3     0     1              where its block tables lie, here and on the device

    num_tokens - num_computed == decode_len         A and B decode, C is in its prompt
    num_tokens > num_reserved                       no sequence needs a block for this step

A sequence enters when it is admitted and leaves when it ends or is preempted; the columns after it move by
one. The *row* does not move: it names the sequence's line in `tables`, which the kernels read, for as long as
the sequence runs. The cache layout decides the number of tables (cache/layout.py), usually one.

**Several tokens per step.** A step may compute drafts, tokens that were proposed and may be refused:

    propose 3   num_tokens 21 -> 24, decode_len 4                  one known token and three drafts
    advance     num_computed 24, num_tokens 25                     as if all were right, and one more drawn
    retract 2   num_computed 22, num_tokens 23                     two were refused

`retract` takes back tokens that the last step computed. Their slots stay reserved and are written again. A
full block enters the prefix tree (`commit`) only after the step's drafts have been judged, so `retract` never
has to take back a block that others may read, and refuses to.

A sequence that does not run keeps its own column, so its counts are read in the same way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from operator import attrgetter

import numpy as np

from infer.cache.paged_pool import NEVER
from infer.errors import EngineError
from infer.scheduling.plan import Chunks
from infer.scheduling.sequence import (
    DECODE_LEN,
    LEFT_OUT,
    LINES,
    NEXT_COMMIT,
    NO_ROW,
    NUM_PLANNED,
    NUM_RESERVED,
    NUM_TOKENS,
    ROW,
    Sequence,
    cells_of,
)

_sort_key = attrgetter("sort_key")


class BatchState:
    """The counts and block tables of all running sequences. One engine thread owns it."""

    num_tokens: np.ndarray  # these and the next: one number per running sequence, in order
    num_computed: np.ndarray
    num_reserved: np.ndarray
    limit: np.ndarray
    next_commit: np.ndarray
    decode_len: np.ndarray
    num_planned: np.ndarray
    turn: np.ndarray
    num_samples: np.ndarray
    row: np.ndarray
    seq_id: np.ndarray
    left_out: np.ndarray

    def __init__(
        self,
        max_sequences: int,
        max_blocks: int,
        *,
        block_size: int,
        num_tables: int = 1,
        spans: Seq[int] = (),
    ) -> None:
        """`spans`: factors on the blocks of each table (cache/layout.py); (): 1."""
        self.block_size, self.spans = block_size, spans or (1,) * num_tables
        self.sequences: list[Sequence] = []  # running, by sort key: one per column
        self.version = 0  # another after every arrival and departure
        self.num_drafts = 0  # proposed and not yet launched, of all sequences
        self.is_unseen = False  # whether no head needs to see the step that was planned last
        self.ahead = 0  # tokens after its last that each column gets slots for in the next plan
        self.num_steady = 0  # coming steps that may repeat a plan which decodes with every column
        self.tables = np.zeros((num_tables, max_sequences, max_blocks), dtype=np.int64)
        self.tenancy = np.zeros(max_sequences, dtype=np.int64)  # how often each row has been given out
        self._table_cells = self.tables.reshape(-1, max_blocks).data  # rows of all tables, numbered through
        self._columns = np.zeros((len(LINES), max_sequences), dtype=np.int64)
        self._cells = cells_of(self._columns)
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._layout: Chunks | None = None  # a plan that decodes with every column, while they are these
        self._name_lines()

    # -- arrivals and departures ------------------------------------------------------------------

    def enter(self, seq: Sequence) -> None:
        """Give a sequence the column that its sort key asks for, and a row."""
        sequences, columns = self.sequences, self._columns
        place, end = bisect_left(sequences, seq.sort_key, key=_sort_key), len(sequences)
        columns[:, place + 1 : end + 1] = columns[:, place:end]
        columns[:, place] = seq.column[:, 0]
        columns[ROW, place] = row = self._free_rows.pop()
        self.tenancy[row] += 1
        sequences.insert(place, seq)
        seq.is_running, seq.cells, seq.place = True, self._cells, place
        for moved in sequences[place + 1 :]:
            moved.place += 1
        self._name_lines()

    def leave(self, seq: Sequence) -> None:
        """Give back the column and the row; the counts rest with the sequence, and unlaunched drafts go."""
        sequences, columns, place, end = self.sequences, self._columns, seq.place, len(self.sequences)
        assert sequences[place] is seq, f"{seq} is not where its column is"
        num_drafts = int(columns[DECODE_LEN, place]) - 1
        self.num_drafts -= num_drafts
        columns[NUM_TOKENS, place] -= num_drafts
        if num_drafts:
            seq.drafts = ()
        self._free_rows.append(seq.row)
        seq.column = columns[:, place : place + 1].copy()
        reset = [NUM_RESERVED, NEXT_COMMIT, DECODE_LEN, NUM_PLANNED, ROW, LEFT_OUT]
        seq.column[reset, 0] = 0, 0, 1, 0, NO_ROW, 0
        seq.is_running, seq.cells, seq.place = False, cells_of(seq.column), 0
        columns[:, place : end - 1] = columns[:, place + 1 : end]
        del sequences[place]
        for moved in sequences[place:]:
            moved.place -= 1
        self._name_lines()

    def _name_lines(self) -> None:
        """Point the lines at the columns in use; what was known of the next plan no longer holds."""
        num_running = len(self.sequences)
        for name, line in zip(LINES, self._columns, strict=True):
            setattr(self, name, line[:num_running])
        self.version += 1
        self.num_steady = 0
        self._layout = None

    def write_tables(self, seq: Sequence, tables: Seq[Seq[int]], changes: list[int]) -> None:
        """Copy the blocks that a sequence may not write yet to its row; then it may write all of them.

        That is, up to the end of its shortest table. Each change is added to `changes`, for a mirror: a row
        (rows of all tables are numbered through), an index and a block.
        """
        cells, table_cells, place, size = self._cells, self._table_cells, seq.place, self.block_size
        row, first = cells[ROW][place], cells[NUM_RESERVED][place] // size
        stop = len(tables[0]) if len(tables) == 1 else min(map(len, tables))
        for blocks, span in zip(tables, self.spans, strict=True):
            for index in range(first, stop):
                table_cells[row, index] = block = blocks[index] * span
                changes += row, index, block
            row += len(self.tenancy)
        cells[NUM_RESERVED][place] = stop * size

    def enter_tables(self, seq: Sequence, tables: Seq[Seq[int]]) -> None:
        """Copy the tables of a sequence that has just entered to its row; it may write all of them.

        An entry whose block has left a window repeats the first block that the table has: a kernel may read
        it along with the blocks it needs, and gives what it reads no weight.
        """
        stop = min(map(len, tables))
        for number, blocks in enumerate(tables):
            line = self.tables[number, seq.row, :stop]
            line[:] = blocks[:stop]
            if stop and blocks[0] < 0:
                line[line < 0] = next(block for block in blocks if block >= 0)
            line *= self.spans[number]
        seq.num_reserved = stop * self.block_size

    # -- one step ---------------------------------------------------------------------------------

    def begin_plan(self) -> tuple[np.ndarray, np.ndarray]:
        """Clear the plan; return the tokens each column is behind, and whether one decode step is enough."""
        self.num_planned.fill(0)
        self.num_steady = 0
        pending = self._pending()
        return pending, pending == self.decode_len

    def _pending(self) -> np.ndarray:
        pending: np.ndarray = np.minimum(self.num_tokens, self.limit) - self.num_computed
        return pending

    def count_left_out(self) -> bool:
        """Count this step for columns that could decode and are not planned; return True if there are any."""
        is_left_out = (self._pending() == self.decode_len) & (self.num_planned == 0)
        self.left_out += 1
        self.left_out *= is_left_out
        return bool(is_left_out.any())

    def due_first(self, places: np.ndarray, due_after: int) -> np.ndarray:
        """These columns, but those left out for `due_after` steps go first, the longest left out leading."""
        left_out = self.left_out[places]
        return places[np.where(left_out >= due_after, -left_out, 0).argsort(kind="stable")]

    def planned_chunks(self, *, decodes_all: bool, in_turn: bool = False) -> Chunks:
        """The chunks of all columns that are planned, in their turn or in the order of the columns.

        Where every column decodes, only positions differ from the last time: the rest is kept.
        """
        layout = self._layout if decodes_all else None
        if layout is None:
            places: np.ndarray | slice = slice(None)
            sequences = self.sequences.copy()
            if not decodes_all:
                places = self.num_planned.nonzero()[0]
                if in_turn:
                    places = places[self.turn[places].argsort(kind="stable")]
                sequences = [sequences[place] for place in places.tolist()]
            starts = self.num_computed[places].copy()
            stops = starts + self.num_planned[places]
            draws = stops == self.num_tokens[places]
            layout = Chunks(
                self.seq_id[places].copy(), starts, stops, np.where(draws, self.num_samples[places], 0),
                self.row[places].copy(), sequences=sequences, places=places, version=self.version,
            )  # fmt: skip
            self._layout = layout if decodes_all else None
            return layout
        return layout.at(self.num_computed.copy(), self.num_tokens.copy(), is_repeated=not self.num_drafts)

    def settle(self) -> None:
        """Find out how often a plan that decodes one token of every column may be repeated.

        That is until the first of them ends: while none comes or goes, the same rule gives the same answer.
        """
        if self.sequences and not self.num_drafts:
            self.num_steady = int((self.limit - self.num_tokens).min())

    @property
    def num_wanted(self) -> np.ndarray:
        """The tokens that each column should have slots for: `ahead` more, as far as tables go."""
        if not self.ahead:
            return self.num_tokens
        most = self.tables.shape[2] * self.block_size
        wanted: np.ndarray = np.maximum(self.num_tokens, np.minimum(self.num_tokens + self.ahead, most))
        return wanted

    def short(self, places: np.ndarray | None = None) -> np.ndarray:
        """The columns without a slot for their last token, among `places` or among all columns."""
        is_short: np.ndarray = (self.num_wanted if self.ahead else self.num_tokens) > self.num_reserved
        return is_short.nonzero()[0] if places is None else places[is_short[places]]

    def advance(self, chunks: Chunks) -> None:
        """Count a step that is under way; sampled tokens get their place before they are known."""
        if chunks.is_repeated:  # every column decodes one token
            self.num_computed[:] = chunks.stops
            np.add(chunks.stops, self.decode_len, self.num_tokens)
            return
        places, stops = chunks.places, chunks.stops
        self.num_computed[places] = stops
        self.num_tokens[places] = np.maximum(self.num_tokens[places], stops + chunks.draws)
        if self.num_drafts:
            chunks.num_drafts = int(self.decode_len[places].sum()) - len(chunks)
            self.num_drafts -= chunks.num_drafts
            self.decode_len[places] = 1

    def filled(self, chunks: Chunks) -> np.ndarray:
        """The chunks that complete a block in a step that has run, of sequences that still run."""
        if chunks.is_repeated and chunks.version == self.version:
            is_full: np.ndarray = chunks.ends >= self.next_commit
            return is_full.nonzero()[0]
        running = np.array([seq.is_running for seq in chunks.sequences], dtype=bool).nonzero()[0]
        is_due = chunks.ends[running] >= self.next_commit[self.places_of(chunks.sequences)]
        return np.compress(is_due, running)

    def places_of(self, sequences: Seq[Sequence]) -> np.ndarray:
        """The columns of those sequences that run."""
        return np.array([seq.place for seq in sequences if seq.is_running], dtype=np.int64)

    def grow(self, seq: Sequence, count: int) -> None:
        """Give a running sequence `count` more tokens that came from no step: it falls behind by that many.

        Its row counts as given out anew, for a device may have drawn another token in their place.
        """
        self.num_tokens[seq.place] += count
        self.tenancy[seq.row] += 1
        self.num_steady = 0
        self._layout = None

    # -- drafts -----------------------------------------------------------------------------------

    def propose(self, seq: Sequence, drafts: Seq[int]) -> None:
        """Let a sequence that is one token behind compute drafts with its next step, as many as fit."""
        place = seq.place
        assert seq.is_running and seq.num_pending == self.decode_len[place] == 1, f"{seq} cannot take drafts"
        count = max(min(len(drafts), int(self.limit[place]) - seq.num_tokens), 0)
        seq.drafts = tuple(drafts[:count])
        self.num_tokens[place] += count
        self.decode_len[place] += count
        self.num_drafts += count
        self.num_steady = 0

    def retract(
        self, chunks: Chunks, num_refused: np.ndarray, num_replayed: np.ndarray | None = None
    ) -> None:
        """Take back tokens at the end of the chunks of a step that has run, before the step is committed.

        `num_tokens` and `num_computed` move back together. The reservation stays: the slots are written
        again. A chunk keeps its first token, which was known, and a sequence all tokens of the blocks that
        it has committed; to take more back is an error. A sequence that was preempted after the step was
        launched loses the tokens as well, and as much of its cache as it has left.

        `num_replayed`: tokens of each chunk before the kept ones, which have to be computed again.
        """
        num_undone = num_refused if num_replayed is None else num_refused + num_replayed
        undone = num_undone.nonzero()[0]
        sequences = [chunks.sequences[number] for number in undone.tolist()]
        runs = np.array([seq.is_running for seq in sequences], dtype=bool)
        places, counts = self.places_of(sequences), num_refused[undone[runs]]
        next_commit = self.next_commit[places]
        num_left = self.num_computed[places] - num_undone[undone[runs]]
        is_too_far = (next_commit < NEVER) & (num_left < next_commit - self.block_size)
        if is_too_far.any() or (chunks.stops - num_undone <= chunks.starts).any():
            raise EngineError("a step cannot take back its first token, or one of a block that is committed")
        chunks.ends = chunks.stops - num_undone
        self.num_computed[places] = num_left
        self.num_tokens[places] -= counts
        for number in undone[~runs].tolist():
            seq = chunks.sequences[number]
            seq.num_tokens -= int(num_refused[number])
            seq.num_computed = max(seq.num_computed - int(num_undone[number]), 0)
        self.num_steady = 0
