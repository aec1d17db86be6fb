"""Several ranks on one GPU: their sums, what a dead rank leads to, and the answers of whole models."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.execution.rank_ring import RankLink
from infer.kernels.linear.residual import ResidualInput
from infer.kernels.runtime.gpu_communicator import NCCL_BYTES, GpuCommunicator
from infer.kernels.runtime.nccl import load_nccl
from infer.loader.find.source import resolve_model
from infer.tools.quantize import Recipe, quantize_checkpoint
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.gpu.graphs import capture
from tests.support.adapters import make_adapter
from tests.support.gpu_ranks import mps, run_cases, run_ranks

pytestmark = pytest.mark.gpu

COUNTS = (4, 7, 4096, 12 * 4096, 300_001, 1 << 20)  # numbers of a share: less than a piece to many rounds


@pytest.fixture(scope="module")
def env() -> Iterator[dict[str, str]]:
    with mps() as found:
        yield found


def share(rank: int, count: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    return torch.randn(count, generator=generator, device="cuda").to(dtype)


def total(size: int, count: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum in the order of the ranks, rounded once."""
    shares = [share(rank, count, seed, dtype).float() for rank in range(size)]
    for other in shares[1:]:
        shares[0] += other
    return shares[0].to(dtype)


def exchange_all(ranks: GpuCommunicator, link: RankLink, rank: int) -> int:
    """Sums of many lengths, gathered columns, ids of rank 0, and a captured graph, with delays in between."""
    delays, dtype, num_wrong = random.Random(rank), ranks._dtype, 0
    for seed in range(8):
        for count in COUNTS:
            x = share(rank, count, seed, dtype)
            torch.cuda._sleep(delays.choice((0, 0, 1000, 200_000)))  # type: ignore[no-untyped-call]
            if not delays.randrange(4):
                time.sleep(0.001)
            num_wrong += not torch.equal(ranks.all_reduce(x), total(ranks.size, count, seed, dtype))
    for columns in (300, 50_257):
        whole = share(0, 3 * columns, columns, dtype).view(3, columns)
        width = -(-columns // ranks.size // 32) * 32
        mine = whole[:, rank * width : (rank + 1) * width]
        num_wrong += not torch.equal(ranks.all_gather(mine, columns), whole)
    ids = torch.arange(5, device="cuda") + 10 * rank
    ranks.first(ids)
    num_wrong += ids.tolist() != [0, 1, 2, 3, 4]
    x = torch.zeros(4096, dtype=dtype, device="cuda")
    with ranks.alone():
        assert ranks.all_reduce(x) is x
        graph, y = capture(lambda: ranks.all_reduce(ranks.all_reduce(x + 0) * 0.5))
    for seed in range(40):
        x.copy_(share(rank, 4096, seed, dtype))
        torch.cuda._sleep(delays.choice((0, 100_000)))  # type: ignore[no-untyped-call]
        graph.replay()
        half = total(ranks.size, 4096, seed, dtype) * 0.5
        expected = half.float().clone()
        for _ in range(ranks.size - 1):
            expected += half.float()
        num_wrong += not torch.equal(y, expected.to(dtype))
    return num_wrong


def add_all(ranks: GpuCommunicator, link: RankLink, rank: int) -> list[str]:
    """Sums that are added to the residual stream, of several shapes, one after the other."""
    wrong, dtype = [], torch.bfloat16
    for seed, (rows, size) in enumerate(
        [(1, 4096), (8, 4096), (3, 520), (32, 4096), (2, 8192), (1, 128)] * 5
    ):
        assert (parts := ranks.num_parts(rows, size)) is not None
        x, residual = share(rank, rows * size, seed, dtype), share(8, rows * size, seed, dtype)
        gain = share(9, size, seed, dtype)
        torch.cuda._sleep(50_000 * rank)  # type: ignore[no-untyped-call]
        total = ranks.add(x.view(rows, size), ResidualInput(residual.view(rows, size), gain, 1.0))
        shares = [share(other, rows * size, seed, dtype).float() for other in range(ranks.size)]
        expected = shares[0]
        for other in (*shares[1:], residual.float()):
            expected = expected + other
        expected = expected.to(dtype).view(rows, size)
        if not torch.equal(total.sum_MN, expected):
            wrong.append(f"sum {rows} {size}")
        if not torch.equal(total.scaled_MN, (expected.float() * (gain.float() + 1.0)).to(dtype)):
            wrong.append(f"scaled {rows} {size}")
        squares = expected.double().square().sum(1)
        if total.squares_PM.shape != (parts, rows) or not torch.allclose(total.squares_PM.sum(0), squares):
            wrong.append(f"squares {rows} {size}")
    return wrong


def exchange_and_add(ranks: GpuCommunicator, link: RankLink, rank: int) -> tuple[int, list[str]]:
    return exchange_all(ranks, link, rank), add_all(ranks, link, rank) if ranks.can_add else []


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.bfloat16), (4, torch.bfloat16), (2, torch.float16)], ids=str
)
def test_exchanges_are_those_of_torch_whatever_comes_first(
    size: int, dtype: torch.dtype, env: dict[str, str]
) -> None:
    assert run_ranks(exchange_and_add, size, env, dtype) == [(0, [])] * size


def wait_for_nobody(ranks: GpuCommunicator, link: RankLink, rank: int) -> Any:
    """Rank 0 begins an exchange to which rank 1 never comes."""
    x = torch.ones(4096, device="cuda")
    if rank == 1:
        while not link.communicator.is_aborted:
            time.sleep(0.01)
        return True
    start = time.monotonic()
    for _ in range(100):  # those behind the first find out at once
        ranks.all_reduce(x)
    torch.cuda.synchronize()
    return time.monotonic() - start


def abort_soon(ranks: GpuCommunicator, link: RankLink, rank: int) -> Any:
    """The same, and another thread says that rank 1 is gone."""
    if rank == 0:
        threading.Timer(0.3, link.communicator.abort).start()
    return wait_for_nobody(ranks, link, rank)


def test_a_rank_that_does_not_come_ends_the_wait(env: dict[str, str]) -> None:
    seconds, _ = run_ranks(wait_for_nobody, 2, env, torch.float32, wait_s=1.0)
    assert 0.9 < seconds < 20
    seconds, _ = run_ranks(abort_soon, 2, env, torch.float32)
    assert 0.2 < seconds < 20


def use_nccl(ranks: GpuCommunicator, link: RankLink, rank: int) -> bool:
    x = torch.arange(NCCL_BYTES // 4, dtype=torch.float32, device="cuda")
    assert ranks._nccl is not None
    is_right = torch.equal(ranks.all_reduce(x), torch.arange(NCCL_BYTES // 4, device="cuda").float())
    link.communicator.abort()
    return is_right


def test_long_sums_of_ranks_with_gpus_of_their_own_go_through_nccl(env: dict[str, str]) -> None:
    """One GPU is one rank of its own: the calls are right, whatever NCCL then does."""
    if load_nccl() is None:
        pytest.skip("this PyTorch has no NCCL that others can call")
    assert run_ranks(use_nccl, 1, env, torch.float32) == [True]


# -- whole models --------------------------------------------------------------------------------------

SIZES = Sizes(hidden_size=128, vocab_size=300, num_layers=2, num_experts=3)
FEW: dict[str, Any] = {"max_batch_size": 4, "max_num_batched_tokens": 256}


def test_two_ranks_answer_as_one_process_does_and_end_together(tmp_path: Path) -> None:
    """They take turns on the GPU: MPS may not be well when a process is killed in a kernel."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
    path = tmp_path / "qwen3_moe"
    make_checkpoint(path.name, path, sizes=SIZES, seed=3, max_position_embeddings=32_768,
                    moe_intermediate_size=128)  # fmt: skip
    case = FEW | {"path": str(path), "dtype": "float32"}
    alone, together = run_cases([case | {"size": 1}, case | {"size": 2, "lose": int(signal.SIGKILL)}], env)
    assert together[0] == alone[0]
    reason, seconds = together[2:]
    assert "rank 1 ended with signal 9" in reason and seconds < 30


def test_sixteen_bits_and_codes_are_cut_right(tmp_path: Path, env: dict[str, str]) -> None:
    """Greedy ids may differ by a tie, so the logprobs of prompts are compared, and only first ids."""
    make_checkpoint("llama", tmp_path / "plain", sizes=SIZES, seed=3)
    recipe = Recipe(scheme="gptq", group_size=32)
    quantize_checkpoint(resolve_model(str(tmp_path / "plain")), tmp_path / "gptq", recipe)
    case = FEW | {"path": str(tmp_path / "gptq"), "dtype": "bfloat16", "quantization": "auto"}
    case |= {"kv_cache_dtype": "fp8"}
    found = run_cases([case | {"size": 1}, case | {"size": 2}], env)
    alone, together = (torch.tensor(logprobs) for _, logprobs in found)
    assert len(alone) > 40
    torch.testing.assert_close(together, alone, rtol=0, atol=0.2)
    pairs = [(row[:3], other[:3]) for row, other in zip(found[0][0], found[1][0], strict=True)]
    assert sum(row == other for row, other in pairs) >= len(pairs) / 2, pairs


def test_a_gpu_that_fails_on_another_rank_ends_the_group_in_time(tmp_path: Path) -> None:
    """Its kernels never come to the sums that rank 0's wait for; without MPS, which would end rank 0, too."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
    make_checkpoint("llama", tmp_path / "llama", sizes=SIZES, seed=3, max_position_embeddings=32_768)
    case = FEW | {"path": str(tmp_path / "llama"), "dtype": "float32", "size": 2, "fault": "poke"}
    ((_, _, reason, seconds),) = run_cases([case], env)
    assert "rank 1 failed: the device failed" in reason and "illegal memory access" in reason
    assert seconds < 10  # most of it for compiling the kernel that goes astray


def test_a_capture_that_fails_on_one_rank_leaves_all_with_the_same_steps(
    tmp_path: Path, env: dict[str, str]
) -> None:
    make_checkpoint("llama", tmp_path / "llama", sizes=SIZES, seed=3, max_position_embeddings=32_768)
    case: dict[str, Any] = FEW | {"path": str(tmp_path / "llama"), "dtype": "float32", "fault": "capture"}
    case |= {"max_num_batched_tokens": 2048, "prepares": True, "longest": 700}
    alone, together = run_cases([case | {"size": 1}, case | {"size": 2}], env)
    assert together[0] == alone[0]


def test_ranks_have_parts_of_adapters(tmp_path: Path, env: dict[str, str]) -> None:
    """In bfloat16 few rows multiply an adapter in the kernel of a matrix, and the sums go through Triton."""
    sizes = Sizes(hidden_size=512, vocab_size=300, num_layers=2)
    make_checkpoint("llama", tmp_path / "llama", sizes=sizes, seed=3)
    adapter = make_adapter(tmp_path / "adapter", tmp_path / "llama", seed=5, rank=16)
    case: dict[str, Any] = FEW | {"path": str(tmp_path / "llama"), "lora_modules": {"x": str(adapter)}}
    exact, rounded = ([case | {"dtype": dtype, "size": size, "adapter": "x"} for size in (1, 2)]
                      for dtype in ("float32", "bfloat16"))  # fmt: skip
    plain = case | {"dtype": "float32", "size": 2}
    alone, together, base, *found = run_cases([*exact, plain, *rounded], env)
    assert together[0] == alone[0] != base[0]
    few, many = (torch.tensor(logprobs) for _, logprobs in found)
    torch.testing.assert_close(many, few, rtol=0, atol=0.2)
