"""Ranks on one machine that exchange numbers through shared memory (csrc/collectives.c).

A float32 model exchanges its numbers unchanged, and the exchanges of a step can be recorded with the rest of
it (program.py). 16-bit numbers are exchanged as float32 and rounded once, when they are added up.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from copy import copy
from typing import NamedTuple

import torch

from infer.errors import RanksEnded
from infer.kernels.cpu.library import Library
from infer.kernels.cpu.program import empty, recorder, run_or_record
from infer.kernels.runtime.communicator import Communicator, RankLine

HEADER_BYTES = 8192  # words that ranks wait for, as in csrc/collectives.c
WORD_BYTES = 64
MAX_RANKS = 64
CAPACITY = 1 << 19  # most floats that a rank exchanges at once
PIPE_SLOTS = 8  # pieces of CAPACITY floats by which a stage may be ahead of the next one
OUTSIDE = -(2**63)  # row of an id that belongs to another rank
_EXCHANGE = struct.Struct("qqqqqqqqqqqq")
_PASS = struct.Struct("qqqqqqq")
_OWN_IDS = struct.Struct("qqqqq")
_LINE = struct.Struct("<IIIIQQQ")  # a rank's line of the header, as in csrc/collectives.c
LINE_STATE = slice(8, _LINE.size)  # part of a line on which no rank waits
_PIPE_BYTES = 2 * WORD_BYTES + PIPE_SLOTS * CAPACITY * 4


def region_bytes(size: int) -> int:
    """The bytes that this many ranks share for their exchanges; untouched pages take no memory."""
    return HEADER_BYTES + 2 * size * CAPACITY * 4 + size * _PIPE_BYTES


class MirroredWord(NamedTuple):
    """A word that ranks on other machines wait for, and the location of the data that it announces."""

    offset: int
    writer: int  # rank that writes it
    readers: frozenset[int]
    first_slot: int = 0  # offset of the data of number 0
    num_slots: int = 0  # slots of data; 0: only the word
    slot_bytes: int = 0
    counts: int | None = None  # offset of the float count of each slot; None: a slot holds its own length


def mirrored_words(size: int, num_stages: int, *, meets_all: bool = False) -> list[MirroredWord]:
    """The words of exchanges and pipes; `meets_all`: `everyone` exchanges as well."""
    group, floats = size // num_stages, CAPACITY * 4
    words, pipes = [], HEADER_BYTES + 2 * size * floats
    for rank in range(size):
        line, first = WORD_BYTES * (1 + rank), rank - rank % group
        others = frozenset(range(size) if meets_all else range(first, first + group)) - {rank}
        own = HEADER_BYTES + 2 * rank * floats
        words.append(MirroredWord(line, rank, others, own, 2, floats, line + _LINE.size))
        if rank >= group:  # its rows go to the next stage
            sent, reader = pipes + rank * _PIPE_BYTES, rank - group
            slots = sent + 2 * WORD_BYTES, PIPE_SLOTS, floats, sent + 8
            words.append(MirroredWord(sent, rank, frozenset({reader}), *slots))
            words.append(MirroredWord(sent + WORD_BYTES, reader, frozenset({rank})))
    return words


def read_line(memory: mmap.mmap, rank: int) -> RankLine:
    """Read the state that a rank has published."""
    arrived, _, ticks, waiting, *times = _LINE.unpack_from(memory, WORD_BYTES * (1 + rank))
    return RankLine(arrived + ticks, waiting, *(time * 1e-9 for time in times))


def address_of(memory: mmap.mmap, offset: int = 0) -> int:
    """The address of mapped memory in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))


class SharedCommunicator(Communicator):
    """One rank that exchanges through memory that all ranks have mapped.

    If layers are split into stages, it exchanges with the ranks of its own stage, numbered consecutively.
    """

    def __init__(
        self, library: Library, memory: mmap.mmap, rank: int, size: int, num_stages: int = 1
    ) -> None:
        assert 0 <= rank < size <= MAX_RANKS and len(memory) >= region_bytes(size), (rank, size, len(memory))
        self.size = size // num_stages  # ranks of the stage
        self.rank = rank % self.size
        self._number, self._first, self._total = rank, rank - self.rank, size
        self.on_abort: list[Callable[[], None]] = []  # callbacks that end waits outside this memory
        self._library, self._memory, self.address = library, memory, address_of(memory)

    def everyone(self) -> SharedCommunicator:
        """Return a communicator of the ranks of all stages; all ranks must make each call."""
        found = copy(self)
        found.rank, found.size, found._first = self._number, self._total, 0
        return found

    def abort(self) -> None:
        """End every wait of every rank, now and later: a rank is lost, and results are invalid."""
        self._library.word_set(self.address, 1)
        for end in self.on_abort:
            end()

    @property
    def is_aborted(self) -> bool:
        """True once a rank has called `abort`."""
        return bool(self._library.word_get(self.address))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the tensors of all ranks, in the memory of `x` where possible."""
        shares = x if x.dtype is torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous()
        M = shares.shape[0] if shares.dim() > 1 else 1
        fields = M, shares.data_ptr(), 0, shares.numel() // max(M, 1), 0, 0, 0
        self._exchange(self._library.all_reduce, M, *fields)
        return shares if shares is x else shares.to(x.dtype).view(x.shape)

    def all_gather(self, x_MN: torch.Tensor, num_columns: int) -> torch.Tensor:
        """The columns of all ranks side by side; all except the last ranks have the same number."""
        if x_MN.dtype is not torch.float32:
            return self.all_gather(x_MN.to(torch.float32), num_columns).to(x_MN.dtype)
        assert x_MN.dim() == 2 and (x_MN.stride(1) == 1 or not x_MN.shape[1]), (x_MN.shape, x_MN.stride())
        M, width = x_MN.shape[0], column_share(num_columns, self.size)
        assert width <= CAPACITY, f"{num_columns} columns are more than {self.size} ranks exchange at once"
        out_MV = empty((M, num_columns))
        fields = M, x_MN.data_ptr(), x_MN.stride(0), width, out_MV.data_ptr(), num_columns, num_columns
        self._exchange(self._library.all_gather, M, *fields)
        return out_MV

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """The bytes of every rank, of equal length, padded with zeros. Not for recorded steps."""
        width = -(-len(mine) // COLUMNS_ALIGNED) * COLUMNS_ALIGNED
        numbers_1N = torch.tensor([[*mine.ljust(width, b"\0")]], dtype=torch.float32)
        rows = self.all_gather(numbers_1N, width * self.size).view(self.size, width)
        if self.is_aborted:
            raise RanksEnded("a rank of the model is gone")
        return [bytes(row) for row in rows.to(torch.uint8).tolist()]

    def _exchange(self, run: int, num_rows: int, *fields: int) -> None:
        args = _EXCHANGE.pack(*fields, self.address, self._number, self._first, self.size, CAPACITY)
        _run(self._library, run, args, num_rows)


class SharedPipe:
    """The channel of hidden states from the previous stage to this one, and from this one to the next.

    The last stage has the ranks from 0 on, the stage before it the next ranks, and so on: a rank receives the
    rows of the rank with the same index in the previous stage.
    """

    def __init__(self, library: Library, memory: mmap.mmap, rank: int, size: int, num_stages: int) -> None:
        self.num_stages, group = num_stages, size // num_stages
        self.stage = num_stages - 1 - rank // group
        self._library, self._memory, self._rank, self._region = library, memory, rank, address_of(memory)
        pipes = region_bytes(size) - size * _PIPE_BYTES
        self._out, self._in = (self._region + pipes + each * _PIPE_BYTES for each in (rank, rank + group))

    def take(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows [num_rows, width] from the previous stage."""
        x_MN = empty((num_rows, width))
        self._run(self._library.take_rows, x_MN, self._in)
        return x_MN if dtype is torch.float32 else x_MN.to(dtype)

    def pass_on(self, x_MN: torch.Tensor) -> None:
        """Pass rows on to the next stage; waits if that stage is far behind."""
        self._run(self._library.pass_on, x_MN.to(torch.float32).contiguous(), self._out)

    def tick(self) -> None:
        """Report that one more layer has been computed."""
        args = _PASS.pack(0, 0, 0, 0, self._region, self._rank, 0)
        _run(self._library, self._library.tick, args, 0)

    def _run(self, run: int, x_MN: torch.Tensor, pipe: int) -> None:
        M, N = x_MN.shape
        args = _PASS.pack(M, x_MN.data_ptr(), N, pipe, self._region, self._rank, CAPACITY)
        _run(self._library, run, args, M)


def _run(library: Library, run: int, args: bytes, num_rows: int) -> None:
    if recorder() is not None:
        run_or_record(library, run, args, num_rows=num_rows)
    else:  # runs without the lock of the thread pool, so that others may compute while this one waits
        library.exchange[run](args, 0)


COLUMNS_ALIGNED = 32  # alignment of a rank's columns: codes of any number of bits fill whole words


def column_share(num_columns: int, size: int) -> int:
    """The columns per rank; the last ranks have fewer."""
    return -(-num_columns // size // COLUMNS_ALIGNED) * COLUMNS_ALIGNED


def own_ids(library: Library, ids_T: torch.Tensor, first: int, num_rows: int) -> torch.Tensor:
    """The rows of ids in a table that begins with the id `first`; OUTSIDE: the table lacks the id."""
    assert ids_T.dtype is torch.int64 and ids_T.is_contiguous(), (ids_T.dtype, ids_T.stride())
    T = ids_T.shape[0]
    out_T = empty((T,), torch.int64)
    args = _OWN_IDS.pack(T, ids_T.data_ptr(), out_T.data_ptr(), first, num_rows)
    run_or_record(library, library.own_ids, args, num_rows=T)
    return out_T
