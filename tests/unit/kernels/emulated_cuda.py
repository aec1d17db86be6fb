"""The CUDA kernels on a CPU: compiled by the system's C++ compiler, a block's threads taking turns."""

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

from infer.kernels.cuda.build import as_pointers
from infer.kernels.cuda.paged_attention import SOURCE

EMULATOR = Path(__file__).with_name("emulated_cuda.cpp")


class EmulatedKernels:
    """Launches like `LoadedKernels`, and returns when every block has run."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.launched: list[tuple[str, tuple[int, int, int]]] = []

    def launch(
        self, name: str, grid: tuple[int, int, int], num_threads: int, arguments: Sequence[Any]
    ) -> None:
        self.launched.append((name, grid))
        getattr(self._library, f"emulate_{name}")(*grid, num_threads, as_pointers(arguments))


@functools.cache
def emulated_kernels(defines: tuple[tuple[str, int], ...]) -> EmulatedKernels:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    flags = [f"-D{name}={value}" for name, value in defines]
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "emulated.so"
        command = [compiler, "-std=c++17", "-O2", "-w", "-shared", "-fPIC", *flags]
        command += [f'-DKERNEL_SOURCE="{SOURCE}"', str(EMULATOR), "-o", str(library)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert answer.returncode == 0, answer.stderr
        return EmulatedKernels(library)
