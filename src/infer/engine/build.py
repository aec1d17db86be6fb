"""From settings and a loaded model to a running engine: the composition root.

    EngineConfig ─► resolve ─┬─► pool (books) ───► scheduler ─┐
    LoadedModel ─────────────┴─► store (tensors) ─► device ───┴─► Engine

Nothing is decided here: `config/resolve.py` decides, `cache_fit.py` sizes the cache, this file composes.
`resolve_for` and `fit_to_device` need none of the weights, so `memory_plan.check_settings` asks them before a
model is loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from infer import __version__
from infer.cache.block_allocator import BlockAllocator
from infer.cache.kv_store import KVStore
from infer.cache.layout import KVLayout
from infer.cache.memory import GRAPH_WORKSPACE, CacheSize, StepBytes, format_bytes
from infer.cache.paged_pool import PagedKVCachePool
from infer.config.own_code import load_code
from infer.config.resolve import ResolvedConfig, resolve
from infer.config.settings import EngineConfig
from infer.config.speculation import WINDOW_TOKENS
from infer.constraints.token_bytes import TokenBytes, tokenizer_json
from infer.engine.adapters import Adapters, AdapterSlots, needed_room, network_of
from infer.engine.cache_fit import (
    NO_DRAFT,
    compute_step,
    fit_to_device,
    for_each,
    graph_tokens,
    kept_as,
    kv_layout,
    state_size,
)
from infer.engine.device_memory import Arena, enforce_limit
from infer.engine.engine import Engine
from infer.engine.gc_freeze import freeze_with, freezing
from infer.engine.itl_target import prompt_tokens_within
from infer.engine.machine import facts_of, gpu_name, machine_of
from infer.engine.observer import EngineObserver
from infer.engine.phases import Phases
from infer.engine.preemption_cost import measure_cost, prefill_seconds
from infer.engine.rehearsal import rehearse
from infer.engine.run_manifest import RunFacts, fingerprint, shareable_knobs
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
from infer.execution.device import StateShape
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.warm_up import WarmUp
from infer.execution.rank_ring import RankMessage
from infer.execution.torch_device import TorchDevice, TorchHead
from infer.kernels.attention.dense import attend_by_cudnn
from infer.kernels.cpu.collectives import SharedCommunicator
from infer.kernels.elementwise.copy_block import copy_block
from infer.kernels.runtime.communicator import Communicator, Pipe
from infer.kernels.runtime.dispatch import device_kind, is_gpu
from infer.kernels.runtime.gpu_communicator import GpuCommunicator
from infer.layers.adapted import AdapterBank
from infer.layers.bind import bind
from infer.loader.find.source import ModelSource
from infer.loader.load import LoadChoice, LoadedModel, RankGroup, choose_device
from infer.loader.quantization import PACKED
from infer.loader.text_headers import TextHeaders, read_text_headers
from infer.models.config import ModelConfig
from infer.scheduling.batch_state import BatchState
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
    """Return an engine for this model; costs and `steps_ahead` replace this machine's, to repeat a run.

    `phases` gets the time that each part of it takes, and is the engine's. `token_bytes` reads the vocabulary
    (`token_bytes_of`).
    A model may serve one engine after the other; `deterministic` of the last one built is the model's.
    """
    config, ranks = resolve_for(settings, loaded), loaded.ranks
    if settings.load.num_ranks > 1 and ranks is None:
        raise ConfigError(
            f"tensor_parallel_size={settings.load.tensor_parallel_size} and "
            f"pipeline_parallel_size={settings.load.pipeline_parallel_size} need a model that ranks have "
            "loaded; random weights and models that are given whole run in one process: leave them out"
        )
    if steps_ahead is not None and (config.steps_ahead or not config.uses_gpu_device):
        config = replace(config, steps_ahead=steps_ahead)
    phases = Phases() if phases is None else phases
    if ranks is not None:
        ranks.send(RankMessage.BIND, json.dumps(settings.knobs()).encode())
    with phases("compile"):
        bank = make_bank(settings, loaded)
        communicator = None
        if ranks is not None:
            try:
                communicator = ranks.communicator = join_ranks(ranks.communicator, loaded)
            except DeviceLost:
                ranks.wait()  # it raises the error of the rank that is gone
                raise
        wait_for_linears = _bind(config, loaded, communicator, None if ranks is None else ranks.pipe, bank)
    if ranks is not None:
        ranks.wait()
    with phases("load draft"):
        draft = load_draft(config, loaded)
    with phases("plan memory"):
        step = _rehearse(config, loaded, wait_for_linears, bank, communicator)
        layout = kv_layout(loaded.config, config)
        beside = NO_DRAFT
        if draft is not None:
            width = draft.headers.eagle.states_width if isinstance(draft, LoadedHead) else 0
            beside = draft_bytes(config, draft.config, draft.dtype, layout, width)
        shortage = communicator.shortage if isinstance(communicator, GpuCommunicator) else 0
        size = fit_to_device(config, loaded, weight_bytes=shortage, step=step, draft=beside)
        store = _make_store(config, loaded, size, layout)
    pool = make_pool(settings, size, windows=layout.windows, max_chunk=config.scheduler.max_chunk)
    if cost is None and size.num_host_blocks:
        wait_for_linears()
        prefill, max_tokens = partial(_probe_all, loaded, None), config.scheduler.max_num_batched_tokens
        cost = measure_cost(prefill, loaded.model, store, size.block_size, max_tokens)
    served_len = min(config.max_seq_len, pool.longest() + 1)  # the last token of an output is not cached
    if served_len < config.max_seq_len:
        logger.warning(
            "the KV cache holds less than max_seq_len of one sequence: longer requests are refused "
            "max_seq_len=%d served=%d kv_cache=%s",
            config.max_seq_len,
            served_len,
            format_bytes(size.num_bytes).replace(" ", ""),
        )
    scheduler = Scheduler(
        pool,
        config.scheduler,
        cost=cost,
        keeps_cache=config.keeps_cache,
        max_seq_len=config.max_seq_len,
        spans=layout.spans,
    )
    with phases("warm up"):
        shape = shape_of(scheduler.state)
        if ranks is not None:
            ranks.send(RankMessage.BUILD, json.dumps([astuple(size), shape, step]).encode())
        draft_device = make_draft_device(config, draft, size, layout, shape)
        device, warm_up = _make_warm(config, loaded, store, shape, step, draft_device, bank, communicator)
        if ranks is not None:
            ranks.wait()
    with phases("compile"):
        wait_for_linears()
    with phases("measure steps"):
        speculation = make_speculation(
            config,
            loaded,
            scheduler,
            device,
            draft_device=draft_device,
            size=size,
            shape=shape,
            costs=step_costs,
        )
    on_gpu = is_gpu(loaded.device)
    told, ready = ranks is None, ranks is None  # whether other ranks prepare their steps, and have done so

    def prepare_all() -> bool:
        """Prepare one more piece, while other ranks prepare everything."""
        nonlocal told, ready
        if warm_up is None:
            return False
        if ranks is not None and not told:
            ranks.send(RankMessage.PREPARE, b"")
        told, is_more = True, warm_up.prepare()
        if ranks is not None and not (is_more or ready):
            ranks.wait()
            ranks.send(RankMessage.AGREE, b"")
            with suppress(DeviceLost):  # `check` knows the reason
                warm_up.device.agree()
            ranks.check()
            ready = True
        return is_more

    target_ms, asked = settings.scheduler.itl_target_ms, settings.scheduler.prefill_tokens_while_decoding
    if target_ms is not None and asked is None:
        if warm_up is not None:
            with phases("capture"):
                while prepare_all():
                    pass
        time_step = partial(_probe_all, loaded, warm_up)
        max_tokens = min(config.scheduler.max_num_batched_tokens, config.max_seq_len)
        tokens = prompt_tokens_within(target_ms, time_step, max_tokens=max_tokens)
        config = replace(config, scheduler=replace(config.scheduler, prefill_tokens_while_decoding=tokens))
        scheduler.config = config.scheduler
    if observer is not None:
        step_costs = None if speculation is None else speculation.costs
        observer.on_start(_facts(config, loaded, size, scheduler.cost, step_costs, draft))
    token_bytes = token_bytes or token_bytes_of(
        loaded.source, settings.load.tokenizer, loaded.config, loaded.eos_ids
    )

    def prepare() -> bool:
        is_more = prepare_all()
        if is_more:
            token_bytes.start()  # runs while steps are captured
        return is_more or (speculation is not None and speculation.prepare())

    engine = Engine(
        scheduler,
        device,
        context_len=served_len,
        model_len=loaded.config.context_len,
        family=loaded.config.family,
        vocab_size=loaded.config.vocab_size,
        eos_ids=loaded.eos_ids,
        has_head=loaded.config.has_head,
        form=EngineForm(
            dtype=config.dtype,
            weights=config.weights,
            kv_cache_dtype=kv_cache_dtype(config),
            products=products(config),
            gpu=gpu_name(loaded.device) if on_gpu else "",
        ),
        observer=observer,
        steps_ahead=config.steps_ahead,
        prepare=freezing(prepare) if on_gpu else prepare,
        phases=phases,
        token_bytes=token_bytes,
        speculation=speculation,
        adapters=None if bank is None else _load_adapters(settings, loaded, bank, communicator),
        rank_times=partial(_rank_times, device, ranks) if ranks is not None else dict,
    )
    engine.ranks = ranks
    if on_gpu:  # a CPU step never waits for the garbage collector, and tests build many tiny models
        freeze_with(engine)
    logger.info("%s", describe_engine(loaded.name, config, size, attention=device.attention))
    logger.debug("engine settings %s", " ".join(f'{name}="{why}"' for name, why in config.reasons.items()))
    return engine


def _bind(
    config: ResolvedConfig,
    loaded: LoadedModel,
    communicator: Communicator | None,
    pipe: Pipe | None,
    adapters: AdapterBank | None = None,
) -> Callable[[], bool]:
    if isinstance(communicator, GpuCommunicator):
        communicator.uses_nccl = not config.deterministic
        pipe = communicator if communicator.num_stages > 1 else None
    loaded.model.pipe = pipe
    if communicator is not None and communicator.size == 1:  # the only rank of its stage
        communicator = None
    return bind(
        loaded.model,
        loaded.device,
        deterministic=config.deterministic,
        mlp_backend=config.backends.mlp,
        cpu_products=config.settings.run.cpu_products,
        communicator=communicator,
        vocab_size=loaded.config.vocab_size,
        adapters=adapters,
    )


def make_bank(settings: EngineConfig, loaded: LoadedModel) -> AdapterBank | None:
    """Return the room for the LoRA adapters of a model; None: it has none."""
    if not settings.adapters.is_on:
        return None
    network = network_of(loaded)
    room = needed_room(settings.adapters, network)
    try:
        return AdapterBank(loaded.model, room, dtype=loaded.dtype, device=loaded.device, whole=network)
    except RuntimeError as error:
        raise ConfigError(
            f"{room.num_slots} LoRA adapters of rank {room.rank} could not be allocated "
            f"({str(error).splitlines()[0]}); lower max_loras or max_lora_rank"
        ) from error


def _load_adapters(
    settings: EngineConfig, loaded: LoadedModel, bank: AdapterBank, communicator: Communicator | None
) -> Adapters:
    adapters = Adapters(AdapterSlots(bank, loaded, communicator), loaded.ranks)
    for name, path in settings.adapters.modules.items():
        adapters.load(name, path)
    return adapters


def bind_rank(
    settings: EngineConfig, loaded: LoadedModel, communicator: Communicator, pipe: Pipe | None
) -> tuple[ResolvedConfig, AdapterBank | None]:
    """Bind the part of the model that a rank other than 0 has.

    Returns the same decisions as rank 0's, and the room for its parts of LoRA adapters.
    """
    config, bank = resolve_for(settings, loaded), make_bank(settings, loaded)
    _bind(config, loaded, communicator, pipe, bank)()
    return config, bank


def join_ranks(communicator: Communicator, loaded: LoadedModel) -> Communicator:
    """Return what joins the ranks of this model on their devices; all ranks come here together."""
    if is_gpu(loaded.device) and isinstance(communicator, SharedCommunicator):
        return GpuCommunicator(communicator, loaded.device, loaded.dtype)
    return communicator


def build_rank(
    config: ResolvedConfig,
    loaded: LoadedModel,
    size: CacheSize,
    shape: StateShape,
    step: StepBytes | None,
    communicator: Communicator,
    adapters: AdapterBank | None,
) -> tuple[TorchDevice | GpuDevice, WarmUp | None]:
    """Return the device half of a rank other than 0, with as many blocks and rows as rank 0's."""
    store = _make_store(config, loaded, size, kv_layout(loaded.config, config))
    return _make_warm(config, loaded, store, shape, step, adapters=adapters, communicator=communicator)


def probe_rank(loaded: LoadedModel, warm_up: WarmUp | None, num_tokens: int) -> float:
    """Return the seconds that this many prompt tokens take on a rank: in a step, or by themselves."""
    if warm_up is None:
        return prefill_seconds(loaded.model, loaded.device, num_tokens)
    return warm_up.step_seconds(num_tokens)


def _probe_all(loaded: LoadedModel, warm_up: WarmUp | None, num_tokens: int) -> float:
    """Return the seconds that this many prompt tokens take on all ranks together."""
    if loaded.ranks is not None:
        loaded.ranks.send(RankMessage.PROBE, json.dumps(num_tokens).encode())
    seconds = probe_rank(loaded, warm_up, num_tokens)
    if loaded.ranks is not None:
        loaded.ranks.check()
    return seconds


def _rank_times(device: TorchDevice | GpuDevice, ranks: RankGroup) -> dict[str, Any]:
    """Return the time that steps took and ranks waited, as fields of `EngineStats`."""
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
    """Return what reads the tokens of a model's files, or of another `tokenizer`; nothing is read yet.

    `text` are the headers of these files, where they are read already.
    """

    def read() -> str:
        if tokenizer is not None:
            return tokenizer_json(Path(tokenizer).expanduser(), None)
        assert source is not None
        return tokenizer_json(source.path, (text or read_text_headers(source)).gguf_metadata)

    has_text = source is not None or tokenizer is not None
    return TokenBytes(read if has_text else None, vocab_size=config.vocab_size, eos_ids=eos_ids)


def wake_libraries(settings: EngineConfig, token_bytes: TokenBytes) -> None:
    """Start Triton and cuDNN on a GPU, in a thread, while weights are loaded: each takes a second.

    The vocabulary is begun first: it holds Python's lock for half a second, which copies do not need.
    """
    with suppress(Exception):  # the error is reported where they are needed
        device = choose_device(settings.load.device)
        if not is_gpu(device):
            return
        token_bytes.start()
        with torch.cuda.device(device):
            x = torch.zeros((1, 1, 128, 64), dtype=torch.bfloat16, device=device)
            copy_block(x.view(1, 2, 1, 64, 1, 64), 0, 0)
            attend_by_cudnn(x, x, x, 1.0)


def resolve_for(settings: EngineConfig, loaded: LoadedModel | LoadChoice) -> ResolvedConfig:
    """Return the decisions for this model on its device; settings that cannot work there are refused."""
    return resolve(settings, machine_of(loaded, settings.cache.device_memory), facts_of(loaded))


def make_pool(
    settings: EngineConfig,
    size: CacheSize,
    *,
    windows: Sequence[int | None] = (None,),
    max_chunk: int | None = None,
    placement_seed: int | None = None,
) -> PagedKVCachePool:
    """Return the books of a cache of this size, whose tables have these windows (cache/layout.py)."""
    cache = settings.cache
    return PagedKVCachePool(
        size.num_blocks,
        size.block_size,
        use_prefix_caching=cache.caches_prefixes,
        num_host_blocks=size.num_host_blocks,
        max_blocks_per_sequence=1 if cache.kv_cache_backend == "contiguous" else None,
        placement_seed=placement_seed,
        windows=windows,
        max_chunk=max_chunk,
        allocator=_find_allocator(cache.block_allocator),
        block_bytes=size.bytes_per_block,
    )


def _find_allocator(name: str) -> type[BlockAllocator]:
    """Return the allocator of blocks: the engine's own, or a subclass of it that the user has written."""
    if name == "lru":
        return BlockAllocator
    found = load_code(name, "block_allocator")
    if not (isinstance(found, type) and issubclass(found, BlockAllocator)):
        raise ConfigError(
            f"block_allocator={name} is {found!r}; it must be a subclass of "
            "infer.cache.block_allocator.BlockAllocator"
        )
    return found


def _make_store(config: ResolvedConfig, loaded: LoadedModel, size: CacheSize, layout: KVLayout) -> KVStore:
    num_kv_heads, head_dim = layout.plane_heads(loaded.config.num_kv_heads, loaded.config.head_dim)
    try:
        return KVStore(
            layout=layout,
            num_blocks=size.num_blocks,
            block_size=size.block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=loaded.dtype,
            device=loaded.device,
            num_host_blocks=size.num_host_blocks,
            kept_as=kept_as(config.settings.cache, loaded.dtype),
            fixed=loaded.kv_scales if config.has_fixed_kv_scales else None,
            state=state_size(loaded.config),
        )
    except RuntimeError as error:  # what was free is taken, or a limit that cannot be asked for is reached
        raise ConfigError(
            f"a KV cache of {format_bytes(size.num_bytes)} and {size.num_host_blocks} blocks in host "
            f"memory could not be allocated{for_each(config.settings.load.num_ranks)} "
            f"({str(error).splitlines()[0]}); ask for less with kv_cache_memory, num_blocks, swap_blocks or "
            "swap_space"
        ) from error


def _make_arena(step: StepBytes, device: torch.device) -> Arena:
    workspace = GRAPH_WORKSPACE if step.graphs else 0  # the thread that captures keeps one for good
    try:
        return Arena(step.activations + workspace, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the {format_bytes(step.activations)} of the largest step were free and are taken by another "
            f"process ({str(error).splitlines()[0]}); start again, or lower device_memory"
        ) from None


def _rehearse(
    config: ResolvedConfig,
    loaded: LoadedModel,
    wait_for_linears: Callable[[], bool],
    adapters: AdapterBank | None,
    communicator: Communicator | None,
) -> StepBytes | None:
    """Return the memory that the largest step takes on a GPU, by running it; None: it is only computed."""
    if not (config.uses_gpu_device and is_gpu(loaded.device)):
        return None
    cache = config.settings.cache
    enforce_limit(loaded.device, cache.device_memory)
    if config.backends.attention == "flash":  # it cannot attend to padding
        return compute_step(config, loaded)

    def make_warm_up() -> WarmUp:
        layout = kv_layout(loaded.config, config)
        store = _make_store(config, loaded, CacheSize(1, cache.block_size, 0), layout)
        shape = StateShape(2 * config.scheduler.max_batch_size, 1, cache.block_size, len(layout.windows))
        device = make_device(config, loaded, store, shape, adapters=adapters, communicator=communicator)
        assert isinstance(device, GpuDevice)
        return WarmUp(device)

    def compile_steps(warm_up: WarmUp) -> None:
        warm_up.compile()  # Triton's kernels, while others compile those in CUDA C++
        if not wait_for_linears():
            warm_up.compile()  # Triton's kernels in place of those that could not be had
        warm_up.device.wait_for_compilers()

    return rehearse(
        make_warm_up,
        compile_steps,
        loaded.device,
        config.scheduler,
        compute_step(config, loaded),
        graph_tokens(config, loaded.config),
        cache.device_memory,
    )


def shape_of(state: BatchState) -> StateShape:
    """Return the size of the state that a device keeps for a batch."""
    num_tables, num_rows, max_blocks = state.tables.shape
    return StateShape(num_rows, max_blocks, state.block_size, num_tables)


def make_device(
    config: ResolvedConfig,
    loaded: LoadedModel,
    store: KVStore,
    shape: StateShape,
    graph_bytes: int = 0,
    drafter: TorchDevice | GpuDevice | None = None,
    adapters: AdapterBank | None = None,
    communicator: Communicator | None = None,
) -> TorchDevice | GpuDevice:
    """Return the device half that keeps its state on the GPU, or the one that is plain PyTorch and C.

    `drafter` drafts for it, and follows its steps if it is a head; `adapters` are those of the model;
    `communicator` joins its ranks.
    """
    if not config.uses_gpu_device:
        return TorchDevice(
            loaded.model,
            store,
            shape,
            max_batch_size=config.scheduler.max_batch_size,
            attention_backend=config.backends.attention,
            decode_attention_backend=config.backends.decode_attention,
            record_cpu_step=config.record_cpu_step,
            ranks=loaded.ranks,
            pipe=loaded.model.pipe,
            head=drafter if isinstance(drafter, TorchHead) else None,
            adapters=adapters,
        )
    has_trees = config.settings.speculation.is_on and config.settings.speculation.method == "tree"
    return GpuDevice(
        loaded.model,
        store,
        shape,
        max_batch_size=config.scheduler.max_batch_size,
        max_tokens=config.scheduler.max_num_batched_tokens,
        max_seq_len=config.max_seq_len,
        use_cuda_graphs=config.use_cuda_graphs,
        attention_backend=config.backends.attention,
        decode_attention_backend=config.backends.decode_attention,
        steps_ahead=config.steps_ahead,
        graph_bytes=graph_bytes,
        busy_tokens=config.scheduler.busy_step_tokens,
        window_tokens=WINDOW_TOKENS if config.settings.speculation.is_on else 0,
        drafter=drafter if isinstance(drafter, GpuDevice) else None,
        has_trees=has_trees,
        adapters=adapters,
        ranks=loaded.ranks,
        communicator=cast("GpuCommunicator | None", communicator),
        pipe=loaded.model.pipe,
    )


def _make_warm(
    config: ResolvedConfig,
    loaded: LoadedModel,
    store: KVStore,
    shape: StateShape,
    step: StepBytes | None,
    drafter: TorchDevice | GpuDevice | None = None,
    adapters: AdapterBank | None = None,
    communicator: Communicator | None = None,
) -> tuple[TorchDevice | GpuDevice, WarmUp | None]:
    """Return the device half with the memory of its steps, and what prepares it on a GPU."""
    graph_bytes = 0 if step is None else step.graph_block
    device = make_device(config, loaded, store, shape, graph_bytes, drafter, adapters, communicator)
    if not isinstance(device, GpuDevice):
        return device, None
    warm_up = WarmUp(device)
    device.wait_for_compilers()
    if step is not None:  # after the device's own buffers, which would lie in the arena for good
        device.arena = _make_arena(step, loaded.device)
    return device, warm_up


def _facts(
    config: ResolvedConfig,
    loaded: LoadedModel,
    size: CacheSize,
    cost: PreemptionCost,
    step_costs: StepCosts | None,
    draft: LoadedModel | LoadedHead | None,
) -> RunFacts:
    knobs = shareable_knobs(config.settings)
    if config.weights in (*PACKED, "fp32"):  # what `auto` meant: a replay must keep the same form
        knobs["quantization"] = config.weights
    if config.settings.scheduler.itl_target_ms is not None:  # a replay must keep what was measured
        knobs["prefill_tokens_while_decoding"] = config.scheduler.prefill_tokens_while_decoding
    return RunFacts(
        version=__version__,
        model=loaded.name,
        fingerprint=fingerprint(loaded.whole or loaded.config, loaded.eos_ids),
        dtype=config.dtype,
        device=device_kind(loaded.device),
        num_threads=torch.get_num_threads(),
        context_len=config.max_seq_len,
        knobs=knobs,
        cache=size,
        cost=cost,
        step_costs=step_costs,
        draft_model="" if draft is None else draft.name,
        draft_fingerprint="" if draft is None else fingerprint(draft.config, draft.eos_ids),
        steps_ahead=config.steps_ahead,
    )
