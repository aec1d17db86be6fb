"""The C kernels in several builds: for this processor and lesser ones, for ARM, and under sanitizers.

Each is compiled once for all tests that need it, whichever process they are in.
"""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from infer.kernels.cpu import build
from infer.kernels.cpu.build import CBuildError, build_library
from infer.kernels.cpu.library import Library
from tests.support.made_once import made_once, one_at_a_time

IS_X86 = platform.machine() in ("x86_64", "AMD64")
NATIVE = "-march=native" if IS_X86 else "-mcpu=native"
HAS_VNNI = "avx512_vnni" in build.cpu_flags().split()
# gcc: multiplications and additions fuse at -O1 all the same, and slower code is compiled faster
QUICK = ("-O1", "-fexpensive-optimizations")
FLAGS = {
    "native": (),
    "portable": ("-DINFER_PORTABLE",),
    **({"avx2": ("-mno-avx512f", *QUICK)} if IS_X86 else {}),
    **({"avx512": ("-mno-avx512vnni", *QUICK)} if HAS_VNNI else {}),
}
BUILDS = tuple(FLAGS)

SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

ARM_COMPILER = shutil.which("aarch64-linux-gnu-gcc")
# variant: the emulated processor, and what -mcpu=native means on such a one
ARM: dict[str, tuple[str, tuple[str, ...]]] = {
    "neon-dotprod": ("neoverse-n1", ("-mcpu=neoverse-n1",)),
    "neon-i8mm": ("max", ("-march=armv8.2-a+dotprod+i8mm",)),
    "portable": ("neoverse-n1", ("-march=armv8.2-a+dotprod", "-DINFER_PORTABLE", *QUICK)),
}


@functools.cache
def c_library(name: str) -> Library:
    """A build for this processor."""
    try:
        with one_at_a_time(f"c-{name}"):
            return Library(build_library(extra_flags=FLAGS[name]))
    except CBuildError as error:
        pytest.skip(str(error))


def arm_library(variant: str) -> Path:
    """The library as `build.py` would build it on such a processor."""
    if ARM_COMPILER is None:
        pytest.skip("no cross compiler for ARM; on Debian: apt-get install gcc-aarch64-linux-gnu")
    return compile_c(ARM_COMPILER, (*build._FLAGS, *ARM[variant][1]), sorted(build.SOURCES.glob("*.c")))


def sanitized_library(*flags: str) -> Path:
    """The library for this processor, with the sanitizers of its compiler."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("needs a C compiler")
    return compile_c(
        compiler, (*build._FLAGS, NATIVE, *QUICK, *SANITIZE, *flags), sorted(build.SOURCES.glob("*.c"))
    )


def compile_c(compiler: str, flags: Sequence[str], sources: Sequence[Path]) -> Path:
    """What a compiler makes of sources, which may include the headers of the kernels and of this folder."""
    here = Path(__file__).parent

    def compile_to(path: Path) -> None:
        found = (f"-I{build.SOURCES}", f"-I{here}")  # differ between checkouts, which share what is made
        command = [compiler, *found, *flags, *map(str, sources), "-o", str(path), "-lm"]
        answer = subprocess.run(command, capture_output=True, text=True)
        if "libclang_rt" in answer.stderr:
            pytest.skip("clang has no sanitizers here; on Debian: apt-get install libclang-rt-dev")
        assert answer.returncode == 0, answer.stderr

    files = [*sources, *sorted(build.SOURCES.iterdir()), *sorted(here.glob("*.h"))]
    return made_once(compile_to, build.compiler_version(compiler), build.cpu_flags(), tuple(flags), *files)
