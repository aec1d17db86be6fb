"""gpt-oss on a GPU: experts in MXFP4 stay codes, and the tokens are those of a CPU with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer import LLM, SamplingParams
from tests.integration.test_gpt_oss import SIZES, write_mxfp4
from tests.support.checkpoints import reference_model

pytestmark = pytest.mark.gpu
PROMPTS = [[(7 * i + j) % 190 + 3 for j in range(3 + 5 * i)] for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("deterministic", [False, True])
def test_codes_on_a_gpu_make_the_tokens_of_numbers_on_a_cpu(tmp_path: Path, deterministic: bool) -> None:
    path = str(write_mxfp4(tmp_path, reference_model("gpt_oss", **SIZES)))
    answers = []
    for device, quantization in (("cpu", "none"), ("cuda", "auto")):
        llm = LLM(
            path, device=device, dtype="float32", quantization=quantization, deterministic=deterministic,
            kv_cache_memory="4MiB", max_batch_size=4,
        )  # fmt: skip
        answers.append([answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)])
    assert answers[0] == answers[1]


def test_half_precision_answers_every_prompt(tmp_path: Path) -> None:
    path = str(write_mxfp4(tmp_path, reference_model("gpt_oss", **SIZES)))
    llm = LLM(path, device="cuda", dtype="bfloat16", quantization="auto", kv_cache_memory="4MiB")
    assert [len(answer.token_ids) for answer in llm.generate(PROMPTS, GREEDY)] == [12] * len(PROMPTS)
