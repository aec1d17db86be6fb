"""Qwen 2 MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): Qwen 2's attention, experts and one expert for every token.

    y = sum over the chosen experts  +  sigmoid(shared_expert_gate x) * shared_expert(x)

`norm_topk_prob`, `decoder_sparse_step` and `mlp_only_layers` mean the same as in Qwen 3 MoE. A config that
switches a window on without listing the layers gives it to every second one, up to `max_window_layers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.mixtral import read_experts
from infer.models.qwen3_moe import EXPERTS, read_dense_layers
from infer.models.raw_config import RawConfig, read_window
from infer.models.weight_map import Target, WeightMap


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Qwen2MoeForCausalLM`."""
    keys = RawConfig(raw)
    window = read_window(keys) if keys.flag("use_sliding_window", default=False) else None
    last = keys.size("max_window_layers", default=28) if window is not None else 0
    shared = llama.read_shared_config(
        keys, family="qwen2_moe", window=window, slides=lambda layer: layer % 2 == 0 and layer < last
    )
    experts = read_experts(
        keys,
        (60, 4),
        size=keys.size("moe_intermediate_size", default=1408),
        shared_size=keys.size("shared_expert_intermediate_size", default=5632),
        dense_layers=read_dense_layers(keys, shared.num_layers),
    )
    return replace(shared, qkv_bias=keys.flag("qkv_bias", default=True), experts=experts)


# fmt: off
SHARED_EXPERT: WeightMap = {
    "model.layers.{}.mlp.shared_expert.gate_proj":  Target("layers.{}.mlp.shared.gate_up", part="gate"),
    "model.layers.{}.mlp.shared_expert.up_proj":    Target("layers.{}.mlp.shared.gate_up", part="up"),
    "model.layers.{}.mlp.shared_expert.down_proj":  Target("layers.{}.mlp.shared.down"),
    "model.layers.{}.mlp.shared_expert_gate":       Target("layers.{}.mlp.shared_gate"),
}
WEIGHT_MAP: WeightMap = {**llama.WEIGHT_MAP, **EXPERTS, **SHARED_EXPERT}
# fmt: on
