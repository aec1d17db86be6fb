"""Quantized checkpoints on a GPU: unpacked there while they are loaded, to the numbers of the CPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import LLM, SamplingParams
from infer.loader.find.source import resolve_model
from infer.loader.load import read_headers
from infer.tools.quantize import SCHEME_NAMES, Recipe, quantize_checkpoint
from scripts.make_checkpoint import Sizes, make_checkpoint

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
RECIPES = {
    **{scheme: Recipe(scheme=scheme, group_size=32) for scheme in SCHEME_NAMES},
    "gptq-3": Recipe(scheme="gptq", bits=3, group_size=64, symmetric=False),
    "gptq-actorder": Recipe(scheme="gptq", group_size=32, act_order=True),
    "ct-w4a16-asym": Recipe(scheme="ct-w4a16", group_size=64, symmetric=False),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_unpacks_the_numbers_of_the_cpu(recipe: str, tmp_path: Path, caplog: Any) -> None:
    make_checkpoint(
        "mixtral", tmp_path / "dense", sizes=Sizes(hidden_size=192, num_heads=6), dtype="bfloat16"
    )
    source = resolve_model(str(tmp_path / "dense"), show_progress=False)
    path = tmp_path / "quantized"
    quantize_checkpoint(source, path, RECIPES[recipe])
    for name, stored in read_headers(resolve_model(str(path), show_progress=False)).tensors.items():
        there = torch.empty(stored.shape, dtype=torch.bfloat16, device="cuda")
        here = torch.empty(stored.shape, dtype=torch.bfloat16)
        stored.copy_to(there)
        stored.copy_to(here)
        assert torch.equal(there.cpu(), here), name
    prompts = [[3, 1, 4, 1, 5, 9], [7], list(range(20, 60))]
    with LLM(path, device="cpu", dtype="float32", quantization="none") as cpu:
        expected = [answer.token_ids for answer in cpu.generate(prompts, GREEDY)]
    with LLM(path, device="cuda", dtype="float32") as gpu:
        assert [answer.token_ids for answer in gpu.generate(prompts, GREEDY)] == expected
    with caplog.at_level(logging.INFO), LLM(path, device="cuda") as gpu:
        gpu.generate(prompts, GREEDY)
    assert ", unpacked to bfloat16" in caplog.text
