"""OLMo 3: OLMo 2's block, in which three layers see a sliding window, and the fourth everything.

Only layers without a window scale their rotary positions beyond the trained context: the others never look
further back than their window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.raw_config import RawConfig, read_window

DEFAULT_THETA = 500_000.0


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of an `Olmo3ForCausalLM`."""
    top = RawConfig(raw)
    keys = top.with_defaults(rms_norm_eps=1e-5)
    shared = llama.read_shared_config(
        keys,
        family="olmo3",
        window=read_window(top),
        slides=lambda layer: (layer + 1) % 4 != 0,
        attention_bias=False,
    )
    both = llama.with_two_ropes(shared, keys, theta=DEFAULT_THETA, local_theta=DEFAULT_THETA)
    return replace(both, projection_norm=True)
