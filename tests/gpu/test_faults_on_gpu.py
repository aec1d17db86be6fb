"""Faults on a GPU: memory that runs out anywhere, graphs that cannot be captured, a kernel that goes astray.

And what a start meets on a shared machine: caches of compilers that are damaged, full or no folders, and a
card that another process has taken.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from infer import LLM, SamplingParams
from infer.execution.gpu.graphs import StepGraphs, StepSize
from scripts.make_checkpoint import make_checkpoint
from tests.gpu.graphs import FEW_SIZES
from tests.support.failing_allocator import FailingAllocator, FailingEngine
from tests.support.faulty_gpu_server import POKE
from tests.support.server_process import ROOT, start_server, wait_until

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * i + j) % 200 + 10 for j in range(3 + 5 * i)] for i in range(5)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, seed=1, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, banned_ids=((11,), (12, 13))),
]
NUM_TRIED = 12  # of the hundreds of allocations of a run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("faults") / "qwen3"
    make_checkpoint("qwen3", directory)
    return str(directory)


def answers_of(llm: LLM) -> list[list[list[int]]]:
    return [[output.token_ids for output in answer.outputs] for answer in llm.generate(PROMPTS, PARAMS)]


def failing(checkpoint: str, number: int, **knobs: Any) -> tuple[list[list[list[int]]], FailingAllocator]:
    """The answers of an engine one of whose allocations fails; 0: none does."""
    llm = LLM(checkpoint, device="cuda", dtype="float32", **(FEW_SIZES | knobs))
    allocator = FailingAllocator(lambda count: count == number)
    FailingEngine(llm.engine, allocator)
    return answers_of(llm), allocator


@pytest.mark.parametrize("knobs", [{}, {"use_cuda_graphs": False}, {"max_num_batched_tokens": 16}], ids=str)
def test_whichever_allocation_of_a_step_fails_no_token_differs(
    checkpoint: str, knobs: dict[str, Any]
) -> None:
    expected, counted = failing(checkpoint, 0, **knobs)
    num_failed = 0
    for number in sorted({*range(1, counted.count + 1, max(counted.count // NUM_TRIED, 1)), counted.count}):
        found, allocator = failing(checkpoint, number, **knobs)
        num_failed += allocator.num_failed  # a first run compiles, and allocates more
        assert found == expected, f"allocation {number} of {counted.count}"
    assert num_failed > 0


@pytest.mark.parametrize("error", [RuntimeError("capture"), torch.OutOfMemoryError("capture")], ids=repr)
def test_a_capture_that_fails_leaves_steps_that_are_launched(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    expected = answers_of(LLM(checkpoint, device="cuda", dtype="float32", **FEW_SIZES))
    record, numbers = StepGraphs._record, iter(range(10**6))

    def fails_half(self: StepGraphs, size: StepSize) -> Any:
        if next(numbers) % 2:
            return record(self, size)
        raise error

    monkeypatch.setattr(StepGraphs, "_record", fails_half)
    assert answers_of(LLM(checkpoint, device="cuda", dtype="float32", **FEW_SIZES)) == expected


def test_a_capture_that_breaks_off_in_the_middle_spoils_no_other(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers_of(LLM(checkpoint, device="cuda", dtype="float32", **FEW_SIZES))
    numbers = iter(range(10**6))
    take = StepGraphs._take_block

    def synchronizes(self: StepGraphs) -> None:
        take(self)
        if next(numbers) % 3 == 0:
            torch.cuda.current_stream().synchronize()  # CUDA refuses that while it records

    monkeypatch.setattr(StepGraphs, "_take_block", synchronizes)
    try:
        found = answers_of(LLM(checkpoint, device="cuda", dtype="float32", **FEW_SIZES))
    except torch.AcceleratorError:
        pytest.fail("a capture that was refused is no lost device")
    assert found == expected


def test_a_kernel_that_goes_astray_ends_the_engine_and_another_takes_over(
    checkpoint: str, tmp_path: Path
) -> None:
    flags = (f"tiny={checkpoint}", "--device", "cuda", "--max-batch-size", "8", "--max-queue", "64")
    with start_server(tmp_path, *flags, module="tests.support.faulty_gpu_server") as server:
        body = {"prompt": [7, 8, 9], "max_tokens": 8, "temperature": 0, "ignore_eos": True}

        def ask(**fields: Any) -> httpx.Response:
            return httpx.post(f"{server.url}/v1/completions", json=body | fields, timeout=60)

        before = ask().json()["choices"][0]["text"]
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(ask, max_tokens=100, prompt=[20 + i, 21]) for i in range(3)]
            poked = pool.submit(ask, prompt=[POKE, 8]).result()
            told = [other.result() for other in others]
        assert poked.status_code in (500, 503), poked.text
        assert {answer.status_code for answer in told} <= {200, 500, 503}
        wait_until(lambda: ask().status_code == 200, timeout_s=90)
        assert ask().json()["choices"][0]["text"] == before
        log = server.log.read_text()
        assert "engine down reason=" in log and "engine restarted" in log, log[-6000:]


def generate(
    checkpoint: str, environment: dict[str, str], *, prefix: str = ""
) -> subprocess.CompletedProcess[str]:
    command = (
        f"{prefix} exec {sys.executable} -m infer generate --model {checkpoint} --device cuda "
        "--dtype float32 --max-batch-size 8 --max-num-batched-tokens 1024 "
        "--temperature 0 --max-tokens 5 river < /dev/null"
    )
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=os.environ | environment,
        check=False,
    )


@pytest.fixture(scope="module")
def plain(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Caches that a run has filled, and what that run said."""
    folder = tmp_path_factory.mktemp("caches")
    done = generate(checkpoint, caches(folder))
    assert done.returncode == 0, done.stderr
    yield folder, done.stdout


def caches(folder: Path) -> dict[str, str]:
    return {"TRITON_CACHE_DIR": str(folder / "triton"), "XDG_CACHE_HOME": str(folder / "xdg")}


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_damaged_caches_of_compilers_are_made_again(
    checkpoint: str, plain: tuple[Path, str], tmp_path: Path, damage: str
) -> None:
    folder, said = plain
    subprocess.run(["cp", "-r", f"{folder}/.", str(tmp_path)], check=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(files) > 10
    for path in files:
        data = path.read_bytes()
        spoilt = {"cut": data[: len(data) // 2], "garbage": os.urandom(len(data)), "empty": b""}[damage]
        path.write_bytes(spoilt)
    done = generate(checkpoint, caches(tmp_path))
    assert (done.returncode, done.stdout) == (0, said), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("trouble", ["a file in place of the folder", "no byte may be written"])
def test_caches_that_cannot_be_written_are_done_without(
    checkpoint: str, plain: tuple[Path, str], tmp_path: Path, trouble: str
) -> None:
    prefix, environment = "", caches(tmp_path)
    if trouble.startswith("a file"):
        for name in ("triton", "xdg"):
            (tmp_path / name).write_text("")
    else:
        prefix = "ulimit -f 0;"
    done = generate(checkpoint, environment, prefix=prefix)
    assert "Traceback" not in done.stderr, done.stderr
    if done.returncode == 0:
        assert done.stdout == plain[1]
    else:  # Triton cannot run without its cache: then a line says which folder it is
        assert done.returncode == 2, done.stderr
        assert any(word in done.stderr for word in ("TRITON_CACHE_DIR", "TMPDIR", str(tmp_path))), done.stderr


@pytest.mark.whole_card
def test_a_card_that_another_process_has_taken_is_told_in_a_line(
    checkpoint: str, plain: tuple[Path, str]
) -> None:
    script = (
        "import torch, sys; free, _ = torch.cuda.mem_get_info(); "
        "held = torch.empty(free - (200 << 20), dtype=torch.uint8, device='cuda'); held[::1 << 20] = 1; "
        "torch.cuda.synchronize(); print('taken', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as neighbour:
        assert neighbour.stdout is not None and neighbour.stdin is not None
        assert neighbour.stdout.readline() == "taken\n"
        done = generate(checkpoint, caches(plain[0]))
        neighbour.stdin.close()
    assert done.returncode != 0
    assert "Traceback" not in done.stderr, done.stderr
    assert "memory" in done.stderr.splitlines()[-1].lower(), done.stderr
    again = generate(checkpoint, caches(plain[0]))
    assert (again.returncode, again.stdout) == (0, plain[1]), again.stderr
