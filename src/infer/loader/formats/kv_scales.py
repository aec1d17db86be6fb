"""Read a checkpoint's calibrated scales of an FP8 KV cache: k ≈ code * k_scale for all tokens.

    self_attn.k_scale, self_attn.v_scale         one number, or one for each kv head [G, 1, 1]
    self_attn.attn.k_scale, k_proj.k_scale       the same, by other tools
    k_proj.output_scale, v_proj.output_scale     older compressed-tensors
    self_attn.kv_scale                           one for both

The scales are used only if every layer has both. Otherwise the log says why not. Other reasons are scales
that are all 1, which tools write if nothing was calibrated, codes other than fp8, and zero points.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from infer.loader.formats.checkpoint import StoredTensor
from infer.models.weight_map import WeightMap

LEAVES = {
    *("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale", "output_scale"),
    *("k_zero_point", "v_zero_point", "q_zero_point", "output_zero_point"),
}
_SIDES = {"k_scale": (0,), "k_proj": (0,), "v_scale": (1,), "v_proj": (1,), "kv_scale": (0, 1)}

log = logging.getLogger(__name__)


def read_kv_scales(
    tensors: Mapping[str, StoredTensor],
    settings: Mapping[str, Any],
    weight_map: WeightMap,
    num_layers: int,
    num_kv_heads: int,
) -> torch.Tensor | None:
    """Return scales of keys and values, float32 [layers, 2, G]; None: there are none that can be used.

    Other towers of a checkpoint may have scales too; only those in the layers of `weight_map` count.
    """
    stems = {re.escape(name.partition("{}")[0]) for name in weight_map if "{}" in name}
    of_layer = re.compile(f"(?:{'|'.join(stems)})(\\d+)\\.")
    found = {
        name: (int(below[1]), tensor)
        for name, tensor in tensors.items()
        if name.rpartition(".")[2] in LEAVES and (below := of_layer.match(name))
    }
    if not found:
        return None
    scales = torch.zeros(num_layers, 2, num_kv_heads)
    reasons = [_other_codes(settings)]
    for name, (layer, tensor) in found.items():
        (module, _, leaf), count = name.rpartition("."), math.prod(tensor.shape)
        sides = _SIDES.get(leaf if leaf != "output_scale" else module.rpartition(".")[2])
        if leaf.endswith("zero_point"):
            stored = torch.empty(tensor.shape, dtype=tensor.dtype)
            tensor.copy_to(stored)
            reasons.append(f"{name} is not 0" if stored.float().any() else "")
        elif sides and tensor.is_readable and layer < num_layers and count in (1, num_kv_heads):
            numbers = torch.empty(tensor.shape)
            tensor.copy_to(numbers)
            scales[layer, list(sides)] = numbers.flatten()
        elif sides:
            held = f"{tensor.type_name} {list(tensor.shape)}"
            reasons.append(f"{name} is {held} in a model of {num_layers} layers")
    if not ((scales > 0) & scales.isfinite()).all():
        reasons.append("not all layers have scales above 0 of keys and of values")
    if (scales == 1).all():
        reasons.append("all are 1, so nothing was calibrated")
    if not any(reasons):
        return scales
    reason = next(filter(None, reasons))
    log.warning("the checkpoint's scales of a KV cache are not used tensors=%d reason=%r", len(found), reason)
    return None


def _other_codes(settings: Mapping[str, Any]) -> str:
    """Return the reason why the scales are not for e4m3 codes; "": the config names no other codes."""
    scheme, algorithm = settings.get("kv_cache_scheme"), settings.get("kv_cache_quant_algo")
    said = {"num_bits": 8, "type": "float"} | dict(scheme if isinstance(scheme, Mapping) else {})
    if (said["num_bits"], said["type"]) != (8, "float") or algorithm not in (None, "FP8"):
        return f"they are of {algorithm or '{type}{num_bits}'.format(**said)}, not of fp8"
    return ""
