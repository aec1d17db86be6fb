"""The text part of Qwen's models that read images, from checkpoints in new and in published form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from infer.loader.find.source import resolve_model
from infer.loader.load import load_model
from tests.support.checkpoints import TINY, randomize
from tests.support.step import run_step

TOKENS = list(range(3, 26))
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 48,
}  # fmt: skip
DEEP = VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
OLD = {"depth": 1, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
EXPERTS = TINY["qwen3_moe"] | {"mlp_only_layers": []}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2VL": ("qwen2_vl", TINY["qwen2"] | {"rope_parameters": ROPE | {"mrope_section": [2, 2, 2]}}, OLD),
    "Qwen2_5_VL": (
        "qwen2_vl",
        TINY["qwen2"] | {"rope_parameters": ROPE | {"mrope_section": [2, 2, 2]}},
        VISION | {"fullatt_block_indexes": [0]},
    ),
    "Qwen3VL": ("qwen3_vl", TINY["qwen3"] | {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}}, DEEP),
    "Qwen3VLMoe": ("qwen3_vl_moe", EXPERTS | {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}}, DEEP),
}


def saved(directory: Path, kind: str) -> torch.Tensor:
    """Save a tiny checkpoint with a vision tower; returns the reference's logits for text."""
    _, text, vision = KINDS[kind]
    ids = {"image_token_id": 198, "video_token_id": 197, "vision_start_token_id": 196}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text | special, vision_config=vision, vision_end_token_id=195, **ids
    )
    config._attn_implementation = "eager"
    reference = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    randomize(reference, 0)
    reference.float().eval().save_pretrained(directory)
    assert any("visual" in name for name in load_file(directory / "model.safetensors"))
    with torch.inference_mode():
        logits: torch.Tensor = reference(input_ids=torch.tensor([TOKENS])).logits[0]
    return logits


def check(directory: Path, kind: str, expected: torch.Tensor) -> None:
    source = resolve_model(str(directory), show_progress=False)
    model = load_model(source, dtype="float32", device="cpu")
    assert model.config.family == KINDS[kind][0]
    torch.testing.assert_close(run_step(model.model, [TOKENS])[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_text_has_the_logits_of_the_reference(kind: str, tmp_path: Path) -> None:
    expected = saved(tmp_path, kind)
    check(tmp_path, kind, expected)


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2_5_VL"])
def test_the_keys_of_text_may_be_at_the_top(kind: str, tmp_path: Path) -> None:
    expected = saved(tmp_path, kind)
    raw = json.loads((tmp_path / "config.json").read_text())
    flat = {**raw.pop("text_config"), **raw, "torch_dtype": raw.pop("dtype"), "rope_theta": 10_000.0}
    rope = flat.pop("rope_parameters")
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    check(tmp_path, kind, expected)


def test_experts_may_be_stored_by_their_inputs(tmp_path: Path) -> None:
    """Published stacks are [experts, in, out]; transformers 5 saves them as [experts, out, in]."""
    expected = saved(tmp_path, "Qwen3VLMoe")
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in tensors.items()
    }
    assert turned["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (7, 48, 112)
    save_file(turned, tmp_path / "model.safetensors")
    check(tmp_path, "Qwen3VLMoe", expected)
