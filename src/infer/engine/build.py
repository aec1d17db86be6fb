"""The composition root: builds an engine from settings and a loaded model.

    EngineConfig ─► resolve ─┬─► pool (books) ───► scheduler ─┐
    LoadedModel ─────────────┴─► store (tensors) ─► device ───┴─► Engine

This file decides nothing: `config/resolve.py` decides and `cache_fit.py` sizes the cache. `device_build.py`
builds the parts that every rank of a model needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from infer import __version__
from infer.cache.block_allocator import BlockAllocator
from infer.cache.layout import KVLayout
from infer.cache.memory import CacheSize, StepBytes
from infer.cache.paged_pool import PagedKVCachePool
from infer.config.knobs import format_bytes
from infer.config.own_code import load_code
from infer.config.resolve import ResolvedConfig, ResolvedScheduler
from infer.config.settings import EngineConfig
from infer.constraints.token_bytes import TokenBytes, tokenizer_json
from infer.engine.adapters import Adapters, AdapterSlots
from infer.engine.cache_fit import NO_DRAFT, fit_to_device, kv_layout
from infer.engine.device_build import DeviceBuild, join_ranks, make_bank, probe_rank, resolve_for, shape_of
from infer.engine.engine import Engine
from infer.engine.gc_freeze import freeze_with, freezing
from infer.engine.itl_target import prompt_tokens_within
from infer.engine.machine import gpu_name
from infer.engine.observer import EngineObserver
from infer.engine.phases import Phases
from infer.engine.preemption_cost import measure_cost
from infer.engine.run_manifest import RunFacts, fingerprint, shareable_knobs
from infer.engine.speculation import Speculation
from infer.engine.speculation_build import (
    LoadedHead,
    draft_bytes,
    load_draft,
    make_draft_device,
    make_speculation,
)
from infer.engine.start_line import describe_engine, kv_cache_dtype, products
from infer.engine.stats import EngineForm
from infer.errors import ConfigError, DeviceLost
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.warm_up import WarmUp
from infer.execution.rank_ring import RankMessage
from infer.execution.torch_device import TorchDevice
from infer.kernels.attention.dense import attend_by_cudnn
from infer.kernels.elementwise.copy_block import copy_block
from infer.kernels.runtime.communicator import RankGroup
from infer.kernels.runtime.device_ranks import DeviceRanks
from infer.kernels.runtime.dispatch import device_kind, is_gpu
from infer.loader.find.source import ModelSource
from infer.loader.load import LoadedModel, choose_device
from infer.loader.quantization import PACKED
from infer.loader.text_headers import TextHeaders, read_text_headers
from infer.models.config import ModelConfig
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.scheduler import Scheduler
from infer.speculative.adaptive import StepCosts

logger = logging.getLogger(__name__)


def build_engine(
    settings: EngineConfig,
    loaded: LoadedModel,
    *,
    observer: EngineObserver | None = None,
    cost: PreemptionCost | None = None,
    step_costs: StepCosts | None = None,
    steps_ahead: int | None = None,
    phases: Phases | None = None,
    token_bytes: TokenBytes | None = None,
) -> Engine:
    """Return an engine for this model.

    To repeat a recorded run, give its `cost`, `step_costs` and `steps_ahead`: they replace this machine's.
    `phases` receives the seconds of each phase. `token_bytes` reads the vocabulary (`token_bytes_of`).
    Several engines may use a model one after another; the last one built sets its `deterministic`.
    """
    config = _resolve(settings, loaded, steps_ahead)
    phases = Phases() if phases is None else phases
    build, wait_for_linears = _bind_ranks(settings, config, loaded, phases)
    with phases("load draft"):
        draft = load_draft(config, loaded)
    layout = kv_layout(loaded.config, config)
    with phases("plan memory"):
        step = build.rehearse(wait_for_linears)
        size = _fit(build, layout, step, draft)
        store = build.make_store(size)
    if cost is None and size.num_host_blocks:
        wait_for_linears()
        prefill, max_tokens = partial(_probe_all, loaded, None), config.scheduler.max_num_batched_tokens
        cost = measure_cost(prefill, loaded.model, store, size.block_size, max_tokens)
    scheduler = _make_scheduler(config, size, layout, cost)
    shape = shape_of(scheduler.state)
    with phases("warm up"), _with_ranks(loaded.ranks, RankMessage.BUILD, (size, shape, step)):
        draft_device = make_draft_device(config, draft, size, layout, shape)
        device, warm_up = build.make_warm(store, shape, step, draft_device)
    with phases("compile"):
        wait_for_linears()
    with phases("measure steps"):
        speculation = make_speculation(
            config, loaded, scheduler, device,
            draft_device=draft_device, size=size, shape=shape, costs=step_costs,
        )  # fmt: skip
    pieces = _prepare_all(warm_up, loaded.ranks)
    scheduler.config = _within_target(config, loaded, warm_up, pieces, phases)
    config = replace(config, scheduler=scheduler.config)
    if observer is not None:
        step_costs = None if speculation is None else speculation.costs
        observer.on_start(_facts(config, loaded, size, scheduler.cost, step_costs, draft))
    token_bytes = token_bytes or token_bytes_of(
        loaded.source, settings.load.tokenizer, loaded.config, loaded.eos_ids
    )
    prepare, on_gpu = partial(_prepare, pieces, token_bytes, speculation), is_gpu(loaded.device)
    engine = Engine(
        scheduler, device, context_len=_served_len(config, scheduler.pool, size),
        model_len=loaded.config.context_len, family=loaded.config.family,
        vocab_size=loaded.config.vocab_size, eos_ids=loaded.eos_ids, has_head=loaded.config.has_head,
        form=_form(config, loaded), observer=observer, steps_ahead=config.steps_ahead,
        prepare=freezing(prepare) if on_gpu else prepare, phases=phases, token_bytes=token_bytes,
        speculation=speculation, adapters=_load_adapters(settings, build),
        rank_times=partial(_rank_times, device, loaded.ranks) if loaded.ranks is not None else dict,
    )  # fmt: skip
    engine.ranks = loaded.ranks
    if on_gpu:  # a CPU step never waits for the garbage collector, and tests build many tiny models
        freeze_with(engine)
    _report(loaded.name, config, size, device)
    return engine


def _resolve(settings: EngineConfig, loaded: LoadedModel, steps_ahead: int | None) -> ResolvedConfig:
    """Return the decisions for this model; `steps_ahead` replaces the resolved one if steps can overlap."""
    if settings.load.num_ranks > 1 and loaded.ranks is None:
        raise ConfigError(
            f"tensor_parallel_size={settings.load.tensor_parallel_size} and "
            f"pipeline_parallel_size={settings.load.pipeline_parallel_size} need a model that was loaded by "
            "several ranks; random weights and model objects run in one process: leave both settings out"
        )
    config = resolve_for(settings, loaded)
    if steps_ahead is not None and (config.steps_ahead or not config.uses_gpu_device):
        config = replace(config, steps_ahead=steps_ahead)
    return config


def _bind_ranks(
    settings: EngineConfig, config: ResolvedConfig, loaded: LoadedModel, phases: Phases
) -> tuple[DeviceBuild, Callable[[], bool]]:
    """Bind the projections of all ranks; return rank 0's parts and a function that waits for compilers."""
    ranks, communicator = loaded.ranks, None
    with _with_ranks(ranks, RankMessage.BIND, settings), phases("compile"):
        bank = make_bank(settings, loaded)
        if ranks is not None:
            try:
                communicator = ranks.communicator = join_ranks(settings, ranks.communicator, loaded)
            except DeviceLost:
                ranks.wait()  # raises the error of the lost rank
                raise
        build = DeviceBuild(config, loaded, bank, communicator)
        wait_for_linears = build.bind(None if ranks is None else ranks.pipe)
    return build, wait_for_linears


@contextmanager
def _with_ranks(ranks: RankGroup | None, message: RankMessage, facts: object) -> Iterator[None]:
    """Let the other ranks do their part while a `with` block does the part of rank 0."""
    if ranks is not None:
        ranks.send(message, msgspec.json.encode(facts))
    yield
    if ranks is not None:
        ranks.wait()


def _fit(
    build: DeviceBuild, layout: KVLayout, step: StepBytes | None, draft: LoadedModel | LoadedHead | None
) -> CacheSize:
    """Return the size of the cache, given the memory of the draft model and of the fullest rank."""
    (config, loaded, _, communicator), beside = build, NO_DRAFT
    if draft is not None:
        width = draft.headers.eagle.states_width if isinstance(draft, LoadedHead) else 0
        beside = draft_bytes(config, draft.config, draft.dtype, layout, width)
    shortage = communicator.shortage if isinstance(communicator, DeviceRanks) else 0
    return fit_to_device(config, loaded, weight_bytes=shortage, step=step, draft=beside)


def _make_scheduler(
    config: ResolvedConfig, size: CacheSize, layout: KVLayout, cost: PreemptionCost | None
) -> Scheduler:
    pool = make_pool(config.settings, size, windows=layout.windows, max_chunk=config.scheduler.max_chunk)
    return Scheduler(
        pool, config.scheduler, cost=cost, keeps_cache=config.keeps_cache,
        max_seq_len=config.max_seq_len, spans=layout.spans,
    )  # fmt: skip


def _served_len(config: ResolvedConfig, pool: PagedKVCachePool, size: CacheSize) -> int:
    """Return the longest sequence length served; warn if the cache limits it below max_seq_len."""
    served_len = min(config.max_seq_len, pool.longest() + 1)  # the last token of an output is not cached
    if served_len < config.max_seq_len:
        logger.warning(
            "the KV cache is too small for one sequence of max_seq_len: longer requests are refused "
            "max_seq_len=%d served=%d kv_cache=%s",
            config.max_seq_len,
            served_len,
            format_bytes(size.num_bytes).replace(" ", ""),
        )
    return served_len


def _prepare_all(warm_up: WarmUp | None, ranks: RankGroup | None) -> Iterator[bool]:
    """Prepare graphs and kernels, one piece per yielded True; the other ranks prepare theirs meanwhile."""
    if warm_up is None:
        return
    if ranks is not None:
        ranks.send(RankMessage.PREPARE, b"")
    while warm_up.prepare():
        yield True
    if ranks is not None:
        ranks.wait()
        ranks.send(RankMessage.AGREE, b"")
        with suppress(DeviceLost):  # `check` knows the reason
            warm_up.launcher.agree()
        ranks.check()


def _within_target(
    config: ResolvedConfig,
    loaded: LoadedModel,
    warm_up: WarmUp | None,
    pieces: Iterator[bool],
    phases: Phases,
) -> ResolvedScheduler:
    """Return the scheduler's limits; `itl_target_ms` limits the prompt tokens of a step."""
    limits, asked = config.scheduler, config.settings.scheduler
    if asked.itl_target_ms is None or asked.prefill_tokens_while_decoding is not None:
        return limits
    if warm_up is not None:
        with phases("capture"):
            for _ in pieces:
                pass
    time_step = partial(_probe_all, loaded, warm_up)
    max_tokens = min(limits.max_num_batched_tokens, config.max_seq_len)
    tokens = prompt_tokens_within(asked.itl_target_ms, time_step, max_tokens=max_tokens)
    return replace(limits, prefill_tokens_while_decoding=tokens)


def _prepare(pieces: Iterator[bool], token_bytes: TokenBytes, speculation: Speculation | None) -> bool:
    """Prepare one more piece of the engine; returns False if there was nothing left to do."""
    if next(pieces, False):
        token_bytes.start()  # runs while steps are captured
        return True
    return speculation is not None and speculation.prepare()


def _load_adapters(settings: EngineConfig, build: DeviceBuild) -> Adapters | None:
    _, loaded, bank, communicator = build
    if bank is None:
        return None
    adapters = Adapters(AdapterSlots(bank, loaded, communicator), loaded.ranks)
    for name, path in settings.adapters.modules.items():
        adapters.load(name, path)
    return adapters


def _probe_all(loaded: LoadedModel, warm_up: WarmUp | None, num_tokens: int) -> float:
    """Return the seconds that all ranks together take for a prompt of `num_tokens`."""
    if loaded.ranks is not None:
        loaded.ranks.send(RankMessage.PROBE, msgspec.json.encode(num_tokens))
    seconds = probe_rank(loaded, warm_up, num_tokens)
    if loaded.ranks is not None:
        loaded.ranks.check()
    return seconds


def _rank_times(device: TorchDevice | GpuDevice, ranks: RankGroup) -> dict[str, Any]:
    """Return the seconds that steps took and that ranks waited, as fields of `EngineStats`."""
    waits = [seconds for line in ranks.lines() for seconds in (line.sum_s, line.stage_s, line.idle_s)]
    step_s = device.step_s if isinstance(device, TorchDevice) else 0.0
    return {"rank_step_s": step_s, "rank_wait_s": tuple(waits)}


def token_bytes_of(
    source: ModelSource | None,
    tokenizer: str | None,
    config: ModelConfig,
    eos_ids: tuple[int, ...],
    text: TextHeaders | None = None,
) -> TokenBytes:
    """Return a lazy reader of the vocabulary in a model's files, or in another `tokenizer`.

    `text`: the headers of these files, if they have been read already.
    """

    def read() -> str:
        if tokenizer is not None:
            return tokenizer_json(Path(tokenizer).expanduser(), None)
        assert source is not None
        return tokenizer_json(source.path, (text or read_text_headers(source)).gguf_metadata)

    has_text = source is not None or tokenizer is not None
    return TokenBytes(read if has_text else None, vocab_size=config.vocab_size, eos_ids=eos_ids)


def wake_libraries(settings: EngineConfig, token_bytes: TokenBytes) -> None:
    """Initialize Triton and cuDNN on a GPU, in a thread, while weights load: each takes a second.

    Reading the vocabulary starts first: it holds the GIL for half a second, which copies do not need.
    """
    with suppress(Exception):  # an error is reported at the first real use
        device = choose_device(settings.load.device)
        if not is_gpu(device):
            return
        token_bytes.start()
        with torch.cuda.device(device):
            x = torch.zeros((1, 1, 128, 64), dtype=torch.bfloat16, device=device)
            copy_block(x.view(1, 2, 1, 64, 1, 64), 0, 0)
            attend_by_cudnn(x, x, x, 1.0)


def make_pool(
    settings: EngineConfig,
    size: CacheSize,
    *,
    windows: Sequence[int | None] = (None,),
    max_chunk: int | None = None,
) -> PagedKVCachePool:
    """Return the block pool of a cache of this size, whose tables have these windows (cache/layout.py)."""
    cache = settings.cache
    return PagedKVCachePool(
        size.num_blocks, size.block_size, use_prefix_caching=cache.caches_prefixes,
        num_host_blocks=size.num_host_blocks,
        max_blocks_per_sequence=1 if cache.kv_cache_backend == "contiguous" else None,
        windows=windows, max_chunk=max_chunk, allocator=_find_allocator(cache.block_allocator),
        block_bytes=size.bytes_per_block,
    )  # fmt: skip


def _find_allocator(name: str) -> type[BlockAllocator]:
    """Return the class of the block allocator: the default, or a user's subclass."""
    if name == "lru":
        return BlockAllocator
    found = load_code(name, "block_allocator")
    if not (isinstance(found, type) and issubclass(found, BlockAllocator)):
        raise ConfigError(
            f"block_allocator={name} is {found!r}; it must be a subclass of "
            "infer.cache.block_allocator.BlockAllocator"
        )
    return found


def _form(config: ResolvedConfig, loaded: LoadedModel) -> EngineForm:
    return EngineForm(
        dtype=config.dtype, weights=config.weights, kv_cache_dtype=kv_cache_dtype(config),
        products=products(config), gpu=gpu_name(loaded.device) if is_gpu(loaded.device) else "",
    )  # fmt: skip


def _report(name: str, config: ResolvedConfig, size: CacheSize, device: TorchDevice | GpuDevice) -> None:
    """Log the engine's decisions, the settings without effect, and the reasons."""
    logger.info("%s", describe_engine(name, config, size, attention=device.attention))
    for knob, why in config.unused.items():
        logger.warning("%s is without effect: %s", knob, why)
    logger.debug("engine settings %s", " ".join(f'{knob}="{why}"' for knob, why in config.reasons.items()))


def _facts(
    config: ResolvedConfig,
    loaded: LoadedModel,
    size: CacheSize,
    cost: PreemptionCost,
    step_costs: StepCosts | None,
    draft: LoadedModel | LoadedHead | None,
) -> RunFacts:
    knobs = shareable_knobs(config.settings)
    if config.weights in (*PACKED, "fp32"):  # a replay must use the form that `auto` chose here
        knobs["quantization"] = config.weights
    if config.settings.scheduler.itl_target_ms is not None:  # a replay must use the measured limit
        knobs["prefill_tokens_while_decoding"] = config.scheduler.prefill_tokens_while_decoding
    return RunFacts(
        version=__version__, model=loaded.name,
        fingerprint=fingerprint(loaded.whole or loaded.config, loaded.eos_ids), dtype=config.dtype,
        device=device_kind(loaded.device), num_threads=torch.get_num_threads(),
        context_len=config.max_seq_len, knobs=knobs, cache=size, cost=cost, step_costs=step_costs,
        draft_model="" if draft is None else draft.name,
        draft_fingerprint="" if draft is None else fingerprint(draft.config, draft.eos_ids),
        steps_ahead=config.steps_ahead,
    )  # fmt: skip
