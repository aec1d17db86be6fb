"""Gemma 2: Gemma 3's block without norms of heads, and with soft caps.

local and global     even layers see a sliding window, odd ones everything; one RoPE base for both
soft caps            c tanh(x / c) for attention scores (c = 50) and logits (c = 30)
query scale          1 / sqrt(query_pre_attn_scalar), which need not be the head size (27B)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.models import gemma3, llama
from infer.models.config import ModelConfig
from infer.models.raw_config import RawConfig, read_window
from infer.models.weight_map import WeightMap

_DEFAULTS = {  # defaults of the reference for absent keys
    "vocab_size": 256_000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Gemma2ForCausalLM`."""
    given = RawConfig(raw)
    given.refuse("use_bidirectional_attention", "only causal models can generate")
    keys = given.with_defaults(**_DEFAULTS)
    shared = llama.read_shared_config(
        keys,
        family="gemma2",
        window=read_window(given),
        slides=lambda layer: layer % 2 == 0,
        attention_bias=False,
    )
    return replace(
        shared,
        norm_offset=1.0,
        activation=keys.activation("hidden_activation", default="gelu_pytorch_tanh"),
        embedding_scale=shared.hidden_size**0.5,
        query_scale=keys.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=_read_cap(given, "attn_logit_softcapping", 50.0),
        logit_softcap=_read_cap(given, "final_logit_softcapping", 30.0),
    )


def _read_cap(raw: RawConfig, name: str, default: float) -> float | None:
    """Read a soft cap. Unlike an absent key, null switches the cap off."""
    if name in raw.raw and raw.raw[name] is None:
        return None
    return raw.number(name, default=default)


WEIGHT_MAP: WeightMap = {**llama.WEIGHT_MAP, **gemma3.SANDWICH_NORMS}
