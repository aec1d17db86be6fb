"""Ranks on the GPUs of one machine, which exchange data through each other's memory (exchange.cu).

Each rank has slots on its GPU that the other processes can write to (CUDA IPC). Ranks find each other through
shared host memory (kernels/cpu/collectives.py), and a word in it ends every wait, on GPUs as on CPUs. Ranks
may share one GPU. If each rank has its own, long sums go through NCCL, which does not support ranks that
share a GPU.

Ranks on several machines use NCCL for everything (node_communicator.py).

Shapes:  M rows, N columns of a rank.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import torch

from infer.errors import ConfigError
from infer.kernels.cpu.collectives import HEADER_BYTES, SharedCommunicator, column_share
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.runtime import dispatch
from infer.kernels.runtime.cuda_build import (
    BuildError,
    LoadedKernels,
    PreparedLaunch,
    driver,
    make_cubin,
)
from infer.kernels.runtime.device_ranks import WAIT_S, DeviceRanks, have_room, wait_for_all
from infer.kernels.runtime.gpu_way import (
    DEPTH,
    IDS,
    NUM_BLOCKS,
    NUM_THREADS,
    NUM_UNITS,
    PIECE,
    ROWS,
    TYPES,
    GpuWay,
    RankMemory,
    way_bytes,
    whole_pieces,
)
from infer.kernels.runtime.nccl import NAME_BYTES, NcclGroup, load_nccl, make_name

SOURCE: Final = Path(__file__).with_name("exchange.cu")
SUM, SIDE_BY_SIDE = 0, 1  # `how` of the kernel `exchange`: all_reduce, all_gather
NCCL_BYTES: Final = 1 << 19  # size of a share from which ranks on several GPUs use NCCL
_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_HANDLE_BYTES: Final = 64
_OF_RANKS: Final = (*(ctypes.c_void_p,) * 4, ctypes.c_ulonglong, ctypes.c_int)
_TYPES: Final = TYPES | {
    "exchange": (*(ctypes.c_void_p,) * 2, *_OF_RANKS, *(ctypes.c_ulonglong,) * 2, ctypes.c_int),
    "exchange_add": (
        *(ctypes.c_void_p,) * 6, *_OF_RANKS, ctypes.c_ulonglong, *(ctypes.c_int,) * 3, ctypes.c_float,
    ),
}  # fmt: skip


class _Handle(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * _HANDLE_BYTES),)


class GpuCommunicator(DeviceRanks):
    """One rank that exchanges through GPU memory; all ranks must construct theirs at the same time."""

    def __init__(
        self, shared: SharedCommunicator, device: torch.device, dtype: torch.dtype, wait_s: float = WAIT_S
    ) -> None:
        """`shared` joins the same ranks on the host; `dtype` is the type of sums and hidden states."""
        super().__init__(shared, device, dtype)
        everyone, number, num_ranks = self._everyone, self._everyone.rank, self._everyone.size
        with torch.cuda.device(device), ExitStack() as taken:  # freed if a rank fails before the end
            # the first tensor of a process makes the context that driver calls need
            self._numbers = torch.zeros(NUM_BLOCKS * NUM_THREADS + 1, dtype=torch.int32, device=device)
            slot_bytes = 2 * PIECE * 2 * self.size * NUM_BLOCKS * NUM_THREADS * NUM_UNITS
            own = _allocate(slot_bytes + way_bytes(num_ranks), taken)
            aborted = _map_word(everyone, taken)
            torch.cuda.synchronize(device)  # other ranks may write only once the slots are cleared
            found, ranks = self._meet(_export(own))
            dispatch.PDL &= have_room(ranks)
            self._kernels = _load(device, self.size, dtype)
            self.can_add = "exchange_add" in self._kernels
            opened = [
                own if r == number else _open(found[r], ranks[r].card, device, taken)
                for r in range(num_ranks)
            ]
            first = number - self.rank  # number of the first rank of its stage
            self._slots = torch.tensor(opened[first : first + self.size], dtype=torch.int64, device=device)
            has_own = len({each.card for each in ranks}) == num_ranks
            if has_own:
                self._note_shortage(ranks)
            self._nccl: NcclGroup | None = None
            adds_up = self.size > 1 or num_ranks == 1
            if has_own and adds_up and (nccl := load_nccl()) is not None:
                made = make_name(nccl) if self.rank == 0 else bytes(NAME_BYTES)
                made, wait = everyone.gather_bytes(made)[first], partial(wait_for_all, shared, wait_s, "")
                self._nccl = NcclGroup(nccl, made, self.rank, self.size, device, wait)
                shared.on_abort.append(self._nccl.abort)
            taken.callback(torch.cuda.synchronize, device)
            resources = taken.pop_all()
        numbers = self._numbers.data_ptr()
        dead, limit_ns = numbers + 4 * NUM_BLOCKS * NUM_THREADS, int(wait_s * 1e9)
        self._of_ranks = self._slots.data_ptr(), numbers, aborted, dead, limit_ns, self.rank
        memory = RankMemory([place + slot_bytes for place in opened], aborted, dead, limit_ns, number)
        way = partial(GpuWay, self._kernels, memory, device)
        self._ids = way(IDS, 0, range(1, num_ranks))
        self._before = way(ROWS, number + self.size, [number]) if self.stage else None
        self._after = way(ROWS, number, [number - self.size]) if first else None
        self._finalizer = weakref.finalize(self, resources.close)
        self._finalizer.atexit = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the tensors of all ranks, in the memory of `x` where possible."""
        if not self._exchanges:
            return x
        shares = whole_pieces(x)
        is_long = shares.numel() * shares.element_size() >= NCCL_BYTES
        if is_long and not self.deterministic and self._nccl is not None:
            self._nccl.all_reduce(shares)
        else:
            assert x.dtype is self._dtype, f"sums are made in {self._dtype}, not in {x.dtype}"
            self._exchange(shares, shares, SUM)
        return x if shares is x else shares.view(-1)[: x.numel()].view(x.shape)

    def all_gather(self, x_MN: torch.Tensor, num_columns: int) -> torch.Tensor:
        """The columns of all ranks side by side, without gaps; the last ranks have fewer than the others."""
        M, width = x_MN.shape[0], column_share(num_columns, self.size)
        if not self._exchanges:
            return x_MN.new_zeros((M, num_columns))
        out_MV, shares_MN = x_MN.new_empty((M, self.size * width)), x_MN.contiguous()
        if missing := width - x_MN.shape[1]:
            shares_MN = torch.nn.functional.pad(shares_MN, (0, missing))
        self._exchange(shares_MN, out_MV, SIDE_BY_SIDE, width * x_MN.element_size() // PIECE)
        return out_MV[:, :num_columns].contiguous()

    def first(self, x: torch.Tensor) -> None:
        """Replace a tensor of 8-byte ids by the tensor of rank 0 of all stages, which samples."""
        if self._exchanges:
            self._ids.go(x)

    def take(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows [num_rows, width] from the previous stage; the GPU waits for them."""
        assert self._before is not None, "the first stage has the embedding"
        if not self._exchanges:
            return torch.zeros((num_rows, width), dtype=dtype, device=self._device)
        count = num_rows * width
        x = torch.empty(count + -count % (PIECE // dtype.itemsize), dtype=dtype, device=self._device)
        self._before.go(x)
        return x[:count].view(num_rows, width)

    def pass_on(self, x_MN: torch.Tensor) -> None:
        """Pass rows on to the next stage; the GPU waits if that stage is far behind."""
        assert self._after is not None, "the last stage has the head"
        if self._exchanges:
            self._after.go(whole_pieces(x_MN))

    def num_parts(self, num_rows: int, size: int) -> int | None:
        """The number of parts per row in the `ResidualSum` of `add`; None: too many rows for `add`."""
        num_pieces = size * self._dtype.itemsize // PIECE
        for units in (1, 2, NUM_UNITS):
            parts = -(-num_pieces // (units * NUM_THREADS))
            if num_rows * parts <= NUM_BLOCKS and not size * self._dtype.itemsize % PIECE:
                return parts
        return None

    def add(self, x_MN: torch.Tensor, stream: ResidualInput) -> ResidualSum:
        """Add the sum of all ranks to the residual stream and start the norm that reads it, in one launch."""
        (M, N), residual_MN = x_MN.shape, stream.residual_MN
        num_parts = self.num_parts(M, N)
        assert num_parts is not None and x_MN.is_contiguous(), (x_MN.shape, x_MN.stride())
        new = torch.empty if self._exchanges else torch.zeros
        sum_MN, scaled_MN = (new((M, N), dtype=x_MN.dtype, device=x_MN.device) for _ in range(2))
        squares_PM = new((num_parts, M), dtype=torch.float64, device=x_MN.device)
        total = ResidualSum(sum_MN, scaled_MN, squares_PM)
        if self._exchanges:
            num_pieces, gain_N = N * x_MN.element_size() // PIECE, stream.norm_weight_N
            row_pieces = residual_MN.stride(0) * residual_MN.element_size() // PIECE
            assert gain_N.dtype is residual_MN.dtype is x_MN.dtype, (gain_N.dtype, residual_MN.dtype)
            assert not (residual_MN.stride(0) * residual_MN.element_size() | residual_MN.data_ptr()) % PIECE
            units = -(-num_pieces // (num_parts * NUM_THREADS))
            tensors = x_MN, residual_MN, gain_N, *total
            self._kernels["exchange_add"](
                M * num_parts, *(tensor.data_ptr() for tensor in tensors), *self._of_ranks,
                row_pieces, num_pieces, num_parts, units, stream.offset,
            )  # fmt: skip
        return total

    def _exchange(self, x: torch.Tensor, y: torch.Tensor, how: int, width: int = 1) -> None:
        count = x.numel() * x.element_size() // PIECE
        if not count:
            return
        self._kernels["exchange"](
            min(NUM_BLOCKS, -(-count // NUM_THREADS)), x.data_ptr(), y.data_ptr(), *self._of_ranks,
            count, width, how,
        )  # fmt: skip


def _load(device: torch.device, size: int, dtype: torch.dtype) -> dict[str, PreparedLaunch]:
    defines = (
        ("RANKS", size), ("BLOCKS", NUM_BLOCKS), ("THREADS", NUM_THREADS), ("UNITS", NUM_UNITS),
        ("DEPTH", DEPTH), ("KIND", _KINDS[dtype]),
    )  # fmt: skip
    major, minor = dispatch.gpu_capability(device)
    try:
        kernels = LoadedKernels(make_cubin(SOURCE, f"sm_{major}{minor}", dict(defines)))
    except BuildError as error:
        raise ConfigError(f"several ranks on GPUs need {SOURCE.name} compiled, and {error}") from None
    pdl = dispatch.PDL and dispatch.has_pdl(device)
    names = _TYPES.keys() - ({"exchange_add"} if _KINDS[dtype] != 1 else ())
    return {name: kernels.prepare(name, NUM_THREADS, _TYPES[name], pdl=pdl) for name in names}


# -- memory that other processes write to, by driver calls ------------------------------------------------


def _check(code: int, what: str) -> None:
    if code:
        reason = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(reason))
        raise ConfigError(
            f"several ranks on GPUs do not work here: {what} failed "
            f"({(reason.value or b'unknown error').decode()}); leave out tensor_parallel_size and "
            "pipeline_parallel_size"
        )


def _allocate(num_bytes: int, taken: ExitStack) -> int:
    """Allocate zeroed device memory as a separate allocation, which sharing it requires."""
    address = ctypes.c_ulonglong()
    _check(driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)), "taking GPU memory")
    taken.callback(driver().cuMemFree_v2, address)
    _check(driver().cuMemsetD8_v2(address, 0, ctypes.c_size_t(num_bytes)), "clearing GPU memory")
    return address.value


def _export(address: int) -> bytes:
    handle = _Handle()
    code = driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_ulonglong(address))
    _check(code, "sharing GPU memory")
    return ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES)


def _open(found: bytes, card: int, device: torch.device, taken: ExitStack) -> int:
    address, lazily = ctypes.c_ulonglong(), 1
    handle = _Handle.from_buffer_copy(found[:_HANDLE_BYTES])
    opens = driver().cuIpcOpenMemHandle_v2
    opens.argtypes = ctypes.c_void_p, _Handle, ctypes.c_uint
    code = opens(ctypes.byref(address), handle, lazily)
    _check(code, f"opening the memory of cuda:{card} on {device}")
    taken.callback(driver().cuIpcCloseMemHandle, address)
    return address.value


def _map_word(shared: SharedCommunicator, taken: ExitStack) -> int:
    """Map the first page of the memory that ranks share; returns its address on the GPU."""
    address = ctypes.c_void_p(shared.address)
    code = driver().cuMemHostRegister_v2(address, ctypes.c_size_t(HEADER_BYTES), 3)
    _check(code, "mapping memory of the host")
    taken.callback(_unmap, shared)  # the reference keeps the memory alive
    found = ctypes.c_ulonglong()
    code = driver().cuMemHostGetDevicePointer_v2(ctypes.byref(found), address, 0)
    _check(code, "mapping memory of the host")
    return found.value


def _unmap(shared: SharedCommunicator) -> None:
    driver().cuMemHostUnregister(ctypes.c_void_p(shared.address))
