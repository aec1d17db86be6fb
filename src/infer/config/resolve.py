"""Resolves settings: what a knob that is None or `auto` means on this machine, for this model.

    EngineConfig  (what was asked)  ┐
    Machine       (what there is)   ├──► resolve ──► ResolvedConfig  (what will be done, and why)
    ModelFacts    (what is served)  ┘

`resolve` is a pure function: it queries no device and reads no file, so a plan for another machine, or a test
for an absent GPU, gets the engine's decisions. Settings that cannot work on the machine are refused
(`machine_rules.py`). Only the size of the KV cache is decided later: it depends on the memory that is free
after the weights are loaded (`engine/cache_fit.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from infer.config.backends import AUTO, Chosen
from infer.config.knobs import refuse
from infer.config.machine_rules import Machine, ModelFacts, backend_faults, machine_faults
from infer.config.profiles.cpu import CPU
from infer.config.profiles.generic import GENERIC
from infer.config.profiles.profile import DeviceProfile, SchedulingProfile, StepDefaults
from infer.config.settings import EngineConfig
from infer.config.speculation import MAX_DRAFTS
from infer.config.unused import unused_knobs
from infer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedScheduler:
    """`SchedulerConfig` with a value for every limit."""

    batching_mode: str
    scheduler_policy: str
    max_batch_size: int
    max_num_batched_tokens: int
    use_chunked_prefill: bool
    prefill_chunk_size: int
    prefill_tokens_while_decoding: int | None  # None: as many as a step has room for
    hurries: bool  # True if many waiting prompts are computed at full speed, beyond that
    busy_step_tokens: int  # tokens of a step with decoding rows if hurried steps are frequent; 0: never
    packed_step_tokens: int  # prompt tokens of a step with many short prompts
    max_prefill_chunks_per_step: int | None  # None: no limit
    preemption: str
    max_wait_steps: int
    max_decode_gap: int
    max_queue: int | None  # None: no limit
    seed: int
    profile: SchedulingProfile  # limits at which prompts get longer steps

    @property
    def max_chunk(self) -> int | None:
        """The most tokens of one sequence that a step computes, of a prompt or drafts; None: all it has."""
        return max(self.prefill_chunk_size, MAX_DRAFTS + 1) if self.use_chunked_prefill else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(ModelFacts):
    """The settings of an engine with a value for each, the reasons, and the facts about its model."""

    settings: EngineConfig  # settings as asked, with `kv_cache_dtype` as it is understood
    device: str
    profile: DeviceProfile  # measurements of the device
    scheduler: ResolvedScheduler
    keeps_cache: bool
    use_prefix_caching: bool
    backends: Chosen  # backends of each operation
    gathers_kv: bool  # True if attention copies keys and values together before it reads them
    uses_gpu_device: bool  # True if the state of the batch is kept on the device
    use_cuda_graphs: bool
    steps_ahead: int  # steps launched before one is read
    record_cpu_step: bool
    deterministic: bool
    reasons: Mapping[str, str]  # reasons for decisions that the settings left open, by the name of the knob
    overruled: Mapping[str, str]  # knobs that another knob overrides: their actual values, and why
    unused: Mapping[str, str]  # knobs that were given and have no effect, and why

    @property
    def has_fixed_kv_scales(self) -> bool:
        """True if keys and values are kept with the scales of the checkpoint."""
        return self.has_kv_scales and self.settings.cache.kv_cache_dtype == "fp8"  # not *_per_token_head


def resolve(config: EngineConfig, machine: Machine, model: ModelFacts) -> ResolvedConfig:
    """Return the resolved settings for this model on this machine; settings that cannot work are refused."""
    refuse(machine_faults(config, machine, model))
    asked, config = config, _with_readable_cache(config, machine, model)
    run, cache, backends = config.run, config.cache, choose_backends(config, machine)
    on_gpu = machine.runs_kernels(config)
    steps_ahead = 0
    is_staged = config.load.pipeline_parallel_size > 1
    if cache.keeps_cache and (on_gpu or is_staged) and run.use_overlap is not False:
        steps_ahead = machine.profile.steps.steps_ahead if on_gpu and model.is_small(machine.profile) else 1
    is_ours = model.model_impl == "infer"  # only then can steps be captured or recorded
    captures = is_ours and machine.can_capture(config) and run.use_cuda_graphs is not False
    defaults = step_defaults(machine, model)
    if not captures:
        defaults = defaults._replace(packed_tokens=None)
    scheduler = resolve_scheduler(config, model.max_seq_len, defaults, machine.profile.scheduling)
    return ResolvedConfig(
        **asdict(model),
        settings=config,
        device=machine.device,
        profile=machine.profile,
        scheduler=scheduler,
        keeps_cache=cache.keeps_cache,
        use_prefix_caching=cache.caches_prefixes,
        backends=Chosen("invariant", "invariant", "kernels") if run.deterministic and on_gpu else backends,
        gathers_kv=not on_gpu and backends[:2] != ("c", "c"),
        uses_gpu_device=on_gpu,
        use_cuda_graphs=captures,
        steps_ahead=steps_ahead,
        record_cpu_step=is_ours and run.record_cpu_step is not False,
        deterministic=run.deterministic,
        reasons=_reasons(config, scheduler, machine, model),
        overruled=_overruled(asked, model, backends),
        unused=unused_knobs(asked, asdict(scheduler)),
    )


def step_defaults(machine: Machine, model: ModelFacts) -> StepDefaults:
    """Return the size of steps on this machine unless a knob says otherwise."""
    profile, memory = machine.profile, machine.gpu_memory
    tuned = profile.steps
    if not machine.is_gpu:
        return tuned.usual
    steps = tuned.large if memory is not None and memory >= tuned.large_bytes else tuned.usual
    if not model.is_small(profile):
        return tuned.tight if memory is not None and memory <= tuned.tight_bytes else steps
    packed = tuned.small_packed_tokens
    return steps._replace(
        mixed_tokens=tuned.small_mixed_tokens,
        busy_tokens=tuned.small_busy_tokens,
        packed_tokens=packed if model.is_launched_slowly(packed, profile) else None,
    )


def resolve_scheduler(
    config: EngineConfig,
    max_seq_len: int,
    defaults: StepDefaults = CPU.steps.usual,
    profile: SchedulingProfile = GENERIC.scheduling,
) -> ResolvedScheduler:
    """Return the scheduler's limits; without chunking a step must hold the longest prompt whole."""
    settings = config.scheduler
    is_chunked = settings.use_chunked_prefill and config.cache.keeps_cache
    budget = settings.max_num_batched_tokens
    if budget is None:
        needed = max(settings.max_batch_size or 1, 1 if is_chunked else max_seq_len)
        budget = max(defaults.batched_tokens, needed)
    if not is_chunked and budget < max_seq_len:
        can_chunk = config.cache.keeps_cache
        raise ConfigError(
            f"without chunked prefill a step must hold a whole sequence of up to {max_seq_len} tokens, but "
            f"max_num_batched_tokens is {budget}; raise it, lower max_seq_len, or "
            f"{'turn use_chunked_prefill on' if can_chunk else 'use another kv_cache_backend than naive'}"
        )
    mixed = settings.prefill_tokens_while_decoding
    if mixed is None and defaults.mixed_tokens is not None and is_chunked:
        mixed = min(defaults.mixed_tokens, budget)
    asked = settings.max_num_batched_tokens, settings.prefill_tokens_while_decoding, settings.itl_target_ms
    packs = is_chunked and asked == (None, None, None)
    left = {field.name for field in fields(ResolvedScheduler)} & {field.name for field in fields(settings)}
    known = {name: getattr(settings, name) for name in left}
    decided: dict[str, Any] = {
        "profile": profile,
        "max_batch_size": settings.max_batch_size or min(defaults.batch_size, budget),
        "max_num_batched_tokens": budget,
        "prefill_chunk_size": settings.prefill_chunk_size or defaults.chunk_size or budget,
        "prefill_tokens_while_decoding": mixed,
        "hurries": settings.itl_target_ms is None,
        "packed_step_tokens": (packs and defaults.packed_tokens) or budget,
        "busy_step_tokens": defaults.busy_tokens if settings.prefill_tokens_while_decoding is None else 0,
    }
    return ResolvedScheduler(**(known | decided))


def choose_backends(config: EngineConfig, machine: Machine) -> Chosen:
    """Return the backend of each operation on this machine; refuse one that does not work there."""
    refuse(backend_faults(config, machine))
    attention, decode, mlp = config.asked_backends
    mlp = "kernels" if mlp == AUTO else mlp
    if machine.has_gpu_kernels:
        halves = {"cuda": ("triton", "cuda"), "flash": ("flash", "triton")}
        attention, usual = halves.get(attention, (attention, attention))
        return Chosen(attention, usual if decode == AUTO else decode, mlp)
    if attention == AUTO:
        attention = "c" if machine.has_c_attention else "sdpa"
    return Chosen(attention, attention if decode == AUTO else decode, mlp)


def _with_readable_cache(config: EngineConfig, machine: Machine, model: ModelFacts) -> EngineConfig:
    """Return the settings with blocks that hold a layer's state, or with a cache in fp8 instead of auto."""
    cache = config.cache
    is_open = cache.kv_cache_dtype == AUTO and cache.keeps_cache and cache.attention_backend != "flash"
    if model.state_tokens:
        cache = replace(cache, block_size=max(cache.block_size, model.state_tokens))
    elif model.has_kv_scales and machine.has_fp8 and is_open and not model.has_mixed_heads:
        cache = replace(cache, kv_cache_dtype="fp8")
    return replace(config, cache=cache)


def _reasons(
    config: EngineConfig, scheduler: ResolvedScheduler, machine: Machine, model: ModelFacts
) -> dict[str, str]:
    """Return the reason for the value of each knob that was left open."""
    where = "a GPU" if machine.is_gpu else "a CPU"
    reasons = {
        name: f"{getattr(scheduler, name)} is the default on {where}"
        for name in ("max_batch_size", "max_num_batched_tokens", "prefill_chunk_size")
        if getattr(config.scheduler, name) is None
    }
    mixed = scheduler.prefill_tokens_while_decoding
    if config.scheduler.prefill_tokens_while_decoding is None and mixed is not None:
        size = "small" if model.is_small(machine.profile) else "large"
        reasons["prefill_tokens_while_decoding"] = f"{mixed} is the default for a {size} model on {where}"
    return reasons


def _overruled(config: EngineConfig, model: ModelFacts, backends: Chosen) -> dict[str, str]:
    """Return the actual values of knobs that another knob overrides, and why."""
    cache, found = config.cache, dict[str, str]()
    if config.run.record_cpu_step and backends[:2] != ("c", "c"):
        found["record_cpu_step"] = "off, because attention is not computed by C kernels"
    if config.run.use_overlap and not cache.keeps_cache:
        found["use_overlap"] = f"off, because kv_cache_backend is {cache.kv_cache_backend}"
    if cache.use_prefix_caching and not cache.caches_prefixes:
        found["use_prefix_caching"] = f"off, because kv_cache_backend is {cache.kv_cache_backend}"
    if cache.kv_cache_backend == "contiguous" and cache.block_size != type(cache)().block_size:
        found["block_size"] = f"{model.max_seq_len} (max_seq_len), because kv_cache_backend is contiguous"
    if type(cache)().block_size != cache.block_size < model.state_tokens:
        found["block_size"] = f"{model.state_tokens}, because a block must hold the state of a layer"
    return found
