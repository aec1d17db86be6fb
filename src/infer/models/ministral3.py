"""Ministral 3: Llama's block with yarn, in which queries grow with their position.

A query at position p is multiplied by  1 + beta ln(1 + floor(p / trained context)),  where beta is
`llama_4_scaling_beta`; keys are not. Without `sliding_window`, layers have no window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.raw_config import RawConfig, read_window, rope_section

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Ministral3ForCausalLM`."""
    keys = RawConfig(raw).with_defaults(rms_norm_eps=1e-5, num_key_value_heads=8)
    if keys.get("rope_parameters", "rope_scaling") is None:
        keys = keys.with_defaults(rope_parameters=_ROPE)
    window = read_window(keys, default=None)
    shared = llama.read_shared_config(keys, family="ministral3", default_head_dim=128, window=window)
    section = rope_section(keys)
    has_growth = section.get("llama_4_scaling_beta") and shared.rope_scaling is not None
    return replace(shared, query_growth=section.number("llama_4_scaling_beta") if has_growth else 0.0)
