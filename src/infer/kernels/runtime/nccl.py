"""Groups of ranks, each with its own GPU, that exchange through NCCL, which ships with PyTorch for CUDA.

Its functions are called through ctypes: PyTorch's own interface starts with processes that find each other
over a network, and our ranks are already connected. A call is enqueued on the current stream, so captured
steps can contain it. Ranks capture independently, so a capture must not exchange anything: connections are
made when a group is created, and buffers are not registered.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from infer.errors import ConfigError, DeviceLost

NAME_BYTES: Final = 128
_TYPES: Final = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_BYTES: Final = 0
_SUM: Final = 0
_PLACE, _COUNT, _NUMBER = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_CALLS: Final = {
    "ncclAllReduce": (_PLACE, _PLACE, _COUNT, _NUMBER, _NUMBER, _PLACE, _PLACE),
    "ncclAllGather": (_PLACE, _PLACE, _COUNT, _NUMBER, _PLACE, _PLACE),
    "ncclBroadcast": (_PLACE, _PLACE, _COUNT, _NUMBER, _NUMBER, _PLACE, _PLACE),
    "ncclSend": (_PLACE, _COUNT, _NUMBER, _NUMBER, _PLACE, _PLACE),
    "ncclRecv": (_PLACE, _COUNT, _NUMBER, _NUMBER, _PLACE, _PLACE),
}

Wait = Callable[[threading.Thread], None]


class _Name(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * NAME_BYTES),)


def load_nccl() -> Any:
    """The library that PyTorch has loaded; None: there is none, or it is linked into PyTorch."""
    for name in ("NCCL_GRAPH_REGISTER", "NCCL_RUNTIME_CONNECT"):
        os.environ.setdefault(name, "0")  # otherwise a capture would wait for the captures of other ranks
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None


def make_name(nccl: Any) -> bytes:
    """A new unique id for a group of ranks: rank 0 creates it and sends it to the others."""
    name = _Name()
    _check(nccl, nccl.ncclGetUniqueId(ctypes.byref(name)))
    return ctypes.string_at(ctypes.byref(name), NAME_BYTES)


def nccl_version() -> str:
    """The version of NCCL, which must be the same on all machines."""
    nccl, version = load_nccl(), ctypes.c_int()
    if nccl is None:
        raise ConfigError(
            "ranks on the GPUs of several machines need NCCL, and libnccl.so.2 cannot be loaded here; "
            "install the PyTorch for CUDA that brings it (nvidia-nccl), or use one machine, or device=cpu"
        )
    _check(nccl, nccl.ncclGetVersion(ctypes.byref(version)))
    return str(version.value)


class NcclGroup:
    """One rank of a group; all ranks construct theirs at the same time, each on its GPU."""

    def __init__(
        self, nccl: Any, name: bytes, rank: int, size: int, device: torch.device, wait: Wait
    ) -> None:
        """`wait` waits for the others, and raises if one of them does not join."""
        self._nccl, self._group, codes = nccl, ctypes.c_void_p(), list[int]()
        self._aside: torch.cuda.Stream | None = None
        nccl.ncclCommInitRank.argtypes = ctypes.c_void_p, ctypes.c_int, _Name, ctypes.c_int

        def join() -> None:
            with torch.cuda.device(device):
                given = size, _Name.from_buffer_copy(name), rank
                codes.append(nccl.ncclCommInitRank(ctypes.byref(self._group), *given))

        thread = threading.Thread(target=join, name="infer-nccl-join", daemon=True)
        thread.start()  # NCCL itself would wait without a limit
        wait(thread)
        _check(nccl, codes[0])
        for call, types in _CALLS.items():
            getattr(nccl, call).argtypes = types

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace a contiguous tensor by the sum over all ranks."""
        self._call("ncclAllReduce", x, x.data_ptr(), x.data_ptr(), x.numel(), _TYPES[x.dtype], _SUM)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Concatenate the tensors of all ranks."""
        self._call("ncclAllGather", x, x.data_ptr(), out.data_ptr(), x.nbytes, _BYTES)

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace a tensor by the first rank's."""
        self._call("ncclBroadcast", x, x.data_ptr(), x.data_ptr(), x.nbytes, _BYTES, 0)

    def broadcast_aside(self, x: torch.Tensor) -> Callable[[], None]:
        """Start a broadcast on a separate stream; calling the result makes the current stream wait for it."""
        self._aside = self._aside or torch.cuda.Stream(x.device, priority=-1)
        self._aside.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._aside):
            self.broadcast(x)
            done = self._aside.record_event()
        return lambda: torch.cuda.current_stream(x.device).wait_event(done)

    def send(self, x: torch.Tensor, rank: int) -> None:
        """Send a tensor to a rank, which must receive it."""
        self._call("ncclSend", x, x.data_ptr(), x.nbytes, _BYTES, rank)

    def receive(self, x: torch.Tensor, rank: int) -> None:
        """Replace a tensor by the next tensor that a rank sends."""
        self._call("ncclRecv", x, x.data_ptr(), x.nbytes, _BYTES, rank)

    def abort(self) -> None:
        """Abort all pending exchanges, from any thread; NCCL rejects later ones."""
        group, self._group = self._group, ctypes.c_void_p()  # its memory is freed
        self._nccl.ncclCommAbort(group)

    def _call(self, name: str, x: torch.Tensor, *args: int) -> None:
        assert x.is_contiguous(), x.stride()
        stream = torch.cuda.current_stream(x.device).cuda_stream
        _check(self._nccl, getattr(self._nccl, name)(*args, self._group, stream))


def _check(nccl: Any, code: int) -> None:
    if code:
        nccl.ncclGetErrorString.restype = ctypes.c_char_p
        reason = nccl.ncclGetErrorString(code).decode()
        raise DeviceLost(f"NCCL failed: {reason}; set NCCL_DEBUG=WARN for details")
