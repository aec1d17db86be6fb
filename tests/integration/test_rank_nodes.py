"""Ranks on two nodes, as process trees of their own: they answer as one process does, and end together."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer import LLM
from infer.errors import DeviceLost
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.integration.test_rank_processes import (
    GREEDY,
    LONG,
    PATIENCE,
    PROMPTS,
    is_alive,
    rank_pids,
    shared_memory,
    wait_for,
)
from tests.support import gloo_ranks
from tests.support.server_process import start_server
from tests.unit.client.test_rank_greeting import free_port

SECRET = "a secret of the nodes"
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "nnodes")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nodes") / "llama"
    make_checkpoint("llama", path, sizes=Sizes(hidden_size=128, vocab_size=300, num_layers=3), seed=3,
                    max_position_embeddings=32_768)  # fmt: skip
    shutil.copytree(path, path.parent / "copy")  # the other machine has it in another place
    return path


def knobs_of(port: int, **knobs: Any) -> dict[str, Any]:
    defaults = {"device": "cpu", "quantization": "fp32", "kv_cache_memory": "64MiB"}
    return defaults | {"tensor_parallel_size": 2, "nnodes": 2, "master_port": port} | knobs


@contextmanager
def start_node(
    log: Path, model: Path, secret: str = SECRET, module: str = "infer", **knobs: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """`infer serve` on the second node; it is killed at the end."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in knobs.items()]
    arguments = ["serve", str(model), "--node-rank", "1", "--headless", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "INFER_RANK_TOKEN": secret}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdout=output, stderr=output, env=environment
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def own_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_RANK_TOKEN", SECRET)


def tokens(llm: LLM) -> list[Any]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY)]


def lose(llm: LLM, pid: int, number: signal.Signals) -> DeviceLost:
    """Send a process a signal while a request decodes; returns what the request got."""
    seen = threading.Event()

    def send() -> None:
        seen.wait()
        os.kill(pid, number)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(DeviceLost) as lost:
        for _ in llm.stream(PROMPTS[0], LONG):
            seen.set()
    thread.join()
    return lost.value


def test_two_nodes_answer_as_one_and_meet_again_after_a_killed_rank(checkpoint: Path, tmp_path: Path) -> None:
    before, log = shared_memory(), tmp_path / "node.log"
    knobs = knobs_of(free_port())
    with LLM(checkpoint, **knobs | {"tensor_parallel_size": 1, "nnodes": 1}) as llm:
        alone = tokens(llm)
    with start_node(log, checkpoint.parent / "copy", **knobs) as node:
        with LLM(checkpoint, **knobs) as llm:
            assert not rank_pids(), "the other rank is on the other node"
            assert tokens(llm) == alone
            (rank,) = rank_pids(node.pid)
            assert "rank 1 ended with signal 9" in str(lose(llm, rank, signal.SIGKILL))
        with LLM(checkpoint, **knobs) as llm:
            assert tokens(llm) == alone
            (rank,) = rank_pids(node.pid)
        wait_for(lambda: not is_alive(rank))
        assert node.poll() is None and "rank 1 ended with signal 9" in log.read_text()
        node.terminate()
        assert node.wait(PATIENCE) == 0
    assert shared_memory() == before


@pytest.mark.parametrize(
    "size", [(1, 2), *(pytest.param((2, stages), marks=pytest.mark.slow) for stages in (1, 2))], ids=str
)
def test_ranks_as_on_the_gpus_of_two_nodes_answer_as_one_and_end_together(
    size: tuple[int, int], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo stands in for NCCL; ranks are killed while they decode and while they start."""
    before, knobs = shared_memory(), knobs_of(free_port(), quantization="none", dtype="float32")
    gloo_ranks.install(monkeypatch.setattr)
    monkeypatch.setenv(gloo_ranks.FOLDER, str(tmp_path))
    knobs |= dict(zip(SIZES[:2], size, strict=True))
    with LLM(checkpoint, **knobs | dict.fromkeys(SIZES, 1)) as llm:
        alone = tokens(llm)
    with start_node(tmp_path / "log", checkpoint, module=gloo_ranks.MODULE, **knobs) as node:
        with LLM(checkpoint, **knobs) as llm:
            assert tokens(llm) == alone
            start = time.monotonic()
            error = str(lose(llm, max(rank_pids(node.pid)), signal.SIGKILL))
            # Gloo may notice before the other node says so
            assert "ended with signal 9" in error or "the device failed in step" in error
            assert time.monotonic() - start < PATIENCE
        for seconds in (0.0, 2.0):  # it has just begun, or imports and reads weights
            with pytest.raises(DeviceLost, match="ended with signal 9|is gone|the device failed"):
                threading.Thread(target=kill_next_rank, args=(node.pid, seconds)).start()
                with LLM(checkpoint, **knobs) as llm:
                    list(llm.stream(PROMPTS[0], LONG))
            wait_for(lambda: not rank_pids(node.pid) and rank_pids() == [node.pid])
        with LLM(checkpoint, **knobs) as llm:
            assert tokens(llm) == alone
    assert shared_memory() == before


def kill_next_rank(parent: int, seconds: float) -> None:
    """Kill the next rank of a node, this long after it has been started."""
    wait_for(lambda: rank_pids(parent))
    (*_, rank) = rank_pids(parent)
    time.sleep(seconds)
    os.kill(rank, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["rank", "node"])
@pytest.mark.parametrize("knob", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_stopped_process_of_the_other_node_ends_the_group(
    who: str, knob: str, checkpoint: Path, tmp_path: Path
) -> None:
    knobs = knobs_of(free_port()) | {"tensor_parallel_size": 1} | {knob: 2}
    with start_node(tmp_path / "log", checkpoint, **knobs) as node, LLM(checkpoint, **knobs) as llm:
        (rank,) = rank_pids(node.pid)
        error = lose(llm, rank if who == "rank" else node.pid, signal.SIGSTOP)
        reason = "rank 1 was stopped by a signal" if who == "rank" else "node 1 has not answered"
        assert reason in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("secret", "model", "knobs", "reason"),
    [
        (
            "another secret, also long",
            "",
            {},
            "the secret (INFER_RANK_TOKEN) of this node differs from node 0's",
        ),
        (SECRET, "other", {}, "node 1 has model="),
        (SECRET, "", {"max_seq_len": 64}, "node 1 has max_seq_len=64, and node 0 has max_seq_len=None"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_the_right_one_waited_for(
    secret: str, model: str, knobs: dict[str, Any], reason: str, checkpoint: Path, tmp_path: Path
) -> None:
    if model:
        make_checkpoint("llama", tmp_path / model, sizes=Sizes(vocab_size=300, num_layers=2))
    own = knobs_of(free_port())
    log = tmp_path / "wrong"
    made: list[LLM] = []
    head = threading.Thread(target=lambda: made.append(LLM(checkpoint, **own)), daemon=True)
    head.start()
    path = tmp_path / model if model else checkpoint
    with start_node(log, path, secret, **own | knobs) as wrong:
        assert wrong.wait(PATIENCE) == 2
    assert reason in log.read_text() and not made
    with start_node(tmp_path / "right", checkpoint, **own):
        head.join(PATIENCE)
        with made[0]:
            assert len(tokens(made[0])) == len(PROMPTS)


@pytest.mark.slow
def test_a_server_starts_again_with_a_node_that_lost_a_rank(checkpoint: Path, tmp_path: Path) -> None:
    def ask() -> int:
        body = {"model": "llama", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
        try:
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).status_code
        except httpx.HTTPError:
            return 0

    knobs = knobs_of(free_port(), dtype="float32")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in knobs.items()]
    with start_node(tmp_path / "log", checkpoint, **knobs) as node:
        arguments = ("--model", str(checkpoint), *flags, "--served-model-name", "llama")
        with start_server(tmp_path, *arguments) as server:
            wait_for(lambda: ask() == 200)
            (rank,) = rank_pids(node.pid)
            (engine,) = server.children()
            os.kill(rank, signal.SIGKILL)  # while the engine is idle
            wait_for(lambda: server.children() not in ([engine], []))
            wait_for(lambda: ask() == 200)
            (engine,) = server.children()
            os.kill(engine, signal.SIGKILL)
            (again,) = rank_pids(node.pid)
            wait_for(lambda: not is_alive(again))
            wait_for(lambda: ask() == 200)
            server.stop()
        assert node.poll() is None
