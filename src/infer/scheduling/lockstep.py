"""The same step again, one token on: what most steps are, and what then need not be done row by row.

While nobody comes or goes, the plans of sequences that decode differ in nothing but their positions:

    step 7    A [20:21]   B [5:6]   C [31:32]       its chunks
    step 8    A [21:22]   B [6:7]   C [32:33]       those of step 7, one token on
    step 9    A [22:23]   B [7:8]   C [33:34]       ..., two tokens on

So a plan need only say which step it goes on from, and how far. What a single sequence needs is known long
before, and noted in a calendar by that distance: a block for its next token, to hear that a block is full.
The counts of all sequences grow alike, and are written down at every step: whoever draws a token reads them.

A lockstep begins when a plan has come several times in a row, and ends when somebody begins or ceases to
run, or has no token left to compute. What a step does is the scheduler's decision all the same: it asks for
the same again only where its rule would choose nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeGuard, overload

from infer.cache.kv_pool import KVCachePool
from infer.scheduling.plan import Chunk
from infer.scheduling.sequence import Sequence as TokenSequence

ALIKE_PLANS = 4  # in a row: to begin costs about as much as it spares in one step


class LaterChunks(Sequence[Chunk]):
    """The chunks of an earlier plan, each some tokens on; written out for whoever looks at them."""

    __slots__ = ("_made", "by", "first")

    def __init__(self, first: Sequence[Chunk], by: int) -> None:
        self.first = first
        self.by = by
        self._made: tuple[Chunk, ...] | None = None

    def __len__(self) -> int:
        return len(self.first)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._all())

    @overload
    def __getitem__(self, place: int) -> Chunk: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, place: int | slice) -> Chunk | tuple[Chunk, ...]:
        if self._made is None and isinstance(place, int):  # to look at one of them, no other is needed
            return self._moved(self.first[place])
        return self._all()[place]

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, LaterChunks) else other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> tuple[Chunk, ...]:
        if self._made is None:
            self._made = tuple(map(self._moved, self.first))
        return self._made

    def _moved(self, chunk: Chunk) -> Chunk:
        return Chunk(chunk.seq_id, chunk.start + self.by, chunk.stop + self.by, chunk.num_samples)


class Lockstep:
    """Sequences that decode together, from a plan on that serves each of them with one token; or nobody."""

    def __init__(self) -> None:
        self._chunks: Sequence[Chunk] = ()  # of the plan it began with
        self._sequences: list[TokenSequence] = []  # of those, one each
        self._num_ahead = 0  # steps launched since that plan
        self._num_steps = 0  # until one of them has no token left to compute
        self._to_reserve: defaultdict[int, list[int]] = defaultdict(list)  # by steps ahead: numbers of chunks
        self._to_commit: defaultdict[int, list[int]] = defaultdict(list)
        self._last: list[TokenSequence] = []  # of a plan that may have been the first of several,
        self._num_alike = 0  # that so many were like

    def note(self, chunks: Sequence[Chunk], sequences: list[TokenSequence], *, goes_on: bool) -> None:
        """A plan that is no repetition; if it serves each with one token and goes on so, one may begin."""
        if self._sequences or not goes_on:
            self.end()
        if not goes_on:
            return
        self._num_alike = self._num_alike + 1 if sequences == self._last else 0
        self._last = sequences
        if self._num_alike < ALIKE_PLANS:
            return
        self._chunks, self._sequences = chunks, sequences
        self._num_ahead = 0
        self._num_steps = min([s.max_total - c.stop for c, s in zip(chunks, sequences, strict=True)])
        self._to_reserve.clear()
        self._to_commit.clear()
        for number, (chunk, seq) in enumerate(zip(chunks, sequences, strict=True)):
            self._to_reserve[seq.num_reserved - chunk.stop + 1].append(number)
            self._to_commit[max(1, seq.next_commit - chunk.stop)].append(number)

    def end(self) -> None:
        """Whatever comes next is not the same again."""
        self._chunks, self._sequences, self._last, self._num_alike = (), [], [], 0

    def next_chunks(self, reserve: Callable[[TokenSequence, int], bool]) -> LaterChunks | None:
        """The same again, one token on, with room for it; None: there is no lockstep, or it ends here."""
        step = self._num_ahead + 1
        if step >= self._num_steps or not self._sequences:
            return None
        for number in sorted(self._to_reserve.pop(step, ())):  # in the order of any other plan
            seq, stop = self._sequences[number], self._chunks[number].stop
            reserve(seq, stop + step)
            if not self._sequences:
                return None  # somebody was preempted for it, which was the end
            self._to_reserve[seq.num_reserved - stop + 1].append(number)
        return LaterChunks(self._chunks, step)

    def advance(self, chunks: Sequence[Chunk]) -> bool:
        """Count a step that is under way; False: it is none of these."""
        if not self._is_ours(chunks):
            return False
        self._num_ahead += 1
        for seq in self._sequences:
            seq.num_computed += 1
            seq.num_tokens += 1
        return True

    def commit(self, chunks: Sequence[Chunk], pool: KVCachePool) -> bool:
        """Commit to the pool whose blocks are full now that a step has run; False: it is none of these."""
        if not self._is_ours(chunks):
            return False
        step = chunks.by
        for number in sorted(self._to_commit.pop(step, ())):
            seq, stop = self._sequences[number], self._chunks[number].stop
            if stop + step >= seq.next_commit:  # a step from before the first may have told it
                seq.next_commit = pool.commit(seq.seq_id, seq.tokens, stop + step)
            self._to_commit[seq.next_commit - stop].append(number)
        return True

    def _is_ours(self, chunks: Sequence[Chunk]) -> TypeGuard[LaterChunks]:
        return isinstance(chunks, LaterChunks) and chunks.first is self._chunks
