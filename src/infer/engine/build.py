"""From an `EngineConfig` and a loaded model to a running engine: the only place that knows every part.

EngineConfig ──┬─► pool (books) ──► scheduler ──┐
LoadedModel  ──┴─► store (tensors) ─► runner ───┴─► Engine

What cannot be built is refused by `check_knobs` and `fit_to_device`. Both need to know how the model is
loaded but none of its weights, so whoever is about to load one can ask them first
(`memory_plan.check_settings`).
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from infer import __version__
from infer.cache.kv_pool import KVCachePool
from infer.cache.kv_store import KVStore
from infer.cache.memory import (
    CPU_SHARE,
    GPU_SHARE,
    CacheSize,
    LayerSizes,
    check_host_blocks,
    fit_cache,
    format_bytes,
    free_host_bytes,
)
from infer.cache.paged_pool import PagedKVCachePool, SlottedKVCachePool
from infer.config.settings import (
    CPU_STEPS,
    GPU_STEPS,
    LARGE_GPU_BYTES,
    LARGE_GPU_STEPS,
    SMALL_MODEL_MIXED_TOKENS,
    SMALL_MODEL_WEIGHTS,
    EngineConfig,
    SchedulerConfig,
    StepDefaults,
)
from infer.engine.engine import STEPS_AHEAD, Engine
from infer.engine.gc_freeze import freeze_with, freezing
from infer.engine.observer import EngineObserver
from infer.engine.run_manifest import RunFacts, fingerprint, shareable_knobs
from infer.engine.start_line import describe_engine
from infer.errors import ConfigError
from infer.execution.cpu_step import attention_gathers
from infer.execution.gpu.runner import DeviceRunner
from infer.execution.runner import ModelRunner
from infer.kernels.attention.reference import attend_sdpa
from infer.layers.linear import set_invariant
from infer.layers.prepare import prepare_linears
from infer.layers.whole_sequence import WholeSequence
from infer.loader.cpu_weights import PACKED
from infer.loader.load import LoadChoice, LoadedModel
from infer.models.config import ModelConfig
from infer.models.model import Model
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

DEVICE_BACKENDS = ("triton", "flash", "cuda")  # of attention: kernels that read a GPU's own state
PROBE_TOKENS = 64  # of the prefill that measures what recomputing costs


def build_engine(
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    observer: EngineObserver | None = None,
    cost: PreemptionCost | None = None,
    steps_ahead: int | None = None,
) -> Engine:
    """Put the parts together; `cost` and `steps_ahead` replace this machine's, to repeat a recorded run.

    A model may serve one engine after the other; `deterministic` of the last one built is the model's.
    """
    model_config = loaded.config
    scheduler_config = check_knobs(config, loaded)
    set_invariant(loaded.model, config.run.deterministic)
    wait_for_linears = prepare_linears(loaded.model.layers, loaded.model.head, loaded.device)
    size = fit_to_device(config, scheduler_config, loaded)
    store = _make_store(config, loaded, size)
    pool = make_pool(config, size)
    if cost is None and scheduler_config.preemption == "auto" and config.cache.num_host_blocks:
        wait_for_linears()
        cost = measure_cost(loaded.model, store, size, loaded.device)
    keeps_cache = config.cache.kv_cache_backend != "naive"
    steps_ahead = _steps_ahead(config, loaded, steps_ahead) if keeps_cache else 0
    runner = _make_runner(config, scheduler_config, loaded, store, pool, steps_ahead)
    wait_for_linears()
    scheduler = Scheduler(pool, scheduler_config, cost=cost, keeps_cache=keeps_cache)
    if observer is not None:
        observer.on_start(_facts(config, loaded, size, scheduler.cost, steps_ahead))
    is_gpu = loaded.device.type == "cuda"
    engine = Engine(
        scheduler,
        runner,
        context_len=loaded.max_seq_len,
        model_len=model_config.context_len,
        dtype=str(loaded.dtype).removeprefix("torch."),
        weights=loaded.weights,
        vocab_size=model_config.vocab_size,
        eos_ids=loaded.eos_ids,
        observer=observer,
        embedder=runner.embed,
        steps_ahead=steps_ahead,
        prepare=freezing(runner.prepare) if is_gpu else runner.prepare,
    )
    if is_gpu:  # a CPU waits for nobody while garbage is collected, and tiny models are built by the hundred
        freeze_with(engine)
    logger.info("%s", describe_engine(loaded, scheduler_config, size, config.cache.attention_backend))
    return engine


def check_knobs(config: EngineConfig, loaded: LoadedModel | LoadChoice) -> SchedulerConfig:
    """The scheduler's settings for this model and device; knobs that cannot be had there are refused."""
    scheduler = resolve_scheduler(config, loaded.max_seq_len, step_defaults(loaded.device, loaded.config))
    backend = config.cache.attention_backend
    check_steps(config, loaded.device)
    if not config.run.deterministic:
        return scheduler
    if loaded.device.type == "cuda" and backend not in ("auto", "triton"):
        raise ConfigError(
            f"deterministic needs attention_backend=auto or triton, not {backend}; leave one of the two out"
        )
    if loaded.device.type != "cuda" and attention_gathers(
        backend, loaded.device, loaded.dtype, loaded.config.head_dim
    ):
        raise ConfigError(
            "deterministic needs the attention kernel in C, which reads float32 with attention_backend=auto; "
            f"this is {str(loaded.dtype).removeprefix('torch.')} on {loaded.device} with {backend} "
            "(`infer doctor` says what is missing)"
        )
    return scheduler


def check_steps(config: EngineConfig, device: torch.device) -> None:
    """Refuse what was asked for and would do nothing on this device."""
    backend = config.cache.attention_backend
    is_there = keeps_state_on_device(backend, device)
    for name in ("use_cuda_graphs", "use_overlap"):
        if getattr(config.run, name) and not is_there:
            plain = f" with attention_backend={backend}, which is plain PyTorch" * (device.type == "cuda")
            raise ConfigError(
                f"{name} needs the kernels of a GPU, and the model is on {device}{plain}; leave it out"
            )
    if config.run.use_cpu_program and device.type != "cpu":
        raise ConfigError(
            f"use_cpu_program is for a model on a CPU, and this one is on {device}; leave it out"
        )


def _make_runner(
    config: EngineConfig,
    scheduler: SchedulerConfig,
    loaded: LoadedModel,
    store: KVStore,
    pool: KVCachePool,
    steps_ahead: int,
) -> ModelRunner:
    """On a GPU the one that keeps its state there, unless attention is asked for in plain PyTorch."""
    backend = config.cache.attention_backend
    if not keeps_state_on_device(backend, loaded.device):
        return ModelRunner(
            loaded.model,
            store,
            pool,
            max_batch_size=scheduler.width,
            attention_backend=backend,
            use_cpu_program=config.run.use_cpu_program is not False,
        )
    assert scheduler.max_num_batched_tokens is not None
    return DeviceRunner(
        loaded.model,
        store,
        pool,
        max_batch_size=scheduler.width,
        max_tokens=scheduler.max_num_batched_tokens,
        max_seq_len=loaded.max_seq_len,
        use_cuda_graphs=config.run.use_cuda_graphs is not False,
        attention_backend="invariant" if config.run.deterministic else backend,
        steps_ahead=steps_ahead,
    )


def _steps_ahead(config: EngineConfig, loaded: LoadedModel, asked: int | None) -> int:
    """How many steps may be launched before one is read: none where it is computed at once."""
    if config.run.use_overlap is False or not keeps_state_on_device(
        config.cache.attention_backend, loaded.device
    ):
        return 0
    if asked is not None:
        return asked
    return STEPS_AHEAD if is_small(loaded.config) else 1


def keeps_state_on_device(attention_backend: str, device: torch.device) -> bool:
    """Whether the kernels that read a GPU's own state compute attention."""
    if attention_backend in DEVICE_BACKENDS and device.type != "cuda":
        raise ConfigError(
            f"attention_backend={attention_backend} needs a GPU, and the model is on {device}; "
            "use auto, sdpa or naive"
        )
    return attention_backend in DEVICE_BACKENDS or (attention_backend == "auto" and device.type == "cuda")


def _facts(
    config: EngineConfig, loaded: LoadedModel, size: CacheSize, cost: PreemptionCost, steps_ahead: int
) -> RunFacts:
    return RunFacts(
        version=__version__,
        model=loaded.name,
        fingerprint=fingerprint(loaded.config, loaded.eos_ids),
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=loaded.device.type,
        num_threads=torch.get_num_threads(),
        context_len=loaded.max_seq_len,
        knobs=shareable_knobs(config) | _resolved_weights(loaded),
        cache=size,
        cost=cost,
        steps_ahead=steps_ahead,
    )


def _resolved_weights(loaded: LoadedModel) -> dict[str, str]:
    """What `auto` meant here: a replay must keep the weights in the same form."""
    return {"cpu_weights": loaded.weights} if loaded.weights in (*PACKED, "fp32") else {}


def resolve_scheduler(
    config: EngineConfig, max_seq_len: int, defaults: StepDefaults = CPU_STEPS
) -> SchedulerConfig:
    """Fill in what depends on the device; without chunking a step must hold the longest prompt whole."""
    scheduler = config.scheduler
    is_chunked = scheduler.use_chunked_prefill and config.cache.kv_cache_backend != "naive"
    budget = scheduler.max_num_batched_tokens
    if budget is None:
        needed = max(scheduler.max_batch_size or 1, 1 if is_chunked else max_seq_len)
        budget = max(defaults.batched_tokens, needed)
    if not is_chunked and budget < max_seq_len:
        raise ConfigError(
            f"without chunked prefill a step must hold a whole sequence of up to {max_seq_len} tokens, but "
            f"max_num_batched_tokens is {budget}; raise it, lower max_seq_len, or turn use_chunked_prefill on"
        )
    mixed = scheduler.mixed_prefill_tokens
    if mixed is None and defaults.mixed_tokens is not None and is_chunked:
        mixed = min(defaults.mixed_tokens, budget)
    return replace(
        scheduler,
        max_num_batched_tokens=budget,
        max_batch_size=scheduler.max_batch_size or min(defaults.batch_size, budget),
        prefill_chunk_size=scheduler.prefill_chunk_size or defaults.chunk_size or budget,
        mixed_prefill_tokens=mixed,
    )


def step_defaults(device: torch.device, model: ModelConfig, memory: int | None = None) -> StepDefaults:
    """How large steps are unless somebody says so; `memory` of a GPU that is not this machine's."""
    if device.type != "cuda":
        return CPU_STEPS
    if memory is None and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(device).total_memory
    steps = LARGE_GPU_STEPS if memory is not None and memory >= LARGE_GPU_BYTES else GPU_STEPS
    return steps._replace(mixed_tokens=SMALL_MODEL_MIXED_TOKENS) if is_small(model) else steps


def is_small(model: ModelConfig) -> bool:
    """Whether a step that decodes is so short on a GPU that everything around it counts."""
    return model.all_layer_weights <= SMALL_MODEL_WEIGHTS


def make_pool(config: EngineConfig, size: CacheSize, *, placement_seed: int | None = None) -> KVCachePool:
    """The books for a cache of this size."""
    cache = config.cache
    if cache.kv_cache_backend == "contiguous":
        return SlottedKVCachePool(
            size.num_blocks,
            size.block_size,
            num_host_sequences=cache.num_host_blocks,
            placement_seed=placement_seed,
        )
    return PagedKVCachePool(
        size.num_blocks,
        size.block_size,
        use_prefix_caching=cache.use_prefix_caching and cache.kv_cache_backend == "paged",
        num_host_blocks=cache.num_host_blocks,
        placement_seed=placement_seed,
    )


@torch.inference_mode()
def measure_cost(model: Model, store: KVStore, size: CacheSize, device: torch.device) -> PreemptionCost:
    """Time one block's way to host memory and a short prefill: what the two kinds of preemption cost."""

    def prefill() -> None:
        step = WholeSequence(attend_sdpa, device)
        step.advance(num_tokens)
        model(tokens_T, step)

    def seconds(work: object) -> float:
        assert callable(work)
        work()  # the first time pays for allocations
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        return time.perf_counter() - start

    num_tokens = min(PROBE_TOKENS, model.config.context_len)
    tokens_T = torch.arange(num_tokens, device=device) % model.config.vocab_size
    swap = seconds(lambda: store.transfer([("swap_out", 0, 0)])) / size.block_size
    recompute = seconds(prefill) / num_tokens
    return PreemptionCost(swap_seconds=swap, recompute_seconds=recompute)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fit_to_device(
    config: EngineConfig,
    scheduler: SchedulerConfig,
    loaded: LoadedModel | LoadChoice,
    *,
    weight_bytes: int = 0,
) -> CacheSize:
    """The size of the cache here and now, with the formula of `infer plan`; refused if it does not fit.

    `weight_bytes` are of weights that will be loaded: what is free now is free less these.
    """
    is_gpu = loaded.device.type == "cuda"
    free_host = free_host_bytes() - (0 if is_gpu else weight_bytes)
    size = fit_cache(
        config.cache,
        scheduler,
        layer_sizes(loaded.config),
        max_seq_len=loaded.max_seq_len,
        bytes_per_element=loaded.dtype.itemsize,
        free_bytes=torch.cuda.mem_get_info(loaded.device)[0] - weight_bytes if is_gpu else free_host,
        share=GPU_SHARE if is_gpu else CPU_SHARE,
        gathers=attention_gathers(
            config.cache.attention_backend, loaded.device, loaded.dtype, loaded.config.head_dim
        ),
    )
    check_host_blocks(config.cache.num_host_blocks, size, free_host if is_gpu else free_host - size.num_bytes)
    return size


def _make_store(config: EngineConfig, loaded: LoadedModel, size: CacheSize) -> KVStore:
    try:
        return KVStore(
            num_layers=loaded.config.num_layers,
            num_blocks=size.num_blocks,
            block_size=size.block_size,
            num_kv_heads=loaded.config.num_kv_heads,
            head_dim=loaded.config.head_dim,
            dtype=loaded.dtype,
            device=loaded.device,
            num_host_blocks=config.cache.num_host_blocks,
        )
    except RuntimeError as error:  # what was free is taken, or a limit that cannot be asked for is reached
        raise ConfigError(
            f"a KV cache of {format_bytes(size.num_bytes)} and {config.cache.num_host_blocks} blocks in host "
            f"memory could not be allocated ({str(error).splitlines()[0]}); ask for less with "
            "kv_cache_memory, num_blocks or num_host_blocks"
        ) from error


def layer_sizes(config: ModelConfig) -> LayerSizes:
    """The sizes that decide how much a step needs."""
    widest_mlp = max(config.mlp_size(layer) for layer in range(config.num_layers))
    if config.experts is not None:  # each of a token's experts has a result of its own until they are added
        widest_mlp += config.experts.num_choices * config.hidden_size
    return LayerSizes(
        hidden_size=config.hidden_size,
        intermediate_size=widest_mlp,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
    )
