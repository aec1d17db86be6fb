"""The plan of one step, made by the scheduler: integers only.

    transfers   blocks to move before the step, one after the other: copies of shared blocks that will be
                written; blocks of preempted sequences, and evicted ones, to host memory; blocks back from it
    chunks      tokens[start:stop] of one sequence each, computed together

A plan is data: it can be recorded, compared and replayed. Its chunks are stored as columns, one array for
each field, because a batch is planned, counted and mirrored on the device as a whole. Iterating over them
gives `Chunk`s.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import msgspec
import numpy as np

from infer.cache.layout import Transfer
from infer.scheduling.sequence import NO_ROW
from infer.scheduling.sequence import Sequence as TokenSequence


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens[start:stop] of a sequence, then sample `num_samples` tokens after the last one.

    0 samples: the prompt continues. More than 1: the sequence forks into that many afterwards.
    """

    seq_id: int
    start: int
    stop: int
    num_samples: int


class Chunks(Sequence[Chunk]):
    """The chunks of a plan as columns, in the order in which a device lays them out."""

    def __init__(
        self,
        seq_ids: np.ndarray,
        starts: np.ndarray,
        stops: np.ndarray,
        num_samples: np.ndarray,
        rows: np.ndarray,
        *,
        sequences: list[TokenSequence],
        places: np.ndarray | slice = slice(0),
        version: int = 0,
    ) -> None:
        self.seq_ids, self.starts, self.stops, self.num_samples = seq_ids, starts, stops, num_samples
        self.ends = stops  # stops without the rejected drafts
        self.rows = rows  # rows of the block tables
        self.sequences = sequences  # one for each chunk
        self.places, self.version = places, version  # columns of the batch state, valid for this version
        self.draws: np.ndarray = num_samples > 0
        self.is_repeated = False  # True: the previous plan, one token further; every column decodes
        self.num_drafts = 0  # drafts among the tokens of all chunks
        self._made: tuple[Chunk, ...] | None = None

    def at(self, starts: np.ndarray, stops: np.ndarray, *, is_repeated: bool) -> Chunks:
        """Return a copy of these chunks at other positions, with nothing rejected yet."""
        moved = Chunks.__new__(Chunks)
        moved.__dict__.update(self.__dict__)  # several times faster than a copy
        moved.starts, moved.stops, moved.ends = starts, stops, stops
        moved.is_repeated, moved.num_drafts, moved._made = is_repeated, 0, None
        return moved

    @classmethod
    def of(cls, chunks: Iterable[Chunk], sequences: Sequence[TokenSequence] = ()) -> Chunks:
        """Return single chunks as columns, with the rows of `sequences` if these are given."""
        written = [msgspec.structs.astuple(chunk) for chunk in chunks]
        seq_ids, starts, stops, num_samples = np.array(written, dtype=np.int64).reshape(-1, 4).T.copy()
        rows = [seq.row for seq in sequences] or [NO_ROW] * len(written)
        return cls(
            seq_ids, starts, stops, num_samples, np.array(rows, dtype=np.int64), sequences=list(sequences)
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the model computes."""
        return int((self.stops - self.starts).sum())

    def __len__(self) -> int:
        return len(self.seq_ids)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._all())

    @overload
    def __getitem__(self, place: int) -> Chunk: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, place: int | slice) -> Chunk | tuple[Chunk, ...]:
        return self._all()[place]

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, Chunks) else other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> tuple[Chunk, ...]:
        if self._made is None:
            columns = self.seq_ids, self.starts, self.stops, self.num_samples
            self._made = tuple(map(Chunk, *(column.tolist() for column in columns)))
        return self._made


@dataclass(slots=True)
class StepPlan:
    """The work of one step."""

    step: int
    chunks: Chunks
    preempted: tuple[int, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    table_changes: list[int] = field(default_factory=list, compare=False)
    """New blocks of sequences that were running before the plan: (row, index, block) for each, flattened.

    Rows are numbered through all tables: rows of the second table follow the rows of the first.
    """


class PlanDraft:
    """A plan being made: the rest of the budget, and the decisions other than the chunks."""

    def __init__(self, budget: int, num_prompts: int | None) -> None:
        self.budget = budget  # tokens that may still be added
        self.num_prompts = sys.maxsize if num_prompts is None else num_prompts  # prompt chunks still allowed
        self.num_tokens = 0  # tokens that were added
        self.num_turns = 0  # positions used in the order of chunks
        self.preempted: list[int] = []
        self.table_changes: list[int] = []
        self.transfers: list[Transfer] = []  # never undone: a later transfer may rely on an earlier one

    def spend(self, num_tokens: int) -> None:
        """Add tokens to the plan."""
        self.budget -= num_tokens
        self.num_tokens += num_tokens

    def set_aside(self, num_tokens: int) -> None:
        """Reserve tokens and one prompt chunk for later; a negative count releases them."""
        self.budget -= num_tokens
        self.num_prompts -= (num_tokens > 0) - (num_tokens < 0)

    def drop(self, row: int, num_tokens: int, num_rows: int) -> None:
        """Remove the part of a preempted sequence: its tokens and its table changes."""
        self.spend(-num_tokens)
        changes = self.table_changes
        kept = [place for place in range(0, len(changes), 3) if changes[place] % num_rows != row]
        self.table_changes = [number for place in kept for number in changes[place : place + 3]]

    def to_plan(self, step: int, chunks: Chunks) -> StepPlan:
        """Return the finished plan with these chunks."""
        return StepPlan(step, chunks, tuple(self.preempted), tuple(self.transfers), self.table_changes)
