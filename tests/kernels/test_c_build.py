"""Compiling the C kernels: once, safely, and never as a reason to fail."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from infer.kernels.cpu import build, library
from infer.kernels.cpu.build import SOURCES, CBuildError, build_library
from infer.kernels.cpu.program import ProgramArena
from tests.kernels.c_builds import sanitized_library
from tests.support.server_process import is_alive, wait_until

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="needs a C compiler")
QUICK = ("-O0",)


@pytest.fixture
def small_source(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is compiled in no time."""
    sources = tmp_path_factory.mktemp("csrc")
    (sources / "answer.c").write_text("int answer(void) { return 42; }\n")
    monkeypatch.setattr(build, "SOURCES", sources)


@needs_compiler
@pytest.mark.usefixtures("small_source")
def test_is_compiled_once(tmp_path: Path) -> None:
    path = build_library(extra_flags=QUICK, directory=tmp_path)
    before = path.stat().st_mtime_ns
    assert build_library(extra_flags=QUICK, directory=tmp_path) == path
    assert path.stat().st_mtime_ns == before and list(tmp_path.iterdir()) == [path]


@needs_compiler
@pytest.mark.usefixtures("small_source")
def test_two_that_start_together_both_get_a_whole_library(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda _: build_library(extra_flags=QUICK, directory=tmp_path), range(2)))
    assert made[0] == made[1] and list(tmp_path.iterdir()) == [made[0]]
    assert ctypes.CDLL(str(made[0])).answer() == 42


@needs_compiler
@pytest.mark.usefixtures("small_source")
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_a_library_that_was_cut_short_is_compiled_again(tmp_path: Path, kept: float) -> None:
    path = build_library(extra_flags=QUICK, directory=tmp_path)
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[: int(kept * len(whole))])
    assert build_library(extra_flags=QUICK, directory=tmp_path) == path
    assert ctypes.CDLL(str(path)).answer() == 42 and len(path.read_bytes()) == len(whole)


@needs_compiler
def test_another_source_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build._key("cc", QUICK)
    copy = tmp_path / "csrc"
    shutil.copytree(SOURCES, copy)
    (copy / "pack.c").write_text((copy / "pack.c").read_text() + "\n/* changed */\n")
    monkeypatch.setattr(build, "SOURCES", copy)
    assert build._key("cc", QUICK) != first


def test_no_compiler_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CBuildError, match=r"^there is no C compiler \(cc, gcc or clang\)$"):
        build_library(directory=tmp_path)


def test_a_compiler_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho 'x.c:1: error: no such thing' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(CBuildError, match="cc failed: x.c:1: error: no such thing") as caught:
        build_library(directory=tmp_path / "made")
    assert "\n" not in str(caught.value) and list((tmp_path / "made").iterdir()) == []


def test_a_compiler_that_takes_too_long_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, child = tmp_path / "cc", tmp_path / "child"
    fake.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit\nsleep 60 & echo $! >{child}\nwait\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(build, "TIMEOUT", 1.0)
    with pytest.raises(CBuildError, match="did not finish within 1 s"):
        build_library(directory=tmp_path / "made")
    pid = int(child.read_text())
    wait_until(lambda: not is_alive(pid), timeout_s=30.0)  # a kill takes time on a busy machine


def test_without_a_library_the_reason_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Path:
        raise CBuildError("there is no C compiler")

    monkeypatch.setattr(library, "build_library", fail)
    monkeypatch.setattr(library, "_state", None)
    assert library.library() is None and library.library() is None
    assert [record.message for record in caplog.records] == [
        "the C kernels cannot be used, so the CPU is slower: there is no C compiler"
    ]
    assert library.why_not() == "there is no C compiler"


def test_an_arena_gives_memory_out_again_when_its_last_view_is_gone() -> None:
    arena = ProgramArena()
    first = arena.empty((4, 100), torch.float32)
    view, address = first[1:3], first.data_ptr()
    del first
    second = arena.empty((4, 100), torch.float32)
    assert second.data_ptr() != address
    del view
    assert arena.empty((4, 100), torch.float32).data_ptr() == address


DRIVER = """
import sys, torch
from pathlib import Path
from infer.kernels.cpu import operations
from infer.kernels.cpu.library import Library
from infer.quant.packed import PackedMatrix
c = Library(Path(sys.argv[1]))
c.set_threads(2)
for bits in (8, 4):
    for M, N, K in ((1, 17, 45), (43, 33, 64), (3, 16, 31)):
        matrix = PackedMatrix(c, N, K, bits)
        matrix.fill(torch.randn(N, K), 0)
        y = matrix.multiply(torch.randn(M, K), torch.randn(N))
        matrix.lookup(torch.tensor([0, N - 1, N]))
        assert y.isfinite().all()
operations.rms_norm(c, torch.randn(3, 45), torch.randn(45), 1e-5, 0.0)
operations.activation(c, torch.randn(3, 90), "silu", is_gated=True)
operations.activation(c, torch.randn(3, 45), "gelu_tanh")
operations.layer_norm(c, torch.randn(3, 45), torch.randn(3, 45), torch.randn(45), torch.randn(45), 1e-5)
operations.scale(c, torch.randn(3, 45), 1.5)
q, k = torch.randn(5, 4, 20), torch.randn(5, 2, 20)
keys, values = torch.randn(64, 2, 20), torch.randn(64, 2, 20)
table = torch.arange(4).view(1, 4)
operations.rope(c, q, k, torch.randn(9, 10), torch.randn(9, 10), torch.arange(5))
operations.write_cache(c, k, k, keys, values, torch.arange(5))
operations.attend(c, q, keys, values, table, torch.tensor([[0, 5, 0, 40, -1, 0]]),
                  block_size=16, scale=1.0, window=9)
keys, values = torch.randn(1104, 2, 20), torch.randn(1104, 2, 20)
parts = torch.zeros(operations.parts_shape(3, 4, 2, 20))
operations.attend(c, q, keys, values, torch.arange(69).view(1, 69),
                  torch.tensor([[0, 1, 0, 1097, s, s] for s in range(3)] + [[1, 4, 0, 1098, -1, 0]]),
                  block_size=16, scale=1.0, window=None, parts=parts)
from infer.kernels.elementwise.kv_codes import KVScales
x = torch.randn(64, 2, 20)
x[0], x[1], x[2, 0, 3], x[3, 1, 4] = x[0] * 1e-37, x[1] * 1e-44, torch.nan, torch.inf
for dtype in (torch.float8_e4m3fn, torch.int8):
    keys, values = torch.zeros(2, 64, 2, 20, dtype=torch.uint8).view(dtype)
    scales = KVScales(*torch.zeros(2, 4, 2, 16))
    operations.write_cache(c, x, x, keys, values, torch.arange(64), scales)
    operations.attend(c, q, keys, values, torch.arange(4).view(1, 4), torch.tensor([[0, 5, 0, 58, -1, 0]]),
                      block_size=16, scale=1.0, window=9, scales=scales)
for size in (1, 45, 5000):
    logits = torch.randn(3, size)
    logits[2, size // 2] = torch.nan
    peak, best = logits.max(dim=1)
    noise = torch.randint(2**31, (3, 2)).int()
    for temperature in (0.1, 50.0):
        operations.likely(c, logits, best, peak, torch.full((3,), temperature), noise)
c.set_threads(1)
print("clean")
"""


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the sanitizer's library")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="native"),
        pytest.param(("-DINFER_PORTABLE",), id="portable", marks=pytest.mark.slow),  # to compile
    ],
)
def test_sanitizers_find_nothing(flags: tuple[str, ...]) -> None:
    """Odd shapes under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of their own."""
    compiler = build.find_compiler()
    assert compiler is not None
    answer = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True)
    runtime = answer.stdout.strip()
    if "/" not in runtime:
        pytest.skip("the compiler has no AddressSanitizer")
    path = sanitized_library(*flags)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(path)],
        env={
            "LD_PRELOAD": runtime,
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONPATH": ":".join(sys.path),
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout == "clean\n", done.stderr[-2000:]
