"""Qwen 2 and 2.5: Llama's block with a bias on queries, keys and values.

The config can switch on a sliding window for the layers from `max_window_layers` on; the published
instruct models leave it off (`use_sliding_window: false`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.raw_config import MAX_LAYERS, RawConfig, read_window
from infer.models.weight_map import WeightMap

DEFAULT_MAX_WINDOW_LAYERS = 28


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Qwen2ForCausalLM`."""
    keys = RawConfig(raw)
    window, layer_types = read_upper_windows(keys)
    return llama.read_shared_config(
        keys, family="qwen2", qkv_bias=True, window=window, default_layer_types=layer_types
    )


def read_upper_windows(raw: RawConfig) -> tuple[int | None, list[str]]:
    """Qwen's spelling of windows: the window, and which layers slide unless `layer_types` says."""
    num_layers = raw.size("num_hidden_layers", at_most=MAX_LAYERS)
    window = read_window(raw) if raw.flag("use_sliding_window", default=False) else None
    if window is None:
        return None, ["full_attention"] * num_layers
    first = raw.get("max_window_layers")  # may be 0, unlike a size: then every layer slides
    if first != 0:
        first = raw.size("max_window_layers", default=DEFAULT_MAX_WINDOW_LAYERS)
    return window, [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]


WEIGHT_MAP: WeightMap = llama.WEIGHT_MAP
