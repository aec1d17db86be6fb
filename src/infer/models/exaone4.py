"""EXAONE 4: OLMo 2's block with a norm for each query and key head.

In models with a sliding window (32B) three layers see the window, and the fourth sees everything and does not
rotate its heads. In models without one (1.2B) every layer rotates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from infer.errors import CheckpointError
from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.raw_config import RawConfig


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of an `Exaone4ForCausalLM`."""
    top = RawConfig(raw)
    keys = top.with_defaults(rms_norm_eps=1e-5)
    window: int | None = None
    slides: Callable[[int], bool] = lambda layer: False
    if "sliding_window" in raw and raw["sliding_window"] is None:  # the reference then ignores `layer_types`
        keys = keys.without("layer_types")
    else:
        window, slides = keys.size("sliding_window", default=4096), _pattern(keys)
    shared = llama.read_shared_config(keys, family="exaone4", window=window, slides=slides)
    layers = range(shared.num_layers) if window is not None else ()
    return replace(
        shared, qk_norm=True, still_layers=tuple(layer for layer in layers if shared.window(layer) is None)
    )


def _pattern(keys: RawConfig) -> Callable[[int], bool]:
    """Return the rule for layers with a window, if none are listed: "LLLG", or all but every n-th (4)."""
    pattern = keys.get("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise CheckpointError(
                f"'sliding_window_pattern' in {keys.where} must consist of L and G, got {pattern!r}"
            )
        return lambda layer: pattern[layer % len(pattern)] == "L"
    every = keys.size("sliding_window_pattern", default=4)
    return lambda layer: (layer + 1) % every != 0
