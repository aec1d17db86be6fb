"""Read a LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

    base_model.model.<module>.lora_A.weight   [r, in]
    base_model.model.<module>.lora_B.weight   [out, r]      y += scale B (A x)

The module is named as in the base model's checkpoint, so the family's weight map says where it goes, fused
parts included. The tensors decide what is adapted: `target_modules` of the config is not read, and a tensor
that has no place is an error, never skipped. Scale and rank of a module:

    scale   lora_alpha / r, with use_rslora lora_alpha / sqrt(r); alpha_pattern has exceptions by module
    r       rows of A; the config must say the same, and rank_pattern has exceptions by module

Everything is checked before a weight is read.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infer.errors import CheckpointError
from infer.layers.linear import ExpertLinear, Linear
from infer.loader.formats.checkpoint import StoredTensor, read_header
from infer.loader.formats.hf_config import MAX_CONFIG_BYTES, read_json
from infer.loader.row_order import reordered, row_order
from infer.models.model import Model
from infer.models.weight_map import WeightMap, find_target

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
MAX_PATTERNS = 4096
_LEAF = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

# other things that a PEFT checkpoint may ask for: the key in the config, and the name of the feature
_REFUSED = {
    "use_dora": "DoRA, which rescales the weights of the base model",
    "lora_bias": "biases in its matrices (lora_bias)",
    "modules_to_save": "whole modules of its own (modules_to_save)",
    "target_parameters": "matrices of experts (target_parameters)",
    "trainable_token_indices": "embeddings of its own (trainable_token_indices)",
    "alora_invocation_tokens": "activation by tokens of the prompt (aLoRA)",
    "layer_replication": "repeated layers (layer_replication)",
    "use_qalora": "quantized groups (QALoRA)",
}


class LowRankPair(NamedTuple):
    """The two matrices that adapt one part of a matrix, or all of it, on disk."""

    module: str  # name of the module in the model
    part: int | None  # number of the part that it adapts; None: all of the matrix
    a: StoredTensor
    b: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        """The rank of the product."""
        return self.a.shape[0]

    def read(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A [r, in] and the scale times B [out, r], in the memory of the host."""
        a_RK, b_NR = (torch.empty(each.shape, dtype=torch.float32) for each in (self.a, self.b))
        self.a.copy_to(a_RK)
        self.b.copy_to(b_NR)
        return a_RK.to(dtype), (self.scale * b_NR).to(dtype)


def read_adapter(directory: Path, model: Model, weight_map: WeightMap) -> list[LowRankPair]:
    """The pairs of an adapter, checked against the model, which need not have weights yet."""
    config = _read_config(directory)
    patterns = {
        "r": _read_patterns(directory, config, "rank_pattern"),
        "lora_alpha": _read_patterns(directory, config, "alpha_pattern"),
    }
    if not (directory / WEIGHTS).is_file() and (directory / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"{directory} has adapter_model.bin and no {WEIGHTS}; pickles are not opened: convert it with "
            f"scripts/unpickle.py {directory / 'adapter_model.bin'} {directory}"
        )
    sides = _sides(directory, read_header(directory / WEIGHTS))
    pairs = [
        _pair(directory, name, found, config, patterns, model, weight_map) for name, found in sides.items()
    ]
    if not pairs:
        raise CheckpointError(f"{directory / WEIGHTS} holds no tensors; an adapter has lora_A and lora_B")
    return pairs


def _read_config(directory: Path) -> dict[str, Any]:
    if not os.path.isdir(directory):  # Path.is_dir raises where a name is too long
        raise CheckpointError(f"no directory {directory}; an adapter is one with {CONFIG} and {WEIGHTS}")
    config = read_json(directory / CONFIG, MAX_CONFIG_BYTES)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{directory / CONFIG} has peft_type {kind!r}; only LORA can be served")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise CheckpointError(f"the adapter in {directory} has {what}, which cannot be served")
    if config.get("bias", "none") != "none":
        raise CheckpointError(
            f"the adapter in {directory} has bias={config['bias']!r}; only 'none' can be served"
        )
    _check_alpha(directory, config.get("lora_alpha"))
    return config


def _check_alpha(directory: Path, alpha: Any) -> None:
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not abs(alpha) <= sys.float_info.max:
        raise CheckpointError(
            f"{directory / CONFIG} needs numbers for lora_alpha and alpha_pattern, got {str(alpha)[:100]}"
        )


def _read_patterns(
    directory: Path, config: Mapping[str, Any], key: str
) -> list[tuple[re.Pattern[str], float]]:
    """The exceptions to `lora_alpha` or `r`: patterns for the end of a module's name, as PEFT matches them.

    Only patterns whose matching takes bounded time are compiled: no repeated groups, and few repetitions.
    """
    given = config.get(key) or {}
    if not isinstance(given, dict) or len(given) > MAX_PATTERNS:
        raise CheckpointError(
            f"{directory / CONFIG}: {key} must be an object of at most {MAX_PATTERNS} patterns"
        )
    patterns = []
    for pattern, value in given.items():
        if key == "alpha_pattern":
            _check_alpha(directory, value)
        bare = re.sub(r"\\.|\[[^]]*\]", "x", pattern)
        if (
            len(pattern) > 500
            or len(re.findall(r"[*+?{]", bare)) > 3
            or bare.count("(") > 3
            or re.search(r"\)[*+?{]|\(\?", bare)
        ):
            raise CheckpointError(
                f"{directory / CONFIG}: {key} has {pattern[:100]!r}, which is too complex; name the "
                "modules, or use at most 3 repetitions and 3 groups, none of them repeated"
            )
        try:
            patterns.append((re.compile(rf"(.*\.)?({pattern})$"), value))
        except (re.error, OverflowError) as error:
            raise CheckpointError(f"{directory / CONFIG}: {key} has {pattern[:100]!r}: {error}") from None
    return patterns


def _sides(directory: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """The tensors A and B of each module of the base model; a tensor that is neither is refused."""
    sides: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        found = _LEAF.fullmatch(name)
        if found is None or not name.startswith(PREFIX):
            kinds = {"lora_magnitude_vector": "DoRA", "lora_embedding": "an adapted embedding"}
            what = next((what for leaf, what in kinds.items() if leaf in name), "no matrix of a LoRA adapter")
            raise CheckpointError(f"{directory / WEIGHTS} has {name!r}, {what}, which cannot be served")
        sides.setdefault(found["module"].removeprefix(PREFIX), {})[found["side"]] = tensor
    return sides


def _pair(
    directory: Path,
    name: str,
    found: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
    patterns: Mapping[str, Sequence[tuple[re.Pattern[str], float]]],
    model: Model,
    weight_map: WeightMap,
) -> LowRankPair:
    """The pair of one module of the base model, checked."""
    where = f"the adapter in {directory} adapts {name!r}"
    if len(found) < 2:
        raise CheckpointError(f"{where} with lora_{next(iter(found))} alone; it needs lora_A and lora_B")
    a, b = found["A"], found["B"]
    try:
        target, _ = find_target(f"{name}.weight", weight_map)
        layer = model.get_submodule(target.module)
    except (CheckpointError, AttributeError):
        raise CheckpointError(f"{where}, which the model does not have; is it for another model?") from None
    if isinstance(layer, ExpertLinear) or target.expert is not None:
        raise CheckpointError(f"{where}, a matrix of experts; only attention of such a model can be adapted")
    if target.ignored or not isinstance(layer, Linear) or not target.module.startswith("layers."):
        raise CheckpointError(f"{where}; only the matrices of attention and MLP can be adapted")
    if layer.always_dense:
        raise CheckpointError(f"{where}, a router; only attention of such a model can be adapted")
    rows = layer.spec.part_rows(target.part)
    shapes, wanted = (a.shape, b.shape), (layer.spec.size, rows.stop - rows.start)
    if (
        len(a.shape) != 2
        or len(b.shape) != 2
        or (a.shape[1], b.shape[0]) != wanted
        or a.shape[0] != b.shape[1]
    ):
        raise CheckpointError(
            f"{where} with A {list(shapes[0])} and B {list(shapes[1])}, but the model's matrix is "
            f"{wanted[1]} x {wanted[0]}; is it for another model?"
        )
    if not a.shape[0] or not (a.is_readable and b.is_readable):
        raise CheckpointError(f"{where} with {a.type_name} matrices of rank {a.shape[0]}, not with numbers")
    rank, alpha = (
        next((value for pattern, value in patterns[key] if pattern.match(name)), config.get(key))
        for key in ("r", "lora_alpha")
    )
    if rank != a.shape[0]:
        raise CheckpointError(
            f"{where} with rank {a.shape[0]}, but {CONFIG} says {rank!r}; were both files saved together?"
        )
    assert alpha is not None  # checked with the config
    root = math.sqrt(a.shape[0]) if config.get("use_rslora") else a.shape[0]
    if order := row_order(model.config, target.module, target.part, layer.spec.parts, b.shape[0]):
        b = reordered(b, order, name, model.config.head_dim)  # the order of the rows of the matrix
    part = None if target.part is None else list(layer.spec.parts).index(target.part)
    return LowRankPair(target.module, part, a, b, alpha / root)
