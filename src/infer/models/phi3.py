"""Phi-3, Phi-3.5 and Phi-4: Llama's block, with fused matrices in the file.

qkv_proj, gate_up_proj   the rows of q, k, v and of gate, up, one after the other
longrope                 positions beyond the trained context; older files call it su or yarn
partial rotation         Phi-4-mini rotates the first three quarters of a head

If `sliding_window` is set, every layer has that window; otherwise none has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.raw_config import RawConfig, read_window, rope_section
from infer.models.weight_map import Target, WeightMap


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Phi3ForCausalLM`."""
    keys = RawConfig(raw).with_defaults(
        rms_norm_eps=1e-5, max_position_embeddings=4096, original_max_position_embeddings=4096
    )
    section = rope_section(keys)
    if section.get("rope_type", "type") in ("su", "yarn"):  # older names of longrope
        longrope = {"rope_type": "longrope", **{k: v for k, v in section.raw.items() if "type" not in k}}
        keys = keys.without("rope_parameters", "rope_scaling").with_defaults(rope_scaling=longrope)
    window = read_window(keys, default=None)
    has_bias = keys.flag("attention_bias", default=False)
    shared = llama.read_shared_config(keys, family="phi3", window=window, rotary_share=1.0)
    return replace(shared, qkv_bias=has_bias)


# fmt: off
WEIGHT_MAP: WeightMap = {
    **{key: target for key, target in llama.WEIGHT_MAP.items() if target.part is None},
    "model.layers.{}.self_attn.qkv_proj":         Target("layers.{}.attention.qkv"),
    "model.layers.{}.mlp.gate_up_proj":           Target("layers.{}.mlp.gate_up"),
}
# fmt: on
