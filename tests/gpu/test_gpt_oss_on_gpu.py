"""gpt-oss on a GPU: experts in MXFP4 stay codes, and the tokens are those of a CPU with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.loader.find.source import resolve_model
from infer.loader.load import load_model
from tests.gpu.graphs import FEW_SIZES
from tests.integration.test_gpt_oss import SIZES, write_mxfp4
from tests.support.checkpoints import reference_model
from tests.support.tiny import greedy, run_engine

pytestmark = pytest.mark.gpu
PROMPTS = [[(7 * i + j) % 190 + 3 for j in range(3 + 5 * i)] for i in range(5)]


def answers(
    path: Path, device: str, dtype: str, quantization: str, *, deterministic: bool = False
) -> list[list[list[int]]]:
    """The tokens that follow each prompt."""
    source = resolve_model(str(path), show_progress=False)
    loaded = load_model(source, device=device, dtype=dtype, quantization=quantization)
    config = EngineConfig.from_knobs(
        device=device, dtype=dtype, quantization=quantization, deterministic=deterministic,
        kv_cache_memory="4MiB", **FEW_SIZES,
    )  # fmt: skip
    return run_engine(build_engine(config, loaded), [(prompt, greedy(12)) for prompt in PROMPTS])


@pytest.mark.parametrize("deterministic", [False, True])
def test_codes_on_a_gpu_make_the_tokens_of_numbers_on_a_cpu(tmp_path: Path, deterministic: bool) -> None:
    path = write_mxfp4(tmp_path, reference_model("gpt_oss", **SIZES))
    on_cpu = answers(path, "cpu", "float32", "none", deterministic=deterministic)
    assert answers(path, "cuda", "float32", "auto", deterministic=deterministic) == on_cpu


def test_half_precision_answers_every_prompt(tmp_path: Path) -> None:
    path = write_mxfp4(tmp_path, reference_model("gpt_oss", **SIZES))
    found = answers(path, "cuda", "bfloat16", "auto")
    assert [len(tokens) for (tokens,) in found] == [12] * len(PROMPTS)
