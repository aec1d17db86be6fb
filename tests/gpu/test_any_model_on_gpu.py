"""Models whose code is transformers' on a GPU: the tokens and the scores of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infer import LLM, SamplingParams
from infer.errors import ConfigError
from tests.integration.test_any_model import PROMPTS, checkpoints
from tests.integration.test_scores import DOCUMENTS, QUERY, classifier

pytestmark = pytest.mark.gpu
foreign = checkpoints  # the fixture of that file

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TOGGLES: list[dict[str, Any]] = [
    {},
    {"attention_backend": "sdpa"},
    {"max_num_batched_tokens": 16},
    {"num_blocks": 14, "max_num_batched_tokens": 16},
]


FAMILIES = ["starcoder2", "gpt_neox", "opt", "granitemoe", "gpt_oss", "gemma2", "deepseek_v3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_makes_the_tokens_of_transformers(checkpoints: Any, family: str) -> None:
    path, _, greedy = checkpoints(family)
    for knobs in TOGGLES:
        options: dict[str, Any] = {
            "max_batch_size": 4,
            "block_size": 16,
            "model_impl": "transformers",
        } | knobs
        with LLM(str(path), device="cuda", dtype="float32", **options) as gpu:
            made = [list(output.token_ids) for output in gpu.generate(PROMPTS, GREEDY)]
        assert made == greedy, knobs


def test_bfloat16_runs_and_graphs_are_refused_by_name(checkpoints: Any) -> None:
    path, _, _ = checkpoints("phi")
    with LLM(str(path), device="cuda", dtype="bfloat16") as gpu:
        assert all(len(output.token_ids) == 12 for output in gpu.generate(PROMPTS, GREEDY))
    with pytest.raises(ConfigError, match="use_cuda_graphs=on needs a model that infer implements"):
        LLM(str(path), device="cuda", use_cuda_graphs=True)


def test_a_gpu_makes_the_scores_of_the_cpu(tmp_path: Path) -> None:
    path = classifier("qwen3", tmp_path / "m")
    with LLM(str(path), device="cpu", dtype="float32") as cpu:
        wanted = cpu.score(QUERY, DOCUMENTS)
    with LLM(str(path), device="cuda", dtype="float32") as gpu:
        assert gpu.score(QUERY, DOCUMENTS) == pytest.approx(wanted, abs=1e-3)
