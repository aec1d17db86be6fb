"""The text part of Mistral Small 3.1, 3.2 and of the multimodal Ministral 3; images are not read.

`text_config` is a Mistral config without a window, or a Ministral 3 config. The text part's tensors have
longer names; the vision tower and the projector are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.errors import ConfigError
from infer.models import llama, ministral3
from infer.models.config import ModelConfig
from infer.models.raw_config import RawConfig, read_window
from infer.models.weight_map import nested

_DEFAULTS = {  # defaults of the reference, which published configs leave out
    "vocab_size": 131_072,
    "hidden_size": 5120,
    "intermediate_size": 32_768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000_000.0,
}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a `Mistral3ForConditionalGeneration`."""
    top = RawConfig(raw)
    text = top.section("text_config")
    kind = text.get("model_type") or "mistral"
    if kind == "ministral3":
        shared = ministral3.read_config(text.raw)
    elif kind == "mistral":
        keys = text.with_defaults(**_DEFAULTS)
        window = read_window(keys, default=None)
        shared = llama.read_shared_config(keys, family="mistral3", window=window)
    else:
        raise ConfigError(f"'model_type' in {text.where} is {kind!r}; supported: mistral, ministral3")
    return replace(llama.with_outer_config(shared, top), family="mistral3")


_VISION = ("vision_tower.*", "multi_modal_projector.*")
WEIGHT_MAP = nested(
    llama.WEIGHT_MAP,
    ("language_model.model", "model.language_model"),  # prefixes of older files, and of newer ones
    heads=("language_model.lm_head", "lm_head"),
    ignored=(*_VISION, *(f"model.{name}" for name in _VISION)),
)
