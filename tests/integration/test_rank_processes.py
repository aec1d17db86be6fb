"""Ranks as processes: they answer as one process does, and when one is gone nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from infer import LLM, SamplingParams
from infer.client import rank_group
from infer.engine import rank_worker
from infer.errors import DeviceLost, EngineError
from infer.kernels.runtime.communicator import RankLine
from infer.tools.record import Record, Recorder
from infer.tools.replay import replay_model
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.server_process import start_server

PROMPTS = [list(range(5, 45)), [7, 8, 9, 7, 8, 9], [100, 200]]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=20_000, temperature=0, ignore_eos=True)
PATIENCE = 240.0  # seconds, on a busy machine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "llama"
    make_checkpoint("llama", path, sizes=Sizes(hidden_size=128, vocab_size=300, num_layers=3), seed=3,
                    max_position_embeddings=32_768)  # fmt: skip
    return path


def open_llm(path: Path, size: int, num_stages: int = 1, **knobs: Any) -> LLM:
    defaults: dict[str, Any] = {"device": "cpu", "quantization": "int8", "kv_cache_memory": "64MiB"}
    return LLM(path, tensor_parallel_size=size, pipeline_parallel_size=num_stages, **(defaults | knobs))


def rank_pids(owner: int | None = None) -> list[int]:
    """The processes of ranks that a process has started, by default this one."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if rank_group.RANK_MODULE.encode() in words and parent == (owner or os.getpid()):
            found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
    return value


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def lose_rank(
    llm: LLM, number: signal.Signals, rank: int = 1, pid: int | None = None
) -> tuple[DeviceLost, float]:
    """Send the rank a signal while a request decodes; returns what the request got, and after which time."""
    if pid is None:
        pid = llm.engine._device._ranks._group.processes[rank].pid  # type: ignore[attr-defined]
    seen, sent_at = threading.Event(), list[float]()

    def send() -> None:
        seen.wait()
        sent_at.append(time.monotonic())
        os.kill(pid, number)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(DeviceLost) as lost:
        for _ in llm.stream(PROMPTS[0], LONG):
            seen.set()
    passed = time.monotonic() - sent_at[0]
    thread.join()
    return lost.value, passed


@pytest.mark.parametrize(
    ("size", "num_stages", "killed"),
    [(2, 1, 1), (1, 2, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 3, 2), (2, 2, 1)))],
)
def test_processes_answer_as_one_and_end_with_a_killed_rank(
    size: int, num_stages: int, killed: int, checkpoint: Path, tmp_path: Path
) -> None:
    before = shared_memory()
    recorder = Recorder(tmp_path / "run.jsonl")
    with open_llm(checkpoint, 1) as llm:
        alone = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY)]
    with open_llm(checkpoint, size, num_stages, observer=recorder) as llm:
        assert len(rank_pids()) == size * num_stages - 1
        assert [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY)] == alone
        num_steps, stats = recorder.num_steps, llm.engine.stats()
        assert stats.rank_step_s > 0 and len(stats.rank_wait_s) == 3 * size * num_stages
        assert stats.rank_wait_s[5] > 0, "rank 1 has waited for orders"
        error, passed = lose_rank(llm, signal.SIGKILL, killed)
        assert f"rank {killed} ended with signal 9" in str(error) and passed < PATIENCE
        with pytest.raises(DeviceLost):  # there is no way on, and no waiting
            llm.generate(PROMPTS[0], GREEDY)
    wait_for(lambda: not rank_pids())
    assert shared_memory() == before
    recorder.close()
    replay = replay_model(Record(recorder.path), str(checkpoint), device=None, show_progress=False)
    report = replay.run(until=num_steps)  # with one rank
    assert report.difference is None and num_steps > 10


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 3)])
def test_a_stopped_rank_ends_the_group(size: int, num_stages: int, checkpoint: Path) -> None:
    with open_llm(checkpoint, size, num_stages) as llm:
        error, _ = lose_rank(llm, signal.SIGSTOP)
        assert "rank 1 was stopped by a signal" in str(error)
        wait_for(lambda: not rank_pids())  # a stopped process is killed as well


@pytest.mark.parametrize(
    ("waiting", "silent"),
    [([1, 0, 2], 1), ([0, 1, 1], 0), ([1, 1, 0], 2), ([0, 0, 2], None), ([0, 2, 2], None)],
)
def test_a_rank_that_others_wait_for_is_silent_if_nothing_moves(
    waiting: list[int], silent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "LOOK_S", 0.001)
    monkeypatch.setattr(rank_group, "SILENT_S", 0.01)
    num_looks = 0

    def lines() -> list[RankLine]:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 100 and silent is None:
            group.lost = "the test has ended"
        return [RankLine(7, each, 0.0, 0.0, 0.0) for each in waiting]

    group = rank_group._Group(lambda: None, lines)
    group.is_waited_for = True
    rank_group._watch(group)
    wanted = "the test has ended" if silent is None else f"rank {silent} has not answered for 0 s"
    assert group.lost == wanted


def test_a_step_of_gpus_that_never_ends_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for good for a rank that lives and does not come."""
    monkeypatch.setattr(rank_group, "LOOK_S", 0.001)
    monkeypatch.setattr(rank_group, "SILENT_S", 0.01)
    idle = [RankLine(7, 0, 0.0, 0.0, 0.0)]
    group = rank_group._Group(lambda: None, lambda: idle)
    group.is_waited_for, group.expected_since = True, time.monotonic()
    rank_group._watch(group)
    assert group.lost == "a step of the ranks has not ended for 0 s"


def test_a_gpu_that_fails_is_noticed_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False, torch.AcceleratorError("CUDA error: an illegal address\nmore lines")])

    class Stream:
        def __init__(self, device: torch.device) -> None: ...

        def query(self) -> bool:
            if isinstance(answer := next(answers), Exception):
                raise answer
            return bool(answer)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(rank_worker, "LOOK_S", 0.001)
    monkeypatch.setattr(rank_worker, "is_gpu", lambda device: True)
    lost: list[DeviceLost] = []
    rank_worker.watch_device(torch.device("cpu"), lost.append)
    assert [str(error) for error in lost] == ["the device failed in a step: CUDA error: an illegal address"]


# -- failures while they start -------------------------------------------------------------------------


def test_a_rank_that_fails_to_load_says_so_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_group, "RANK_MODULE", "tests.support.failing_rank")
    with pytest.raises(EngineError, match="RuntimeError in the engine"):
        open_llm(checkpoint, 2)
    written = capfd.readouterr().err
    assert written.count("RuntimeError: no luck with this part") == 1 and "rank 1 failed" in written
    wait_for(lambda: not rank_pids())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("is_loading", [False, True])
def test_a_rank_that_is_lost_before_it_is_ready_ends_the_start(
    number: signal.Signals, is_loading: bool, checkpoint: Path
) -> None:
    def send() -> None:
        (pid,) = wait_for(rank_pids)
        if is_loading:  # the library of PyTorch is mapped: it is past its first line
            wait_for(lambda: b"libtorch_cpu" in Path(f"/proc/{pid}/maps").read_bytes())
        os.kill(pid, number)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(DeviceLost, match="rank 1 (ended with signal 9|was stopped by a signal)"):
        open_llm(checkpoint, 2)
    thread.join()
    wait_for(lambda: not rank_pids())


OWNER = """
import sys, time
from infer import LLM
if __name__ == "__main__":
    llm = LLM(sys.argv[1], device="cpu", tensor_parallel_size=2, kv_cache_memory="8MiB", max_seq_len=64)
    print(*(each.pid for each in llm.engine._device._ranks._group.processes.values()), flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True])
def test_ranks_die_with_the_process_that_has_the_engine(is_stopped: bool, checkpoint: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(checkpoint)], stdout=subprocess.PIPE, env=os.environ
    )
    try:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
    finally:
        owner.kill()
        owner.wait()
    wait_for(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    """True if a process is there and is more than an entry that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("knob", ["--tensor-parallel-size", "-pp"])
def test_a_server_starts_its_engine_again_when_a_rank_is_killed(
    knob: str, checkpoint: Path, tmp_path: Path
) -> None:
    def ask() -> int:
        body = {"model": "llama", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
        try:
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).status_code
        except httpx.HTTPError:
            return 0

    arguments = ("--model", str(checkpoint), knob, "2", "--kv-cache-memory", "8MiB")
    with start_server(tmp_path, *arguments, "--served-model-name", "llama") as server:
        assert ask() == 200
        (engine,) = server.children()
        (rank,) = rank_pids(engine)
        os.kill(rank, signal.SIGKILL)  # while the engine is idle
        wait_for(lambda: server.children() not in ([engine], []))
        log = server.log.read_text()
        assert 'engine down reason="the engine process died: rank 1 ended with signal 9' in log
        assert "Traceback" not in log
        wait_for(lambda: ask() == 200)
        (engine,) = server.children()
        (rank,) = rank_pids(engine)
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: not is_alive(rank))
        wait_for(lambda: ask() == 200)
        server.stop()
    assert not is_alive(rank)
