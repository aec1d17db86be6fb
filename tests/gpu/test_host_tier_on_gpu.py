"""Blocks between a GPU and host memory: in order, whatever the steps write meanwhile, and the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer import LLM, SamplingParams
from infer.cache.kv_store import KVStore
from infer.cache.layout import KVLayout, TransferKind
from infer.engine import build
from infer.scheduling.preemption import PreemptionCost
from scripts.make_checkpoint import Sizes, make_checkpoint

pytestmark = pytest.mark.gpu

NUM_BLOCKS, NUM_HOST = 200, 150  # more than cross at a time


def make_store(dtype: torch.dtype, kept_as: torch.dtype | None) -> KVStore:
    store = KVStore(
        layout=KVLayout.whole(12), num_blocks=NUM_BLOCKS, block_size=16, num_kv_heads=8, head_dim=128,
        dtype=dtype, device=torch.device("cuda"), num_host_blocks=NUM_HOST, kept_as=kept_as,
    )  # fmt: skip
    for part, _ in store._parts:
        numbers = torch.arange(NUM_BLOCKS, device="cuda", dtype=torch.float32)
        part.copy_(numbers.view(NUM_BLOCKS, *[1] * (part.dim() - 3)))
    return store


@pytest.mark.parametrize(
    ("dtype", "kept_as"), [(torch.bfloat16, None), (torch.bfloat16, torch.int8), (torch.float32, None)]
)
def test_what_left_comes_back_though_the_steps_go_on_writing(
    dtype: torch.dtype, kept_as: torch.dtype | None
) -> None:
    store = make_store(dtype, kept_as)
    blocks = range(100)
    store.transfer([(TransferKind.SWAP_OUT, block, NUM_HOST - 1 - block) for block in blocks])
    for part, _ in store._parts:
        part[:, :, :100] = 99  # what a step writes at once
    store.transfer([(TransferKind.SWAP_IN, NUM_HOST - 1 - block, 100 + block) for block in blocks])
    # a host block that is read and written again in one go
    store.transfer(
        [
            (TransferKind.SWAP_IN, NUM_HOST - 1, 0),
            (TransferKind.SWAP_OUT, 107, NUM_HOST - 1),
            (TransferKind.SWAP_IN, NUM_HOST - 1, 1),
        ]
    )
    torch.cuda.synchronize()
    for part, _ in store._parts:
        for block in (*blocks[:3], 63, 64, 65, 99):
            assert (part[:, :, 100 + block].float() == block).all(), block
        assert (part[:, :, 0].float() == 0).all() and (part[:, :, 1].float() == 7).all()
        assert (part[:, :, 2:100].float() == 99).all()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_tier_changes_no_token(
    family: str, kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "measure_cost", lambda *_: PreemptionCost(0.1, 1.0))
    sizes = Sizes(hidden_size=256, vocab_size=512, num_layers=2)
    make_checkpoint(family, tmp_path, sizes=sizes, seed=3)
    prompts = [[(7 * i + j) % 200 + 10 for j in range(40 + 5 * i)] for i in range(8)] * 2
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    knobs: dict[str, Any] = {"deterministic": True, "kv_cache_dtype": kv_cache_dtype, "max_batch_size": 2}
    found = []
    for more in ({}, {"num_blocks": 14, "swap_blocks": 200}):
        with LLM(tmp_path, device="cuda", device_memory="8GiB", **(knobs | more)) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            stats = llm.engine.stats()
    assert found[0] == found[1]
    assert stats.num_host_hit_tokens > 100
