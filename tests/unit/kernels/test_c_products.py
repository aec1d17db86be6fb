"""Products of packed weights against their definition, bit for bit, in every build of the C kernels.

`c_products.c` has the definition, number by number, and is linked with the kernels: for this processor, for
lesser ones, for ARM under an emulator, for AMX with its instructions in C, and with the sanitizers of each
compiler that is here. Programs are kept beside the compiled libraries until a source changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from infer.kernels.cpu import build
from tests.unit.kernels.c_builds import IS_X86

HERE = Path(__file__).parent
PROGRAM, EMULATED_AMX = HERE / "c_products.c", HERE / "emulated_amx.h"
SOURCES = [build.SOURCES / name for name in ("activations.c", "linear.c", "pack.c")]
FLAGS = ("-std=gnu11", "-Wall", "-Wno-psabi", "-Wno-unknown-pragmas", "-fno-math-errno", f"-I{build.SOURCES}")
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FUSING = ("-fexpensive-optimizations",)  # gcc: multiplications and additions fuse at -O1 all the same
GCC, CLANG = shutil.which("gcc"), shutil.which("clang") or shutil.which("clang-19")
ARM_GCC = shutil.which("aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
CPU = build.cpu_flags().split()


class Build(NamedTuple):
    """A compiler, its flags, what the kernels then call themselves, and what the processor must have."""

    compiler: str | None
    flags: tuple[str, ...]
    variant: str
    needs: str = ""
    emulates: str = ""  # a processor of ARM


NATIVE = "-mcpu=native" if not IS_X86 else "-march=native"
BEST = "avx512-vnni" if "avx512_vnni" in CPU else "avx2" if IS_X86 else ""
BUILDS = {
    "native": Build(GCC, ("-O3", NATIVE), BEST),
    "portable": Build(GCC, ("-O1", *FUSING, NATIVE, "-DINFER_PORTABLE"), "portable"),
    "avx2": Build(GCC, ("-O3", "-march=haswell"), "avx2", "avx2"),
    "amx": Build(
        GCC,
        ("-O2", NATIVE, "-D__AMX_INT8__", "-include", str(EMULATED_AMX)),
        "avx512-vnni",
        "avx512_vnni",
    ),
    "sanitized": Build(GCC, (*SANITIZED, *FUSING, NATIVE), BEST),
    "sanitized portable": Build(GCC, (*SANITIZED, *FUSING, NATIVE, "-DINFER_PORTABLE"), "portable"),
    "sanitized avx2": Build(GCC, (*SANITIZED, *FUSING, "-march=haswell"), "avx2", "avx2"),
    "clang": Build(CLANG, (*SANITIZED, NATIVE), BEST),
    "clang portable": Build(CLANG, (*SANITIZED, NATIVE, "-DINFER_PORTABLE"), "portable"),
    "neon": Build(ARM_GCC, ("-O3", "-mcpu=neoverse-n1"), "neon-dotprod", emulates="neoverse-n1"),
    "sanitized neon": Build(
        ARM_GCC, (*SANITIZED, *FUSING, "-mcpu=neoverse-n1"), "neon-dotprod", emulates="neoverse-n1"
    ),
    "neon i8mm": Build(ARM_GCC, ("-O3", "-march=armv8.2-a+dotprod+i8mm"), "neon-i8mm", emulates="max"),
    "neon, no dots": Build(ARM_GCC, ("-O1", *FUSING, "-mcpu=cortex-a72"), "portable", emulates="cortex-a72"),
}


SLOW = ("sanitized avx2", "sanitized neon", "clang", "clang portable")  # to compile


def program_of(it: Build) -> Path:
    """The compiled program."""
    assert it.compiler is not None
    digest = hashlib.sha256(repr((it, build.compiler_version(it.compiler), CPU)).encode())
    for source in (PROGRAM, EMULATED_AMX, *sorted(build.SOURCES.iterdir())):
        digest.update(source.read_bytes())
    path = build.cache_directory() / f"products-{digest.hexdigest()[:24]}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}")
        static = ("-static",) if it.emulates and SANITIZED[1] not in it.flags else ()
        command = [it.compiler, *FLAGS, *it.flags, *static, str(PROGRAM), *map(str, SOURCES), "-o", str(made)]
        answer = subprocess.run([*command, "-lm"], capture_output=True, text=True, timeout=build.TIMEOUT)
        if "libclang_rt" in answer.stderr:
            pytest.skip("clang has no sanitizers here; on Debian: apt-get install libclang-rt-dev")
        assert answer.returncode == 0, answer.stderr
        made.replace(path)
    return path


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
    run = [str(EMULATOR), "-cpu", it.emulates, "-L", "/usr/aarch64-linux-gnu"] if it.emulates else []
    if not it.emulates and IS_X86 and "fma" not in CPU:
        pytest.skip("a processor without fused multiply-add rounds a few numbers differently")
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}  # which an emulator cannot
    done = subprocess.run(
        [*run, str(program_of(it))], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    variant, num_compared = done.stdout.split()
    assert variant == it.variant or not it.variant
    assert int(num_compared) > 10_000
