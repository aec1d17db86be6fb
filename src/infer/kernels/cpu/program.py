"""Record a model's operations once, then run them all with a single call.

A small model's step has hundreds of operations of a few microseconds each, and the calls from Python take as
long again. The operations and their arguments are the same in every step, except for the number of rows, so
they can be recorded:

    with ProgramRecorder(library) as recording:     nothing is computed, every launch is recorded
        y = model(tokens, step)              the model's own Python runs once, as usual
    program = recording.program
    ...
    program.run(num_rows, num_items)         the whole list, in C, for 1 .. max rows

Inputs must be in tensors with fixed addresses, which the caller overwrites before each run. Allocations of
the model come from an *arena*, which takes a buffer back as soon as its last view is gone and reuses it for a
later operation, like PyTorch's allocator.

A PyTorch operation that computes something would be missing from the list. The recorder detects these: only
views and allocations are allowed. Any other operation ends the recording before it computes anything, and
the step runs without a program.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infer.kernels.cpu.library import Library

FIXED, PER_ROW, PER_ITEM = 0, 1, 2
_ALIGNMENT = 64
_OPERATION = struct.Struct("qqqqq")
_HARMLESS = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias"}

_recorder: ProgramRecorder | None = None
_recording_thread = 0


class ProgramArena:
    """An allocator of memory that is returned automatically."""

    def __init__(self) -> None:
        self._free: list[tuple[int, np.ndarray]] = []  # (bytes, memory)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory for a tensor, returned to the arena when its last view is gone."""
        count = 1
        for size in shape:
            count *= size
        wanted = max(count * dtype.itemsize, _ALIGNMENT)
        memory = self._take(wanted)
        piece = memory[:wanted]  # a new object, owned only by the tensor's storage
        weakref.finalize(piece, self._free.append, (len(memory), memory)).atexit = False
        return torch.from_numpy(piece).view(dtype)[:count].view(shape)

    def _take(self, wanted: int) -> np.ndarray:
        fitting = [i for i, (size, _) in enumerate(self._free) if wanted <= size <= 2 * wanted]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: self._free[i][0]))[1]
        whole = np.empty(wanted + _ALIGNMENT, dtype=np.uint8)
        shift = -whole.ctypes.data % _ALIGNMENT
        return whole[shift : shift + wanted]


class Program:
    """A recorded list of operations."""

    def __init__(self, recording: ProgramRecorder) -> None:
        self._library, self._memory = recording.library, recording.arena
        launches = recording.launches
        self._args = ctypes.create_string_buffer(b"".join(args for *_, args in launches))
        ops = bytearray()
        at = ctypes.addressof(self._args)
        for run, kind, chunks, rows_per_chunk, args in launches:
            ops += _OPERATION.pack(run, at, kind, chunks, rows_per_chunk)
            at += len(args)
        self._ops = ctypes.create_string_buffer(bytes(ops))
        self._address = ctypes.addressof(self._ops)
        self.num_operations = len(launches)

    def run(self, num_rows: int, num_items: int) -> None:
        """Run the list for the first `num_rows` rows of its buffers."""
        self._library.run(self._address, self.num_operations, num_rows, num_items)


class ProgramRecorder:
    """A context that records the operations of a model instead of running them."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.arena = ProgramArena()
        self.launches: list[tuple[int, int, int, int, bytes]] = []
        self.program: Program | None = None  # stays None if PyTorch would compute something
        self._watch = _Watch()

    def __enter__(self) -> ProgramRecorder:
        global _recorder, _recording_thread
        assert _recorder is None, "one recording at a time"
        _recorder, _recording_thread = self, threading.get_ident()
        self._watch.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> bool:
        global _recorder
        self._watch.__exit__(kind, *exception)
        _recorder = None
        if kind is None:
            self.program = Program(self)
        return kind is _ForeignOperation


class _ForeignOperation(Exception):
    """Ends a recording: a program would miss this operation of PyTorch."""


class _Watch(TorchDispatchMode):
    """A mode that refuses every PyTorch operation that is neither a view nor an allocation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise PyTorch would load its compiler, a second of start-up, only to disable it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view and func._schema.name.removeprefix("aten::") not in _HARMLESS:
            raise _ForeignOperation(func._schema.name)
        return func(*args, **(kwargs or {}))


def recorder() -> ProgramRecorder | None:
    """The recording in progress on this thread."""
    return _recorder if _recorder is not None and threading.get_ident() == _recording_thread else None


def run_or_record(
    library: Library, run: int, args: bytes, *, num_rows: int, kind: int = FIXED, chunks: int = 1,
    rows_per_chunk: int = 1, num_items: int = 0,
) -> None:  # fmt: skip
    """Run an operation now, or record it if a recording is in progress."""
    if _recorder is not None and recorder() is not None:
        _recorder.launches.append((run, kind, chunks, rows_per_chunk, args))
        return
    if kind == PER_ROW:
        chunks *= -(-num_rows // rows_per_chunk)
    elif kind == PER_ITEM:
        chunks *= num_items
    library.run_one(run, chunks, args)


def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate the result of an operation, from PyTorch or from the recording's arena."""
    if _recorder is not None and recorder() is not None:
        return _recorder.arena.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)
