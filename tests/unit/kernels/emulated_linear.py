"""`linear_ahead.cu` on a CPU: compiled by the system's C++ compiler, a cluster's threads taking turns."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from infer.kernels.cuda import linear_ahead
from infer.kernels.cuda.build import as_pointers

EMULATOR = Path(__file__).with_name("emulated_linear.cpp")


@functools.cache
def compile_library(defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    flags = [f"-D{name}={value}" for name, value in defines]
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "emulated.so"
        command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *flags]
        command += [f'-DKERNEL_SOURCE="{linear_ahead.SOURCE}"', str(EMULATOR), "-o", str(library)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert answer.returncode == 0, answer.stderr
        return ctypes.CDLL(str(library))


class EmulatedLaunch:
    """Launches like `PreparedLaunch`, and returns when every block has run."""

    def __init__(self, defines: tuple[tuple[str, int], ...]) -> None:
        self.library = compile_library(defines)
        self.num_threads = 32 * dict(defines)["WARPS"]

    def __call__(self, num_blocks: int, *arguments: Any) -> None:
        values = [of_type(value) for of_type, value in zip(linear_ahead._TYPES, arguments, strict=True)]
        assert self.library.emulate(num_blocks, self.num_threads, as_pointers(values)), "a rule was broken"
