"""Qwen 2 and 2.5: Llama's block with a bias on queries, keys and values.

The config can switch on a sliding window for the layers from `max_window_layers` on; the published
instruct models leave it off (`use_sliding_window: false`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.raw_config import RawConfig, read_window

DEFAULT_MAX_WINDOW_LAYERS = 28


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Qwen2ForCausalLM`."""
    return replace(read_windowed_config(RawConfig(raw), family="qwen2"), qkv_bias=True)


def read_windowed_config(
    raw: RawConfig, *, family: str, default_head_dim: int | None = None, attention_bias: bool | None = None
) -> ModelConfig:
    """Read Llama's keys, and Qwen's for windows: `use_sliding_window` and the first layer that has one."""
    window = read_window(raw) if raw.flag("use_sliding_window", default=False) else None
    first = raw.get("max_window_layers")  # may be 0, unlike a size: then every layer slides
    if window is not None and first != 0:
        first = raw.size("max_window_layers", default=DEFAULT_MAX_WINDOW_LAYERS)
    return llama.read_shared_config(
        raw,
        family=family,
        default_head_dim=default_head_dim,
        window=window,
        slides=lambda layer: window is not None and layer >= first,
        attention_bias=attention_bias,
    )
