"""Builds the drafter of an engine from the knobs of speculative decoding.

ngram, suffix     a proposer that looks up earlier text: nothing to load
draft_model       a second model on the same device, with as many blocks as the first, and a device half
tree              a draft model that drafts several ids after each token (draft_tree.py)
eagle3            a head on the model's hidden states, with as many blocks, and a device half that follows the
                  model's (execution/head_model.py)
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from infer.cache.kv_store import KVStore, crossing_bytes
from infer.cache.layout import KVLayout
from infer.cache.memory import CacheSize, kv_bytes_per_token
from infer.config.own_code import load_code, names_code
from infer.config.resolve import ResolvedConfig
from infer.config.speculation import WINDOW_TOKENS, SpeculationConfig
from infer.engine.cache_fit import DraftBytes, step_bytes
from infer.engine.draft_head import DraftHead
from infer.engine.draft_model import DraftModel
from infer.engine.draft_tree import TreeModel
from infer.engine.speculation import Speculation
from infer.engine.step_costs import measure_again, measure_step_costs
from infer.errors import ConfigError, ModelSourceError
from infer.execution.device import StateShape
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.draft_device import DraftDevice, TurnLauncher
from infer.execution.gpu.warm_up import WarmUp
from infer.execution.head_model import HeadModel
from infer.execution.host_sampling import SyntheticJudge
from infer.execution.torch_device import TorchDevice, TorchHead
from infer.layers.bind import bind
from infer.loader.eagle import load_eagle, read_eagle_headers
from infer.loader.find.source import ModelSource, resolve_model
from infer.loader.formats.hf_config import read_hf_config
from infer.loader.headers import ModelHeaders, headers_of_config, read_headers
from infer.loader.load import LoadedModel, load_model
from infer.loader.random_weights import load_random
from infer.loader.weight_plan import kept_bytes
from infer.models.config import ModelConfig
from infer.models.eagle3 import Eagle3, EagleConfig
from infer.models.model import Network
from infer.scheduling.scheduler import Scheduler
from infer.speculative.adaptive import DraftLengths, StepCosts
from infer.speculative.careful import CarefulProposer
from infer.speculative.ngram import NgramProposer
from infer.speculative.proposer import Proposer
from infer.speculative.suffix import SuffixProposer
from infer.speculative.tree import survival, tree_of, turns_of

logger = logging.getLogger(__name__)

DRAFT_ROWS: Final = 64  # most sequences with drafts in a batch
DRAFT_TOKENS: Final = 2048  # most tokens of an order of a draft model that catches up with a long text
HOST_GAP_S: Final = 0.3e-3  # seconds of planning and reporting on the host between steps without overlap
PROPOSES: Final = ("propose", "has_match", "finish")  # methods of a proposer
ROW_GAP_S: Final = 80e-6  # additional host seconds for each sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadHeaders:
    """The facts about an EAGLE-3 head, read from its files."""

    source: ModelSource
    eagle: EagleConfig
    eos_ids: tuple[int, ...] = ()  # empty: the target model's ids end texts

    @property
    def config(self) -> ModelConfig:
        """The config of its only layer."""
        return self.eagle.block


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedHead:
    """An EAGLE-3 head that is ready to run, in the dtype and on the device of its model."""

    headers: HeadHeaders
    head: Eagle3
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        """The name of its files."""
        return self.headers.source.name

    @property
    def config(self) -> ModelConfig:
        """The config of its only layer."""
        return self.headers.config

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Empty: a head has no eos ids."""
        return self.headers.eos_ids


def read_draft(
    settings: SpeculationConfig,
    model: ModelConfig,
    name: str,
    find: Callable[[str], ModelHeaders] | None = None,
) -> ModelHeaders | HeadHeaders | None:
    """Read the headers of the draft model or head, if there is one; refuse one that does not fit the model.

    `find` replaces how a draft model's headers are found: a plan or a benchmark may have only a config.json.
    """
    if not settings.is_on or settings.draft_model is None:
        return None
    if settings.method == "tree":
        check_tree(model, name)
    if find is None or _is_head(settings, Path(settings.draft_model).expanduser()):
        source = _find_draft(settings.draft_model)
        if _is_head(settings, source.path):
            return _read_head(settings, source, model)
        headers = read_headers(source)
    else:
        headers = find(settings.draft_model)
    if headers.config.delta is not None or headers.config.layer_specs:
        raise ConfigError(
            f"draft_model={settings.draft_model} has layers that keep a state, or layers of several sizes, "
            "and cannot draft; use another draft model"
        )
    if settings.method == "tree":
        check_tree(headers.config, f"draft_model={settings.draft_model}")
    if headers.config.vocab_size != model.vocab_size:
        raise ConfigError(
            f"draft_model={settings.draft_model} has {headers.config.vocab_size} tokens and {name} has "
            f"{model.vocab_size}; use a draft model with the same vocabulary"
        )
    return headers


def check_tree(model: ModelConfig, name: str) -> None:
    """Raise a ConfigError if a model can neither verify nor draft trees."""
    why = {
        "has layers of several sizes": bool(model.layer_specs),
        "has layers that see a window of the text": any(map(model.window, range(model.num_layers))),
        f"runs with the code of {model.impl}": model.impl != "infer",
    }
    for reason, is_so in why.items():
        if is_so:
            raise ConfigError(
                f"speculative_method=tree cannot be used with {name}, which {reason}; use "
                "speculative_method=draft_model, whose drafts are chains"
            )


def _find_draft(name: str) -> ModelSource:
    """Return the files of the draft model or head."""
    try:
        return resolve_model(name, show_progress=False)
    except ModelSourceError as error:
        raise ModelSourceError(f"draft_model: {error}") from None


def _is_head(settings: SpeculationConfig, path: Path) -> bool:
    """True if the settings or the config in `path` name an EAGLE-3 head, not a whole model."""
    if settings.method == "eagle3":
        return True
    raw = read_hf_config(path) if (path / "config.json").is_file() else {}
    is_named = "Eagle3" in str(raw.get("architectures"))
    return is_named or "draft_vocab_size" in raw or "speculators_model_type" in raw


def _read_head(settings: SpeculationConfig, source: ModelSource, model: ModelConfig) -> HeadHeaders:
    """Return the facts about a head from its files; a head for another model is refused."""
    if settings.speculative_method in ("draft_model", "tree"):
        raise ConfigError(
            f"draft_model={settings.draft_model} is an EAGLE-3 head and "
            f"speculative_method={settings.speculative_method} needs "
            "a whole model; use speculative_method=eagle3, or leave it out"
        )
    if model.impl != "infer":
        raise ConfigError(
            f"draft_model={settings.draft_model} is an EAGLE-3 head: it needs a model that infer implements, "
            f"and this one runs with the code of {model.impl}; use a whole model or speculative_method=ngram"
        )
    try:
        config, _ = read_eagle_headers(source.path, model)
    except ConfigError as error:
        raise ConfigError(
            f"draft_model={settings.draft_model} cannot be read as an EAGLE-3 head: {error} (a whole model "
            "drafts with speculative_method=draft_model)"
        ) from None
    return HeadHeaders(source=source, eagle=config)


def _find_shape(name: str) -> ModelHeaders:
    return headers_of_config(Path(name) / "config.json", name)


def load_draft(config: ResolvedConfig, loaded: LoadedModel) -> LoadedModel | LoadedHead | None:
    """Load the draft model or head, if there is one."""
    settings, is_made_up = config.settings.speculation, loaded.source is None  # True: random weights
    find = _find_shape if is_made_up else None
    headers = read_draft(settings, loaded.config, loaded.name, find)
    if headers is None:
        return None
    if isinstance(headers, HeadHeaders):
        if loaded.ranks is not None:
            raise ConfigError(
                "an EAGLE-3 head reads whole matrices of its model, and ranks split them; leave out "
                "tensor_parallel_size and pipeline_parallel_size, or use another speculative_method"
            )
        head = load_eagle(headers.source.path, loaded, num_drafts=settings.max_drafts)
        bind(
            head,
            loaded.device,
            deterministic=config.deterministic,
            cpu_products=config.settings.run.cpu_products,  # the mode of the matrices shared with the model
        )()
        return LoadedHead(headers=headers, head=head, dtype=loaded.dtype, device=loaded.device)
    dtype, device = config.settings.load.dtype, str(loaded.device)
    if is_made_up:
        draft = load_random(headers.source.path.parent, dtype=dtype, device=device)
    else:
        draft = load_model(headers.source, dtype=dtype, device=device, quantization="auto", headers=headers)
    bind(draft.model, draft.device, deterministic=config.deterministic)()
    return draft


def draft_bytes(
    config: ResolvedConfig, model: ModelConfig, dtype: torch.dtype, layout: KVLayout, states_width: int = 0
) -> DraftBytes:
    """Return the bytes of a draft model or head: its keys and values in all block tables, and its steps.

    `states_width`: width of the hidden states that a head reads for each token of the model's steps.
    """
    scheduler = config.scheduler
    num_tokens = scheduler.max_num_batched_tokens if states_width else DRAFT_TOKENS
    each = kv_bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, dtype.itemsize)
    num_rows = min(DRAFT_ROWS, scheduler.max_batch_size)
    step = step_bytes(
        replace(scheduler, max_batch_size=num_rows, max_num_batched_tokens=num_tokens), model,
        max_seq_len=config.max_seq_len, bytes_per_element=dtype.itemsize,
        graph_tokens=WINDOW_TOKENS if config.use_cuda_graphs else None,
    )  # fmt: skip
    states = 2 * num_tokens * states_width * dtype.itemsize  # states of the layers, and their concatenation
    crossing = 0  # a head's blocks are swapped with the model's, through a separate buffer
    cache = config.settings.cache
    if states_width and cache.has_host_memory and config.device.startswith("cuda"):
        crossing = crossing_bytes(cache.block_size * each)
    return DraftBytes(each * len(layout.windows), step.total + states + crossing)


def make_speculation(
    config: ResolvedConfig,
    loaded: LoadedModel,
    scheduler: Scheduler,
    device: TorchDevice | GpuDevice,
    *,
    draft_device: TorchDevice | DraftDevice | None,
    size: CacheSize,
    shape: StateShape,
    costs: StepCosts | None = None,
) -> Speculation | None:
    """Return the part that gives sequences drafts; None: speculative decoding is off.

    `costs` replace the ones measured here; `draft_device`: the device half of the draft model or head.
    """
    settings = config.settings.speculation
    if not settings.is_on:
        return None
    prepare = _begin_warm_up(draft_device)
    proposer = _make_proposer(settings) if draft_device is None else None
    max_len = sys.maxsize if draft_device is None else draft_device.model.config.context_len
    again: Iterable[tuple[StepCosts, float | None]] = ()
    if costs is None:
        max_tokens = min(config.max_seq_len, size.num_tokens, max_len)
        costs = _measure_costs(config, loaded, device, draft_device, size, shape, max_tokens)
        if isinstance(device, TorchDevice) and draft_device is None and loaded.ranks is None:
            again = measure_again(device, shape, loaded.config.vocab_size, costs)
    if settings.synthetic_acceptance is not None:
        logger.warning(
            "drafts are accepted at random, so the text is wrong: synthetic_acceptance is for benchmarks"
        )
        device.use_judge(SyntheticJudge(settings.synthetic_acceptance))
    has_trees = settings.method == "tree"
    lengths = DraftLengths(costs, survival=survival, turns=turns_of) if has_trees else DraftLengths(costs)
    drafter = _make_drafter(settings, draft_device, device, scheduler, size.num_blocks, lengths)
    return Speculation(
        scheduler, lengths, proposer, drafter, max_drafts=settings.max_drafts, max_rows=DRAFT_ROWS,
        vocab_size=loaded.config.vocab_size, max_len=max_len, is_adaptive=settings.adaptive_speculation,
        is_synthetic=settings.synthetic_acceptance is not None, has_trees=has_trees, prepare=prepare,
        again=again,
    )  # fmt: skip


def _runs_head(device: TorchDevice | DraftDevice | None) -> bool:
    return device is not None and isinstance(device.model, HeadModel)


def _begin_warm_up(draft_device: TorchDevice | DraftDevice | None) -> Callable[[], bool]:
    """Wait until a draft device can run; returns a function that prepares one more piece of it."""
    if not isinstance(draft_device, DraftDevice):
        return lambda: False
    prepare = draft_device.graphs.prepare if _runs_head(draft_device) else WarmUp(draft_device).prepare
    draft_device.launcher.wait_for_compilers()
    return prepare


def _measure_costs(
    config: ResolvedConfig,
    loaded: LoadedModel,
    device: TorchDevice | GpuDevice,
    draft_device: TorchDevice | DraftDevice | None,
    size: CacheSize,
    shape: StateShape,
    max_tokens: int,
) -> StepCosts:
    """Measure the steps of the model and of the draft model, with texts of up to `max_tokens`."""
    overlaps = config.steps_ahead > 0
    draft_kv_bytes = 0 if draft_device is None else draft_device.store.num_bytes
    costs = measure_step_costs(
        device, shape, max_tokens=max_tokens, vocab_size=loaded.config.vocab_size,
        weight_bytes=kept_bytes(loaded.model),
        kv_bytes_per_token=device.store.num_bytes // max(size.num_tokens, 1),
        draft_kv_bytes_per_token=draft_kv_bytes // max(size.num_tokens, 1),
        gap_s=HOST_GAP_S if overlaps else 0.0, row_gap_s=ROW_GAP_S if overlaps else 0.0,
        drafter=draft_device, draft_start=int(_runs_head(draft_device)),
        has_trees=config.settings.speculation.method == "tree",
    )  # fmt: skip
    logger.info(
        "steps measured tokens_ms=%s draft_ms=%.2f",
        ",".join(f"{tokens}:{1e3 * seconds:.2f}" for tokens, seconds in costs.pairs),
        1e3 * costs.draft_s,
    )
    return costs


def _make_drafter(
    settings: SpeculationConfig,
    draft_device: TorchDevice | DraftDevice | None,
    device: TorchDevice | GpuDevice,
    scheduler: Scheduler,
    num_blocks: int,
    lengths: DraftLengths,
) -> DraftModel | None:
    """Return the host part of the draft model or head; None: a proposer looks drafts up."""
    if draft_device is None:
        return None
    target, state = device if isinstance(device, GpuDevice) else None, scheduler.state
    if _runs_head(draft_device):
        knows = lengths if settings.adaptive_speculation else None
        return DraftHead(draft_device, state, num_drafts=settings.max_drafts, lengths=knows, target=target)
    kind = TreeModel if settings.method == "tree" else DraftModel
    return kind(draft_device, state, num_blocks, max_tokens=DRAFT_TOKENS, target=target)


def _make_proposer(settings: SpeculationConfig) -> Proposer:
    """Return the proposer that looks drafts up: ngram, suffix or a user's class."""
    if names_code(settings.method):
        found = load_code(settings.method, "speculative_method")
        if not (isinstance(found, type) and all(callable(getattr(found, name, None)) for name in PROPOSES)):
            raise ConfigError(
                f"speculative_method={settings.method} is {found!r}; it must be a class with the methods "
                f"{', '.join(PROPOSES)} of infer.speculative.proposer.Proposer"
            )
        return CarefulProposer(found(), settings.method)
    if settings.method == "suffix":
        return SuffixProposer(settings.suffix_max_answers)
    return NgramProposer(settings.prompt_lookup_min, settings.prompt_lookup_max)


def make_draft_device(
    config: ResolvedConfig,
    draft: LoadedModel | LoadedHead | None,
    size: CacheSize,
    layout: KVLayout,
    shape: StateShape,
) -> TorchDevice | DraftDevice | None:
    """Return the device half of the draft model or head, whose layers use the first table; None: no drafter.

    A head's blocks are swapped together with the model's, so it has as many blocks in host memory.
    """
    if draft is None:
        return None
    model, is_head = draft.config, isinstance(draft, LoadedHead)
    planes = tuple(range(model.num_layers))
    store = KVStore(
        layout=KVLayout(layout.windows, (0,) * model.num_layers, planes, model.num_layers),
        num_blocks=size.num_blocks, block_size=size.block_size, num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim, dtype=draft.dtype, device=draft.device,
        num_host_blocks=size.num_host_blocks * is_head,
    )  # fmt: skip
    max_rows = min(DRAFT_ROWS, config.scheduler.max_batch_size)
    network: Network
    if isinstance(draft, LoadedHead):
        network = HeadModel(draft.head, shape.num_rows, config.settings.speculation.max_drafts)
    else:
        network = draft.model
    attention, decode_attention = config.backends.attention, config.backends.decode_attention
    if not config.uses_gpu_device:
        return (TorchHead if is_head else TorchDevice)(
            network, store, shape, max_batch_size=max_rows, attention_backend=attention,
            decode_attention_backend=decode_attention,
            record_cpu_step=config.record_cpu_step and not is_head,  # turns of a head are not recorded
        )  # fmt: skip
    launcher = TurnLauncher(
        network, store, shape, max_batch_size=max_rows,
        max_tokens=0 if is_head else DRAFT_TOKENS,  # a head computes no prompts
        max_seq_len=config.max_seq_len, use_cuda_graphs=config.use_cuda_graphs,
        attention_backend="triton" if is_head and attention != "invariant" else attention,
        decode_attention_backend=decode_attention, num_drafts=config.settings.speculation.max_drafts,
        tree_of=tree_of if config.settings.speculation.method == "tree" else None,
    )  # fmt: skip
    return DraftDevice(launcher)
