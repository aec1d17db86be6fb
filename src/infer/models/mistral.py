"""Mistral 7B: Llama's block, in which (v0.1) every layer sees only a sliding window.

sliding_window   4096 in v0.1, null from v0.2 on; the reference takes a missing key as 4096
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.raw_config import RawConfig, read_window


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `MistralForCausalLM`."""
    keys = RawConfig(raw)
    return llama.read_shared_config(keys, family="mistral", window=read_window(keys))
