"""A few numbers in memory that all API processes of a server share (private if there is one process).

    [ is_starting | is_draining | running requests of each process | connections of each process ]

Every process writes its own counts; process 0 also writes the two flags, and resets the requests of a process
that died. A read is a load from memory, so a drain stops all processes at the same moment, without a
message.
"""

from __future__ import annotations

import mmap
import os

_STARTING, _DRAINING, _NUM_FLAGS = 0, 1, 2
_SLOT = 8  # bytes


class Board:
    """The shared numbers of `num_processes` processes, seen from process `number`."""

    def __init__(self, num_processes: int = 1, number: int = 0, fd: int | None = None) -> None:
        self.num_processes = num_processes
        self.number = number
        size = _SLOT * (_NUM_FLAGS + 2 * num_processes)
        if fd is None and num_processes > 1:
            fd = os.memfd_create("infer-board")
            os.ftruncate(fd, size)
        self.fd = -1 if fd is None else fd  # -1: private memory
        self._slots = memoryview(mmap.mmap(self.fd, size)).cast("q")
        self._first_connections = _NUM_FLAGS + num_processes

    @property
    def is_starting(self) -> bool:
        """True while the first models are being loaded."""
        return bool(self._slots[_STARTING])

    @is_starting.setter
    def is_starting(self, value: bool) -> None:
        self._slots[_STARTING] = value

    @property
    def is_draining(self) -> bool:
        """True once no new requests are accepted."""
        return bool(self._slots[_DRAINING])

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        self._slots[_DRAINING] = value

    def count_request(self, change: int) -> None:
        """Add to the running requests of this process, including streams that are still being read."""
        self._slots[_NUM_FLAGS + self.number] += change

    def forget_requests(self, number: int) -> None:
        """Reset the running requests of another process, which has ended."""
        self._slots[_NUM_FLAGS + number] = 0

    @property
    def num_active(self) -> int:
        """The number of running requests of all processes."""
        return sum(self._slots[_NUM_FLAGS : self._first_connections])

    def count_connection(self, change: int) -> None:
        """Add to the connections of this process."""
        self._slots[self._first_connections + self.number] += change

    @property
    def has_more_connections(self) -> bool:
        """True if another process has fewer connections than this one."""
        counts = self._slots[self._first_connections :]
        return counts[self.number] > min(counts)
