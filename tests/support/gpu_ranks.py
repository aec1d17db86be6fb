"""Ranks as processes on one GPU, for tests and benchmarks: MPS, and a group of functions that exchange.

Without MPS processes take turns on a GPU, milliseconds each; everything works, a hundred times slower.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from infer.errors import DeviceLost
from infer.execution.rank_ring import RankLink, link_bytes
from infer.kernels.cpu.library import library
from infer.kernels.runtime.gpu_communicator import GpuCommunicator
from infer.kernels.runtime.node_communicator import NodeCommunicator

CONTROL = "nvidia-cuda-mps-control"
LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Run the MPS daemon, if there is one, once for all processes of tests; yields their environment."""
    if shutil.which(CONTROL) is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield dict(os.environ)
        return
    folder = Path(tempfile.gettempdir()) / f"infer-mps-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    env = dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=str(folder), CUDA_MPS_LOG_DIRECTORY=str(folder))
    with (folder / "users").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        subprocess.run([CONTROL, "-d"], env=env, capture_output=True)  # an error: it runs already
        try:
            yield env
        finally:
            with suppress(BlockingIOError):  # the last one ends it
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                subprocess.run([CONTROL], input="quit\n", env=env, text=True, timeout=60, capture_output=True)


Work = Callable[[Any, RankLink, int], Any]  # a communicator, its link, the number of the rank


def run_ranks(
    work: Work,
    size: int,
    env: dict[str, str],
    dtype: torch.dtype,
    wait_s: float = 60.0,
    num_stages: int = 1,
    *,
    on_nodes: bool = False,
) -> list[Any]:
    """Run a function of a module on every rank, and return what each gave; `on_nodes`: each is a machine."""
    context, before = multiprocessing.get_context("spawn"), dict(os.environ)
    os.environ.update(env)
    try:
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            os.truncate(file.name, link_bytes(size))
            queue: Any = context.Queue()
            ranks: list[Any] = []
            try:
                for index in range(size):
                    args = work, file.name, index, size, num_stages, dtype, wait_s, on_nodes, queue
                    ranks.append(context.Process(target=_run, args=args))
                    ranks[-1].start()
                found = dict[int, Any]()
                while len(found) < size:
                    rank, gave = queue.get(timeout=240)
                    assert not isinstance(gave, str), gave  # the others may wait for this rank
                    found[rank] = gave
                for process in ranks:
                    process.join(60)
            finally:
                for process in ranks:
                    process.kill()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return [found[rank] for rank in range(size)]


def _run(
    work: Work,
    path: str,
    rank: int,
    size: int,
    num_stages: int,
    dtype: torch.dtype,
    wait_s: float,
    on_nodes: bool,
    queue: Any,
) -> None:
    try:
        if on_nodes:  # NCCL refuses two ranks on one GPU of one machine
            os.environ |= LOOPBACK | {"NCCL_HOSTID": f"machine-{rank}"}
        c = library()
        assert c is not None, "ranks need the C kernels"
        with Path(path).open("r+b") as file:
            link = RankLink(c, mmap.mmap(file.fileno(), link_bytes(size)), rank, size, num_stages)
        kind = NodeCommunicator if on_nodes else partial(GpuCommunicator, wait_s=wait_s)
        communicator = kind(link.communicator, torch.device("cuda", 0), dtype)
        result = work(communicator, link, rank)
        torch.cuda.synchronize()
        queue.put((rank, result))
        link.communicator.everyone().all_reduce(
            torch.zeros(1)
        )  # no rank ends while another may write to its memory
    except BaseException:
        queue.put((rank, traceback.format_exc()))


# -- whole models, in a process that begins under MPS ------------------------------------------------------


def run_cases(cases: list[dict[str, Any]], env: dict[str, str], timeout: float = 600) -> list[Any]:
    """What models answer, one after the other; a case is knobs and arguments of `_answer`."""
    command = [sys.executable, "-m", "tests.support.gpu_ranks", json.dumps(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == len(cases), done.stdout[-2000:]
    return [json.loads(line) for line in lines]


def _answer(
    path: str, size: int = 1, stages: int = 1, lose: int = 0, fault: str = "", adapter: str = "",
    prepares: bool = False, longest: int = 0, node: int = 0, **knobs: Any,
) -> list[Any]:  # fmt: skip
    """Ids of outputs and logprobs of prompts; with `lose`, also the error and the seconds after a signal.

    `fault`: that of the other ranks (faulty_gpu_rank.py); `poke` gives the error and the seconds, too.
    `node`: the process of another node, whose rank gets the signal. `adapter` is the name of one. If it
    `prepares`, all steps are prepared first. `longest`: the tokens of one more prompt.
    """
    from infer import LLM, SamplingParams
    from infer.client import rank_group
    from tests.integration.test_rank_processes import LONG, lose_rank, rank_pids, wait_for

    if fault:
        rank_group.RANK_MODULE = "tests.support.faulty_gpu_rank"
        os.environ["INFER_TEST_FAULT"] = fault

    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, prompt_logprobs=1)
    defaults: dict[str, Any] = {"quantization": "none", "kv_cache_memory": "64MiB", "max_batch_size": 8,
                                "max_num_batched_tokens": 1024, "device": "cuda:0"}  # fmt: skip
    prompts = [list(range(5, 45)), [7, 8, 9, 7, 8, 9], [100, 200]]
    if longest:
        prompts.append([3 + i * i % 200 for i in range(longest)])
    ranks = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
    with LLM(path, **(defaults | ranks | knobs)) as llm:
        while prepares and llm.engine.prepare():
            pass
        made = llm.generate(prompts, params, adapter=adapter)
        params = replace(params, max_tokens=10, prompt_logprobs=None)
        longer = llm.generate(prompts * 3, params, adapter=adapter)
        logprobs = [row.logprob for each in made for row in each.prompt_logprobs or [] if row is not None]
        answer = [[list(each.token_ids) for each in (*made, *longer)], logprobs]
        if lose:
            error, seconds = lose_rank(llm, signal.Signals(lose), pid=rank_pids(node)[0] if node else None)
            wait_for(lambda: not rank_pids())
            answer += [str(error), seconds]
        if fault == "poke":
            last = time.monotonic()
            try:
                for _ in llm.stream(prompts[0], LONG):
                    last = time.monotonic()
            except DeviceLost as error:
                answer += [str(error), time.monotonic() - last]
    return answer


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        print(json.dumps(_answer(**case)), flush=True)
