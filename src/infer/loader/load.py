"""Build a model and fill it: every tensor goes from disk straight to its final place.

    1. read the headers          config, names, types and shapes; no weights yet (headers.py)
    2. plan                      the form of every matrix, and the dtype (weight_plan.py)
    3. build on the device       memory is allocated, not initialised
    4. match names and shapes    missing, unexpected or misshapen tensors are reported now (placement.py)
    5. fill                      one tensor after the other, in the order of the files; codes that were slow
                                 to make at an earlier start come from a cache (code_cache.py)

Parts of a fused matrix are slices of it, so fusing costs nothing; conversion and unpacking happen during the
copy. Besides the model itself, loading needs memory for one tensor at most, or only for a few rows of weights
that are unpacked or rounded, unless they are stored transposed.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from infer.errors import ConfigError, EngineError
from infer.kernels.runtime.communicator import Communicator as Communicator
from infer.kernels.runtime.communicator import Pipe as Pipe
from infer.kernels.runtime.communicator import RankGroup as RankGroup
from infer.kernels.runtime.communicator import RankLine as RankLine
from infer.loader.code_cache import CodeCache
from infer.loader.dtype import settle_products
from infer.loader.find.source import ModelSource
from infer.loader.formats.quantized import published_as
from infer.loader.headers import ModelHeaders, read_headers
from infer.loader.placement import Move, plan_moves
from infer.loader.quantization import AS_STORED
from infer.loader.slices import ALONE, Rank, own_kv_heads
from infer.loader.weight_plan import WeightPlan, plan_weights, refused_if_full
from infer.log import progress
from infer.models.config import ModelConfig
from infer.models.model import Model

MAX_ROTARY_NUMBERS = 2**27  # limit on positions times head size: tables of half a gigabyte

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run, and the facts from its files that running it needs."""

    model: Model
    config: ModelConfig  # the network of this process; on a rank, with the rank's heads and rows
    name: str
    dtype: torch.dtype  # dtype of the activations and of the KV cache
    device: torch.device
    max_seq_len: int  # prompt + output, in tokens: the model's context, or a smaller setting
    eos_ids: tuple[int, ...]  # any of these ends an answer
    source: ModelSource | None = None  # its files; None: random weights, and no tokenizer
    weights: str = "as stored"  # form of the weights: int8, int4, int4+int8, fp32, bf16 (quantization.py)
    published_as: str = ""  # the checkpoint's quantized formats, and their bytes
    kept_as: str = ""  # the form of the weights in memory, for the start line
    kv_scales: torch.Tensor | None = None  # scales of an FP8 KV cache, as in `ModelHeaders`
    whole: ModelConfig | None = None  # the network of all ranks together; None: `config` is all of it
    ranks: RankGroup | None = None  # the group of ranks that this one communicates with; None: no others


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadChoice:
    """The decisions about loading a model, all made before any weight is read."""

    plan: WeightPlan
    weights: str  # form of the weights, as in `LoadedModel`
    published_as: str = ""
    kept_as: str = ""
    max_seq_len: int

    @property
    def headers(self) -> ModelHeaders:
        """The headers of the model's files."""
        return self.plan.headers

    @property
    def config(self) -> ModelConfig:
        """The network that this process will have."""
        return self.plan.config

    @property
    def kv_scales(self) -> torch.Tensor | None:
        """The scales of a KV cache, from the headers."""
        return kv_scales_of(self.plan)

    @property
    def device(self) -> torch.device:
        """The device that the model is loaded onto."""
        return self.plan.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""
        return self.plan.rule.dtype


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
    rank: Rank = ALONE,
    check: Callable[[LoadChoice], None] = lambda choice: None,
) -> LoadedModel:
    """Load the model of `source` onto `device`; `dtype` as in dtype.py, `headers` if already read.

    `quantization` as in quantization.py; the default "none" keeps plain numbers. `home` and `rank` as in
    `plan_weights`. `check` is called when all is decided and nothing is loaded yet, and may raise.
    """
    chosen_device = choose_device(device)
    headers = headers or read_headers(source)
    context_len = check_length(max_seq_len, headers.config)
    plan = plan_weights(
        headers, quantization=quantization, dtype=dtype, device=chosen_device, home=home, rank=rank
    )
    plan.check_cuts()
    rule = plan.rule
    if rule.home == "cpu" and rule.label != AS_STORED:
        log.info("weights are kept as %s (%s)", rule.label, rule.reason)
    settle_products(rule.dtype, chosen_device)
    published = published_as(headers.tensors)
    check(LoadChoice(plan=plan, weights=rule.label, published_as=published, max_seq_len=context_len))

    if headers.family.load is not None:
        with refused_if_full(source.name, rule.dtype, chosen_device):
            foreign = headers.family.load(plan.config, rule.dtype, chosen_device)
            return loaded_as(plan, foreign, context_len, source=source)
    scaling = headers.config.rope_scaling
    if scaling is not None and scaling.depends_on_length and context_len > scaling.original_context_len:
        log.info(
            "%s: every text gets positions for %d tokens; max_seq_len=%d keeps the trained positions",
            scaling.kind,
            context_len,
            scaling.original_context_len,
        )
    model = plan.build(context_len)
    moves = plan_moves(model, headers, plan.slices)
    codes, left = CodeCache.open(plan, model, moves)
    is_cached = len(left) < len(moves)
    label = f"loading {source.name}"
    if codes.projections and not is_cached:
        schemes = Counter(projection.scheme for projection in codes.projections.values())
        forms = "+".join(name for name, _ in schemes.most_common())  # the head's form may differ
        label += f", rounding weights to {forms}"
        is_silent = show_progress and not sys.stderr.isatty()  # True: a log line replaces the progress bar
        level, count = logging.WARNING if is_silent else logging.INFO, len(codes.projections)
        log.log(level, "weights are rounded while they are loaded matrices=%d to=%s", count, forms)
    _fill(model, left, label=label, show_progress=show_progress)
    if not is_cached:
        codes.keep(show_progress=show_progress)
    if rank.is_alone:
        _check_tied_head(model, headers)
    kept = plan.describe() + (", read from the cache" if is_cached else "")
    scales = kv_scales_of(plan)
    return loaded_as(
        plan, model, context_len, source=source, published_as=published, kept_as=kept, kv_scales=scales
    )


def loaded_as(plan: WeightPlan, model: Model, max_seq_len: int, **others: Any) -> LoadedModel:
    """Return the `LoadedModel` of a plan that was carried out; `others` are its remaining fields."""
    return LoadedModel(
        model=model.eval(),
        config=plan.config,
        name=plan.headers.source.name,
        dtype=plan.rule.dtype,
        device=plan.device,
        max_seq_len=max_seq_len,
        eos_ids=plan.headers.eos_ids,
        weights=plan.rule.label,
        whole=None if plan.rank.world_size == 1 else plan.headers.config,
        **others,
    )


def kv_scales_of(plan: WeightPlan) -> torch.Tensor | None:
    """Return the KV-cache scales of the kv heads that a rank has."""
    scales, rank = plan.headers.kv_scales, plan.rank
    if scales is None or rank.world_size == 1:
        return scales
    return scales[..., own_kv_heads(plan.headers.config, rank)].contiguous()


def choose_device(device: str) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda` or `cuda:N` means on this machine."""
    num_gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device != "cpu" and torch.cuda._is_in_bad_fork():
        raise EngineError(
            "this process was forked from one that uses a GPU, so it cannot use a GPU; start it with "
            'multiprocessing.get_context("spawn"), load no model before the fork, or set device to cpu'
        )
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
    """Return the longest sequence to serve, in tokens: the model's context, or `max_seq_len` if given."""
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


def _fill(model: Model, moves: list[Move], *, label: str, show_progress: bool) -> None:
    total = sum(move.source.num_bytes for move in moves)
    with progress(label, total, is_shown=show_progress, counts_bytes=True) as advance, torch.no_grad():
        for move in moves:
            move.run(model)
            advance(move.source.num_bytes)


def _check_tied_head(model: Model, headers: ModelHeaders) -> None:
    """Warn if a tied head is also stored in the checkpoint and differs from the embedding."""
    found = [source for source in headers.sources if (source.module, source.leaf) == ("head", "weight")]
    embedding = model.embedding.weight  # packed weights are on the meta device: nothing to compare
    if not found or not model.config.tie_embeddings or embedding.is_meta:
        return
    name, stored = found[0][:2]
    if not stored.is_readable:
        return
    is_same = stored.shape == tuple(embedding.shape)
    if is_same:
        copy = torch.empty_like(embedding)
        stored.copy_to(copy)
        is_same = torch.equal(copy, embedding)
    if not is_same:
        log.warning("%s differs from the embedding, but the config ties the two: it is not used", name)
