"""The C kernels of ARM, on an emulated processor: dot products of NEON against plain C.

A cross compiler builds the library as `build.py` would on such a machine, and qemu runs `c_driver.c` with
it. Without Python on that side the driver only writes results down; they are compared here, once with plain
C on the same processor and once with plain C on this one, which other tests compare with PyTorch.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from infer.kernels.cpu import build
from tests.unit.kernels.c_builds import c_library

CROSS_COMPILER = shutil.which("aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
LOADER = Path("lib/ld-linux-aarch64.so.1")
DRIVER = Path(__file__).with_name("c_driver.c")
TUNING = "-march=armv8.2-a+dotprod"  # what -mcpu=native means on a processor with the instructions
# -O1: the slower code is compiled faster; the third flag: multiplications and additions fuse all the same
PORTABLE = ("-DINFER_PORTABLE", "-O1", "-fexpensive-optimizations")
TOLERANCE = 1e-5


class Result(NamedTuple):
    """What one kernel wrote."""

    name: str
    is_exact: bool
    data: bytes


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    """Results by variant, both of them on the emulated processor."""
    if CROSS_COMPILER is None:
        pytest.skip("no cross compiler for ARM; on Debian: apt-get install gcc-aarch64-linux-gnu")
    if EMULATOR is None:
        pytest.skip("no emulator for ARM; on Debian: apt-get install qemu-user")
    scratch = tmp_path_factory.mktemp("aarch64")
    emulator = [EMULATOR, "-L", str(system_root(CROSS_COMPILER))]
    driver = compile_driver(CROSS_COMPILER, scratch)
    results = {}
    for flags in ((), PORTABLE):
        path = scratch / f"{len(flags)}.so"
        build._compile(CROSS_COMPILER, (*build._FLAGS, TUNING, *flags), path)
        variant, answer = run_driver([*emulator, str(driver)], path, scratch)
        results[variant] = answer
    return results


def system_root(compiler: str) -> Path:
    """The directory that is / for emulated programs: their C library is there."""
    answer = subprocess.run([compiler, "-print-sysroot"], capture_output=True, text=True, check=True)
    for root in (Path(answer.stdout.strip() or "/"), Path("/usr/aarch64-linux-gnu")):
        if (root / LOADER).exists():
            return root
    pytest.skip("no C library for ARM; on Debian: apt-get install libc6-dev-arm64-cross")


def compile_driver(compiler: str, scratch: Path) -> Path:
    path = scratch / "driver"
    command = [compiler, "-O1", "-std=gnu11", "-Wall", "-Werror", str(DRIVER), "-o", str(path), "-ldl", "-lm"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=build.TIMEOUT)
    assert answer.returncode == 0, answer.stderr
    return path


def run_driver(driver: list[str], library: Path, scratch: Path) -> tuple[str, list[Result]]:
    """The library's name for itself, and what its kernels computed."""
    output = scratch / "results"
    done = subprocess.run([*driver, str(library), str(output)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), list(read_results(output.read_bytes()))


def read_results(text: bytes) -> Iterator[Result]:
    while text:
        line, _, text = text.partition(b"\n")
        name, kind, size = line.decode().split()
        assert len(text) >= int(size) > 0, name
        yield Result(name, kind == "bytes", text[: int(size)])
        text = text[int(size) :]


def assert_same(results: list[Result], expected: list[Result]) -> None:
    assert [result.name for result in results] == [result.name for result in expected]
    for result, other in zip(results, expected, strict=True):
        if result.is_exact:
            assert result.data == other.data, result.name
        else:
            torch.testing.assert_close(
                floats(result), floats(other), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True, msg=result.name
            )


def floats(result: Result) -> torch.Tensor:
    return torch.frombuffer(bytearray(result.data), dtype=torch.float32)


def test_neon_equals_plain_c(emulated: dict[str, list[Result]]) -> None:
    assert set(emulated) == {"neon-dotprod", "portable"}
    assert_same(emulated["neon-dotprod"], emulated["portable"])


def test_a_nan_reaches_its_whole_row_and_no_other(emulated: dict[str, list[Result]]) -> None:
    broken = [result for result in emulated["neon-dotprod"] if result.name.startswith("product_with_nan")]
    assert broken
    for result in broken:
        M, N, _ = (int(number) for number in result.name.rsplit("_", 1)[1].split("x"))
        rows = floats(result).view(M, N)
        assert rows[-1].isnan().all() and rows[:-1].isfinite().all(), result.name


@pytest.mark.skipif(
    platform.machine() in ("x86_64", "AMD64") and " fma " not in build.cpu_flags(),
    reason="a processor without fused multiply-add rounds a few numbers differently",
)
def test_neon_equals_plain_c_of_this_processor(emulated: dict[str, list[Result]], tmp_path: Path) -> None:
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("needs a C compiler")
    driver = compile_driver(compiler, tmp_path)
    variant, expected = run_driver([str(driver)], c_library("portable").path, tmp_path)
    assert variant == "portable"
    assert_same(emulated["neon-dotprod"], expected)
