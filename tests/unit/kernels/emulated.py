"""A kernel in CUDA C++ as a library for a CPU: an emulator beside this file, around the text of a kernel."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from infer.kernels.attention.decode_cuda import Defines

HERE = Path(__file__).parent


def compile_library(emulator: str, source: Path, defines: Defines, *flags: str) -> ctypes.CDLL:
    """By the system's C++ compiler; its `emulate` is a launch."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    values = [f"-D{name}={value}" for name, value in (*defines, ("KERNEL_SOURCE", f'"{source}"'))]
    with tempfile.TemporaryDirectory() as scratch:
        made, library = str(Path(scratch) / "emulated.o"), str(Path(scratch) / "emulated.so")
        _run(compiler, "-std=c++17", "-w", "-fPIC", *flags, *values, "-c", str(HERE / emulator), "-o", made)
        _run(compiler, "-shared", made, "-o", library)
        return ctypes.CDLL(library)


def _run(*command: str) -> None:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
