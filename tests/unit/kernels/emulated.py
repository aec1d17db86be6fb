"""A kernel in CUDA C++ as a library for a CPU: an emulator beside this file, around the text of a kernel."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from infer.kernels.attention.decode_cuda import Defines

HERE = Path(__file__).parent
BUILDS = HERE.parents[2] / ".pytest_cache" / "emulated"  # shared by the processes of a run, and by later runs
# A multiplication and an addition stay two roundings, also on processors that always have one for both.
FLAGS = ("-std=c++17", "-w", "-fPIC", "-ffp-contract=off")


def compile_library(emulator: str, source: Path, defines: Defines, *flags: str) -> ctypes.CDLL:
    """By the system's C++ compiler, once for each text; its `emulate` is a launch."""
    compiler = find_compiler()
    files = sorted([*HERE.glob("*.[ch]pp"), source, *source.parent.glob("*.cuh")])
    spelled = repr((compiler, os.stat(compiler).st_mtime_ns, emulator, defines, FLAGS, flags))
    key = hashlib.sha256(b"\0".join([spelled.encode(), *(file.read_bytes() for file in files)])).hexdigest()
    library = BUILDS / f"{key}.so"
    if not library.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}.so")
        build_library(compiler, made, emulator, source, defines, *flags)
        made.with_suffix(".o").unlink()
        made.replace(library)
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


def build_program(compiler: str, program: Path, source: str, *flags: str) -> None:
    """Of one file beside this one."""
    _run(compiler, *FLAGS, *flags, str(HERE / source), "-o", str(program))


def _run(*command: str) -> None:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
