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


def test_a_gpu_makes_the_vectors_of_the_cpu(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    with LLM(tmp_path, device="cpu", dtype="float32") as cpu:
        expected = {pooling: cpu.embed(PROMPTS, pooling=pooling) for pooling in ("last", "mean")}
        answer = cpu.generate(PROMPTS[1], GREEDY)[0].token_ids
    for knobs in TOGGLES:
        with LLM(tmp_path, device="cuda", dtype="float32", **(FEW_SIZES | knobs)) as gpu:
            stream = gpu.stream(PROMPTS[1], GREEDY)
            made = list(next(stream).token_ids)
            for pooling, vectors in expected.items():
                for vector, wanted in zip(gpu.embed(PROMPTS, pooling=pooling), vectors, strict=True):
                    assert vector == pytest.approx(wanted, abs=1e-3), (pooling, knobs)
            made += [token_id for delta in stream for token_id in delta.token_ids]
            assert made == answer, f"embeddings beside it change no token: {knobs}"
