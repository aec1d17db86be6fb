"""Qwen 3 Next: the block of Qwen 3.5 MoE, whose linear attention stores its rows grouped by key head.

    in_proj_qkvz    for each key head: q, k, then v and z of the value heads that it serves
    in_proj_ba      for each key head: b and a of these value heads

The products are reordered as layers/delta.py expects: all q, all k, all v, z, b, a.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from infer.models.config import DeltaConfig, ModelConfig
from infer.models.qwen3_5 import LAYER_MAP, Qwen35, with_prefixes
from infer.models.qwen3_5_moe import EXPERT_MAP, read_hybrid_moe_config
from infer.models.raw_config import RawConfig
from infer.models.weight_map import Target


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Qwen3NextForCausalLM`."""
    return read_hybrid_moe_config(RawConfig(raw), family="qwen3_next")


class Qwen3Next(Qwen35):
    """Qwen 3.5's stack with other input matrices in linear attention."""

    @staticmethod
    def delta_parts(delta: DeltaConfig) -> tuple[dict[str, int], list[int] | None]:
        """The rows of each input matrix of linear attention, and the order of all rows."""
        num_served = delta.num_value_heads // delta.num_key_heads
        values = num_served * delta.value_dim
        sizes = delta.key_dim, delta.key_dim, values, values
        qkvz = np.arange(delta.num_key_heads * sum(sizes)).reshape(delta.num_key_heads, -1)
        ba = qkvz.size + np.arange(2 * delta.num_value_heads).reshape(delta.num_key_heads, -1)
        parts = [*np.split(qkvz, np.cumsum(sizes)[:-1], axis=1), *np.split(ba, 2, axis=1)]
        order: list[int] = np.concatenate([part.ravel() for part in parts]).tolist()
        return {"qkvz": qkvz.size, "ba": ba.size}, order


WEIGHT_MAP = with_prefixes(
    {
        **LAYER_MAP,
        **EXPERT_MAP,
        "layers.{}.linear_attn.in_proj_qkvz": Target("layers.{}.attention.projected", part="qkvz"),
        "layers.{}.linear_attn.in_proj_ba": Target("layers.{}.attention.projected", part="ba"),
    }
)
