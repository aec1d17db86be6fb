"""The further families on a GPU: the tokens of the CPU in float32, and codes that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infer import LLM
from infer.sampling.params import SamplingParams
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.checkpoints import MORE_FAMILIES

pytestmark = pytest.mark.gpu

# beyond the trained contexts of the tiny models, which are 24 to 64 tokens
PROMPTS = [[(7 * i + j) % 200 + 10 for j in range(3 + 25 * i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SIZES = Sizes(hidden_size=128, vocab_size=300, context_len=128, num_layers=4)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"prefill_chunk_size": 7},
    {"attention_backend": "sdpa"},
    {"attention_backend": "triton"},
    {"decode_attention_backend": "triton"},
    {"use_cuda_graphs": False},
]
all_families = pytest.mark.parametrize("family", (*MORE_FAMILIES, "mistral3"))


def tokens(path: Path, device: str, **knobs: Any) -> list[list[int]]:
    settings: dict[str, Any] = {"dtype": "float32", "num_blocks": 128, "block_size": 16} | knobs
    with LLM(path, device=device, **settings) as llm:
        return [list(answer.token_ids) for answer in llm.generate(PROMPTS, GREEDY)]


@all_families
def test_a_gpu_makes_the_tokens_of_the_cpu(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path / family, sizes=SIZES, seed=1)
    expected = tokens(tmp_path / family, "cpu", quantization="none")
    for knobs in VARIANTS:
        assert tokens(tmp_path / family, "cuda", quantization="none", **knobs) == expected, knobs


@all_families
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_sixteen_bits_and_codes_answer_alike_in_any_batch(
    family: str, quantization: str, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path / family, sizes=SIZES, seed=1)
    knobs: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization, "deterministic": True}
    together = tokens(tmp_path / family, "cuda", **knobs)
    assert tokens(tmp_path / family, "cuda", max_batch_size=1, **knobs) == together


@pytest.mark.parametrize("has_no_values", [False, True])
def test_gemma4_with_heads_of_published_sizes_makes_the_tokens_of_the_cpu(
    has_no_values: bool, tmp_path: Path
) -> None:
    """Heads of 256 and 512; without values, global layers have one kv head, whose keys are both."""
    changes: dict[str, Any] = {"head_dim": 256, "global_head_dim": 512}
    if has_no_values:
        changes |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}
    make_checkpoint("gemma4", tmp_path / "model", sizes=SIZES, seed=1, **changes)
    expected = tokens(tmp_path / "model", "cpu", quantization="none")
    for knobs in ({}, {"prefill_chunk_size": 7, "use_cuda_graphs": False}):
        assert tokens(tmp_path / "model", "cuda", quantization="none", **knobs) == expected, knobs
    tokens(tmp_path / "model", "cuda", dtype="bfloat16", use_cuda_graphs=False)
