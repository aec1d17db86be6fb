"""Compiling CUDA C++ at run time: either compiler will do, and without one the operator reads why."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.errors import ConfigError
from infer.kernels.cuda import build
from infer.kernels.cuda.build import (
    BuildError,
    compile_source,
    compile_with_nvcc,
    compile_with_nvrtc,
    options,
)
from infer.kernels.cuda.paged_attention import SOURCE, defines_of
from tests.unit.kernels.attention_contract import Heads

DEFINES = {"H": 64, "G": 2}


class FakeNvrtc:
    """The library's functions over one program; `log` makes it refuse."""

    def __init__(self, log: bytes = b"") -> None:
        self.log, self.source, self.num_programs = log, b"", 0
        self.flags: list[str] = []
        self.nvrtcGetErrorString: Any = lambda code: b"NVRTC_ERROR"

    def nvrtcCreateProgram(self, program: Any, source: bytes, *_: Any) -> int:
        self.source = source
        self.num_programs += 1
        return 0

    def nvrtcCompileProgram(self, program: Any, num: int, flags: Any) -> int:
        self.flags = [flags[i].decode() for i in range(num)]
        return 6 if self.log else 0

    def nvrtcGetProgramLogSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(self.log) + 1
        return 0

    def nvrtcGetProgramLog(self, program: Any, buffer: Any) -> int:
        buffer.value = self.log
        return 0

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:
        size._obj.value = 6
        return 0

    def nvrtcGetCUBIN(self, program: Any, buffer: Any) -> int:
        ctypes.memmove(buffer, b"cu\0bin", 6)
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:
        self.num_programs -= 1
        return 0


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "nvrtc_paths", lambda: iter(["/nonexistent/libnvrtc.so"]))


def make_nvcc(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "nvcc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_nvrtc_is_asked_first_and_its_bytes_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = FakeNvrtc()
    monkeypatch.setattr(build, "load_nvrtc", lambda: nvrtc)
    assert compile_source(SOURCE, "sm_90", DEFINES) == b"cu\0bin"
    assert nvrtc.flags == ["--gpu-architecture=sm_90", "--std=c++17", "-DH=64", "-DG=2"]
    assert nvrtc.source == SOURCE.read_bytes() and nvrtc.num_programs == 0


def test_what_nvrtc_says_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = FakeNvrtc(log=b"a.cu(3): warning: so so\na.cu(7): error: no such thing\n1 error detected")
    monkeypatch.setattr(build, "load_nvrtc", lambda: nvrtc)
    with pytest.raises(BuildError, match=r"^NVRTC failed: a.cu\(7\): error: no such thing$"):
        compile_with_nvrtc(SOURCE, options("sm_90", DEFINES))
    assert nvrtc.num_programs == 0


def test_nvcc_is_asked_where_there_is_no_nvrtc(
    no_nvrtc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_nvcc(
        tmp_path, f'echo "$@" > {tmp_path}/flags; for last; do :; done; printf made > "$last"', monkeypatch
    )
    assert compile_source(SOURCE, "sm_90", DEFINES) == b"made"
    flags = (tmp_path / "flags").read_text()
    assert flags.startswith(f"-cubin --gpu-architecture=sm_90 --std=c++17 -DH=64 -DG=2 {SOURCE} -o ")


def test_without_either_the_operator_reads_what_is_missing_and_what_to_do(
    no_nvrtc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        compile_source(SOURCE, "sm_90", DEFINES)
    assert str(caught.value) == (
        "attention_backend=cuda compiles paged_attention.cu for sm_90 and neither NVRTC nor nvcc could: "
        "NVRTC (libnvrtc) is not installed; nvcc is not on the PATH; "
        "install the CUDA toolkit, or use attention_backend=triton"
    )


def test_an_nvcc_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_nvcc(tmp_path, "echo 'nvcc fatal   : Unsupported gpu architecture' >&2; exit 1", monkeypatch)
    with pytest.raises(BuildError, match="nvcc failed: nvcc fatal   : Unsupported gpu architecture$"):
        compile_with_nvcc(SOURCE, options("sm_999", {}))


def test_an_nvcc_that_does_not_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_nvcc(tmp_path, "", monkeypatch)
    (tmp_path / "nvcc").write_text("#!/nonexistent/sh\n")
    with pytest.raises(BuildError, match="nvcc does not run: No such file or directory"):
        compile_with_nvcc(SOURCE, options("sm_90", DEFINES))


@pytest.mark.parametrize("compile_with", [compile_with_nvrtc, compile_with_nvcc])
def test_a_gpus_compiler_accepts_the_kernel(compile_with: Callable[[Path, Sequence[str]], bytes]) -> None:
    """No GPU is needed for that, only the compiler; NVRTC refuses what nvcc takes for code of the host."""
    if compile_with is compile_with_nvcc and shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    if compile_with is compile_with_nvrtc:
        try:
            build.load_nvrtc()
        except BuildError:
            pytest.skip("needs NVRTC")
    for heads, dtype in ((Heads(32, 8, 128), torch.bfloat16), (Heads(4, 2, 80), torch.float16)):
        defines = defines_of(dtype, block_size=16, **dataclasses.asdict(heads))
        cubin = compile_with(SOURCE, options("sm_90", dict(defines)))
        assert cubin.startswith(b"\x7fELF") and b"paged_attention" in cubin and b"merge_splits" in cubin


def test_the_kernel_is_installed_with_the_package() -> None:
    declared = Path(__file__).parents[3] / "pyproject.toml"
    assert '"kernels/cuda/*.cu"' in declared.read_text() and SOURCE.is_file()
