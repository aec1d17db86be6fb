"""Read a LoRA adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

    base_model.model.<module>.lora_A.weight   [r, in]
    base_model.model.<module>.lora_B.weight   [out, r]      y += scale B (A x)
    base_model.model.<module>.lora_embedding_A [r, ids], lora_embedding_B [size, r]: an adapted embedding
    base_model.model.<module>.base_layer.weight  the embedding or the head itself, which PEFT may save with
                                              its adapter; it must equal the model's

The module is named as in the base model's checkpoint, so the family's weight map gives its place, including
fused parts. The tensors decide which modules are adapted: `target_modules` of the config is not read, and a
tensor without a place is an error, never skipped. Scale and rank of a module:

    scale   lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora; alpha_pattern overrides alpha by module
    r       rows of A; must match the config, where rank_pattern overrides r by module

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
from infer.layers.adapted import OUTER
from infer.layers.embedding import Embedding
from infer.layers.linear import ExpertLinear, Linear, without_weights
from infer.loader.cut_tensor import CutTensor, part_of
from infer.loader.formats.checkpoint import StoredTensor, read_header
from infer.loader.formats.hf_config import MAX_CONFIG_BYTES, read_json
from infer.loader.row_order import reordered, row_order
from infer.loader.slices import ALONE, Rank, own_part, own_vocabulary
from infer.models.config import ModelConfig
from infer.models.model import Model
from infer.models.registry import get_family
from infer.models.weight_map import Target, WeightMap, find_target

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
MAX_PATTERNS = 4096
_LEAF = re.compile(r"(?P<module>.+)\.lora_(?:(?P<side>[AB])\.weight|embedding_(?P<of_embedding>[AB]))")
_WHOLE = re.compile(r"(?P<module>.+?)(\.base_layer)?\.weight")
_ROWS_AT_ONCE = 4096
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")  # starts of training that change the base model

# unsupported features of PEFT: the key in the config, and the name of the feature
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
    """The two stored matrices that adapt one matrix of the model, or one part of it."""

    module: str  # name of the module in the model
    part: int | None  # number of the adapted part; None: all of the matrix
    a: StoredTensor
    b: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        """The rank of the product B A."""
        return self.a.shape[0]

    def read(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [r, in] and the scale times B [out, r], in host memory."""
        a_RK, b_NR = (torch.empty(each.shape, dtype=torch.float32) for each in (self.a, self.b))
        self.a.copy_to(a_RK)
        self.b.copy_to(b_NR)
        return a_RK.to(dtype), (self.scale * b_NR).to(dtype)


def whole_network(config: ModelConfig) -> Model:
    """Return the network of all ranks together, without weights, to check adapters against."""
    with torch.device("meta"), without_weights():
        return get_family(config.family).build(config)


def cut_pair(pair: LowRankPair, network: Model, rank: Rank) -> LowRankPair:
    """Return a rank's part of a pair: B is cut like the rows of the rank's matrix, or A like its columns.

    So the product of a matrix that is cut along columns is a partial sum, and so is its low-rank term.
    Adapters of the embedding and the head are whole on every rank.
    """
    layer = network.get_submodule(pair.module)
    if rank.world_size == 1 or pair.module in OUTER or not isinstance(layer, Linear):
        return pair
    parts = layer.spec.parts
    if pair.part is not None:
        parts = dict([list(parts.items())[pair.part]])
    shape = pair.b.shape[0], pair.a.shape[1]
    rows, columns = own_part(pair.module, parts, shape, network.config, rank)
    return pair._replace(a=CutTensor(pair.a, (None, columns)), b=CutTensor(pair.b, (rows, None)))


def read_adapter(directory: Path, model: Model, weight_map: WeightMap) -> list[LowRankPair]:
    """Return the pairs of an adapter, checked against the model, which needs no weights for that."""
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
    sides = _sides(directory, read_header(directory / WEIGHTS), weight_map)
    pairs = [
        _pair(directory, name, found, config, patterns, model, weight_map) for name, found in sides.items()
    ]
    if not pairs:
        raise CheckpointError(f"{directory / WEIGHTS} holds no tensors; an adapter has lora_A and lora_B")
    return pairs


def _read_config(directory: Path) -> dict[str, Any]:
    if not os.path.isdir(directory):  # Path.is_dir raises where a name is too long
        raise CheckpointError(f"{directory} is not a directory; an adapter has {CONFIG} and {WEIGHTS}")
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
    if str(start := config.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"the adapter in {directory} has init_lora_weights={start!r}, for which PEFT changes "
            "the base model; convert it: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
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
    """Read the overrides of `lora_alpha` or `r`: patterns for the end of a module's name, as in PEFT.

    Only patterns that match in bounded time are compiled: no repeated groups, and few repetitions.
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


def _sides(
    directory: Path, tensors: Mapping[str, StoredTensor], weight_map: WeightMap
) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors A and B of each module of the base model; a tensor that is neither is refused."""
    sides: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        found = _LEAF.fullmatch(name)
        if found is None and _whole(name, weight_map):
            continue  # compared when the adapter is loaded
        if found is None or not name.startswith(PREFIX):
            is_dora = "lora_magnitude_vector" in name
            what = "DoRA" if is_dora else "not a matrix of a LoRA adapter"
            raise CheckpointError(f"{directory / WEIGHTS} has {name!r}, {what}, which cannot be served")
        side = found["side"] or found["of_embedding"]
        sides.setdefault(found["module"].removeprefix(PREFIX), {})[side] = tensor
    return sides


def _whole(name: str, weight_map: WeightMap) -> str | None:
    """Return the module of which a tensor is the whole weight, if that is the embedding or the head."""
    found = _WHOLE.fullmatch(name.removeprefix(PREFIX))
    if found is None or not name.startswith(PREFIX):
        return None
    try:
        target, leaf = find_target(f"{found['module']}.weight", weight_map)
    except CheckpointError:
        return None
    return target.module if target.module in OUTER and leaf == "weight" else None


def check_whole(directory: Path, model: Model, weight_map: WeightMap, rank: Rank = ALONE) -> None:
    """Refuse an adapter with a changed embedding or head: a copy that PEFT saved must equal the model's.

    Each rank compares the rows that it has.
    """
    for name, tensor in read_header(directory / WEIGHTS).items():
        if (module := _whole(name, weight_map)) is None:
            continue
        if not (tensor.is_readable and _is_own(tensor, model, module, rank)):
            raise CheckpointError(
                f"{directory / WEIGHTS} has {name!r}, which is not the model's own; an adapter that changes "
                "whole weights cannot be served"
            )


def _is_own(tensor: StoredTensor, model: Model, module: str, rank: Rank) -> bool:
    """Return True if a stored matrix equals the model's embedding or head in the rows of this rank."""
    embedding, head = model.embedding, model.head.stored
    is_known = module == "embedding" or head.can_dequantize
    if not is_known or tensor.shape != (model.config.vocab_size, embedding.weight.shape[1]):
        return False
    theirs = torch.empty(tensor.shape, dtype=embedding.dtype)
    tensor.copy_to(theirs)
    theirs = part_of(theirs, ((own_vocabulary(model.config, rank),),))
    device = embedding.weight.device
    if module == "head":
        return torch.equal(head.dequantized().to(embedding.dtype), theirs.to(device))
    pieces = torch.split(torch.arange(len(theirs), device=device), _ROWS_AT_ONCE)
    return all(torch.equal(embedding.rows(ids), theirs[ids[0] : ids[-1] + 1].to(device)) for ids in pieces)


def _pair(
    directory: Path,
    name: str,
    found: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
    patterns: Mapping[str, Sequence[tuple[re.Pattern[str], float]]],
    model: Model,
    weight_map: WeightMap,
) -> LowRankPair:
    """Return the checked pair of one module of the base model."""
    where = f"the adapter in {directory} adapts {name!r}"
    if len(found) < 2:
        raise CheckpointError(f"{where} with lora_{next(iter(found))} alone; it needs lora_A and lora_B")
    a, b = found["A"], found["B"]
    target, layer = _find_layer(where, name, model, weight_map)
    _check_shapes(where, a, b, layer, target)
    scale = _scale(where, name, a.shape[0], config, patterns)
    parts = layer.spec.parts if isinstance(layer, Linear) else {}
    if order := row_order(model.config, target.module, target.part, parts, b.shape[0]):
        b = reordered(b, order, name, model.config.head_dim)  # same row order as the adapted matrix
    part = None if target.part is None else list(parts).index(target.part)
    return LowRankPair(target.module, part, a, b, scale)


def _find_layer(
    where: str, name: str, model: Model, weight_map: WeightMap
) -> tuple[Target, Linear | Embedding]:
    """Return the place of a module of the base model, and the layer that it adapts there."""
    try:
        target, _ = find_target(f"{name}.weight", weight_map)
        layer = model.get_submodule(target.module)
    except (CheckpointError, AttributeError):
        raise CheckpointError(f"{where}, which the model does not have; is it for another model?") from None
    if isinstance(layer, ExpertLinear) or target.expert is not None:
        raise CheckpointError(f"{where}, a matrix of experts; only attention of such a model can be adapted")
    is_inside = target.module in OUTER or target.module.startswith("layers.")
    if target.ignored or not is_inside or not isinstance(layer, Linear | Embedding):
        raise CheckpointError(f"{where}; only attention, MLP, embedding and head can be adapted")
    if isinstance(layer, Linear) and layer.always_dense:
        raise CheckpointError(f"{where}, a router; only attention of such a model can be adapted")
    if isinstance(layer, Linear) and target.part not in (None, *layer.spec.parts):
        raise CheckpointError(f"{where}, and this layer of the model has no such matrix")
    return target, layer


def _check_shapes(
    where: str, a: StoredTensor, b: StoredTensor, layer: Linear | Embedding, target: Target
) -> None:
    """Refuse matrices that do not fit the adapted one, or that are not numbers."""
    if isinstance(layer, Embedding):
        size, num_rows = layer.weight.shape
    else:
        rows = layer.spec.part_rows(target.part)
        size, num_rows = layer.spec.size, rows.stop - rows.start
    rank = a.shape[0] if a.shape else 0
    if (a.shape, b.shape) != ((rank, size), (num_rows, rank)):
        raise CheckpointError(
            f"{where} with A {list(a.shape)} and B {list(b.shape)}, but the model's matrix is "
            f"{num_rows} x {size}; is it for another model?"
        )
    if not rank or not (a.is_readable and b.is_readable):
        raise CheckpointError(f"{where} with {a.type_name} matrices of rank {rank}, not with numbers")


def _scale(
    where: str,
    name: str,
    rank: int,
    config: Mapping[str, Any],
    patterns: Mapping[str, Sequence[tuple[re.Pattern[str], float]]],
) -> float:
    """Return the factor of a module's product B A; a rank that is not the config's is refused."""
    told, alpha = (
        next((value for pattern, value in patterns[key] if pattern.match(name)), config.get(key))
        for key in ("r", "lora_alpha")
    )
    if told != rank:
        raise CheckpointError(
            f"{where} with rank {rank}, but {CONFIG} says {told!r}; were both files saved together?"
        )
    assert alpha is not None  # checked with the config
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
