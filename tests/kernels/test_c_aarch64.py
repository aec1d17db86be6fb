"""The C kernels of ARM, on emulated processors: dot products and i8mm of NEON against plain C.

A cross compiler builds the library as `build.py` would on such machines, and qemu runs `c_driver.c` with
it. Without Python on that side the driver only writes results down; they are compared here, once with plain
C on the same processor and once with plain C on this one, which other tests compare with PyTorch. The two
forms of NEON differ in how they add integers alone, so they have every bit in common.

The driver itself is tested on every machine: its lists of arguments have to grow with those of the kernels.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from infer.kernels.cpu import build
from tests.kernels.c_builds import ARM, ARM_COMPILER, SANITIZE, arm_library, sanitized_library

DISASSEMBLER = shutil.which("aarch64-linux-gnu-objdump")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
LOADER = Path("lib/ld-linux-aarch64.so.1")
DRIVER = Path(__file__).with_name("c_driver.c")
TOLERANCE = 1e-5
JUMP = re.compile(r"(?:b\.\w+|cbn?z|tbn?z)\s.*?([0-9a-f]+) <")
SPILL = re.compile(r"(?:ld|st)[rp]\s+[qd]\d+.*\[sp")
NEON = ("neon-dotprod", "neon-i8mm")


class Result(NamedTuple):
    """What one kernel wrote."""

    name: str
    is_exact: bool
    data: bytes


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    """Results by variant, each on its emulated processor."""
    libraries = {variant: arm_library(variant) for variant in ARM}
    if EMULATOR is None:
        pytest.skip("no emulator for ARM; on Debian: apt-get install qemu-user")
    assert ARM_COMPILER is not None
    scratch = tmp_path_factory.mktemp("driver")
    driver = compile_driver(ARM_COMPILER, scratch)
    root = system_root(ARM_COMPILER)
    results = {}
    for variant, library in libraries.items():
        emulator = [EMULATOR, "-cpu", ARM[variant][0], "-L", str(root)]
        name, results[variant] = run_driver([*emulator, str(driver)], library, scratch)
        assert name == variant
    return results


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Results of plain C on this processor, where a sanitizer checks each argument that a kernel reads."""
    library = sanitized_library("-DINFER_PORTABLE")
    scratch = tmp_path_factory.mktemp("driver")
    driver = compile_driver(str(build.find_compiler()), scratch, *SANITIZE)
    variant, results = run_driver([str(driver)], library, scratch)
    assert variant == "portable"
    return results


def system_root(compiler: str) -> Path:
    """The directory that is / for emulated programs: their C library is there."""
    answer = subprocess.run([compiler, "-print-sysroot"], capture_output=True, text=True, check=True)
    for root in (Path(answer.stdout.strip() or "/"), Path("/usr/aarch64-linux-gnu")):
        if (root / LOADER).exists():
            return root
    pytest.skip("no C library for ARM; on Debian: apt-get install libc6-dev-arm64-cross")


def compile_driver(compiler: str, scratch: Path, *flags: str) -> Path:
    path = scratch / "driver"
    command = [compiler, "-O1", "-std=gnu11", "-Wall", "-Werror", *flags, str(DRIVER), "-o", str(path)]
    answer = subprocess.run([*command, "-ldl", "-lm"], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return path


def run_driver(driver: list[str], library: Path, scratch: Path) -> tuple[str, list[Result]]:
    """The library's name for itself, and what its kernels computed."""
    output = scratch / "results"
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}  # the driver frees nothing
    command = [*driver, str(library), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
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


def shape_of(result: Result) -> tuple[int, int]:
    """M and N of a product, from its name."""
    M, N, _ = (int(number) for number in result.name.rsplit("_", 1)[1].split("x"))
    return M, N


def floats(result: Result) -> torch.Tensor:
    return torch.frombuffer(bytearray(result.data), dtype=torch.float32)


def test_driver_passes_every_argument_that_a_kernel_reads(sanitized: list[Result]) -> None:
    sizes = {result.name: len(result.data) for result in sanitized}
    assert sizes["product_int8_40x9x31"] == 40 * 9 * 4 and {"attention", "likely_counts"} <= sizes.keys()


@pytest.mark.parametrize("variant", NEON)
def test_neon_equals_plain_c(emulated: dict[str, list[Result]], variant: str) -> None:
    assert_same(emulated[variant], emulated["portable"])


def test_i8mm_equals_dot_products_to_the_last_bit(emulated: dict[str, list[Result]]) -> None:
    for result, other in zip(emulated["neon-i8mm"], emulated["neon-dotprod"], strict=True):
        assert result == other, result.name


@pytest.mark.parametrize("variant", NEON)
def test_a_row_alone_is_the_row_among_others(emulated: dict[str, list[Result]], variant: str) -> None:
    matrices = [result for result in emulated[variant] if result.name.startswith("product_int")]
    alone = [result for result in emulated[variant] if result.name.startswith("middle_row")]
    assert max(shape_of(result)[0] for result in matrices) > 32
    for matrix, row in zip(matrices, alone, strict=True):
        M, N = shape_of(matrix)
        first = M // 2 * N * 4
        assert matrix.data[first : first + N * 4] == row.data, matrix.name


@pytest.mark.skipif(DISASSEMBLER is None, reason="needs a disassembler for ARM")
@pytest.mark.parametrize(("variant", "has_i8mm"), [("neon-dotprod", False), ("neon-i8mm", True)])
def test_each_build_has_its_instructions(variant: str, has_i8mm: bool) -> None:
    command = [str(DISASSEMBLER), "--disassemble", str(arm_library(variant))]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ("\tsmmla\t" in code) == has_i8mm
    assert "\tsdot\t" in code  # one row is multiplied by dot products in both


class Loop(NamedTuple):
    """What an innermost loop consists of."""

    num_instructions: int
    num_products: int  # fused multiplications and additions of vectors
    num_spills: int  # of vector registers, to the stack or from there


def innermost_loops(library: Path, function: str) -> list[Loop]:
    command = [str(DISASSEMBLER), "--disassemble=" + function, "--no-show-raw-insn", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.partition(":\t") for line in listing.splitlines() if ":\t" in line]
    code = {int(address, 16): text for address, _, text in lines}
    jumps = [(int(found[1], 16), at) for at, text in code.items() if (found := JUMP.match(text))]
    loops = [(start, end) for start, end in jumps if start <= end and start in code]
    innermost = [
        (start, end)
        for start, end in loops
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in loops)
    ]
    bodies = [[text for at, text in code.items() if start <= at <= end] for start, end in innermost]
    return [
        Loop(len(body), sum("fmla" in text for text in body), sum(bool(SPILL.match(text)) for text in body))
        for body in bodies
    ]


@pytest.mark.skipif(DISASSEMBLER is None, reason="needs a disassembler for ARM")
def test_attention_keeps_its_tile_in_registers() -> None:
    """The order of a source's lines decides; a tile that goes through memory takes twice the time."""
    loops = innermost_loops(arm_library("neon-dotprod"), "visit_direct")
    products = [loop for loop in loops if loop.num_instructions < 32 and loop.num_products >= 8]
    assert sum(loop.num_products == 16 for loop in products) >= 2  # scores and values of four queries
    assert all(loop.num_spills == 0 for loop in products)
    exponentials = [loop for loop in loops if loop.num_products >= 18 and loop not in products]
    assert exponentials and sum(loop.num_spills for loop in exponentials) < 15


@pytest.mark.skipif(DISASSEMBLER is None, reason="needs a disassembler for ARM")
@pytest.mark.parametrize("function", ["infer_activation", "turn"])
def test_rows_of_numbers_stay_in_registers(function: str) -> None:
    loops = [loop for loop in innermost_loops(arm_library("neon-dotprod"), function) if loop.num_products]
    assert loops and all(loop.num_spills == 0 for loop in loops)


@pytest.mark.parametrize("variant", NEON)
def test_a_nan_reaches_its_whole_row_and_no_other(emulated: dict[str, list[Result]], variant: str) -> None:
    broken = [result for result in emulated[variant] if result.name.startswith("product_with_nan")]
    assert broken
    for result in broken:
        rows = floats(result).view(shape_of(result))
        assert rows[-1].isnan().all() and rows[:-1].isfinite().all(), result.name


@pytest.mark.skipif(
    platform.machine() in ("x86_64", "AMD64") and " fma " not in build.cpu_flags(),
    reason="a processor without fused multiply-add rounds a few numbers differently",
)
def test_neon_equals_plain_c_of_this_processor(
    emulated: dict[str, list[Result]], sanitized: list[Result]
) -> None:
    for name in NEON:
        assert_same(emulated[name], sanitized)
