"""A kernel in CUDA C++ as a library for a CPU: an emulator beside this file, around the text of a kernel."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from infer.kernels.attention.decode_cuda import Defines
from tests.support.made_once import made_once

HERE = Path(__file__).parent
# A multiplication and an addition stay two roundings, also on processors that always have one for both.
FLAGS = ("-std=c++17", "-w", "-fPIC", "-ffp-contract=off")


def compile_library(emulator: str, source: Path, defines: Defines, *flags: str) -> ctypes.CDLL:
    """By the system's C++ compiler, once for each text; its `emulate` is a launch."""
    compiler = find_compiler()
    files = sorted([*HERE.glob("*.[ch]pp"), source, *source.parent.glob("*.cuh")])
    built_from = (compiler, os.stat(compiler).st_mtime_ns, emulator, defines, FLAGS, flags)
    library = made_once(
        lambda path: build_library(compiler, path, emulator, source, defines, *flags), built_from, *files
    )
    return ctypes.CDLL(str(library))


def find_compiler() -> str:
    """The path of the system's C++ compiler."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    return compiler


def build_library(
    compiler: str, library: Path, emulator: str, source: Path, defines: Defines, *flags: str
) -> None:
    """By this compiler, to this path."""
    made = str(library.with_suffix(".o"))
    values = [f"-D{name}={value}" for name, value in (*defines, ("KERNEL_SOURCE", f'"{source}"'))]
    _run(compiler, *FLAGS, *flags, *values, "-c", str(HERE / emulator), "-o", made)
    _run(compiler, "-shared", made, "-o", str(library))
    Path(made).unlink()


def build_program(compiler: str, program: Path, source: str, *flags: str) -> None:
    """Of one file beside this one."""
    _run(compiler, *FLAGS, *flags, str(HERE / source), "-o", str(program))


def _run(*command: str) -> None:
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
