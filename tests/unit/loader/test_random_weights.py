from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from infer.layers.norm import RMSNorm
from infer.loader.random_weights import load_random
from scripts.make_checkpoint import Sizes, raw_config


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_any_shape_gets_weights(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config(family, Sizes())))
    loaded = load_random(tmp_path, device="cpu", dtype="float32", max_seq_len=64)
    assert (loaded.max_seq_len, loaded.eos_ids, loaded.dtype) == (64, (), torch.float32)
    for name, parameter in loaded.model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.2), name
    norms = [module for module in loaded.model.modules() if isinstance(module, RMSNorm)]
    assert all((norm.weight + norm.offset == 1).all() for norm in norms)
    assert norms or family == "gpt2"


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config("llama", Sizes())))
    first, second, other = (load_random(tmp_path, device="cpu", seed=seed).model for seed in (1, 1, 2))
    assert torch.equal(first.embedding.weight, second.embedding.weight)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
