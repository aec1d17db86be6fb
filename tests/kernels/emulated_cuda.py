"""Decode attention in CUDA C++ on a CPU: a block's threads take turns."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from infer.kernels.attention.decode_cuda import DECODE, Defines
from infer.kernels.attention.decode_work import DecodeWork
from infer.kernels.runtime.cuda_build import as_pointers
from tests.kernels.attention_contract import Heads
from tests.kernels.emulated import compile_library

FLAGS = ("-O1", "-fsanitize=alignment", "-fno-toplevel-reorder")  # the emulator explains


@functools.cache
def compile_attention(source: Path, defines: Defines) -> ctypes.CDLL:
    loaded = compile_library("emulated_cuda.cpp", source, defines, f"-DKERNEL={source.stem}", *FLAGS)
    loaded.emulate.restype = ctypes.c_char_p
    return loaded


class Place(ctypes.Structure):
    """Memory that the kernel before writes."""

    _fields_ = (("at", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


class EmulatedLaunch:
    """Launches like `PreparedLaunch`, and returns when every block has run.

    `written_before` is what the kernel before writes: views of tensors that hold it already. A block finds
    NaN there until all of its threads have waited.
    """

    def __init__(
        self,
        defines: Defines,
        source: Path = DECODE.source,
        types: Sequence[Any] = DECODE.types,
        written_before: Sequence[torch.Tensor] = (),
    ) -> None:
        self.library, self.num_threads = compile_attention(source, defines), 32 * dict(defines)["WARPS"]
        self.types = types
        assert all(view.is_contiguous() for view in written_before)
        self.places = [Place(view.data_ptr(), view.nbytes) for view in written_before]
        self.grids: list[int] = []

    def __call__(self, num_blocks: int, *arguments: int | float) -> None:
        self.grids.append(num_blocks)
        values = [of_type(value) for of_type, value in zip(self.types, arguments, strict=True)]
        places = (Place * len(self.places))(*self.places)
        fault = self.library.emulate(num_blocks, self.num_threads, as_pointers(values), len(places), places)
        assert fault is None, fault.decode()

    @property
    def num_early_loads(self) -> int:
        """Pieces of keys and values that threads of the last launch asked for before they waited."""
        return ctypes.c_uint.in_dll(self.library, "num_early_loads").value


def make_work(heads: Heads, *, max_rows: int, max_len: int, split_len: int, num_sms: int = 1) -> DecodeWork:
    """Scratch memory without a number in it; few SMs, so that each block takes several units."""
    work = DecodeWork(
        max_rows=max_rows, max_len=max_len, device="cpu", split_len=split_len, **dataclasses.asdict(heads)
    )
    for scratch in (work.sums, work.maxima, work.denominators):
        scratch.fill_(torch.nan)
    work.num_sms = num_sms
    return work


def plan_on_host(
    work: DecodeWork, rows_S: torch.Tensor, lens_S: torch.Tensor, *, window: int | None = None
) -> None:
    """What `DecodeWork.plan` writes with splits of a fixed length, without Triton."""
    length, most = work.split_len(len(rows_S)), work.max_splits(len(rows_S))
    whole: list[list[int]] = []
    last: list[list[int]] = []
    for s, (row, end) in enumerate(zip(rows_S.tolist(), lens_S.tolist(), strict=True)):
        first, size = max(end - (window or end), 0), length
        while -(-end // size) - first // size > most:
            size *= 2
        num_splits = max(-(-end // size) - first // size, 1)
        for split in range(num_splits):
            start = (first // size + split) * size
            item = [s, row, max(start, first), min(start + size, end), split, num_splits, end, 0]
            (last if split == num_splits - 1 else whole).append(item)
    items_W8, num_items = work.work_list(window)
    items_W8[: len(whole) + len(last)] = torch.tensor(whole + last, dtype=torch.int32)
    num_items.fill_(len(whole) + len(last))
    work.is_fresh = True
