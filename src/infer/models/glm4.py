"""GLM-4-0414: Llama's attention and MLP between Gemma's norms, with a partial rotation.

   x ──► attention_norm ──► attention ──► post_attention_norm ──► (+) ──► (same with the MLP) ──►
    └──────────────────────────────────────────────────────────────┘

norms                four in a block; the file's `post_attention_layernorm` is the one *before* the MLP
rotation             only the first half of a head; channels 2 i and 2 i + 1 rotate together
biases               for queries, keys and values
gate_up_proj         the rows of gate, then the rows of up
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.raw_config import RawConfig
from infer.models.weight_map import Target, WeightMap


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Glm4ForCausalLM`."""
    keys = RawConfig(raw).with_defaults(
        rms_norm_eps=1.5625e-7, num_key_value_heads=2, eos_token_id=[151329, 151336, 151338]
    )
    shared = llama.read_shared_config(keys, family="glm4", default_head_dim=128, rotary_share=0.5)
    return replace(shared, pairs_neighbours=True, qkv_bias=keys.flag("attention_bias", default=True))


# fmt: off
WEIGHT_MAP: WeightMap = {
    **{key: target for key, target in llama.WEIGHT_MAP.items() if target.part not in ("gate", "up")},
    "model.layers.{}.post_self_attn_layernorm":   Target("layers.{}.post_attention_norm"),
    "model.layers.{}.post_mlp_layernorm":         Target("layers.{}.post_mlp_norm"),
    "model.layers.{}.mlp.gate_up_proj":           Target("layers.{}.mlp.gate_up"),
}
# fmt: on
