"""The emulators' own numbers, and the emulators on another processor: what x86 alone has shows here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from infer.kernels.attention.decode_cuda import DECODE, PROJECTED, CachedHeads, Defines
from infer.kernels.linear import pdl as linear_pdl
from infer.kernels.linear import wgmma as linear_wgmma
from infer.kernels.linear.pdl import PdlConfig
from infer.kernels.linear.wgmma import WgmmaConfig
from tests.kernels.emulated import build_library, build_program, find_compiler
from tests.kernels.emulated_cuda import FLAGS as ATTENTION_FLAGS
from tests.kernels.test_c_aarch64 import EMULATOR, system_root

CROSS_COMPILER = shutil.which("aarch64-linux-gnu-g++")
PROCESSORS = ("this one", "aarch64")
NUM_PATTERNS = 1 << 16


def compiler_for(processor: str) -> str:
    if processor == "this one":
        return find_compiler()
    if CROSS_COMPILER is None:
        pytest.skip("no cross compiler for ARM; on Debian: apt-get install g++-aarch64-linux-gnu")
    return CROSS_COMPILER


def runner_for(processor: str) -> list[str]:
    """What a program for this processor is run with."""
    if processor == "this one":
        return []
    if EMULATOR is None:
        pytest.skip("no emulator for ARM; on Debian: apt-get install qemu-user")
    return [EMULATOR, "-L", str(system_root(compiler_for(processor)))]


def convert(
    processor: str, scratch: Path, is_bfloat16: bool, floats: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """All patterns of 16 bits as floats, and the patterns of `floats`."""
    program = scratch / "numbers"
    build_program(
        compiler_for(processor), program, "emulated_numbers.cpp", "-O1", f"-DIS_BFLOAT16={int(is_bfloat16)}"
    )
    command = [*runner_for(processor), str(program)]
    done = subprocess.run(command, input=floats.numpy().tobytes(), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    data = np.frombuffer(done.stdout, np.uint8).copy()
    return (
        torch.from_numpy(data[: 4 * NUM_PATTERNS]).view(torch.float32),
        torch.from_numpy(data[4 * NUM_PATTERNS :]).view(torch.int16),
    )


def near_every_edge(numbers: torch.Tensor) -> torch.Tensor:
    """Each positive number, the middle to the next, what lies just beside these, and all that negated."""
    ordered = numbers[numbers.isfinite() & ~numbers.signbit()].double().sort().values
    past_the_last = 2 * ordered[-1:] - ordered[-2:-1]
    ordered = torch.cat([ordered, past_the_last])  # a middle to infinity as well
    middles = (ordered[1:] + ordered[:-1]) / 2
    points = torch.cat([ordered, middles]).float()
    infinity = torch.tensor(torch.inf)
    beside = [points.nextafter(infinity), points.nextafter(-infinity)]
    extremes = torch.tensor([torch.inf, torch.nan, 1e-45, 3.4e38])
    positive = torch.cat([points, *beside, extremes])
    return torch.cat([positive, -positive])


def assert_same_numbers(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit by bit; not a number is one whatever its bits."""
    is_number = ~expected.isnan()
    as_integers = torch.int32 if expected.dtype is torch.float32 else torch.int16
    assert torch.equal(found.view(as_integers)[is_number], expected.view(as_integers)[is_number])
    assert found[~is_number].isnan().all()


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_16_bits_are_converted_as_ieee_754_says(
    processor: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """All of them, and floats halfway between two and beside it: to the nearest, from the middle to even."""
    patterns = torch.arange(NUM_PATTERNS, dtype=torch.int32).to(torch.int16).view(dtype)
    random = torch.randint(-(2**31), 2**31, (1 << 18,), dtype=torch.int32).view(torch.float32)
    floats = torch.cat([near_every_edge(patterns.float()), random])
    as_floats, as_patterns = convert(processor, tmp_path, dtype is torch.bfloat16, floats)
    assert_same_numbers(as_floats, patterns.float())
    assert_same_numbers(as_patterns.view(dtype), floats.to(dtype))
    if dtype is torch.float16:  # by other hands, too
        with np.errstate(over="ignore", invalid="ignore"):
            theirs = torch.from_numpy(floats.numpy().astype(np.float16))
        assert_same_numbers(as_patterns.view(dtype), theirs)


HEADS = CachedHeads(torch.float16, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
LINEAR = linear_pdl.defines_of(PdlConfig(1, 2, depth=2), torch.float16, tiles=1, N=16, K=128)
EMULATED: dict[str, tuple[str, Path, Defines, tuple[str, ...]]] = {
    "decode_attention": (
        "emulated_cuda.cpp",
        DECODE.source,
        HEADS.defines(DECODE, pdl=True),
        ATTENTION_FLAGS,
    ),
    "decode_projected": (
        "emulated_cuda.cpp",
        PROJECTED.source,
        HEADS.defines(PROJECTED, has_norm=True, pdl=True),
        ATTENTION_FLAGS,
    ),
    "linear_pdl": ("emulated_linear.cpp", linear_pdl.SOURCE, LINEAR, ("-O1",)),
    "linear_wgmma": (
        "emulated_wgmma.cpp",
        linear_wgmma.SOURCE,
        linear_wgmma.defines_of(WgmmaConfig(16, 64, 3, 2, 1), torch.float16, adds=True),
        ("-O1",),
    ),
}


@pytest.mark.parametrize("kernel", EMULATED)
def test_every_emulator_compiles_for_arm(kernel: str, tmp_path: Path) -> None:
    emulator, source, defines, flags = EMULATED[kernel]
    library = tmp_path / "emulated.so"
    how = (f"-DKERNEL={kernel}", *flags, "-O0")  # the quickest way to code
    build_library(compiler_for("aarch64"), library, emulator, source, defines, *how)
    assert library.stat().st_size > 0


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_linear_is_the_same_on_every_processor(processor: str, tmp_path: Path) -> None:
    """Threads that take turns, in a program of its own: it needs no Python on the other side."""
    program = tmp_path / "linear"
    values = [f"-D{name}={value}" for name, value in (*LINEAR, ("KERNEL_SOURCE", f'"{linear_pdl.SOURCE}"'))]
    build_program(compiler_for(processor), program, "emulated_linear_driver.cpp", "-O1", *values)
    x, w = torch.randn(5, 128).half(), torch.randn(16, 128).half()
    given = x.numpy().tobytes() + w.numpy().tobytes()
    done = subprocess.run(
        [*runner_for(processor), str(program)], input=given, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    y = torch.frombuffer(bytearray(done.stdout), dtype=torch.float16).view(5, 16)
    torch.testing.assert_close(y.double(), x.double() @ w.double().T, rtol=2**-10, atol=2**-10)
