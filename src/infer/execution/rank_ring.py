"""Messages from rank 0 to the other ranks: a ring of slots in shared memory.

    words    sent · taken by rank 1 · taken by rank 2 · ...     numbers of pieces, which only grow
    slots    piece 5   piece 6   piece 7   piece 4              a long message is several pieces

Rank 0 writes a piece when every rank has taken the earlier piece of its slot, and then increments `sent`. No
locks are needed, because each word has one writer (kernels/cpu/csrc/collectives.c). A message is a kind and
bytes, such as a packed order (order.py).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final

from infer.errors import DeviceLost, RanksEnded
from infer.kernels.cpu.collectives import (
    HEADER_BYTES,
    WORD_BYTES,
    MirroredWord,
    SharedCommunicator,
    SharedPipe,
    address_of,
    mirrored_words,
    read_line,
    region_bytes,
)
from infer.kernels.cpu.library import Library
from infer.kernels.runtime.communicator import RankGroup, RankLine

NUM_SLOTS: Final = 32  # more than are ever in flight while stages wait for each other
SLOT_BYTES: Final = 1 << 15
_PIECE: Final = struct.Struct("<III")  # kind, bytes, and 1 if the message ends with this piece
_COUNT: Final = struct.Struct("<I")
_ROOM: Final = SLOT_BYTES - _PIECE.size
_WRAP: Final = 1 << 32
_MESSAGE: Final = 2  # kind of a wait, as in csrc/collectives.c


class RankMessage(IntEnum):
    """The kinds of messages that rank 0 sends to the others."""

    ORDER = 1  # compute a part of a step
    AHEAD = 2  # an order sent before the ids of the previous one
    IDS = 3  # sampled ids
    BIND = 4  # choose the matrix products
    PROBE = 5  # compute a prompt that rank 0 times
    BUILD = 6  # allocate the KV store and build the device half
    PREPARE = 7  # compile kernels and capture graphs
    AGREE = 8  # keep only the captured steps that all ranks have
    ADAPTER = 9  # load a LoRA adapter into a slot


def link_bytes(size: int) -> int:
    """Return the bytes of shared memory for `size` ranks."""
    return region_bytes(size) + HEADER_BYTES + NUM_SLOTS * SLOT_BYTES


def linked_words(size: int, num_stages: int, *, meets_all: bool = False) -> list[MirroredWord]:
    """Return every word that one rank writes and another waits for, including the words of messages."""
    start, others = region_bytes(size), frozenset(range(1, size))
    slots = start + HEADER_BYTES, NUM_SLOTS, SLOT_BYTES
    taken = [MirroredWord(start + WORD_BYTES * rank, rank, frozenset({0})) for rank in sorted(others)]
    return [
        *mirrored_words(size, num_stages, meets_all=meets_all),
        MirroredWord(start, 0, others, *slots),
        *taken,
    ]


def slot_length(memory: mmap.mmap, word: MirroredWord, number: int) -> int:
    """Return the bytes of the data that belongs to a number of a word."""
    if not word.num_slots:
        return 0
    slot = number % word.num_slots
    if word.counts is not None:
        (count,) = _COUNT.unpack_from(memory, word.counts + _COUNT.size * slot)
        return int(4 * count)
    return _PIECE.size + int(_PIECE.unpack_from(memory, word.first_slot + slot * word.slot_bytes)[1])


@contextmanager
def whole_group(ranks: RankGroup, step: int) -> Iterator[None]:
    """End all ranks if a step fails halfway, because the others would wait for its data forever."""
    try:
        yield
    except BaseException as error:  # Ctrl-C, too
        ranks.check()
        ranks.close(f"step {step} was not finished: {type(error).__name__}")
        if isinstance(error, DeviceLost) or not isinstance(error, Exception):
            raise
        raise DeviceLost(f"the device failed in step {step}") from error


class RankLink:
    """One rank's side of the link between the ranks of a model: collectives, and the messages of rank 0."""

    def __init__(
        self, library: Library, memory: mmap.mmap, rank: int, size: int, num_stages: int = 1
    ) -> None:
        assert len(memory) >= link_bytes(size), (len(memory), size)
        self.communicator = SharedCommunicator(library, memory, rank, size, num_stages)
        self.pipe = SharedPipe(library, memory, rank, size, num_stages) if num_stages > 1 else None
        self.library, self.memory, self.size, self.num_stages = library, memory, size, num_stages
        self._rank = rank
        self._start = region_bytes(size)
        self._words = address_of(memory, self._start)
        self._region = address_of(memory)
        self._number = 0  # number of the last piece sent or taken
        self._room = 0  # free slots, as last seen by rank 0

    def send(self, kind: int, body: bytes | bytearray) -> None:
        """Send a message from rank 0 to all other ranks; waits while the ring is full."""
        view = memoryview(body)
        for first in range(0, max(len(view), 1), _ROOM):
            piece = view[first : first + _ROOM]
            number = (self._number + 1) % _WRAP
            self._room = (self._room or self._wait_for_room(number)) - 1
            start = self._slot(number)
            _PIECE.pack_into(self.memory, start, kind, len(piece), int(first + _ROOM >= len(view)))
            self.memory[start + _PIECE.size : start + _PIECE.size + len(piece)] = piece
            self.library.word_set(self._word(0), number)
            self._number = number

    def receive(self) -> tuple[int, bytearray]:
        """Wait for the next message and return it; for ranks other than 0."""
        body, is_whole, kind = bytearray(), 0, 0
        while not is_whole:
            number = (self._number + 1) % _WRAP
            self._wait(self._word(0), number)
            start = self._slot(number)
            kind, length, is_whole = _PIECE.unpack_from(self.memory, start)
            body += self.memory[start + _PIECE.size : start + _PIECE.size + length]
            self.library.word_set(self._word(self._rank), number)
            self._number = number
        return kind, body

    def lines(self) -> list[RankLine]:
        """Return the state of each rank."""
        return [read_line(self.memory, rank) for rank in range(self.size)]

    def _wait_for_room(self, number: int) -> int:
        """Wait until every rank has taken the earlier piece of a slot; returns the number of free slots."""
        before, words = (number - NUM_SLOTS) % _WRAP, [self._word(rank) for rank in range(1, self.size)]
        for word in words:
            self._wait(word, before)
        rooms: list[int] = [(self.library.word_get(word) - before) % _WRAP for word in words]
        return 1 + min(rooms)

    def _wait(self, word: int, number: int) -> None:
        if not self.library.word_wait(word, number, self._region, self._rank, _MESSAGE):
            raise RanksEnded("the ranks of this model have been ended")

    def _word(self, number: int) -> int:
        return self._words + WORD_BYTES * number

    def _slot(self, number: int) -> int:
        return self._start + HEADER_BYTES + number % NUM_SLOTS * SLOT_BYTES
