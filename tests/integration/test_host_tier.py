"""Blocks that the prefix tree evicts go to host memory and come back: other traffic, the same tokens.

float32 on the CPU, so rounding is no excuse. The cache is filled with NaN first, so a block that came back
without its contents gives no token at all.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import LLM, SamplingParams
from infer.cache.kv_store import KVStore, _Crossing
from infer.cache.layout import TransferKind
from infer.client import load
from infer.config.settings import EngineConfig
from infer.engine import build, machine
from infer.engine.engine import Engine
from infer.engine.stories import EngineStory
from infer.errors import ConfigError
from infer.execution.gpu.device import GpuDevice
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.request import Request
from infer.server.explain import words
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.books import check_books
from tests.support.checkpoints import FAMILIES
from tests.support.rank_threads import RankThreads
from tests.support.thinned import thinned
from tests.support.tiny import greedy, make_engine, random_prompts, run_engine

CHEAP = PreemptionCost(swap_seconds=0.1, recompute_seconds=1.0)
DEAR = PreemptionCost(swap_seconds=1.0, recompute_seconds=0.1)
# two rounds of the same prompts: what the second finds has left the device since the first
REQUESTS = [(prompt, greedy(8)) for prompt in random_prompts(8)] * 2
SMALL: dict[str, Any] = {"block_size": 2, "num_blocks": 30, "max_batch_size": 2, "prefill_chunk_size": 7}
HYBRID = "qwen3_5"  # its blocks are larger: they hold a state


@pytest.fixture(autouse=True)
def cheap_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "measure_cost", lambda *_: CHEAP)


def small(family: str) -> dict[str, Any]:
    return SMALL if family != HYBRID else {"num_blocks": 6, "max_batch_size": 1, "block_size": 16}


@functools.cache
def without(family: str, **knobs: Any) -> list[list[list[int]]]:
    engine = make_engine(family, **({"use_prefix_caching": False, "num_blocks": 200} | knobs))
    return run_engine(engine, requests_of(family))


def requests_of(family: str) -> list[tuple[list[int], SamplingParams]]:
    if family != HYBRID:
        return REQUESTS
    return [([*range(start, start + 40), 7], greedy(4)) for start in range(10, 90, 20)] * 2


def host_hits(engine: Engine) -> int:
    check_books(engine.scheduler)
    usage = engine.scheduler.usage()
    assert usage.num_cached_host + usage.num_free_host_blocks == engine.scheduler.pool.num_host_blocks
    return usage.num_host_hit_tokens


@pytest.mark.parametrize(
    ("family", "on_gpu_half"),
    [*thinned(FAMILIES, (False, True), keep=2), (HYBRID, False), (HYBRID, True)],
)
def test_the_tier_changes_no_token(family: str, on_gpu_half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: on_gpu_half)
    engine = make_engine(family, swap_blocks=200, preemption="recompute", **small(family))
    assert isinstance(engine._device, GpuDevice) == on_gpu_half
    assert run_engine(engine, requests_of(family)) == without(family)
    assert host_hits(engine) > 20


@pytest.mark.parametrize(("swap_blocks", "preemption"), thinned((3, 20), ("swap", "recompute"), keep=2))
def test_preempted_sequences_share_the_host_memory(swap_blocks: int, preemption: str) -> None:
    engine = make_engine("gemma3", swap_blocks=swap_blocks, preemption=preemption,
                         **SMALL | {"num_blocks": 26, "max_batch_size": 6})  # fmt: skip
    assert run_engine(engine, REQUESTS) == without("gemma3")
    assert engine.scheduler.num_preemptions > 0
    host_hits(engine)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_codes_and_scales_come_back(kv_cache_dtype: str) -> None:
    engine = make_engine("qwen3", kv_cache_dtype=kv_cache_dtype, swap_blocks=200, **SMALL)
    assert run_engine(engine, REQUESTS) == without("qwen3", kv_cache_dtype=kv_cache_dtype)
    assert host_hits(engine) > 20


def test_every_rank_has_a_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "RankProcesses", RankThreads)
    make_checkpoint(
        "llama", tmp_path / "m", sizes=Sizes(hidden_size=128, vocab_size=300, num_layers=2), seed=3
    )
    prompts = [prompt for prompt, _ in REQUESTS]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    knobs: dict[str, Any] = {"dtype": "float32", "record_cpu_step": False, **SMALL}
    found = {}
    for ranks, swap_blocks in ((1, 0), (2, 200)):
        with LLM(tmp_path / "m", tensor_parallel_size=ranks, swap_blocks=swap_blocks, **knobs) as llm:
            found[ranks] = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
            stats = llm.engine.stats()
    assert found[2] == found[1]
    assert stats.num_host_hit_tokens > 20
    assert stats.host_bytes_in > 0 and stats.host_bytes_out > 0 and stats.num_used_host_blocks > 0


def test_nothing_is_kept_where_computing_is_cheaper() -> None:
    engine = make_engine("llama", swap_blocks=200, **SMALL)
    engine.scheduler.pool.keep_evicted(DEAR.favors_host)
    run_engine(engine, REQUESTS)
    usage = engine.scheduler.usage()
    assert usage.num_evicted_blocks and not usage.num_cached_host and not usage.num_host_hit_tokens


def test_a_salt_keeps_copies_apart_and_a_reset_forgets_them() -> None:
    engine = make_engine("llama", swap_blocks=200, **SMALL)
    run_engine(engine, REQUESTS[:8])
    pool, prompt = engine.scheduler.pool, REQUESTS[0][0]
    assert pool.match_prefix(1000, prompt, "tenant") == 0
    assert pool.match_prefix(1001, prompt, "") == len(prompt) - 1
    for number in (1000, 1001):
        pool.release(number)
    assert pool.reset_prefix_cache() and pool.match_prefix(1002, prompt, "") == 0
    assert pool.usage().num_cached_host == 0
    pool.release(1002)


def test_a_failed_step_leaves_no_copy_that_was_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("llama", swap_blocks=200, **SMALL)
    run_engine(engine, REQUESTS[:4])
    transfer, num_failures = KVStore.transfer, 0

    def fail(store: KVStore, moves: Any) -> None:
        nonlocal num_failures
        if any(kind == "swap_out" for kind, _, _ in moves) and num_failures < 1:
            num_failures += 1
            raise RuntimeError("no")
        transfer(store, moves)

    monkeypatch.setattr(KVStore, "transfer", fail)
    for number, (prompt, params) in enumerate(REQUESTS[4:8]):
        engine.add(Request(request_id=f"x{number}", prompt=tuple(prompt), params=params))
    while engine.has_work:
        engine.step()
    assert num_failures == 1
    assert run_engine(engine, REQUESTS) == without("llama")
    assert host_hits(engine) > 0


def test_a_block_is_the_same_after_both_ways() -> None:
    engine = make_engine("llama", swap_blocks=4, **SMALL, kv_cache_dtype="int8")
    store = engine.device.store  # type: ignore[attr-defined]
    for part, _ in store._parts:
        part.copy_(torch.arange(part.numel()).reshape(part.shape) % 100)
    before = [part[:, :, 3].clone() for part, _ in store._parts]
    store.transfer(
        [
            (TransferKind.SWAP_OUT, 3, 1),
            (TransferKind.SWAP_IN, 1, 5),
            (TransferKind.SWAP_OUT, 4, 1),
            (TransferKind.COPY, 5, 3),
        ]
    )
    for (part, _), block in zip(store._parts, before, strict=True):
        assert torch.equal(part[:, :, 5], block) and torch.equal(part[:, :, 3], block)


def test_blocks_that_follow_each_other_cross_as_one() -> None:
    """The part of a GPU's way that needs no GPU: runs of host blocks, in both directions."""
    crossing = _Crossing.__new__(_Crossing)
    buffer, host = torch.arange(8.0).reshape(4, 2), torch.zeros(10, 2)
    crossing._parts, crossing._buffers = [(torch.empty(0), host)], [buffer]
    crossing._copy([(90, 5), (91, 6), (92, 2), (93, 3)], is_out=True)
    assert host[[5, 6, 2, 3]].tolist() == buffer.tolist() and host.count_nonzero() == 7
    crossing._copy([(6, 90), (2, 91), (3, 92)], is_out=False)
    assert buffer.tolist() == [[2, 3], [4, 5], [6, 7], [6, 7]]
    host[3] = 9
    crossing._copy([(3, 90)], is_out=False)
    assert buffer[0].tolist() == [9, 9]


def test_explain_names_the_host() -> None:
    story = EngineStory(request_id="a", num_prompt=100, num_cached=64, num_from_host=48)
    assert "64 of the 100 tokens of its prompt (64%, 48 of them from host memory)" in words._cache(story)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("4", "4GiB"), (0.5, "0.5GiB"), ("512MiB", "512MiB"), (0, None)],
)
def test_the_size_is_that_of_other_engines(given: Any, kept: str | None) -> None:
    for name in ("swap_space", "kv_offloading_size", "hicache_size"):
        assert EngineConfig.from_knobs(**{name: given}).cache.swap_space == kept


def test_two_sizes_are_refused_and_one_too_large() -> None:
    with pytest.raises(ConfigError, match="swap_blocks and swap_space both size"):
        EngineConfig.from_knobs(swap_blocks=3, swap_space="1GiB")
    with pytest.raises(ConfigError, match="swap_space=900TiB takes .* set swap_space="):
        make_engine("llama", swap_space="900TiB")
    engine = make_engine("llama", swap_space="1MiB")
    block = engine.scheduler.pool.block_bytes
    assert engine.scheduler.pool.num_host_blocks == (1 << 20) // block
