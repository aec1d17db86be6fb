"""Qwen 3 MoE: Qwen 3's attention and Mixtral's experts, smaller and more of them (8 of 128).

norm_topk_prob        true: the weights of a token's experts are scaled to sum to 1
decoder_sparse_step   every n-th layer has experts; n is 1 in all published models
mlp_only_layers       layers that have a plain MLP of `intermediate_size`; none in published models
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.errors import CheckpointError
from infer.models import llama, qwen3
from infer.models.config import ModelConfig
from infer.models.mixtral import STACKED_EXPERTS, read_experts
from infer.models.raw_config import RawConfig, read_window
from infer.models.weight_map import Target, WeightMap


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Qwen3MoeForCausalLM`."""
    keys = RawConfig(raw)
    window = read_window(keys) if keys.flag("use_sliding_window", default=False) else None
    shared = llama.read_shared_config(keys, family="qwen3_moe", window=window, attention_bias=False)
    experts = read_experts(
        keys,
        (128, 8),
        size=keys.size("moe_intermediate_size", default=768),
        dense_layers=read_dense_layers(keys, shared.num_layers),
    )
    return replace(shared, qk_norm=True, experts=experts)


def read_dense_layers(raw: RawConfig, num_layers: int) -> tuple[int, ...]:
    """The layers that have a plain MLP: the named ones, and all but every n-th."""
    every = raw.size("decoder_sparse_step", default=1)
    named = raw.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise CheckpointError(
            f"'mlp_only_layers' in {raw.where} must be a list of layer numbers, got {named!r}"
        )
    return tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % every)


# fmt: off
EXPERTS: WeightMap = {  # separate experts, then stacks
    "model.layers.{}.mlp.experts.{}.gate_proj":   Target("layers.{}.mlp.gate_up", part="gate"),
    "model.layers.{}.mlp.experts.{}.up_proj":     Target("layers.{}.mlp.gate_up", part="up"),
    "model.layers.{}.mlp.experts.{}.down_proj":   Target("layers.{}.mlp.down"),
    **STACKED_EXPERTS,
}
# fmt: on
WEIGHT_MAP: WeightMap = {**qwen3.WEIGHT_MAP, **EXPERTS}
