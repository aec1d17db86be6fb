"""Build a model and fill it: every tensor goes from disk straight to its final place.

    1. read the config                 from config.json, or from the header of a GGUF file
    2. read the headers of the weights names, types, shapes; no weights yet
    3. build on the device             in the dtype chosen for it, uninitialised: memory is only reserved
    4. match names and shapes          what is missing, unexpected or misshapen is said now
    5. fill                            one tensor after the other, in the order of the disk; codes that an
                                       earlier start was long in making come from a cache (code_cache.py)

Parts of a fused matrix are slices of it, so fusing costs nothing; conversion and unpacking happen on
the way. Apart from the model itself, loading needs memory for one tensor at most, and where weights are
unpacked or rounded only for a few rows of one, unless it is stored transposed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from infer.errors import ConfigError
from infer.layers.linear import without_weights
from infer.loader.code_cache import CodeCache
from infer.loader.dtype import avoid_refused_products, stored_dtype, warn_if_slow
from infer.loader.find.source import ModelSource
from infer.loader.formats.checkpoint import StoredTensor, open_checkpoint
from infer.loader.formats.gguf import read_gguf
from infer.loader.formats.gguf_config import hf_config_from_gguf
from infer.loader.formats.gguf_tensors import gguf_checkpoint
from infer.loader.formats.hf_config import merge_eos_ids, read_hf_config
from infer.loader.formats.kv_scales import read_kv_scales
from infer.loader.formats.quantized import published_as, quantized_checkpoint, read_settings
from infer.loader.placement import Move, plan_moves
from infer.loader.quantization import (
    AS_STORED,
    choose_format,
    describe_kept,
    describe_packed,
    home_of,
    make_projections,
    stored_matrices,
)
from infer.loader.text_headers import TextHeaders, read_text_headers
from infer.log import progress
from infer.models.config import ModelConfig
from infer.models.model import Model
from infer.models.registry import Family, find_family

MAX_ROTARY_NUMBERS = 2**27  # positions times head size: tables of half a gigabyte

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run, and what its files say about running it."""

    model: Model
    config: ModelConfig
    name: str
    dtype: torch.dtype  # of the activations and of the KV cache
    device: torch.device
    max_seq_len: int  # prompt + output, in tokens: the model's context, or less if asked for
    eos_ids: tuple[int, ...]  # any of these ends an answer
    source: ModelSource | None = None  # its files; None: it has none, and no tokenizer
    weights: str = "as stored"  # their form: int8, int4, int4+int8, fp32, bf16, ... (quantization.py)
    published_as: str = ""  # the quantized format that the checkpoint holds, and its bytes
    kept_as: str = ""  # what a device has made of it, or of plain numbers
    kv_scales: torch.Tensor | None = None  # as in `ModelHeaders`


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHeaders(TextHeaders):
    """What a model's files say before any weight is read: enough to plan with, and to tokenize for it."""

    family: Family
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    quantization: Mapping[str, Any] = field(default_factory=dict)  # what its files say of it (quantized.py)
    kv_scales: torch.Tensor | None = None  # of an FP8 KV cache, [layers, 2, G], if it was calibrated for one

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer, whichever file names it."""
        return merge_eos_ids(self.config.eos_ids, self.defaults.eos_ids, vocab_size=self.config.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadChoice:
    """How a model is about to be loaded: all that is decided before a weight is read."""

    headers: ModelHeaders
    device: torch.device
    dtype: torch.dtype
    weights: str  # their form, as in `LoadedModel`
    published_as: str = ""
    kept_as: str = ""
    max_seq_len: int

    @property
    def config(self) -> ModelConfig:
        """The config of the model, from its headers."""
        return self.headers.config

    @property
    def kv_scales(self) -> torch.Tensor | None:
        """The scales of a KV cache, from its headers."""
        return self.headers.kv_scales


def read_headers(source: ModelSource) -> ModelHeaders:
    """Read the config and the headers of the weights; steps 1 and 2 above."""
    file = read_gguf(source.path) if source.is_gguf else None
    if file is not None:
        raw, tensors = hf_config_from_gguf(file), gguf_checkpoint(file)
    else:
        raw, tensors = read_hf_config(source.path), open_checkpoint(source.path)
    family = find_family(raw)
    config = family.read_config(raw)
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
        defaults=text.defaults,
        gguf_metadata=text.gguf_metadata,
        pooling=text.pooling,
        quantization=settings,
        kv_scales=kv_scales,
    )


def load_model(
    source: ModelSource,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str = "none",
    max_seq_len: int | None = None,
    show_progress: bool = False,
    headers: ModelHeaders | None = None,
    home: str | None = None,
    check: Callable[[LoadChoice], None] = lambda choice: None,
) -> LoadedModel:
    """Load the model of `source` onto `device`; `dtype` as in dtype.py, `headers` if already read.

    `quantization` as in quantization.py; "none": nothing is packed that the file does not hold packed.
    With `home` "cuda" weights are kept as a GPU keeps them wherever they are; products are then references.
    `check` may raise when all is decided and nothing is loaded.
    """
    chosen_device = choose_device(device)
    home = home or home_of(chosen_device)
    headers = headers or read_headers(source)
    family, config = headers.family, headers.config
    context_len = check_length(max_seq_len, config)
    stored = stored_dtype(headers.tensors.values())
    matrices = stored_matrices(headers.tensors, family.weight_map)
    weights, chosen_dtype, reason = choose_format(quantization, dtype, chosen_device, stored, matrices, home)
    if home == "cpu" and weights != AS_STORED:
        log.info("weights are kept as %s (%s)", weights, reason)
    avoid_refused_products(chosen_dtype, chosen_device)
    warn_if_slow(chosen_dtype, chosen_device)
    check(
        LoadChoice(
            headers=headers,
            device=chosen_device,
            dtype=chosen_dtype,
            weights=weights,
            published_as=published_as(headers.tensors),
            max_seq_len=context_len,
        )
    )

    # rotary tables need not be longer than what is served; learned positions are as many as are stored
    built = config if config.learned_positions else replace(config, context_len=context_len)
    model = build_model(family, built, chosen_device, chosen_dtype, source.name)
    with refused_if_full(source.name, chosen_dtype, chosen_device):
        make_projections(
            model, weights, chosen_device, chosen_dtype, stored, headers.tensors, family.weight_map,
            headers.quantization, home,
        )  # fmt: skip
    moves = plan_moves(model, headers.tensors, family.weight_map, name=source.name)
    codes = CodeCache.of(model, moves, source)
    is_cached = codes.read()
    left = [move for move in moves if not (is_cached and codes.holds(move, model))]
    label = f"loading {source.name}"
    if codes.projections and not is_cached:
        label += f", rounding weights to {weights}"  # what of these has another form, the start line says
        is_silent = show_progress and not sys.stderr.isatty()  # a line says what a bar would show
        level = logging.WARNING if is_silent else logging.INFO
        log.log(
            level,
            "weights are rounded while they are loaded matrices=%d to=%s",
            len(codes.projections),
            weights,
        )
    _fill(model, left, label=label, show_progress=show_progress)
    if not is_cached:
        codes.keep(show_progress=show_progress)
    _check_tied_head(model, headers.tensors, family)
    kept_as = (
        describe_packed(model, weights, chosen_dtype, headers.tensors, matrices, codes.projections.values())
        if home == "cpu"
        else describe_kept(model, weights, chosen_dtype, headers.tensors, family.weight_map)
    )
    return LoadedModel(
        model=model.eval(),
        config=config,
        name=source.name,
        dtype=chosen_dtype,
        device=chosen_device,
        max_seq_len=context_len,
        eos_ids=headers.eos_ids,
        source=source,
        weights=weights,
        published_as=published_as(headers.tensors),
        kept_as=f"{kept_as}, read from the cache" if is_cached else kept_as,
        kv_scales=headers.kv_scales,
    )


def choose_device(device: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` means here."""
    num_gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "auto":
        return torch.device("cuda", 0) if num_gpus else torch.device("cpu")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if kind == "cuda" and int(index or 0) >= num_gpus:
        have = f"{num_gpus} GPUs, numbered from 0" if num_gpus else "no GPU that PyTorch can use"
        raise ConfigError(f"device is {device!r}, but this machine has {have}; use cpu or auto")
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(index or 0))


def check_length(max_seq_len: int | None, config: ModelConfig) -> int:
    """The longest sequence that will be served: the model's context, or less if asked for."""
    length = config.context_len if max_seq_len is None else max_seq_len
    if not 1 <= length <= config.context_len:
        raise ConfigError(f"max_seq_len must be in 1..{config.context_len} (the context), got {max_seq_len}")
    longest = MAX_ROTARY_NUMBERS // config.head_dim
    if length > longest and not config.learned_positions:
        raise ConfigError(
            f"rotary tables for {length} positions and heads of {config.head_dim} would take gigabytes; "
            f"set max_seq_len to {longest} or less"
        )
    return length


def build_model(
    family: Family, config: ModelConfig, device: torch.device, dtype: torch.dtype, name: str
) -> Model:
    """The network without its matrices, nothing in it; step 3 above."""
    with refused_if_full(name, dtype, device), device, _default_dtype(dtype), without_weights():
        return family.build(config)


@contextmanager
def refused_if_full(name: str, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Let weights that find no memory be a `ConfigError` that says so."""
    try:
        yield
    except RuntimeError as error:  # PyTorch has no narrower one: out of memory on a CPU is a plain one
        if isinstance(error, torch.OutOfMemoryError) or "allocate" in str(error):
            raise ConfigError(
                f"{name} in {dtype} does not fit into the memory of {device}: {error}"
            ) from None
        raise


def _fill(model: Model, moves: list[Move], *, label: str, show_progress: bool) -> None:
    total = sum(move.source.num_bytes for move in moves)
    with progress(label, total, is_shown=show_progress, counts_bytes=True) as advance, torch.no_grad():
        for move in moves:
            move.run(model)
            advance(move.source.num_bytes)


def _check_tied_head(model: Model, tensors: Mapping[str, StoredTensor], family: Family) -> None:
    """A tied head that is stored as well should be a copy of the embedding; say so if it is not."""
    head = next((key for key, target in family.weight_map.items() if target.module == "head"), None)
    stored = tensors.get(f"{head}.weight")
    if not model.config.tie_embeddings or stored is None or not stored.is_readable:
        return
    embedding = model.embedding.weight
    if embedding.is_meta:  # packed: there is nothing left to compare with
        return
    is_same = stored.shape == tuple(embedding.shape)
    if is_same:
        copy = torch.empty_like(embedding)
        stored.copy_to(copy)
        is_same = torch.equal(copy, embedding)
    if not is_same:
        log.warning("%s.weight differs from the embedding, but the config ties the two: it is not used", head)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
