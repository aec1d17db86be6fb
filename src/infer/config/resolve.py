"""Resolves settings: what a knob that is None or `auto` means on this machine, for this model.

    EngineConfig  (what was asked)  ┐
    Machine       (what there is)   ├──► resolve ──► ResolvedConfig  (what will be done, and why)
    ModelFacts    (what is served)  ┘

`resolve` is a pure function: it queries no device and reads no file, so a plan for another machine, or a test
for an absent GPU, gets the engine's decisions. Settings that cannot work on the machine are refused. Only the
size of the KV cache is decided later: it depends on the memory that is free after the weights are loaded
(`engine/cache_fit.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from infer.config.backends import AUTO, PLAIN, REFERENCE, Chosen, available
from infer.config.profiles.cpu import CPU
from infer.config.profiles.generic import GENERIC
from infer.config.profiles.profile import DeviceProfile, SchedulingProfile, StepDefaults
from infer.config.settings import EngineConfig
from infer.config.speculation import MAX_DRAFTS
from infer.config.unused import unused_knobs
from infer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts about an engine's device that settings depend on."""

    device: str = "cpu"  # cpu, cuda or cuda:N
    gpu_memory: int | None = None  # total bytes, free or not
    has_gpu_kernels: bool = False  # kernels that keep the state of the batch on the device
    has_fp8: bool = True  # True if a GPU converts e4m3 numbers, from compute capability 8.9 on
    has_c_attention: bool = False  # the C kernel is built, and reads the model's dtype and head size
    profile: DeviceProfile = CPU  # measurements of the device

    @property
    def is_gpu(self) -> bool:
        """True if the device is a GPU."""
        return self.device.startswith("cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts about a model, loaded or not yet, that settings depend on."""

    max_seq_len: int  # prompt + output, in tokens
    num_layer_weights: int  # active weights per token, in all layers
    num_layers: int = 1
    dtype: str = "float32"  # number format of activations, and of the KV cache unless that is kept in 8 bits
    weights: str = "as stored"  # the form in which weights are kept
    published_as: str = ""  # the quantized format of the checkpoint and its bytes; "": plain numbers
    kept_as: str = ""  # the quantized form in which a device keeps the weights; "": plain numbers
    has_kv_scales: bool = False  # the checkpoint has scales for a KV cache in FP8
    model_impl: str = "infer"  # the code that computes the model
    family: str = ""  # the name of the model's architecture
    has_mixed_heads: bool = False  # the layers have kv heads of several sizes
    state_tokens: int = 0  # tokens of the smallest block that holds a layer's state; 0: no layer has one

    def is_small(self, profile: DeviceProfile) -> bool:
        """Return True if a decode step on a GPU is so short that the overhead around it matters."""
        return self.num_layer_weights <= profile.steps.small_weights

    def is_launched_slowly(self, num_tokens: int, profile: DeviceProfile) -> bool:
        """Return True if launching a layer takes the host longer than the GPU computes this many tokens."""
        return self.num_layer_weights / self.num_layers * num_tokens <= profile.graphs.launched_layer


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
    asked = config
    if model.state_tokens:
        config = _with_states(config, model)
    elif model.has_mixed_heads:
        _check_mixed_heads(config, model.family)
    elif model.has_kv_scales and machine.has_fp8:
        config = _with_fp8_cache(config)
    check_machine(config, machine)
    _check_impl(config, model)
    _check_products(config, machine, model)
    _check_deterministic(config, machine, model)
    _check_cache_dtype(config, machine)
    run, cache, backends = config.run, config.cache, choose_backends(config, machine)
    on_gpu = uses_gpu_device(config, machine)
    steps_ahead = 0
    is_staged = config.load.pipeline_parallel_size > 1
    if cache.keeps_cache and (on_gpu or is_staged) and run.use_overlap is not False:
        steps_ahead = machine.profile.steps.steps_ahead if on_gpu and model.is_small(machine.profile) else 1
    is_ours = model.model_impl == "infer"  # only then can steps be captured or recorded
    captures = is_ours and _captures(config, machine) and run.use_cuda_graphs is not False
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
    holds_prompts_back = settings.batching_mode != "static" and settings.scheduler_policy != "prefill_first"
    if settings.itl_target_ms is not None and not (is_chunked and holds_prompts_back):
        raise ConfigError(
            "itl_target_ms needs prompts that come in chunks and wait for sequences that decode; use "
            "continuous batching, chunked prefill, a cache, and a policy other than prefill_first"
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


def uses_gpu_device(config: EngineConfig, machine: Machine) -> bool:
    """Return True if attention is computed by kernels that read state kept on a GPU."""
    return machine.has_gpu_kernels and config.cache.attention_backend not in PLAIN


def _captures(config: EngineConfig, machine: Machine) -> bool:
    """Return True if steps can be CUDA graphs: references read lengths and chosen experts back."""
    chosen = config.cache.decode_attention_backend, config.run.mlp_backend
    return uses_gpu_device(config, machine) and REFERENCE not in chosen


def check_machine(config: EngineConfig, machine: Machine) -> None:
    """Refuse settings that have no effect on this machine, whatever the model."""
    check_backends(config, machine)
    can_have = {
        "use_cuda_graphs": _captures(config, machine),
        "use_overlap": uses_gpu_device(config, machine) or config.load.pipeline_parallel_size > 1,
    }
    for name, can in can_have.items():
        if getattr(config.run, name) and not can:
            plain = ("attention_backend", "decode_attention_backend", "mlp_backend")
            knobs = config.knobs()
            which = next((f"{k}={knobs[k]}" for k in plain if knobs[k] in PLAIN), "")
            because = f" with {which}, which is plain PyTorch" * machine.is_gpu
            raise ConfigError(
                f"{name} needs the kernels of a GPU, and the model is on {machine.device}{because}; "
                "leave it out"
            )
    if config.run.record_cpu_step and machine.is_gpu:
        raise ConfigError(
            f"record_cpu_step is for a model on a CPU, and this one is on {machine.device}; leave it out"
        )


def check_backends(config: EngineConfig, machine: Machine) -> None:
    """Refuse by name a backend that this kind of device does not have, whatever the model."""
    kind, other = ("gpu", "a CPU") if machine.has_gpu_kernels else ("cpu", "a GPU")
    for operation, value in _asked(config)._asdict().items():
        names = available(operation, kind)
        if value not in (AUTO, *names):
            raise ConfigError(
                f"{operation}_backend={value} needs {other}, and the model is on {machine.device}; "
                f"use {_or([AUTO, *names])}"
            )
    attention, decode, _ = _asked(config)
    if kind == "gpu" and decode not in (AUTO, REFERENCE) and (decode in PLAIN) != (attention in PLAIN):
        others = available("decode_attention", kind)
        with_it = [name for name in others if name == REFERENCE or (name in PLAIN) == (attention in PLAIN)]
        raise ConfigError(
            f"decode_attention_backend={decode} cannot be used with attention_backend={attention} on a GPU; "
            f"use {_or([AUTO, *with_it])}"
        )


def choose_backends(config: EngineConfig, machine: Machine) -> Chosen:
    """Return the backend of each operation on this machine; refuse one that does not work there."""
    check_backends(config, machine)
    attention, decode, mlp = _asked(config)
    mlp = "kernels" if mlp == AUTO else mlp
    if machine.has_gpu_kernels:
        halves = {"cuda": ("triton", "cuda"), "flash": ("flash", "triton")}
        attention, usual = halves.get(attention, (attention, attention))
        return Chosen(attention, usual if decode == AUTO else decode, mlp)
    if "c" in (attention, decode) and not machine.has_c_attention:
        raise ConfigError(
            f"{'attention' if attention == 'c' else 'decode_attention'}_backend=c needs the attention kernel "
            "in C, which is not built here or cannot read this model's dtype or heads (`infer doctor` says "
            f"what is missing); use {_or([AUTO, *PLAIN])}"
        )
    if attention == AUTO:
        attention = "c" if machine.has_c_attention else "sdpa"
    return Chosen(attention, attention if decode == AUTO else decode, mlp)


def _asked(config: EngineConfig) -> Chosen:
    cache = config.cache
    return Chosen(cache.attention_backend, cache.decode_attention_backend, config.run.mlp_backend)


def _or(names: list[str] | tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _check_impl(config: EngineConfig, model: ModelFacts) -> None:
    """Refuse settings that need our own layers if the code of transformers computes the model."""
    if model.model_impl == "infer":
        return
    run, knobs = config.run, config.knobs()
    is_eagle = config.speculation.is_on and config.speculation.method == "eagle3"
    asked = {
        "lora_modules": knobs.get("lora_modules"),
        "enable_lora=on": knobs.get("enable_lora"),
        "use_cuda_graphs=on": run.use_cuda_graphs,
        "record_cpu_step=on": run.record_cpu_step,
        "deterministic=on": run.deterministic,
        f"mlp_backend={run.mlp_backend}": run.mlp_backend != AUTO,
        "speculative_method=eagle3": is_eagle,
    }
    _refuse(asked, f"needs a model that infer implements, and this one runs the code of {model.model_impl}")


def _check_products(config: EngineConfig, machine: Machine, model: ModelFacts) -> None:
    if config.run.cpu_products == "fast" and (machine.is_gpu or not model.weights.startswith("int")):
        raise ConfigError(
            "cpu_products=fast is for weights in int8 or int4 on a CPU, and these are "
            f"{model.weights} on {machine.device}; leave it out"
        )


def _check_deterministic(config: EngineConfig, machine: Machine, model: ModelFacts) -> None:
    if not config.run.deterministic:
        return
    fast = (AUTO, "triton") if machine.is_gpu else (AUTO, "c")
    cache = config.cache
    for name in ("attention_backend", "decode_attention_backend"):
        if (backend := getattr(cache, name)) not in fast:
            raise ConfigError(
                f"deterministic needs {name}={fast[0]} or {fast[1]}, not {backend}; leave one of the two out"
            )
    if config.run.mlp_backend == REFERENCE:
        raise ConfigError(
            f"deterministic has its own reference, not mlp_backend={REFERENCE}; leave one of the two out"
        )
    if not machine.is_gpu and not machine.has_c_attention:
        raise ConfigError(
            "deterministic needs the attention kernel in C, which reads float32; "
            f"this is {model.dtype} on {machine.device} (`infer doctor` says what is missing)"
        )


def _with_fp8_cache(config: EngineConfig) -> EngineConfig:
    """Return the settings with `kv_cache_dtype=fp8` in place of auto if fp8 can be read."""
    cache = config.cache
    if cache.kv_cache_dtype != AUTO or not cache.keeps_cache or cache.attention_backend == "flash":
        return config
    return replace(config, cache=replace(cache, kv_cache_dtype="fp8"))


def _with_states(config: EngineConfig, model: ModelFacts) -> EngineConfig:
    """Return the settings with blocks that hold a layer's state; refuse what does not work with states."""
    cache, draft = config.cache, config.speculation.draft_model
    refused = {
        f"draft_model={draft}": config.speculation.is_on and draft is not None,
        "deterministic": config.run.deterministic,
        f"kv_cache_backend={cache.kv_cache_backend}": cache.kv_cache_backend != "paged",
        f"kv_cache_dtype={cache.kv_cache_dtype}": cache.kv_cache_dtype != AUTO,
    }
    _refuse(refused, f"cannot be used with {model.family}, whose layers keep a state")
    return replace(config, cache=replace(cache, block_size=max(cache.block_size, model.state_tokens)))


def _check_mixed_heads(config: EngineConfig, family: str) -> None:
    """Refuse what does not work with layers of several sizes."""
    cache, draft = config.cache, config.speculation.draft_model
    refused = {
        f"draft_model={draft}": config.speculation.is_on and draft is not None,
        f"kv_cache_backend={cache.kv_cache_backend}": cache.kv_cache_backend != "paged",
        f"kv_cache_dtype={cache.kv_cache_dtype}": cache.kv_cache_dtype not in (AUTO, "none"),
    }
    _refuse(refused, f"cannot be used with {family}, whose layers differ in size")


def _refuse(asked: Mapping[str, object], why: str) -> None:
    """Refuse the first of these that is asked for."""
    for what, is_asked in asked.items():
        if is_asked:
            raise ConfigError(f"{what} {why}; leave it out")


def _check_cache_dtype(config: EngineConfig, machine: Machine) -> None:
    kept_as, attention = config.cache.kv_cache_dtype, config.cache.attention_backend
    if kept_as.startswith("fp8") and machine.is_gpu and not machine.has_fp8:
        raise ConfigError(
            f"kv_cache_dtype={kept_as} needs a GPU of compute capability 8.9 or later, and this one is "
            "older; use kv_cache_dtype=int8"
        )
    if kept_as not in (AUTO, "none") and attention == "flash":
        raise ConfigError(
            f"attention_backend=flash reads no 8-bit cache, and kv_cache_dtype is {kept_as}; "
            "use attention_backend=auto or triton"
        )


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
