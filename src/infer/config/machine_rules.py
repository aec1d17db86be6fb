"""The facts about a machine and a model, and the rules about settings that cannot work with them.

`engine/machine.py` finds the facts; `resolve.py` checks the rules, written like those in `settings.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infer.config.backends import AUTO, PLAIN, REFERENCE, available
from infer.config.profiles.cpu import CPU
from infer.config.profiles.profile import DeviceProfile
from infer.config.settings import EngineConfig


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

    def runs_kernels(self, config: EngineConfig) -> bool:
        """Return True if attention is computed by kernels that read state kept on a GPU."""
        return self.has_gpu_kernels and config.cache.attention_backend not in PLAIN

    def can_capture(self, config: EngineConfig) -> bool:
        """Return True if steps can be CUDA graphs: references read lengths and chosen experts back."""
        chosen = config.cache.decode_attention_backend, config.run.mlp_backend
        return self.runs_kernels(config) and REFERENCE not in chosen


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


def machine_faults(config: EngineConfig, machine: Machine, model: ModelFacts) -> Iterator[str]:
    """Yield the error of every rule that settings break for a model on a machine."""
    yield from _layout_faults(config, model)
    yield from device_faults(config, machine)
    yield from _impl_faults(config, model)
    yield from _numeric_faults(config, machine, model)


def _layout_faults(config: EngineConfig, model: ModelFacts) -> Iterator[str]:
    if not (model.state_tokens or model.has_mixed_heads):
        return
    cache, draft, keeps_state = config.cache, config.speculation.draft_model, model.state_tokens > 0
    readable = (AUTO,) if keeps_state else (AUTO, "none")
    refused = {
        f"draft_model={draft}": config.speculation.is_on and draft is not None,
        "deterministic": config.run.deterministic and keeps_state,
        f"kv_cache_backend={cache.kv_cache_backend}": cache.kv_cache_backend != "paged",
        f"kv_cache_dtype={cache.kv_cache_dtype}": cache.kv_cache_dtype not in readable,
    }
    why = "whose layers keep a state" if keeps_state else "whose layers differ in size"
    for what in (what for what, is_asked in refused.items() if is_asked):
        yield f"{what} cannot be used with {model.family}, {why}; leave it out"


def device_faults(config: EngineConfig, machine: Machine) -> Iterator[str]:
    """Yield the error about each setting that has no effect on this machine, whatever the model."""
    yield from backend_faults(config, machine)
    run = config.run
    runs_ahead = machine.runs_kernels(config) or config.load.pipeline_parallel_size > 1
    refused = {
        "use_cuda_graphs": run.use_cuda_graphs and not machine.can_capture(config),
        "use_overlap": run.use_overlap and not runs_ahead,
    }
    for name in (name for name, is_refused in refused.items() if is_refused):
        asked = config.asked_backends._asdict().items()
        plain = next((f"{each}_backend={value}" for each, value in asked if value in PLAIN), "")
        why = f" with {plain}, which is plain PyTorch" * machine.is_gpu
        yield f"{name} needs the kernels of a GPU, and the model is on {machine.device}{why}; leave it out"
    if run.record_cpu_step and machine.is_gpu:
        yield f"record_cpu_step is for a model on a CPU, and this one is on {machine.device}; leave it out"


def backend_faults(config: EngineConfig, machine: Machine) -> Iterator[str]:
    """Yield the error about each backend that does not work on this machine, whatever the model."""
    kind, other = ("gpu", "a CPU") if machine.has_gpu_kernels else ("cpu", "a GPU")
    for operation, value in config.asked_backends._asdict().items():
        if value not in (names := [AUTO, *available(operation, kind)]):
            yield (
                f"{operation}_backend={value} needs {other}, and the model is on {machine.device}; "
                f"use {_or(names)}"
            )
    attention, decode, _ = config.asked_backends
    if kind == "gpu" and decode not in (AUTO, REFERENCE) and (decode in PLAIN) != (attention in PLAIN):
        others = available("decode_attention", kind)
        with_it = [name for name in others if name == REFERENCE or (name in PLAIN) == (attention in PLAIN)]
        yield (
            f"decode_attention_backend={decode} cannot be used with attention_backend={attention} on a GPU; "
            f"use {_or([AUTO, *with_it])}"
        )
    if "c" in (attention, decode) and not machine.has_c_attention:
        yield (
            f"{'attention' if attention == 'c' else 'decode_attention'}_backend=c needs the attention kernel "
            "in C, which is not built here or cannot read this model's dtype or heads (`infer doctor` says "
            f"what is missing); use {_or([AUTO, *PLAIN])}"
        )


def _impl_faults(config: EngineConfig, model: ModelFacts) -> Iterator[str]:
    if model.model_impl == "infer":
        return
    run, drafts, adapters = config.run, config.speculation, config.adapters
    refused = {
        "lora_modules": adapters.lora_modules,
        "enable_lora=on": adapters.enable_lora,
        "use_cuda_graphs=on": run.use_cuda_graphs,
        "record_cpu_step=on": run.record_cpu_step,
        "deterministic=on": run.deterministic,
        f"mlp_backend={run.mlp_backend}": run.mlp_backend != AUTO,
        "speculative_method=eagle3": drafts.is_on and drafts.method == "eagle3",
    }
    why = f"needs a model that infer implements, and this one runs the code of {model.model_impl}"
    for what in (what for what, is_asked in refused.items() if is_asked):
        yield f"{what} {why}; leave it out"


def _numeric_faults(config: EngineConfig, machine: Machine, model: ModelFacts) -> Iterator[str]:
    run, cache = config.run, config.cache
    if run.cpu_products == "fast" and (machine.is_gpu or not model.weights.startswith("int")):
        yield (
            "cpu_products=fast is for weights in int8 or int4 on a CPU, and these are "
            f"{model.weights} on {machine.device}; leave it out"
        )
    if run.deterministic:
        fast = (AUTO, "triton") if machine.is_gpu else (AUTO, "c")
        for name in ("attention_backend", "decode_attention_backend"):
            if (backend := getattr(cache, name)) not in fast:
                yield f"deterministic needs {name}={_or(fast)}, not {backend}; leave one of the two out"
        if run.mlp_backend == REFERENCE:
            own = f"deterministic has its own reference, not mlp_backend={REFERENCE}"
            yield f"{own}; leave one of the two out"
        if not machine.is_gpu and not machine.has_c_attention:
            yield (
                "deterministic needs the attention kernel in C, which reads float32; "
                f"this is {model.dtype} on {machine.device} (`infer doctor` says what is missing)"
            )
    kept_as = cache.kv_cache_dtype
    if kept_as.startswith("fp8") and machine.is_gpu and not machine.has_fp8:
        yield (
            f"kv_cache_dtype={kept_as} needs a GPU of compute capability 8.9 or later, and this one is "
            "older; use kv_cache_dtype=int8"
        )
    if kept_as not in (AUTO, "none") and cache.attention_backend == "flash":
        yield (
            f"attention_backend=flash reads no 8-bit cache, and kv_cache_dtype is {kept_as}; "
            "use attention_backend=auto or triton"
        )


def _or(names: list[str] | tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
