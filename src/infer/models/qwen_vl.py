"""The text part of Qwen 2-VL, Qwen 2.5-VL and Qwen 3-VL; images are not read.

It is Qwen 2, Qwen 3 or Qwen 3 MoE under longer names. Positions have three axes; text has the same position
on all of them, so it rotates as usual. Older configs of Qwen 2-VL and 2.5-VL have no `text_config`; its keys
are at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from infer.models import llama, qwen2, qwen3, qwen3_moe
from infer.models.config import ModelConfig
from infer.models.raw_config import RawConfig
from infer.models.weight_map import WeightMap, nested


def _reader(family: str, read: Callable[[Mapping[str, Any]], ModelConfig]) -> Any:
    """Make the function that reads a config around the one that `read` reads."""

    def read_config(raw: Mapping[str, Any]) -> ModelConfig:
        top = RawConfig(raw)
        text = top.section("text_config") if "text_config" in raw else top
        rope = text.get("rope_scaling")
        if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) == "mrope":
            text = RawConfig({**text.raw, "rope_scaling": None}, text.where)  # three axes, not scaled
        return replace(llama.with_outer_config(read(text.raw), top), family=family)

    return read_config


read_qwen2_vl = _reader("qwen2_vl", qwen2.read_config)
read_qwen3_vl = _reader("qwen3_vl", qwen3.read_config)
read_qwen3_vl_moe = _reader("qwen3_vl_moe", qwen3_moe.read_config)


def _with_prefixes(names: WeightMap) -> WeightMap:
    return nested(names, ("model", "model.language_model"), ignored=("visual.*", "model.visual.*"))


QWEN2_MAP = _with_prefixes(llama.WEIGHT_MAP)
QWEN3_MAP = _with_prefixes(qwen3.WEIGHT_MAP)
MOE_MAP = _with_prefixes(qwen3_moe.WEIGHT_MAP)
