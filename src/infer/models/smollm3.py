"""SmolLM3: Llama's block, in which every fourth layer does not rotate its heads.

no_rope_layers       one number per layer: 1 where the layer rotates, 0 where it does not (the name says the
                     opposite); missing: 0 in every `no_rope_layer_interval`-th layer
use_sliding_window   a window in the layers that do not rotate; published models have none
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.errors import CheckpointError
from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.raw_config import MAX_LAYERS, RawConfig, read_window


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `SmolLM3ForCausalLM`."""
    top = RawConfig(raw)
    keys = top.with_defaults(rope_theta=2_000_000.0, tie_word_embeddings=True)
    num_layers = keys.size("num_hidden_layers", at_most=MAX_LAYERS)
    interval = keys.size("no_rope_layer_interval", default=4)
    rotates = keys.get("no_rope_layers")
    if rotates is None:
        rotates = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    is_list = isinstance(rotates, list) and len(rotates) == num_layers
    if not is_list or not all(each in (0, 1) for each in rotates):
        raise CheckpointError(
            f"'no_rope_layers' in {keys.where} must have {num_layers} entries of 0 or 1, got {rotates!r}"
        )
    still = tuple(layer for layer in range(num_layers) if not rotates[layer])
    window = read_window(keys, default=None) if keys.flag("use_sliding_window", default=False) else None
    if window is None:  # the flag decides, as in the reference's attention; its masks follow `layer_types`
        keys = keys.without("layer_types")
    shared = llama.read_shared_config(
        keys,
        family="smollm3",
        window=window,
        slides=lambda layer: window is not None and layer in still,
        attention_bias=False,
    )
    return replace(shared, still_layers=still, mlp_bias=keys.flag("mlp_bias", default=False))
