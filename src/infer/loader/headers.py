"""The headers of a model: everything in its files except the weights, enough to plan and to tokenize.

    config      config.json, or the header of a GGUF file
    tensors     names, types and shapes; a quantized matrix counts as one tensor, however it is stored
    sources     the same tensors, each with the module that it fills, by the family's weight map
    stored      the dtype of most weights

All decisions about the weights follow from these (weight_plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infer.errors import CheckpointError, ConfigError
from infer.loader.dtype import DTYPES
from infer.loader.find.source import ModelSource
from infer.loader.formats import gpt_oss
from infer.loader.formats.checkpoint import FLOATS, StoredTensor, open_checkpoint
from infer.loader.formats.gguf import read_gguf
from infer.loader.formats.gguf_config import hf_config_from_gguf
from infer.loader.formats.gguf_tensors import gguf_checkpoint
from infer.loader.formats.hf_config import (
    MAX_CONFIG_BYTES,
    GenerationDefaults,
    merge_eos_ids,
    read_hf_config,
    read_json,
)
from infer.loader.formats.kv_scales import read_kv_scales
from infer.loader.formats.quantized import QuantizedTensor, check_method, quantized_checkpoint, read_settings
from infer.loader.text_headers import TextHeaders, read_text_headers
from infer.models import gemma4
from infer.models.config import ModelConfig, is_headless, read_architectures
from infer.models.registry import FAMILIES, Family, find_family
from infer.models.transformers_model import IMPL, open_foreign
from infer.models.weight_map import Target, WeightMap, find_target


class WeightSource(NamedTuple):
    """A tensor of a checkpoint, and its entry in the weight map."""

    name: str
    tensor: StoredTensor
    target: Target | None  # None: not in the map
    leaf: str  # weight or bias

    @property
    def module(self) -> str:
        """The module of our network that it fills; "": none."""
        return "" if self.target is None or self.target.ignored else self.target.module


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHeaders(TextHeaders):
    """The headers of a checkpoint, or of a config.json alone, which has no tensors."""

    family: Family
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    sources: tuple[WeightSource, ...] = ()
    stored: torch.dtype | None = None  # dtype of most weights in the files; None: quantized, or unknown
    quantization: Mapping[str, Any] = field(default_factory=dict)  # quantization settings of the files
    kv_scales: torch.Tensor | None = None  # scales of an FP8 KV cache, [layers, 2, G], if there are any
    eos_ids: tuple[int, ...] = ()  # all tokens that end an answer, from any of the files


def choose_family(raw: Mapping[str, Any], path: Path, model_impl: str) -> Family:
    """Return the family of a checkpoint: one of ours or transformers' own code, depending on `model_impl`.

    `path` is the config file or its directory.
    """
    why, families = "model_impl=transformers", ""
    if model_impl != IMPL:
        try:
            return find_family(raw)
        except ConfigError as error:
            why = str(error)
            families = f"; families here: {', '.join(family.name for family in FAMILIES)}"
            families += " (docs/adding-a-model.md explains how to add one)"
            if model_impl != "auto":
                raise ConfigError(
                    f"{why}; model_impl=auto may run it with the code of {IMPL}{families}"
                ) from None
    try:
        found = open_foreign(path, raw, why)
    except ConfigError as error:
        raise ConfigError(f"{error}{families}") from None
    names = tuple(read_architectures(raw))
    return Family(IMPL, names, (), lambda _: found.config, found.build, {}, found.load)


def read_headers(source: ModelSource, model_impl: str = "auto") -> ModelHeaders:
    """Read the config and the headers of the weights; `model_impl` selects whose code computes the model."""
    file = read_gguf(source.path) if source.is_gguf else None
    if file is not None:
        raw, tensors = hf_config_from_gguf(file), gguf_checkpoint(file)
    else:
        raw, tensors = read_hf_config(source.path), open_checkpoint(source.path)
    family = choose_family(raw, source.path, "infer" if source.is_gguf else model_impl)
    config = family.read_config(raw)
    if family.name == "gpt_oss" and file is None:
        tensors = gpt_oss.translated(tensors)
    if family.name == "qwen3_vl_moe":
        tensors = gpt_oss.turned(tensors, config.hidden_size)
    if config.layer_specs:
        tensors = gemma4.own_tensors(tensors, config)
    # True: only the inner network was saved, so its names lack the prefix "model."
    bare = family.load is None and "embed_tokens.weight" in tensors
    if bare:
        outer = ("lm_head.", "score.")
        tensors = {n if n.startswith(outer) else f"model.{n}": tensor for n, tensor in tensors.items()}
    if (family.load is None and is_headless(raw)) or (
        bare and "lm_head.weight" not in tensors and not config.tie_embeddings
    ):
        config = replace(config, tie_embeddings=True, has_head=False)
    settings = {} if source.is_gguf else read_settings(raw, source.path)
    kv_scales = read_kv_scales(tensors, settings, family.weight_map, config.num_layers, config.num_kv_heads)
    if not source.is_gguf:
        tensors = quantized_checkpoint(tensors, family.weight_map, settings)
    text = read_text_headers(source, file)
    return ModelHeaders(
        source=source,
        family=family,
        config=config,
        tensors=tensors,
        sources=find_sources(tensors, family.weight_map),
        stored=stored_dtype(tensors.values()),
        defaults=text.defaults,
        gguf_metadata=text.gguf_metadata,
        pooling=text.pooling,
        quantization=settings,
        kv_scales=kv_scales,
        eos_ids=merge_eos_ids(config.eos_ids, text.defaults.eos_ids, vocab_size=config.vocab_size),
    )


def headers_of_config(path: Path, name: str, model_impl: str = "auto") -> ModelHeaders:
    """Return the headers of a config.json alone: the model's shape, dtype and quantization settings."""
    raw = read_json(path, MAX_CONFIG_BYTES)
    family = choose_family(raw, path, model_impl)
    settings = read_settings(raw, path.parent)
    check_method(settings)
    config = family.read_config(raw)
    if is_headless(raw):
        config = replace(config, tie_embeddings=True, has_head=False)
    named = str(raw.get("dtype") or raw.get("torch_dtype")).removeprefix("torch.")
    return ModelHeaders(
        source=ModelSource(path=path, name=name, is_gguf=False),
        family=family,
        config=config,
        tensors={},
        stored=None if settings else DTYPES.get(named),
        defaults=GenerationDefaults(),
        gguf_metadata=None,
        quantization=settings,
    )


def stored_dtype(tensors: Iterable[StoredTensor]) -> torch.dtype | None:
    """Return the dtype with the most bytes of the weights; None for block formats.

    It is also None if any matrix is quantized.
    """
    tensors = list(tensors)
    if any(isinstance(tensor, QuantizedTensor) or tensor.formats == ("mxfp4",) for tensor in tensors):
        return None
    num_bytes: dict[str, int] = {}
    for tensor in tensors:
        num_bytes[tensor.type_name] = num_bytes.get(tensor.type_name, 0) + tensor.num_bytes
    most = max(num_bytes, key=lambda name: num_bytes[name], default="")
    return FLOATS.get(most)


def find_sources(tensors: Mapping[str, StoredTensor], weight_map: WeightMap) -> tuple[WeightSource, ...]:
    """Match every tensor with its module, in the order of the files."""
    found = []
    for name, tensor in tensors.items():
        try:
            found.append(WeightSource(name, tensor, *find_target(name, weight_map)))
        except CheckpointError:  # placement reports all unknown tensors together
            found.append(WeightSource(name, tensor, None, ""))
    return tuple(found)
