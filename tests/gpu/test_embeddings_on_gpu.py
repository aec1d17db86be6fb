"""Embeddings on a GPU: the vectors of the CPU, in chunks beside decoding, and no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infer import LLM, SamplingParams
from scripts.make_checkpoint import make_checkpoint
from tests.gpu.graphs import FEW_SIZES

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * i + j) % 200 + 10 for j in range(3 + 19 * i)] for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TOGGLES: list[dict[str, Any]] = [
    {},
    {"use_cuda_graphs": False},
    {"use_overlap": False},
    {"attention_backend": "sdpa"},
    {"prefill_chunk_size": 5, "max_num_batched_tokens": 16, "max_batch_size": 4},
    {"deterministic": True},
]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("knobs", TOGGLES, ids=str)
def test_a_gpu_makes_the_vectors_of_the_cpu(tmp_path: Path, pooling: str, knobs: dict[str, Any]) -> None:
    make_checkpoint("qwen3", tmp_path)
    with LLM(tmp_path, device="cpu", dtype="float32") as cpu:
        expected = cpu.embed(PROMPTS, pooling=pooling)
        answer = cpu.generate(PROMPTS[1], GREEDY)[0].token_ids
    with LLM(tmp_path, device="cuda", dtype="float32", **(FEW_SIZES | knobs)) as gpu:
        stream = gpu.stream(PROMPTS[1], GREEDY)
        made = list(next(stream).token_ids)
        for vector, wanted in zip(gpu.embed(PROMPTS, pooling=pooling), expected, strict=True):
            assert vector == pytest.approx(wanted, abs=1e-3)
        made += [token_id for delta in stream for token_id in delta.token_ids]
        assert made == answer, "embeddings beside it change no token"
