"""Sums over ranks with a GPU each, by NCCL, a library that comes with PyTorch for CUDA.

Three of its functions are called through ctypes: PyTorch's own way to them begins with a group of processes
that find each other over a network, and ours have found each other already.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from infer.errors import DeviceLost

NAME_BYTES: Final = 128
_TYPES: Final = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SUM: Final = 0

Wait = Callable[[threading.Thread], None]


class _Name(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * NAME_BYTES),)


def load_nccl() -> Any:
    """The library that PyTorch has loaded; None: it has none, or one of its own that nobody else can call."""
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None


def make_name(nccl: Any) -> bytes:
    """A new name for a group of ranks: rank 0 makes it, and tells the others."""
    name = _Name()
    _check(nccl, nccl.ncclGetUniqueId(ctypes.byref(name)))
    return ctypes.string_at(ctypes.byref(name), NAME_BYTES)


class NcclGroup:
    """One rank of a group; all ranks make theirs together, each on its GPU."""

    def __init__(
        self, nccl: Any, name: bytes, rank: int, size: int, device: torch.device, wait: Wait
    ) -> None:
        """`wait` waits for the others, and raises where one of them does not come."""
        self._nccl, self._group, codes = nccl, ctypes.c_void_p(), list[int]()
        nccl.ncclCommInitRank.argtypes = ctypes.c_void_p, ctypes.c_int, _Name, ctypes.c_int

        def join() -> None:
            with torch.cuda.device(device):
                given = size, _Name.from_buffer_copy(name), rank
                codes.append(nccl.ncclCommInitRank(ctypes.byref(self._group), *given))

        thread = threading.Thread(target=join, name="infer-nccl-join", daemon=True)
        thread.start()  # NCCL itself would wait for good
        wait(thread)
        _check(nccl, codes[0])
        nccl.ncclAllReduce.argtypes = (
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
            ctypes.c_void_p,
        )  # fmt: skip

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace a tensor without gaps by the sum over all ranks."""
        stream = torch.cuda.current_stream(x.device).cuda_stream
        place, kind = x.data_ptr(), _TYPES[x.dtype]
        code = self._nccl.ncclAllReduce(place, place, x.numel(), kind, _SUM, self._group, stream)
        _check(self._nccl, code)

    def abort(self) -> None:
        """End every sum that waits for a rank, from any thread; there are no sums after it."""
        self._nccl.ncclCommAbort(self._group)


def _check(nccl: Any, code: int) -> None:
    if code:
        nccl.ncclGetErrorString.restype = ctypes.c_char_p
        raise DeviceLost(f"NCCL failed: {nccl.ncclGetErrorString(code).decode()}")
