"""Qwen 3 Next and Qwen 3.5 in GGUF: names of linear attention's tensors, and the converter's changes.

    A_log     stored as -exp(A_log)
    conv1d    stored as [channels, taps], without the dimension of size one
    norms     stored with 1 added, except the one after linear attention

Several value heads share a key head. Hugging Face stores the value heads of a key head together; files of
Qwen 3.5 have the first one of each key head, then the second one of each. With 2 key heads and 6 value heads:

    Hugging Face   a0 a1 a2 b0 b1 b2
    file           a0 b0 a1 b1 a2 b2        rows of v, z, b, a; channels of conv1d; columns of out_proj

Files of Qwen 3 Next keep Hugging Face's order of value heads. Their in_proj_qkvz is cut into attn_qkv and
attn_gate (z), as in Qwen 3.5, but the rows of ssm_ba are grouped by key head; here they become b and a. The
oldest files have both matrices unchanged (ssm_in, ssm_ba).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from infer.errors import CheckpointError
from infer.loader.formats.gguf import GGUFTensor
from infer.loader.formats.gguf_config import Keys

# fmt: off
HYBRID_NAMES: dict[str, str] = {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.attn_qkv":         "model.layers.{}.linear_attn.in_proj_qkv",
    "blk.{}.attn_gate":        "model.layers.{}.linear_attn.in_proj_z",
    "blk.{}.ssm_beta":         "model.layers.{}.linear_attn.in_proj_b",
    "blk.{}.ssm_alpha":        "model.layers.{}.linear_attn.in_proj_a",
    "blk.{}.ssm_in":           "model.layers.{}.linear_attn.in_proj_qkvz",
    "blk.{}.ssm_ba":           "model.layers.{}.linear_attn.in_proj_ba",
    "blk.{}.ssm_conv1d":       "model.layers.{}.linear_attn.conv1d",
    "blk.{}.ssm_a":            "model.layers.{}.linear_attn.A_log",  # a tensor; other keys are modules
    "blk.{}.ssm_dt.bias":      "model.layers.{}.linear_attn.dt_bias",
    "blk.{}.ssm_norm":         "model.layers.{}.linear_attn.norm",
    "blk.{}.ssm_out":          "model.layers.{}.linear_attn.out_proj",
    "blk.{}.ffn_gate_up_exps": "model.layers.{}.mlp.experts.gate_up_proj",
}
# fmt: on
_TILED = (
    "attn_qkv",
    "attn_gate",
    "ssm_beta",
    "ssm_alpha",
    "ssm_conv1d",
    "ssm_a",
    "ssm_dt.bias",
    "ssm_out",
)  # fmt: skip


def hybrid_changes(keys: Keys, stored: GGUFTensor, key: str) -> dict[str, Any]:
    """Return the converter's changes to a tensor, as fields of a `PackedTensor`."""
    name = key.removeprefix("blk.{}.")
    if name.endswith("norm"):
        return {} if name == "ssm_norm" else {"offset": 1.0}
    changes: dict[str, Any] = {"is_rate": True} if name == "ssm_a" else {}
    num_keys, num_values = keys.size("ssm.group_count"), keys.size("ssm.time_step_rank")
    if keys.architecture == "qwen3next" or name not in _TILED or num_values % num_keys:
        return changes
    is_single = name in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt.bias")  # a number for each head
    size = 1 if is_single else keys.size("ssm.inner_size") // num_values
    others = 2 * num_keys * keys.size("ssm.state_size") if name in ("attn_qkv", "ssm_conv1d") else 0  # q, k
    where, found = ("columns", stored.shape[-1]) if name == "ssm_out" else ("order", stored.shape[0])
    _check_rows(keys, stored, others + num_values * size, found)
    return changes | {where: _untiled(others, found, num_keys, size)}


@functools.cache  # layers share it
def _untiled(first: int, count: int, num_keys: int, size: int) -> tuple[int, ...]:
    """Return the order of `count` rows, in which the value heads begin at row `first`."""
    heads = torch.arange(first, count).view(-1, num_keys, size)
    return (*range(first), *heads.transpose(0, 1).flatten().tolist())


def rows_by_part(keys: Keys, stored: GGUFTensor) -> dict[str, tuple[int, ...]]:
    """Return the rows of b and of a in `ssm_ba`, where each key head has its rows together."""
    num_keys, num_values = keys.size("ssm.group_count"), keys.size("ssm.time_step_rank")
    _check_rows(keys, stored, 2 * num_values if num_values % num_keys == 0 else 0, stored.shape[0])
    rows = torch.arange(2 * num_values).view(num_keys, 2, -1)
    return {part: tuple(rows[:, place].flatten().tolist()) for place, part in enumerate("ba")}


def _check_rows(keys: Keys, stored: GGUFTensor, expected: int, found: int) -> None:
    """Refuse a tensor that has not the size of all heads, before a list of its rows is made."""
    if found != expected:
        raise CheckpointError(
            f"{keys.file.path}: {stored.name!r} has the shape {list(stored.shape)}, but the heads of linear "
            f"attention in the metadata need {expected} in place of {found}"
        )
