"""Qwen 3.5 MoE: Qwen 3.5 with experts in every layer, and a shared expert that every token goes through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.mixtral import read_experts
from infer.models.qwen2_moe import SHARED_EXPERT
from infer.models.qwen3_5 import TEXT_MAP, read_hybrid_config, with_prefixes
from infer.models.qwen3_moe import EXPERTS, read_dense_layers
from infer.models.raw_config import RawConfig
from infer.models.weight_map import WeightMap


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Qwen3_5MoeForCausalLM`, or the text part of one that reads images."""
    top = RawConfig(raw)
    text = top.section("text_config") if "text_config" in raw else top
    keys = text.with_defaults(num_experts=256, num_experts_per_tok=8, norm_topk_prob=True)
    return llama.with_outer_config(read_hybrid_moe_config(keys, family="qwen3_5_moe"), top)


def read_hybrid_moe_config(keys: RawConfig, *, family: str) -> ModelConfig:
    """Read the keys that the families of this block with experts share."""
    size = keys.size("moe_intermediate_size", default=512)
    # layers without experts, if there are any, have their own MLP size
    shared = read_hybrid_config(keys.with_defaults(intermediate_size=size), family=family)
    experts = read_experts(
        keys,
        (512, 10),
        size=size,
        normalized=keys.flag("norm_topk_prob", default=True),
        shared_size=keys.size("shared_expert_intermediate_size", default=512),
        dense_layers=read_dense_layers(keys, shared.num_layers),
    )
    return replace(shared, experts=experts)


EXPERT_MAP: WeightMap = {**EXPERTS, **SHARED_EXPERT}
WEIGHT_MAP = with_prefixes({**TEXT_MAP, **EXPERT_MAP})
