"""Two processes on one GPU that pass for two machines, joined by NCCL over loopback.

NCCL refuses two ranks on one GPU of one machine, and tells machines apart by NCCL_HOSTID. So what goes
between machines goes through NCCL's own sockets here, in captured steps as well. Every wait has an end.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.execution.rank_ring import RankLink
from infer.kernels.runtime.nccl import load_nccl
from infer.kernels.runtime.node_communicator import NodeCommunicator
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.gpu.test_stages_on_gpu import SHAPES, rows_of
from tests.gpu.test_tensor_parallel_on_gpu import COUNTS, share, total
from tests.support.gpu_ranks import LOOPBACK, mps, run_cases, run_ranks
from tests.unit.client.test_rank_greeting import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(load_nccl() is None, reason="this PyTorch has no NCCL that others can call"),
]


@pytest.fixture(scope="module")
def env() -> Iterator[dict[str, str]]:
    with mps() as found:
        yield found


def record(
    ranks: NodeCommunicator, step: Callable[[], torch.Tensor]
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture a step as the device half does: threads of NCCL may call the driver meanwhile."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with ranks.alone(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = step()
    return graph, y


def sum_twice(ranks: NodeCommunicator, x: torch.Tensor) -> torch.Tensor:
    return ranks.all_reduce(ranks.all_reduce(x + 0) * 0.5)


def sum_all(ranks: NodeCommunicator, link: RankLink, rank: int) -> list[str]:
    """Sums of many lengths, in both ways, gathered columns, ids of rank 0, and a captured graph."""
    delays, dtype, wrong = random.Random(rank), ranks._dtype, list[str]()
    for seed in range(4):
        for ranks.deterministic in (False, True):
            for count in COUNTS:
                x = share(rank, count, seed, dtype)
                torch.cuda._sleep(delays.choice((0, 0, 1000, 200_000)))  # type: ignore[no-untyped-call]
                if not torch.equal(ranks.all_reduce(x), total(2, count, seed, dtype)):
                    wrong.append(f"sum of {count}, deterministic={ranks.deterministic}")
    for columns in (300, 50_257):
        whole = share(0, 3 * columns, columns, dtype).view(3, columns)
        width = -(-columns // 2 // 32) * 32
        mine = whole[:, rank * width : (rank + 1) * width]
        if not torch.equal(ranks.all_gather(mine, columns), whole):
            wrong.append(f"{columns} columns")
    ids = torch.arange(5, device="cuda") + 10 * rank
    ranks.first(ids)
    if ids.tolist() != [0, 1, 2, 3, 4]:
        wrong.append("ids")
    for ranks.deterministic in (False, True):
        x = torch.zeros(4096, dtype=dtype, device="cuda")
        graph, y = record(ranks, partial(sum_twice, ranks, x))
        for seed in range(20):
            x.copy_(share(rank, 4096, seed, dtype))
            graph.replay()
            half = total(2, 4096, seed, dtype) * 0.5
            if not torch.equal(y, (half.float() + half.float()).to(dtype)):
                wrong.append(f"replay {seed}, deterministic={ranks.deterministic}")
    return wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_between_machines_are_those_of_torch(dtype: torch.dtype, env: dict[str, str]) -> None:
    assert run_ranks(sum_all, 2, env, dtype, on_nodes=True) == [[]] * 2


def pass_all(ranks: NodeCommunicator, link: RankLink, rank: int) -> list[str]:
    """Rows to the last stage and ids back, several on their way, launched one by one and in a graph."""
    delays, wrong, all_ids = (
        random.Random(rank),
        list[str](),
        torch.zeros(16, dtype=torch.int64, device="cuda"),
    )
    x = rows_of(0, (16, 512), torch.float32)

    def stage(x: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            ranks.pass_on(x + 1)
            return x
        return ranks.take(x.shape[0], x.shape[1], torch.float32)

    def check(seed: int, x: torch.Tensor, y: torch.Tensor) -> None:
        torch.cuda._sleep(delays.choice((0, 0, 1000, 300_000)))  # type: ignore[no-untyped-call]
        if rank == 0 and not torch.equal(y, x + 1):
            wrong.append(f"rows {seed} {tuple(x.shape)}")

    def take_ids(seed: int) -> None:
        ids = torch.zeros(5, dtype=torch.int64, device="cuda")
        if rank == 1:
            ranks.first(ids)
            if ids.tolist() != [seed + each for each in range(5)]:
                wrong.append(f"ids {seed}")

    graph, y = record(ranks, lambda: stage(x))
    for seed in range(100):  # a stage takes the ids of a step two steps later
        if seed % 2:
            x.copy_(rows_of(seed, (16, 512), torch.float32))
            graph.replay()
            check(seed, x, y)
        else:
            rows = rows_of(seed, SHAPES[seed // 2 % len(SHAPES)], torch.float32)
            check(seed, rows, stage(rows))
        if rank == 0:
            all_ids[:5] = torch.arange(5, device="cuda") + seed
        ranks.pass_ids(all_ids)
        if seed >= 2:
            take_ids(seed - 2)
    take_ids(98)
    take_ids(99)
    return wrong


def test_rows_and_ids_pass_between_machines(env: dict[str, str]) -> None:
    assert run_ranks(pass_all, 2, env, torch.float32, num_stages=2, on_nodes=True) == [[]] * 2


# -- whole models --------------------------------------------------------------------------------------

SIZES = Sizes(hidden_size=128, vocab_size=300, num_layers=3, num_experts=3)
FEW: dict[str, Any] = {"max_batch_size": 4, "max_num_batched_tokens": 256, "dtype": "float32"}
SECRET = "a secret of two machines"


@contextmanager
def other_node(
    model: Path, log: Path, env: dict[str, str], **knobs: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The second machine; it is killed at the end."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in knobs.items()]
    command = [sys.executable, "-m", "infer", "serve", str(model), "--node-rank=1", "--headless", *flags]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env | {"NCCL_HOSTID": "second"})
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.parametrize(
    ("family", "knobs"),
    [
        ("qwen3_moe", {"tensor_parallel_size": 2}),
        ("llama", {"tensor_parallel_size": 2, "deterministic": True}),
        ("llama", {"pipeline_parallel_size": 2}),
    ],
    ids=str,
)
def test_two_machines_answer_as_one_process_does_and_end_together(
    family: str, knobs: dict[str, Any], tmp_path: Path
) -> None:
    """Steps are captured. They take turns on the GPU: MPS may not be well after a kill."""
    knobs, plain = (
        dict(knobs),
        {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")},
    )
    env = plain | LOOPBACK | {"NCCL_HOSTID": "first", "INFER_RANK_TOKEN": SECRET}
    path = tmp_path / family
    experts: dict[str, Any] = {"moe_intermediate_size": 128} if "moe" in family else {}
    make_checkpoint(family, path, sizes=SIZES, seed=3, max_position_embeddings=32_768, **experts)
    common = {"nnodes": 2, "master_port": free_port()}
    weights = {"quantization": "none", "dtype": "float32", "device": "cuda:0"}
    case = FEW | {"path": str(path), "prepares": True, "longest": 700}
    case["deterministic"] = knobs.pop("deterministic", False)
    sizes = {"size": knobs.get("tensor_parallel_size", 1), "stages": knobs.get("pipeline_parallel_size", 1)}
    with other_node(path, tmp_path / "log", env, **common | weights | knobs) as node:
        ends = {"lose": int(signal.SIGKILL), "node": node.pid}
        try:
            alone, together = run_cases([case, case | common | sizes | ends], env, timeout=240)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"{error}\n{(tmp_path / 'log').read_text()[-4000:]}") from None
        assert node.poll() is None
    assert together[0] == alone[0]
    assert together[1] == pytest.approx(alone[1], abs=1e-4)
    reason, seconds = together[2:]
    assert "rank 1 ended with signal 9" in reason or "NCCL failed" in reason, reason
    assert seconds < 30
