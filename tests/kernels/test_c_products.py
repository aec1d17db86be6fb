"""Products of packed weights against their definition, bit for bit, in every build of the C kernels.

`c_products.c` has the definition, number by number, and is linked with the kernels: for this processor, for
lesser ones, for ARM under an emulator, for VNNI and AMX with their instructions in C, and with the
sanitizers of each compiler that is here. Where other tests need a build too, it is linked with their library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from infer.kernels.cpu import build
from tests.kernels.c_builds import (
    ARM,
    ARM_COMPILER,
    FLAGS,
    HAS_VNNI,
    IS_X86,
    NATIVE,
    QUICK,
    SANITIZE,
    arm_library,
    c_library,
    compile_c,
    sanitized_library,
)
from tests.kernels.test_c_aarch64 import EMULATOR, system_root

PROGRAM = Path(__file__).with_name("c_products.c")
SOURCES = [build.SOURCES / name for name in ("activations.c", "linear.c", "pack.c")]
WARNINGS = ("-std=gnu11", "-Wall", "-Wno-psabi", "-Wno-unknown-pragmas", "-fno-math-errno")
GCC, CLANG = shutil.which("gcc"), shutil.which("clang") or shutil.which("clang-19")
CPU = build.cpu_flags().split()


class Build(NamedTuple):
    """A compiler, its flags, what the kernels then call themselves, and what the processor must have."""

    compiler: str | None
    flags: tuple[str, ...]
    variant: str
    needs: str = ""
    emulates: str = ""  # a processor of ARM
    library: Callable[[], Path] | None = None  # that has these flags; without one the sources are compiled


BEST = "avx512-vnni" if HAS_VNNI else "avx512" if "avx512bw" in CPU else "avx2" if IS_X86 else ""
SANITIZED = (*QUICK, *SANITIZE)
PORTABLE = "-DINFER_PORTABLE"


def on_this(name: str, variant: str, needs: str = "") -> Build:
    return Build(
        build.find_compiler(), (NATIVE, *FLAGS[name]), variant, needs, "", lambda: c_library(name).path
    )


def on_arm(variant: str) -> Build:
    processor, flags = ARM[variant]
    return Build(ARM_COMPILER, flags, variant, "", processor, lambda: arm_library(variant))


BUILDS = {
    "native": on_this("native", BEST),
    "portable": on_this("portable", "portable"),
    **({"avx2": on_this("avx2", "avx2", "avx2")} if IS_X86 else {}),
    **({"avx512": on_this("avx512", "avx512", "avx512bw")} if HAS_VNNI else {}),
    "amx": Build(
        GCC,
        (*QUICK, NATIVE, "-D__AMX_INT8__", "-include", "emulated_amx.h"),
        "avx512-vnni",
        "avx512bw",
    ),
    "sanitized": Build(
        build.find_compiler(), (NATIVE, *SANITIZED), BEST, library=lambda: sanitized_library()
    ),
    "sanitized portable": Build(
        build.find_compiler(),
        (NATIVE, *SANITIZED, PORTABLE),
        "portable",
        library=lambda: sanitized_library(PORTABLE),
    ),
    "optimized avx2": Build(GCC, ("-O3", NATIVE, "-mno-avx512f"), "avx2", "avx2"),
    "optimized avx512": Build(GCC, ("-O3", NATIVE, "-mno-avx512vnni"), "avx512", "avx512bw"),
    "sanitized avx2": Build(GCC, (*SANITIZED, "-march=haswell"), "avx2", "avx2"),
    "clang": Build(CLANG, ("-O1", *SANITIZE, NATIVE), BEST),
    "clang portable": Build(CLANG, ("-O1", *SANITIZE, NATIVE, PORTABLE), "portable"),
    "neon": on_arm("neon-dotprod"),
    "sanitized neon": Build(
        ARM_COMPILER, (*SANITIZED, "-mcpu=neoverse-n1"), "neon-dotprod", emulates="neoverse-n1"
    ),
    "neon i8mm": on_arm("neon-i8mm"),
    "neon, no dots": Build(ARM_COMPILER, (*QUICK, "-mcpu=cortex-a72"), "portable", emulates="cortex-a72"),
}
SLOW = (  # to compile
    *("optimized avx2", "optimized avx512", "clang", "clang portable"),
    *("sanitized avx2", "sanitized portable", "sanitized neon"),
)


def program_of(it: Build) -> Path:
    """The compiled program."""
    assert it.compiler is not None
    if it.library is None:
        return compile_c(it.compiler, (*WARNINGS, *it.flags), [PROGRAM, *SOURCES])
    return compile_c(it.compiler, (*WARNINGS, *it.flags, "-O1"), [PROGRAM, it.library()])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BUILDS],
)
def test_every_product_is_its_definition_to_the_last_bit(name: str) -> None:
    it = BUILDS[name]
    if it.compiler is None:
        pytest.skip("no such compiler here; on Debian: apt-get install gcc clang gcc-aarch64-linux-gnu")
    if it.needs and it.needs not in CPU:
        pytest.skip(f"this processor has no {it.needs}")
    if it.emulates and EMULATOR is None:
        pytest.skip("no emulator for ARM; on Debian: apt-get install qemu-user")
    root = str(system_root(it.compiler)) if it.emulates else ""
    run = [str(EMULATOR), "-cpu", it.emulates, "-L", root] if it.emulates else []
    if not it.emulates and IS_X86 and "fma" not in CPU:
        pytest.skip("a processor without fused multiply-add rounds a few numbers differently")
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}  # which an emulator cannot
    done = subprocess.run([*run, str(program_of(it))], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    variant, num_compared = done.stdout.split()
    assert variant == it.variant or not it.variant
    assert int(num_compared) > 10_000
