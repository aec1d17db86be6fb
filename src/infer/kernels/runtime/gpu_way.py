"""One-way channels between ranks through GPU memory: rows for the next stage, drawn ids (exchange.cu).

    stage 0    embedding ──► layers 0 .. 15 ──► tell ──┐ rows of the step           ids ◄── hear
    stage 1                         ┌──────────────────┘                             ▲
                                    └─► hear ──► layers 16 .. 31 ──► head ──► sample ┴─► tell

The two ends need not run at the same time: a sender may be some pieces ahead of each listener. Both count in
device memory, so captured steps can contain these launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch

from infer.kernels.runtime.cuda_build import PreparedLaunch

NUM_BLOCKS, NUM_THREADS, NUM_UNITS, DEPTH = 32, 256, 4, 8
PIECE: Final = 8  # bytes
ROWS, IDS = range(2)  # incoming ways of a rank: from the previous stage, and from rank 0
_LANES: Final = NUM_BLOCKS * NUM_THREADS
_INBOX_BYTES: Final = 2 * PIECE * DEPTH * NUM_UNITS * _LANES
_TAKEN_BYTES: Final = 4 * _LANES
_OF_WAY: Final = (*(ctypes.c_void_p,) * 3, *(ctypes.c_ulonglong,) * 2)
TYPES: Final = {
    "tell": (*(ctypes.c_void_p,) * 3, ctypes.c_int, *_OF_WAY),
    "hear": (*(ctypes.c_void_p,) * 3, *_OF_WAY),
}


def way_bytes(size: int) -> int:
    """The bytes that all ways of one of `size` ranks take."""
    return 2 * (_INBOX_BYTES + size * _TAKEN_BYTES)


class RankMemory(NamedTuple):
    """The memory of all ranks, which this rank can write to, and the words that end its waits."""

    places: Sequence[int]  # address of each rank's ways
    aborted: int
    dead: int
    limit_ns: int
    rank: int  # number of this rank

    def inbox(self, rank: int, way: int) -> int:
        """The address of a rank's inbox."""
        return self.places[rank] + way * _INBOX_BYTES

    def taken(self, teller: int, listener: int, way: int) -> int:
        """The address of the words that say how far a listener has read."""
        number = way * len(self.places) + listener
        return self.places[teller] + 2 * _INBOX_BYTES + number * _TAKEN_BYTES


class GpuWay:
    """One end of a way: the sender's end, or the end of one listener."""

    def __init__(
        self, kernels: Mapping[str, PreparedLaunch], memory: RankMemory, device: torch.device,
        way: int, teller: int, listeners: Sequence[int],
    ) -> None:  # fmt: skip
        self._kernels, self._tells = kernels, memory.rank == teller
        # ids of all parts of a step may be in flight, each in one set of slots; rows are received sooner
        self._sets = 1 if way == IDS else DEPTH // 2
        self._numbers = torch.zeros(_LANES, dtype=torch.int32, device=device)
        if self._tells:
            inboxes = [memory.inbox(rank, way) for rank in listeners]
            taken = [memory.taken(teller, rank, way) for rank in listeners]
            self._places = torch.tensor([inboxes, taken], dtype=torch.int64, device=device)
            inbox_L, taken_L = self._places.unbind()
            self._ends: tuple[int, ...] = inbox_L.data_ptr(), taken_L.data_ptr(), len(listeners)
        else:
            self._ends = memory.inbox(memory.rank, way), memory.taken(teller, memory.rank, way)
        self._of_way = self._numbers.data_ptr(), memory.aborted, memory.dead, memory.limit_ns

    def go(self, x: torch.Tensor) -> None:
        """Send a contiguous tensor of whole pieces, or replace it by the received one."""
        count = x.numel() * x.element_size() // PIECE
        assert x.is_contiguous() and not x.data_ptr() % PIECE, (x.stride(), x.data_ptr())
        assert count * PIECE == x.numel() * x.element_size(), (x.shape, x.dtype)
        if count:
            launch = self._kernels["tell" if self._tells else "hear"]
            # few enough blocks to send everything without a wait: a stage on the same GPU needs the rest
            num_blocks = min(NUM_BLOCKS, -(-count // (NUM_THREADS * NUM_UNITS * self._sets)))
            launch(num_blocks, x.data_ptr(), *self._ends, *self._of_way, count)


def whole_pieces(x: torch.Tensor) -> torch.Tensor:
    """The numbers, contiguous and padded to whole pieces of 8 bytes at an aligned address."""
    if x.is_contiguous() and not (x.numel() * x.element_size() | x.data_ptr()) % PIECE:
        return x
    missing = -x.numel() % (PIECE // x.element_size())
    return torch.nn.functional.pad(x.reshape(-1), (0, missing)).clone()
