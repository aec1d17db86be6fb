"""Stages of layers on one GPU: what they pass on, what a dead stage leads to, and answers of whole models."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.execution.rank_ring import RankLink
from infer.kernels.runtime.gpu_communicator import GpuCommunicator
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.gpu.graphs import capture
from tests.support.gpu_ranks import mps, run_cases, run_ranks

pytestmark = pytest.mark.gpu

SHAPES = ((1, 64), (3, 7), (32, 4096), (300, 4096), (2048, 512), (1, 1))


@pytest.fixture(scope="module")
def env() -> Iterator[dict[str, str]]:
    with mps() as found:
        yield found


def rows_of(seed: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def pass_all(ranks: GpuCommunicator, link: RankLink, rank: int) -> list[str]:
    """Rows of many shapes through all stages, each of which adds 1, and ids back, with delays in between."""
    delays, dtype, wrong = random.Random(rank), ranks._dtype, list[str]()
    is_last = ranks.stage == ranks.num_stages - 1

    def stage(x: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
        y = (x if ranks.stage == 0 else ranks.take(num_rows, width, dtype)) + 1
        if not is_last:
            ranks.pass_on(y)
        return y

    def go(seed: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if is_last:
            expected = x.clone()
            for _ in range(ranks.num_stages):
                expected = expected + 1
            if not torch.equal(y, expected):
                wrong.append(f"rows {seed} {tuple(x.shape)}")
        torch.cuda._sleep(delays.choice((0, 0, 1000, 300_000)))  # type: ignore[no-untyped-call]
        ids = torch.arange(5, device="cuda") + 10 * seed + (0 if rank == 0 else 1000)
        ranks.first(ids)
        if ids.tolist() != [10 * seed + each for each in range(5)]:
            wrong.append(f"ids {seed}")

    for seed in range(48):
        shape = SHAPES[seed % len(SHAPES)]
        x = rows_of(seed, shape, dtype)
        torch.cuda._sleep(delays.choice((0, 0, 1000, 300_000)))  # type: ignore[no-untyped-call]
        if not delays.randrange(4):
            time.sleep(0.001)
        go(seed, x, stage(x, *shape))
    for seed in range(40):  # many on their way at once: no ids are waited for
        y = stage(rows_of(seed, (64, 512), dtype), 64, 512)
        if is_last and not torch.equal(y, stage_sum(seed, dtype, ranks.num_stages)):
            wrong.append(f"ahead {seed}")
    x = rows_of(0, (16, 512), dtype)
    with ranks.alone():  # nothing comes, and nothing is waited for
        assert ranks.stage == 0 or not ranks.take(2, 8, dtype).any()
        graph, y = capture(lambda: stage(x, 16, 512))
    for seed in range(60):
        x.copy_(rows_of(seed, (16, 512), dtype))
        graph.replay()
        go(seed, x, y)
    return wrong


def stage_sum(seed: int, dtype: torch.dtype, num_stages: int) -> torch.Tensor:
    x = rows_of(seed, (64, 512), dtype)
    for _ in range(num_stages):
        x = x + 1
    return x


@pytest.mark.parametrize(
    ("num_stages", "dtype"), [(2, torch.bfloat16), (2, torch.float32), (3, torch.float16)], ids=str
)
def test_what_is_passed_on_arrives_whatever_comes_first(
    num_stages: int, dtype: torch.dtype, env: dict[str, str]
) -> None:
    assert run_ranks(pass_all, num_stages, env, dtype, num_stages=num_stages) == [[]] * num_stages


def step_all(ranks: GpuCommunicator, link: RankLink, rank: int) -> list[str]:
    """Steps of two stages of two ranks: sums, rows, columns and ids, also captured and three at once."""
    wrong, num_columns, share = list[str](), 300, 160
    is_last, own = ranks.stage == ranks.num_stages - 1, share if ranks.rank == 0 else num_columns - share

    def step(x: torch.Tensor) -> torch.Tensor:
        if not is_last:
            y = ranks.all_reduce(ranks.all_reduce(x * 1.0) * 0.5)
            ranks.pass_on(y)
            return y
        y = ranks.all_reduce(ranks.take(len(x), x.shape[1], torch.float32) * 0.5)
        return ranks.all_gather(y[:, :1] + torch.zeros((len(x), own), device="cuda"), num_columns)

    for num_rows in (1, 2, 4, 8, 16, 32, 64, 128):
        x = torch.zeros((num_rows, 128), device="cuda")
        mine = torch.arange(num_rows, device="cuda") + (0 if rank == 0 else 1000)
        ids = mine.clone()
        time.sleep(0.05 * ((rank * 7 + num_rows) % 4))
        with ranks.alone():
            graph, y = capture(partial(step, x))
        for seed in range(12):
            x.fill_(float(seed + 1))
            for _ in range(1 if seed % 2 else 3):
                ids.copy_(mine)
                if seed % 3:
                    graph.replay()
                else:
                    y.copy_(step(x))
                ranks.first(ids)
            if ids.tolist() != list(range(num_rows)):
                wrong.append(f"ids {num_rows} {seed}")
            if is_last and not torch.equal(y, torch.full_like(y, 2.0 * (seed + 1))):
                wrong.append(f"columns {num_rows} {seed}")
    return wrong


def test_two_stages_of_two_ranks_exchange_what_a_step_has(env: dict[str, str]) -> None:
    assert run_ranks(step_all, 4, env, torch.float32, num_stages=2) == [[]] * 4


def take_from_nobody(ranks: GpuCommunicator, link: RankLink, rank: int) -> Any:
    """Rank 0, the last stage, waits for rows that the first one never passes on."""
    if rank == 1:
        while not link.communicator.is_aborted:
            time.sleep(0.01)
        return True
    start = time.monotonic()
    for _ in range(20):
        ranks.take(8, 512, torch.float32)
    torch.cuda.synchronize()
    return time.monotonic() - start


def pass_to_nobody(ranks: GpuCommunicator, link: RankLink, rank: int) -> Any:
    """The first stage passes on more than there is room for, and nothing is taken."""
    if rank == 0:
        while not link.communicator.is_aborted:
            time.sleep(0.01)
        return True
    start, x = time.monotonic(), torch.ones((8, 512), device="cuda")
    for _ in range(20):
        ranks.pass_on(x)
    torch.cuda.synchronize()
    return time.monotonic() - start


def test_a_stage_that_does_not_come_ends_the_wait(env: dict[str, str]) -> None:
    seconds, _ = run_ranks(take_from_nobody, 2, env, torch.float32, wait_s=1.0, num_stages=2)
    assert 0.9 < seconds < 20
    _, seconds = run_ranks(pass_to_nobody, 2, env, torch.float32, wait_s=1.0, num_stages=2)
    assert 0.9 < seconds < 20


# -- whole models --------------------------------------------------------------------------------------

SIZES = Sizes(hidden_size=128, vocab_size=300, num_layers=3, num_experts=3)
FEW: dict[str, Any] = {"max_batch_size": 4, "max_num_batched_tokens": 256, "dtype": "float32"}


def test_two_stages_answer_as_one_process_does_and_end_together(tmp_path: Path) -> None:
    """A prompt is longer than a step. They take turns on the GPU: MPS may not be well after a kill."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
    path = tmp_path / "llama"
    make_checkpoint(path.name, path, sizes=SIZES, seed=3, max_position_embeddings=32_768)
    case = FEW | {"path": str(path), "longest": 700}
    alone, staged = run_cases([case, case | {"stages": 2, "lose": int(signal.SIGKILL)}], env)
    assert staged[0] == alone[0]
    assert staged[1] == pytest.approx(alone[1], abs=1e-4)
    reason, seconds = staged[2:]
    assert "rank 1 ended with signal 9" in reason and seconds < 30


def test_stages_answer_the_same_with_tied_heads_windows_swaps_and_captured_steps(
    tmp_path: Path, env: dict[str, str]
) -> None:
    path = tmp_path / "gemma3"
    make_checkpoint(path.name, path, sizes=SIZES, seed=3)
    swaps = {"kv_cache_memory": None, "num_blocks": 24, "swap_blocks": 40, "preemption": "swap"}
    case = FEW | swaps | {"path": str(path), "prepares": True}
    alone, staged = run_cases([case, case | {"stages": 2}], env)
    assert staged[0] == alone[0]


def test_sixteen_bits_are_the_same_where_they_are_deterministic(tmp_path: Path, env: dict[str, str]) -> None:
    path = tmp_path / "qwen3"
    make_checkpoint(path.name, path, sizes=SIZES, seed=3, max_position_embeddings=32_768)
    case = FEW | {"path": str(path), "dtype": "bfloat16", "deterministic": True, "longest": 300}
    alone, staged = run_cases([case, case | {"stages": 2}], env)
    assert staged == alone


def test_ranks_in_stages_answer_as_one_process_does(tmp_path: Path, env: dict[str, str]) -> None:
    """Four processes: two stages, in each two ranks that add up; n-grams draft."""
    path = tmp_path / "llama"
    make_checkpoint(path.name, path, sizes=SIZES, seed=3)
    case = FEW | {"path": str(path), "speculative_method": "ngram", "num_speculative_tokens": 3}
    alone, shared = run_cases([case, case | {"size": 2, "stages": 2}], env)
    assert shared[0] == alone[0]
