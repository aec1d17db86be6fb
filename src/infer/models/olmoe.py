"""OLMoE: Llama's block with experts in every layer, and queries and keys normalised as OLMo 2 does it.

projection_norm   all queries of a token are normalised together, and so are its keys
clip_qkv          if set, queries, keys and values are then clamped to [-clip_qkv, clip_qkv]
norm_topk_prob    false in published models: expert weights are probabilities over all 64 experts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.models import llama, qwen3_moe
from infer.models.config import ModelConfig
from infer.models.mixtral import read_experts
from infer.models.raw_config import RawConfig
from infer.models.weight_map import WeightMap


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of an `OlmoeForCausalLM`."""
    keys = RawConfig(raw).with_defaults(rms_norm_eps=1e-5)
    shared = llama.read_shared_config(keys, family="olmoe", attention_bias=False)
    return replace(
        shared,
        projection_norm=True,
        clip_qkv=None if keys.get("clip_qkv") is None else keys.number("clip_qkv"),
        experts=read_experts(keys, (64, 8), size=shared.intermediate_size),
    )


WEIGHT_MAP: WeightMap = qwen3_moe.WEIGHT_MAP
