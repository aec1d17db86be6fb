"""The batch as columns of integers: the progress of every running sequence.

A running sequence is a *column*, and columns are in the order in which sequences are served. So a condition
on the whole batch is one comparison of two lines (numpy arrays), whatever the number of sequences. The most
important lines (`LINES` in sequence.py has all), with blocks of 16 tokens:

    sequences       A     B     C              by sort key: the first is the most urgent
    num_tokens     21     6    40              tokens, including ids that are still on the device
    num_computed   20     5     8              tokens whose keys and values are in the cache
    num_reserved   32    16    48              tokens for which slots are reserved
    next_commit    32    16    16              the num_computed at which the next block is full
    decode_len      1     1     1              tokens a decode step computes: 1, and more with drafts
    num_planned     1     1     6              tokens that the plan being made computes
    row             3     0     1              row of the block tables, on the host and on the device

    num_tokens - num_computed == decode_len         A and B decode, C is in its prompt
    num_tokens > num_reserved                       no sequence needs a block for this step

A sequence enters when it is admitted and leaves when it ends or is preempted; the columns after it move by
one. Its *row* of `tables`, which the kernels read, stays the same as long as the sequence runs. The cache
layout decides the number of tables (cache/layout.py), usually one.

**Several tokens per step.** A step may compute drafts, which may be rejected:

    propose 3   num_tokens 21 -> 24, decode_len 4                  one known token and three drafts
    advance     num_computed 24, num_tokens 25                     as if all were accepted, and one sampled
    retract 2   num_computed 22, num_tokens 23                     two were rejected

`retract` removes tokens that the last step computed. Their slots stay reserved and are written again. A full
block enters the prefix tree (`commit`) only after the step's drafts have been verified, so `retract` never
has to remove a block that other sequences may read, and it raises if asked to.

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

    num_tokens: np.ndarray  # this and the following lines: one number per running sequence, in order
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
        self.sequences: list[Sequence] = []  # running sequences by sort key, one per column
        self.version = 0  # changes whenever a sequence enters or leaves
        self.num_drafts = 0  # proposed drafts of all sequences that are not launched yet
        self.ahead = 0  # additional slots that the next plan reserves for each column
        self.num_steady = 0  # number of coming steps that may repeat a plan in which every column decodes
        self.tables = np.zeros((num_tables, max_sequences, max_blocks), dtype=np.int64)
        self.tenancy = np.zeros(max_sequences, dtype=np.int64)  # number of times each row was assigned
        self._table_cells = self.tables.reshape(-1, max_blocks).data  # rows of all tables, numbered through
        self._columns = np.zeros((len(LINES), max_sequences), dtype=np.int64)
        self._cells = cells_of(self._columns)
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._layout: Chunks | None = None  # chunks of the last plan in which every column decodes
        self._name_lines()

    # -- arrivals and departures ------------------------------------------------------------------

    def enter(self, seq: Sequence) -> None:
        """Insert a sequence's column at its place in the sort order, and assign it a row."""
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
        """Remove a sequence's column and free its row; it keeps its counts and loses unlaunched drafts."""
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
        """Point the lines at the columns in use, and forget the plan that could be repeated."""
        num_running = len(self.sequences)
        for name, line in zip(LINES, self._columns, strict=True):
            setattr(self, name, line[:num_running])
        self.version += 1
        self.num_steady = 0
        self._layout = None

    def write_tables(self, seq: Sequence, tables: Seq[Seq[int]], changes: list[int]) -> None:
        """Copy a sequence's new blocks to its row and reserve them, up to the end of its shortest table.

        Each is added to `changes`, for devices: a row (numbered through all tables), an index and a block.
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
        """Copy the tables of a sequence that has just entered to its row, and reserve all their blocks.

        An entry whose block has left a window repeats the table's first block: a kernel may read it along
        with the blocks it needs, but masks its values.
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
        """Clear the plan; return each column's pending tokens, and True where one decode step is enough."""
        self.num_planned.fill(0)
        self.num_steady = 0
        pending = self._pending()
        return pending, pending == self.decode_len

    def _pending(self) -> np.ndarray:
        pending: np.ndarray = np.minimum(self.num_tokens, self.limit) - self.num_computed
        return pending

    def count_left_out(self) -> bool:
        """Count this step for columns that could decode but are not planned; return True if any are."""
        is_left_out = (self._pending() == self.decode_len) & (self.num_planned == 0)
        self.left_out += 1
        self.left_out *= is_left_out
        return bool(is_left_out.any())

    def due_first(self, places: np.ndarray, due_after: int) -> np.ndarray:
        """Return these columns; columns left out for `due_after` steps come first, the longest leading."""
        left_out = self.left_out[places]
        return places[np.where(left_out >= due_after, -left_out, 0).argsort(kind="stable")]

    def planned_chunks(self, *, decodes_all: bool, in_turn: bool = False) -> Chunks:
        """Return the chunks of all planned columns, by turn or in the order of the columns.

        If every column decodes, only positions have changed since the last plan: the rest is reused.
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
        """Compute how often a plan in which every column decodes one token may be repeated.

        It may be repeated until a sequence reaches its limit; `enter` and `leave` end it earlier.
        """
        if self.sequences and not self.num_drafts:
            self.num_steady = int((self.limit - self.num_tokens).min())

    @property
    def num_wanted(self) -> np.ndarray:
        """The tokens that each column should have slots for: `ahead` more, up to the length of a table."""
        if not self.ahead:
            return self.num_tokens
        most = self.tables.shape[2] * self.block_size
        wanted: np.ndarray = np.maximum(self.num_tokens, np.minimum(self.num_tokens + self.ahead, most))
        return wanted

    def short(self, places: np.ndarray | None = None) -> np.ndarray:
        """Return the columns without a slot for their last token, among `places` or all columns."""
        is_short: np.ndarray = (self.num_wanted if self.ahead else self.num_tokens) > self.num_reserved
        return is_short.nonzero()[0] if places is None else places[is_short[places]]

    def advance(self, chunks: Chunks) -> None:
        """Count a launched step; sampled tokens count before they are known."""
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
        """Return the chunks that completed a block in a step, of sequences that still run."""
        if chunks.is_repeated and chunks.version == self.version:
            is_full: np.ndarray = chunks.ends >= self.next_commit
            return is_full.nonzero()[0]
        running = np.array([seq.is_running for seq in chunks.sequences], dtype=bool).nonzero()[0]
        is_due = chunks.ends[running] >= self.next_commit[self.places_of(chunks.sequences)]
        return np.compress(is_due, running)

    def places_of(self, sequences: Seq[Sequence]) -> np.ndarray:
        """Return the columns of the running sequences among `sequences`."""
        return np.array([seq.place for seq in sequences if seq.is_running], dtype=np.int64)

    def grow(self, seq: Sequence, count: int) -> None:
        """Add `count` pending tokens to a running sequence that no step has sampled.

        Its row gets a new tenancy, because a device may have sampled another token in their place.
        """
        self.num_tokens[seq.place] += count
        self.tenancy[seq.row] += 1
        self.num_steady = 0
        self._layout = None

    # -- drafts -----------------------------------------------------------------------------------

    def propose(self, seq: Sequence, drafts: Seq[int]) -> None:
        """Let a sequence with one pending token compute drafts in its next step, as many as fit."""
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
        """Remove tokens at the end of the chunks of a step that has run, before the step is committed.

        `num_tokens` and `num_computed` decrease together. The slots stay reserved and are written again. It
        is an error to remove the first token of a chunk, which was known, or a token of a committed block.
        A sequence that was preempted after the launch also loses the tokens, and as much of its cache as it
        has left.

        `num_replayed`: accepted tokens of each chunk that must be computed again.
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
