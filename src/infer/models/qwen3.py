"""Qwen 3: Llama's block, in which each query and key head is normalised before it is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.qwen2 import read_windowed_config
from infer.models.raw_config import RawConfig
from infer.models.weight_map import Target, WeightMap


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Qwen3ForCausalLM`."""
    keys = RawConfig(raw)
    shared = read_windowed_config(keys, family="qwen3", default_head_dim=128, attention_bias=False)
    return replace(shared, qk_norm=True)


# fmt: off
WEIGHT_MAP: WeightMap = {
    **llama.WEIGHT_MAP,
    "model.layers.{}.self_attn.q_norm":           Target("layers.{}.attention.q_norm"),
    "model.layers.{}.self_attn.k_norm":           Target("layers.{}.attention.k_norm"),
}
# fmt: on
