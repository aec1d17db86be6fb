"""Decode attention in CUDA C++ on a CPU: by the system's C++ compiler, a block's threads taking turns."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.kernels.attention_decode import DecodeWork
from infer.kernels.cuda import decode_attention
from infer.kernels.cuda.build import as_pointers
from infer.kernels.cuda.decode_attention import Defines

EMULATOR = Path(__file__).with_name("emulated_cuda.cpp")


@functools.cache
def compile_library(source: Path, defines: Defines) -> ctypes.CDLL:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    flags = [f"-D{name}={value}" for name, value in defines]
    with tempfile.TemporaryDirectory() as scratch:
        made, library = Path(scratch) / "emulated.o", Path(scratch) / "emulated.so"
        flags += [f'-DKERNEL_SOURCE="{source}"', f"-DKERNEL={source.stem}"]
        flags += ["-fsanitize=alignment", "-fno-toplevel-reorder"]  # the emulator explains
        flags += ["-std=c++17", "-O2", "-w", "-fPIC"]
        run(compiler, *flags, "-c", str(EMULATOR), "-o", str(made))
        run(compiler, "-shared", str(made), "-o", str(library))
        loaded = ctypes.CDLL(str(library))
    loaded.emulate.restype = ctypes.c_char_p
    return loaded


def run(*command: str) -> None:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr


class EmulatedLaunch:
    """Launches like `PreparedLaunch`, and returns when every block has run."""

    def __init__(
        self,
        defines: Defines,
        source: Path = decode_attention.SOURCE,
        types: Sequence[Any] = decode_attention._TYPES,
    ) -> None:
        self.library, self.num_threads = compile_library(source, defines), 32 * dict(defines)["WARPS"]
        self.types = types
        self.grids: list[int] = []

    def __call__(self, num_blocks: int, *arguments: int | float) -> None:
        self.grids.append(num_blocks)
        values = [of_type(value) for of_type, value in zip(self.types, arguments, strict=True)]
        fault = self.library.emulate(num_blocks, self.num_threads, as_pointers(values))
        assert fault is None, fault.decode()


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
