"""Mistral 7B: Llama's block, in which (v0.1) every layer sees only a sliding window.

sliding_window   4096 in v0.1, null from v0.2 on; the reference takes a missing key as 4096
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.raw_config import MAX_LAYERS, RawConfig, read_window
from infer.models.weight_map import WeightMap


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `MistralForCausalLM`."""
    keys = RawConfig(raw)
    return read_windowed_config(keys, family="mistral", window=read_window(keys))


def read_windowed_config(raw: RawConfig, *, window: int | None, **facts: Any) -> ModelConfig:
    """Llama's keys; a window, if there is one, is every layer's."""
    layer_type = "full_attention" if window is None else "sliding_attention"
    num_layers = raw.size("num_hidden_layers", at_most=MAX_LAYERS)
    return llama.read_shared_config(
        raw, window=window, default_layer_types=[layer_type] * num_layers, **facts
    )


WEIGHT_MAP: WeightMap = llama.WEIGHT_MAP
