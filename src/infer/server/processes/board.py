"""A few numbers in memory that all API processes of a server share.

    [ is_starting | is_draining | requests inside, of each process | connections, of each process ]

Every process writes its own counts, process 0 the two flags; a read is a load from memory, so a drain stops
all processes at the same moment and no message has to be waited for.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

from infer.config.settings import ServerConfig
from infer.server.state import ServerState

_NUM_FLAGS = 2
_SLOT = 8  # bytes


class Board:
    """The shared numbers of `num_processes` processes, seen from process `number`."""

    def __init__(self, num_processes: int, number: int = 0, fd: int | None = None) -> None:
        self.num_processes = num_processes
        self.number = number
        size = _SLOT * (_NUM_FLAGS + 2 * num_processes)
        if fd is None:
            fd = os.memfd_create("infer-board")
            os.ftruncate(fd, size)
        self.fd = fd
        self._slots = memoryview(mmap.mmap(fd, size)).cast("q")
        self._first_connections = _NUM_FLAGS + num_processes

    def flag(self, which: int) -> bool:
        """Whether a flag is set."""
        return bool(self._slots[which])

    def set_flag(self, which: int, value: int) -> None:
        """Set a flag for all processes."""
        self._slots[which] = value

    @property
    def num_active(self) -> int:
        """The requests inside this process."""
        return self._slots[_NUM_FLAGS + self.number]

    @num_active.setter
    def num_active(self, value: int) -> None:
        self._slots[_NUM_FLAGS + self.number] = value

    @property
    def total_active(self) -> int:
        """The requests inside all processes."""
        return sum(self._slots[_NUM_FLAGS : self._first_connections])

    def count_connection(self, change: int) -> None:
        """Add to the connections of this process."""
        self._slots[self._first_connections + self.number] += change

    @property
    def has_more_connections(self) -> bool:
        """Whether another process has fewer connections than this one."""
        counts = self._slots[self._first_connections :]
        return counts[self.number] > min(counts)


_STARTING, _DRAINING = 0, 1


def _shared(get: Callable[[Board], int], set_: Callable[[Board, int], None]) -> Any:
    """A property of a state that is kept on its board."""
    return property(lambda state: get(state.board), lambda state, value: set_(state.board, value))


class SharedState(ServerState):
    """A server's state whose flags and counts are those of all its API processes."""

    def __init__(self, config: ServerConfig, board: Board) -> None:
        # Not by super().__init__(): it would write the flags, and undo a drain that begins meanwhile.
        self.board = board
        self.config, self.models, self.aliases, self.default_model = config, {}, {}, None
        self.is_cut_off = False  # of process 0 alone, which closes the engines of all

    is_starting = _shared(
        lambda board: board.flag(_STARTING), lambda board, on: board.set_flag(_STARTING, on)
    )
    is_draining = _shared(
        lambda board: board.flag(_DRAINING), lambda board, on: board.set_flag(_DRAINING, on)
    )
    num_active = _shared(lambda board: board.num_active, lambda board, n: setattr(board, "num_active", n))

    @property
    def total_active(self) -> int:
        """The requests inside all processes."""
        return self.board.total_active
