"""LoRA adapters as PEFT saves them, random, and checkpoints into which they are merged."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from infer.loader.formats.checkpoint import open_checkpoint, write_safetensors

FUSED = "qkv_proj|gate_up_proj|in_proj_qkv|in_proj_z|in_proj_b|in_proj_a|out_proj"
ALL = rf"\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|c_attn|c_proj|c_fc|{FUSED})$"
LEAVES = "lora_A.weight", "lora_B.weight"
EMBEDDING_LEAVES = "lora_embedding_A", "lora_embedding_B"
ATTENTION = r"self_attn\.(q_proj|k_proj|v_proj|o_proj)$"


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in float32."""
    tensors = {}
    for name, stored in open_checkpoint(directory).items():
        tensors[name] = torch.empty(stored.shape, dtype=torch.float32)
        stored.copy_to(tensors[name])
    return tensors


def make_adapter(
    directory: Path,
    base: Path,
    *,
    seed: int,
    rank: int = 8,
    targets: str = ALL,
    alpha: float = 16.0,
    **config: Any,
) -> Path:
    """Write a random adapter for the modules of a checkpoint whose names match; returns its directory."""
    generator = torch.Generator().manual_seed(seed)
    ranks: Mapping[str, int] = config.get("rank_pattern", {})
    tensors = {}
    for name, weight in read_weights(base).items():
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or weight.dim() != 2 or not re.search(targets, module):
            continue
        rows, columns = weight.T.shape if _is_transposed(module) else weight.shape
        leaves = EMBEDDING_LEAVES if module.endswith("embed_tokens") else LEAVES
        own = next((r for key, r in ranks.items() if module.endswith(key)), rank)
        a, b = torch.randn(own, columns, generator=generator), torch.randn(rows, own, generator=generator)
        size = rows if leaves is EMBEDDING_LEAVES else columns
        tensors[f"base_model.model.{module}.{leaves[0]}"] = a * size**-0.5
        tensors[f"base_model.model.{module}.{leaves[1]}"] = 0.2 * b
    directory.mkdir(parents=True, exist_ok=True)
    written = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "use_dora": False,
    } | config
    (directory / "adapter_config.json").write_text(json.dumps(written))
    write_safetensors(directory / "adapter_model.safetensors", tensors)
    return directory


def merge(directory: Path, base: Path, adapter: Path) -> Path:
    """Write the checkpoint whose weights are W + scale B A, in our own float32 arithmetic."""
    shutil.copytree(base, directory)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = read_weights(base)
    pairs = {name: (torch.empty(s.shape), s) for name, s in _adapter_tensors(adapter).items()}
    for out, stored in pairs.values():
        stored.copy_to(out)
    for name, (a, _) in pairs.items():
        if not name.endswith((LEAVES[0], EMBEDDING_LEAVES[0])):
            continue
        module = re.sub(r"\.lora_(embedding_)?A(\.weight)?$", "", name.removeprefix("base_model.model."))
        b, rank = pairs[re.sub(r"_A(\.weight)?$", r"_B\1", name)][0], a.shape[0]
        alphas = config.get("alpha_pattern", {})
        alpha = next((x for key, x in alphas.items() if module.endswith(key)), config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        update = scale * (b @ a)
        weights[f"{module}.weight"] += update.T if _is_transposed(module) else update
    write_safetensors(directory / "model.safetensors", weights)
    return directory


def _adapter_tensors(adapter: Path) -> dict[str, Any]:
    from infer.loader.formats.checkpoint import read_header

    return dict(read_header(adapter / "adapter_model.safetensors"))


def _is_transposed(module: str) -> bool:
    return ".c_" in module or module.endswith("embed_tokens")  # GPT-2's Conv1D; rows by id
