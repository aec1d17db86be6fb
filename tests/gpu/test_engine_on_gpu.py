"""The engine on a GPU: the same greedy tokens as on the CPU, for every family, whatever the toggles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infer import LLM, SamplingParams
from scripts.make_checkpoint import make_checkpoint

pytestmark = pytest.mark.gpu

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2")
PROMPTS = [[(7 * i + j) % 200 + 10 for j in range(3 + 5 * i)] for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TOGGLES: list[dict[str, Any]] = [
    {},
    {"kv_cache_backend": "contiguous"},
    {"kv_cache_backend": "naive"},
    {"attention_backend": "naive"},
    {"block_size": 4, "num_blocks": 24, "preemption": "recompute"},
    {"block_size": 4, "num_blocks": 24, "preemption": "swap", "num_host_blocks": 40},
    {"prefill_chunk_size": 5, "use_prefix_caching": False},
]


def tokens_of(directory: str, device: str, **knobs: Any) -> list[list[int]]:
    llm = LLM(directory, device=device, dtype="float32", **knobs)
    return [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("tiny") / str(request.param)
    make_checkpoint(request.param, directory)
    return str(directory)


def test_a_gpu_makes_the_tokens_of_the_cpu(checkpoint: str) -> None:
    expected = tokens_of(checkpoint, "cpu")
    for knobs in TOGGLES:
        assert tokens_of(checkpoint, "cuda", **knobs) == expected, knobs


def test_sampling_with_a_seed_is_the_same_on_both(checkpoint: str) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True)
    on_cpu = LLM(checkpoint, device="cpu", dtype="float32").generate(PROMPTS, params)
    on_gpu = LLM(checkpoint, device="cuda", dtype="float32").generate(PROMPTS, params)
    assert [a.token_ids for a in on_gpu] == [a.token_ids for a in on_cpu]
