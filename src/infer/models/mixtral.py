"""Mixtral: Mistral's block with a mixture of experts as its MLP; Qwen 2 MoE and Qwen 3 MoE use this network.

    router  ──►  2 of 8 experts, their weights scaled to sum to 1  ──►  weighted sum

Published files hold three matrices per expert: w1 (gate), w3 (up) and w2 (down). Others may hold stacks of
all experts instead, as the reference keeps them in memory. This map has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.errors import CheckpointError
from infer.layers.mlp import GatedMLP
from infer.layers.moe import MixtureOfExperts
from infer.models import llama
from infer.models.config import ExpertConfig, ModelConfig
from infer.models.raw_config import RawConfig, read_window
from infer.models.weight_map import Target, WeightMap

MAX_EXPERTS = 4096
_DEFAULTS = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5}  # defaults of the reference for absent keys


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `MixtralForCausalLM`."""
    keys = RawConfig(raw).with_defaults(**_DEFAULTS)
    shared = llama.read_shared_config(keys, family="mixtral", window=read_window(keys, default=None))
    experts = read_experts(keys, (8, 2), size=shared.intermediate_size, normalized=True)
    return replace(shared, experts=experts)


def read_experts(
    raw: RawConfig, defaults: tuple[int, int], *, size: int, normalized: bool | None = None, **others: Any
) -> ExpertConfig:
    """Read the experts, each of size `size`; `defaults`: number of experts, number of experts per token."""
    if normalized is None:
        normalized = raw.flag("norm_topk_prob", default=False)
    num_experts = raw.size("num_local_experts", "num_experts", default=defaults[0], at_most=MAX_EXPERTS)
    num_choices = raw.size("num_experts_per_tok", default=defaults[1], at_most=MAX_EXPERTS)
    if num_choices > num_experts:
        raise CheckpointError(
            f"'num_experts_per_tok' in {raw.where} is {num_choices}, but there are {num_experts} experts"
        )
    return ExpertConfig(
        num_experts=num_experts, num_choices=num_choices, size=size, normalized=normalized, **others
    )


class Mixtral(llama.Llama):
    """Llama's stack with a mixture of experts in each layer that the config does not make dense."""

    @staticmethod
    def make_mlp(config: ModelConfig, layer: int) -> GatedMLP | MixtureOfExperts:
        """The experts of one layer, or its plain MLP."""
        experts = config.experts_of(layer)
        if experts is None:
            return llama.Llama.make_mlp(config, layer)
        return MixtureOfExperts(
            config.hidden_size, experts, activation=config.activation, bias=config.mlp_bias
        )


# fmt: off
STACKED_EXPERTS: WeightMap = {
    "model.layers.{}.mlp.gate":                        Target("layers.{}.mlp.router"),
    "model.layers.{}.mlp.experts.gate_up_proj":        Target("layers.{}.mlp.gate_up"),
    "model.layers.{}.mlp.experts.gate_proj":           Target("layers.{}.mlp.gate_up", part="gate"),
    "model.layers.{}.mlp.experts.up_proj":             Target("layers.{}.mlp.gate_up", part="up"),
    "model.layers.{}.mlp.experts.down_proj":           Target("layers.{}.mlp.down"),
}
WEIGHT_MAP: WeightMap = {
    **{key: target for key, target in llama.WEIGHT_MAP.items() if ".mlp." not in key},
    "model.layers.{}.block_sparse_moe.gate":           Target("layers.{}.mlp.router"),
    "model.layers.{}.block_sparse_moe.experts.{}.w1":  Target("layers.{}.mlp.gate_up", part="gate"),
    "model.layers.{}.block_sparse_moe.experts.{}.w3":  Target("layers.{}.mlp.gate_up", part="up"),
    "model.layers.{}.block_sparse_moe.experts.{}.w2":  Target("layers.{}.mlp.down"),
    **STACKED_EXPERTS,
}
# fmt: on
