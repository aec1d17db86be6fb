"""Messages from rank 0 to the other ranks: a ring of slots in memory that all of them have mapped.

    words    sent · taken by rank 1 · taken by rank 2 · ...     numbers of messages' pieces, which only grow
    slots    piece 5   piece 6   piece 7   piece 4              a long message is several pieces

Rank 0 writes a piece when every rank has taken the earlier piece of its slot, and then increments `sent`. No
locks are needed, because a word has one writer (kernels/cpu/csrc/collectives.c). A message is a kind and
bytes, such as a written order (order.py).
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

NUM_SLOTS: Final = 32  # more than are ever under way while stages wait for each other
SLOT_BYTES: Final = 1 << 15
_PIECE: Final = struct.Struct("<III")  # kind, bytes, and 1 if the message ends with it
_COUNT: Final = struct.Struct("<I")
_ROOM: Final = SLOT_BYTES - _PIECE.size
_WRAP: Final = 1 << 32
_MESSAGE: Final = 2  # kind of a wait, as csrc/collectives.c has it


class RankMessage(IntEnum):
    """The kinds of messages that rank 0 sends to the others."""

    ORDER = 1  # compute a part of a step
    AHEAD = 2  # the same, sent before the ids of the last one
    IDS = 3  # ids that were drawn
    BIND = 4  # choose what projections run with
    PROBE = 5  # compute a prompt that rank 0 measures
    BUILD = 6  # make the KV store and the device half
    PREPARE = 7  # compile and capture what steps need
    AGREE = 8  # keep the captured steps that all ranks have
    ADAPTER = 9  # put a LoRA adapter into a slot


def link_bytes(size: int) -> int:
    """The memory that this many ranks share."""
    return region_bytes(size) + HEADER_BYTES + NUM_SLOTS * SLOT_BYTES


def linked_words(size: int, num_stages: int, *, meets_all: bool = False) -> list[MirroredWord]:
    """Every word that a rank waits for and another rank writes, also for messages."""
    start, others = region_bytes(size), frozenset(range(1, size))
    slots = start + HEADER_BYTES, NUM_SLOTS, SLOT_BYTES
    taken = [MirroredWord(start + WORD_BYTES * rank, rank, frozenset({0})) for rank in sorted(others)]
    return [
        *mirrored_words(size, num_stages, meets_all=meets_all),
        MirroredWord(start, 0, others, *slots),
        *taken,
    ]


def slot_length(memory: mmap.mmap, word: MirroredWord, number: int) -> int:
    """The bytes of the data that a number of a word stands for."""
    if not word.num_slots:
        return 0
    slot = number % word.num_slots
    if word.counts is not None:
        (count,) = _COUNT.unpack_from(memory, word.counts + _COUNT.size * slot)
        return int(4 * count)
    return _PIECE.size + int(_PIECE.unpack_from(memory, word.first_slot + slot * word.slot_bytes)[1])


@contextmanager
def whole_group(ranks: RankGroup, step: int) -> Iterator[None]:
    """End all ranks with whatever ends a step of theirs halfway: the others wait for what does not come."""
    try:
        yield
    except BaseException as error:  # Ctrl-C, too
        ranks.check()
        ranks.close(f"step {step} was not finished: {type(error).__name__}")
        if isinstance(error, DeviceLost) or not isinstance(error, Exception):
            raise
        raise DeviceLost(f"the device failed in step {step}") from error


class RankLink:
    """One rank's end of the link between the ranks of a model: its exchanges, and the messages of rank 0."""

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
        self._number = 0  # number of the last piece that was sent, or taken
        self._room = 0  # pieces that have a free slot, as rank 0 has seen it last

    def send(self, kind: int, body: bytes | bytearray) -> None:
        """Send a message to all other ranks, as rank 0; waits where a rank has not taken the last ones."""
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
        """The next message, as another rank; sleeps until there is one."""
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
        """The state of each rank."""
        return [read_line(self.memory, rank) for rank in range(self.size)]

    def _wait_for_room(self, number: int) -> int:
        """Wait until every rank has taken what is in the slot of a piece; returns the pieces with room."""
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
