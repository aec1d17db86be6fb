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

DEFAULT_WINDOW = 4096


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `MistralForCausalLM`."""
    keys = RawConfig(raw)
    window = read_window(keys, DEFAULT_WINDOW)
    layer_type = "full_attention" if window is None else "sliding_attention"
    num_layers = keys.size("num_hidden_layers", at_most=MAX_LAYERS)
    return llama.read_shared_config(
        keys, family="mistral", window=window, default_layer_types=[layer_type] * num_layers
    )


WEIGHT_MAP: WeightMap = llama.WEIGHT_MAP
