"""Compiling CUDA C++ at run time: where NVRTC cannot, the operator reads why."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infer.errors import ConfigError
from infer.kernels.attention.decode_cuda import DECODE, PROJECTED, CachedHeads, CudaKernel
from infer.kernels.runtime import cubin_cache
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime.cuda_build import (
    BuildError,
    compile_source,
    compile_with_nvrtc,
    options,
)
from tests.kernels.attention_contract import Heads

SOURCE = DECODE.source
DEFINES = {"H": 64, "G": 2}


class FakeNvrtc:
    """The library's functions over one program; `log` makes it refuse."""

    def __init__(self, log: bytes = b"") -> None:
        self.log, self.source, self.num_programs, self.num_compiled = log, b"", 0, 0
        self.version = (13, 0)
        self.flags: list[str] = []
        self.nvrtcGetErrorString: Any = lambda code: b"NVRTC_ERROR"

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.version
        return 0

    def nvrtcCreateProgram(self, program: Any, source: bytes, *_: Any) -> int:
        self.source = source
        self.num_programs += 1
        return 0

    def nvrtcCompileProgram(self, program: Any, num: int, flags: Any) -> int:
        self.flags = [flags[i].decode() for i in range(num)]
        self.num_compiled += 1
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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "infer" / "kernels"


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> FakeNvrtc:
    library = FakeNvrtc()
    monkeypatch.setattr(build, "load_nvrtc", lambda: library)
    return library


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "nvrtc_paths", lambda: iter(["/nonexistent/libnvrtc.so"]))


def test_what_nvrtc_made_is_whole(nvrtc: FakeNvrtc) -> None:
    assert compile_source(SOURCE, "sm_90", DEFINES) == b"cu\0bin"
    usual = ["--gpu-architecture=sm_90", "--std=c++17", "-DH=64", "-DG=2"]
    assert nvrtc.flags == [*usual, f"--include-path={SOURCE.parent}", "--device-as-default-execution-space"]
    assert nvrtc.source == SOURCE.read_bytes() and nvrtc.num_programs == 0


def test_what_nvrtc_says_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = FakeNvrtc(log=b"a.cu(3): warning: so so\na.cu(7): error: no such thing\n1 error detected")
    monkeypatch.setattr(build, "load_nvrtc", lambda: nvrtc)
    with pytest.raises(BuildError, match=r"^NVRTC failed: a.cu\(7\): error: no such thing$"):
        compile_with_nvrtc(SOURCE, options("sm_90", DEFINES))
    assert nvrtc.num_programs == 0


def test_without_nvrtc_the_operator_reads_what_is_missing_and_what_to_do(no_nvrtc: None) -> None:
    with pytest.raises(ConfigError) as caught:
        compile_source(SOURCE, "sm_90", DEFINES)
    assert str(caught.value) == (
        "attention_backend=cuda compiles decode_attention.cu for sm_90 and NVRTC (libnvrtc) is not "
        "installed; install the CUDA toolkit, or use attention_backend=triton"
    )


ON_HOPPER = (Heads(32, 8, 128), torch.bfloat16, "sm_90")
ON_AMPERE = (Heads(4, 2, 64), torch.float16, "sm_80")


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        (DECODE, ON_AMPERE),
        (PROJECTED, ON_HOPPER),
        pytest.param(DECODE, ON_HOPPER, marks=pytest.mark.slow),
        pytest.param(PROJECTED, ON_AMPERE, marks=pytest.mark.slow),
    ],
    ids=["decode sm_80", "projected sm_90", "decode sm_90", "projected sm_80"],
)
def test_the_compiler_accepts_the_kernels(kernel: CudaKernel, case: tuple[Heads, torch.dtype, str]) -> None:
    """No GPU is needed for that, only the compiler."""
    try:
        build.load_nvrtc()
    except BuildError:
        pytest.skip("needs NVRTC")
    heads, dtype, arch = case
    cached = CachedHeads(dtype, **dataclasses.asdict(heads), block_size=16)
    has_norm = kernel is PROJECTED and arch == "sm_90"
    defines = cached.defines(kernel, has_norm=has_norm, pdl=arch == "sm_90")
    cubin = compile_with_nvrtc(kernel.source, options(arch, dict(defines)))
    assert cubin.startswith(b"\x7fELF") and kernel.name.encode() in cubin


def test_the_kernel_is_installed_with_the_package() -> None:
    declared = Path(__file__).parents[3] / "pyproject.toml"
    assert '"kernels/*/*.cu"' in declared.read_text() and SOURCE.is_file()
    assert '"kernels/*/*.cuh"' in declared.read_text() and SOURCE.with_name("decode.cuh").is_file()


# -- cubins are kept ------------------------------------------------------------------------------


def test_a_cubin_is_compiled_once(nvrtc: FakeNvrtc, cache: Path) -> None:
    made = [compile_source(SOURCE, "sm_90", DEFINES) for _ in range(3)]
    assert made == [b"cu\0bin"] * 3 and nvrtc.num_compiled == 1
    assert [path.suffix for path in cache.iterdir()] == [".cubin"], "nothing is left beside it"


def test_of_those_that_want_a_cubin_at_once_one_compiles_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for a lock finds what the one before has made; no lock is left."""
    all_have_looked, num_looks, num_made = threading.Event(), 0, 0
    read = cubin_cache._read

    def look(path: Path) -> bytes | None:
        nonlocal num_looks
        found = read(path)
        num_looks += 1
        if num_looks == 5:  # the first twice, the others once
            all_have_looked.set()
        return found

    def make() -> bytes:
        nonlocal num_made
        num_made += 1
        assert all_have_looked.wait(60)
        return b"made"

    monkeypatch.setattr(cubin_cache, "_read", look)
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(cubin_cache.cached, [b"key"], make) for _ in range(4)]
        assert [one.result(60) for one in made] == [b"made"] * 4
    assert num_made == 1
    assert [path.suffix for path in cache.iterdir()] == [".cubin"]


def test_one_that_hangs_does_not_keep_the_others_from_compiling(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lock is waited for, which is logged, up to a bound; what it makes after all is kept as usual."""
    monkeypatch.setattr(cubin_cache, "_LONG_SECONDS", 0.01)
    monkeypatch.setattr(cubin_cache, "_MAX_SECONDS", 0.1)
    is_in, may_end = threading.Event(), threading.Event()

    def hang() -> bytes:
        is_in.set()
        assert may_end.wait(60)
        return b"made"

    with ThreadPoolExecutor(1) as pool, caplog.at_level("INFO"):
        first = pool.submit(cubin_cache.cached, [b"key"], hang)
        try:
            assert is_in.wait(60)
            assert cubin_cache.cached([b"key"], lambda: b"made") == b"made"
        finally:
            may_end.set()
        assert first.result(60) == b"made"
    waiting, giving_up = (record.getMessage() for record in caplog.records)
    assert "waiting for another process to compile lock=" in waiting and "compiles too lock=" in giving_up
    assert [path.suffix for path in cache.iterdir()] == [".cubin"]


def test_another_source_define_gpu_or_compiler_is_another_cubin(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    copy = tmp_path / "copy.cu"

    def compiled(text: str = "a", arch: str = "sm_90", included: str = "b", **defines: int) -> int:
        copy.write_text(text)
        (tmp_path / "part.cuh").write_text(included)
        before = nvrtc.num_compiled
        compile_source(copy, arch, DEFINES | defines)
        return nvrtc.num_compiled - before

    assert compiled() == 1 and compiled() == 0
    assert compiled(text="c") == compiled(included="d") == compiled(arch="sm_80") == compiled(H=128) == 1
    nvrtc.version = (13, 1)
    assert compiled() == 1 and compiled() == 0


@pytest.mark.parametrize("harm", ["truncated", "changed", "empty", "a folder"])
def test_what_is_not_whole_is_compiled_again(nvrtc: FakeNvrtc, cache: Path, harm: str) -> None:
    compile_source(SOURCE, "sm_90", DEFINES)
    (path,) = cache.iterdir()
    content = path.read_bytes()
    path.unlink()
    if harm == "a folder":
        path.mkdir()
    else:
        path.write_bytes({"truncated": content[:-1], "changed": content[:-1] + b"!", "empty": b""}[harm])
    assert compile_source(SOURCE, "sm_90", DEFINES) == b"cu\0bin" and nvrtc.num_compiled == 2
    if harm != "a folder":
        assert path.read_bytes() == content, "and kept again"


def test_a_folder_that_cannot_be_written_is_no_error(
    nvrtc: FakeNvrtc, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where a folder should be")
    assert compile_source(SOURCE, "sm_90", DEFINES) == b"cu\0bin"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: _no_home()))
    assert compile_source(SOURCE, "sm_90", DEFINES) == b"cu\0bin"


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_what_fails_is_not_kept(nvrtc: FakeNvrtc) -> None:
    nvrtc.log = b"a.cu(7): error: no such thing"
    with pytest.raises(ConfigError):
        compile_source(SOURCE, "sm_90", DEFINES)
    nvrtc.log = b""
    assert compile_source(SOURCE, "sm_90", DEFINES) == b"cu\0bin"


# -- the driver -----------------------------------------------------------------------------------


class FakeDriver:
    """Takes its time to read the arguments of a launch, as one that is called without Python's lock may."""

    def __init__(self) -> None:
        self.launched: list[list[int]] = []

    def cuModuleLoadData(self, *_: Any) -> int:
        return 209

    def cuGetErrorString(self, code: int, reason: Any) -> None:
        reason._obj.value = b"no kernel image is available"

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: Any) -> int:
        values = []
        for pointer in pointers:
            values.append(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int)).contents.value)
            time.sleep(1e-4)
        self.launched.append([config._obj.grid[0], *values])
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(build, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return fake


def test_threads_that_share_a_launch_do_not_mix_their_arguments(driver: FakeDriver) -> None:
    launch = build.PreparedLaunch(ctypes.c_void_p(1), 32, [ctypes.c_int] * 3, pdl=False)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: launch(number, number, number, number), range(1, 41)))
    assert sorted(driver.launched) == [[number] * 4 for number in range(1, 41)]


def test_a_cubin_the_driver_is_too_old_for_is_a_failed_build(driver: FakeDriver) -> None:
    with pytest.raises(BuildError, match="driver refused the compiled kernels: no kernel image is available"):
        build.LoadedKernels(b"cubin")
