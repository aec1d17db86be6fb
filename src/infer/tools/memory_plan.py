"""Will it fit? The memory of a model on a machine, from its config and headers alone.

    memory = weights (+ a draft model's, + LoRA adapters') + activations of the largest step + graphs
             + KV cache (+ workspace) + runtime

Weights, activations and bytes per token are computed (cache/memory.py); the rest of `device_memory` is the
cache, and the cache divided by a context is the number of sequences of that length that run at once. The
result includes flags: an engine that is started with them has exactly the planned cache.

Parameters and their bytes are counted on the skeleton of a weight plan, a model without memory, so they equal
what would be loaded, including fused matrices and tied heads (loader/weight_plan.py). If there are headers,
every tensor in them is first matched with its place, as loading does.

Every start first makes a quicker check (`check_settings`): can this model be served with these knobs at all?
If not, it is refused before minutes are spent on reading weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from infer.cache.host_bytes import free_host_bytes
from infer.cache.layout import STATE, KVLayout, blocks_of_sequence, longest_sequence
from infer.cache.memory import (
    GPU_RUNTIME_BYTES,
    CacheSize,
    DeviceMemory,
    StepBytes,
    check_host_blocks,
    kv_bytes_per_token,
)
from infer.config.defaults import GPU_SHARE
from infer.config.knobs import format_bytes, parse_bytes
from infer.config.resolve import ResolvedConfig, resolve
from infer.config.settings import EngineConfig
from infer.engine.adapters import needed_room, network_of
from infer.engine.cache_fit import (
    NO_DRAFT,
    DraftBytes,
    compute_step,
    fit_to_device,
    fit_to_memory,
    for_each,
    kept_as,
    kept_cache,
    kv_layout,
    ranks_sharing,
    scratch_of,
)
from infer.engine.device_build import resolve_for
from infer.engine.device_memory import device_limit, look
from infer.engine.machine import facts_of, machine_of
from infer.engine.speculation_build import HeadHeaders, draft_bytes, read_draft
from infer.errors import ConfigError, NoRoom
from infer.kernels.runtime.dispatch import is_gpu
from infer.layers.adapted import bank_bytes
from infer.layers.stages import stage_layers
from infer.loader.dtype import DTYPES
from infer.loader.eagle import head_bytes
from infer.loader.find.source import read_hub_id, resolve_model
from infer.loader.headers import ModelHeaders, headers_of_config, read_headers
from infer.loader.load import LoadChoice, check_length, choose_device
from infer.loader.placement import plan_moves
from infer.loader.quantization import AS_STORED, PACKED
from infer.loader.slices import Rank
from infer.loader.weight_plan import WeightPlan, kept_bytes, num_weights, plan_weights
from infer.quant.gpu_schemes import LOADING_BYTES

SEE_PLAN = "'infer plan' shows what fits"
SMALL_STEP, SMALL_BATCH = 256, 8  # tokens and sequences of a step, tried if a larger one does not fit
CONTEXTS = tuple(2**power for power in range(9, 21))
CONCURRENCIES = (1, 4, 16, 64, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """The device that an engine would run on, in this machine or another, and its memory."""

    device: torch.device
    unloaded: DeviceMemory  # memory before the weights are loaded
    runtime: int = 0  # bytes for the runtime of a GPU that is not in use yet

    @property
    def kind(self) -> str:
        """The kind of the device: "gpu" or "cpu"."""
        return "gpu" if is_gpu(self.device) else "cpu"

    @property
    def memory(self) -> int:
        """The bytes available to this engine: the free ones, or the room that `device_memory` leaves."""
        return self.runtime + (
            self.unloaded.free if self.unloaded.limit is None else max(self.unloaded.room, 0)
        )

    @property
    def others(self) -> int:
        """The bytes of a GPU that other processes use."""
        return self.unloaded.others if is_gpu(self.device) else 0

    def resolve(self, config: EngineConfig, choice: LoadChoice) -> ResolvedConfig:
        """Return the decisions of an engine on this device, regardless of other processes' memory."""
        total = (self.unloaded.limit or self.unloaded.total) if is_gpu(self.device) else None
        machine = replace(machine_of(choice), gpu_memory=total)
        return resolve(config, machine, facts_of(choice))


class DraftMemory(NamedTuple):
    """The additional memory of a draft model or head, in bytes."""

    name: str = ""  # empty: drafting needs no weights, or is off
    weights: int = 0
    beside: DraftBytes = NO_DRAFT

    @property
    def total(self) -> int:
        """The sum without keys and values, which are part of the cache."""
        return self.weights + self.beside.step


class StageBytes(NamedTuple):
    """One pipeline stage, and the weights of one of its ranks."""

    layers: range
    weights: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The use of the memory; all sizes in bytes."""

    choice: LoadChoice
    resolved: ResolvedConfig
    machine: MachineMemory
    num_parameters: int
    stored_bytes: int  # bytes of the weights on disk; 0: not known
    weights: int
    stages: tuple[StageBytes, ...]  # pipeline stages; this plan is for a rank of the last one
    draft: DraftMemory
    adapters: int  # room for LoRA adapters
    step: StepBytes
    graphs: int  # bytes of captured graphs and of the GPU's step buffers
    workspace: int
    host_cache: int  # room for preempted sequences and evicted prefixes
    cache: CacheSize
    layout: KVLayout  # groups of layers that share the cache's blocks

    @property
    def memory(self) -> int:
        """The device memory for this rank; ranks that share a device get equal parts of it."""
        return self.machine.memory // ranks_sharing(self.resolved.settings, self.machine.device)

    @property
    def total(self) -> int:
        """The sum of all parts on the device."""
        beside = self.draft.total + self.adapters + self.step.total + self.workspace + self.machine.runtime
        return self.weights + beside + self.cache.num_bytes

    @property
    def longest_sequence(self) -> int:
        """The longest sequence that fits into this cache; its last token is never cached."""
        max_chunk = self.resolved.scheduler.max_chunk
        size, num_blocks = self.cache.block_size, self.cache.num_blocks
        longest = longest_sequence(self.layout.windows, num_blocks, size, max_chunk)
        return min(self.choice.max_seq_len, longest + 1)

    def kv_bytes(self, context: int) -> int:
        """Return the bytes of keys, values and states of one sequence of this length while it decodes."""
        num_blocks = blocks_of_sequence(self.layout.windows, context, self.cache.block_size, 1)
        if STATE in self.layout.windows:  # a state takes a whole block from the first token on
            return num_blocks * self.cache.bytes_per_block
        return min(num_blocks * self.cache.bytes_per_block, context * self.cache.bytes_per_token)

    def at_once(self, context: int) -> int:
        """Return the number of sequences of this length that can run together."""
        size, scheduler = self.cache.block_size, self.resolved.scheduler
        in_prompt = blocks_of_sequence(self.layout.windows, context, size, scheduler.max_chunk)
        decoding = blocks_of_sequence(self.layout.windows, context, size, 1)
        others = (self.cache.num_blocks - in_prompt) // decoding
        return min(max(others + 1, 0), scheduler.max_batch_size)

    def contexts(self) -> list[int]:
        """Return the lengths to show in a table."""
        shorter = [context for context in CONTEXTS if context < self.choice.max_seq_len]
        return [*shorter[-7:], self.choice.max_seq_len]

    def knobs(self) -> dict[str, object]:
        """Return the knobs that give exactly this cache, without knobs at their default value."""
        config, default = self.resolved.settings, EngineConfig().knobs()
        chosen: dict[str, object] = {
            name: value
            for name, value in config.knobs().items()
            if name not in ("model", "max_seq_len", "kv_cache_memory", "num_blocks")
            and value != default[name]
        }
        if self.longest_sequence < self.choice.config.context_len:
            chosen["max_seq_len"] = self.longest_sequence
        # counted in blocks of block_size tokens for any layout
        chosen["num_blocks"] = -(-self.cache.num_tokens // config.cache.block_size)
        return chosen


def check_settings(config: EngineConfig, choice: LoadChoice) -> None:
    """Refuse knobs that no engine can be built with, by the engine's rules, before any weight is read."""
    resolved = resolve_for(config, choice)
    model, machine = choice.plan.skeleton, machine_on(choice.device, config.cache.device_memory)
    scratch = scratch_of(model, resolved.scheduler)
    draft = plan_draft(resolved, choice, machine)
    try:
        fit_to_device(
            resolved,
            choice,
            weight_bytes=(kept_bytes(model) + plan_adapters(config, choice))
            * ranks_sharing(config, choice.device)
            + draft.weights,
            scratch=scratch,
            draft=draft.beside,
        )
    except NoRoom as error:
        advice = _what_fits(config, choice, machine, draft)
        raise ConfigError(f"{str(error).removesuffix('; ' + SEE_PLAN)}; {advice}") from None


def plan_adapters(config: EngineConfig, choice: LoadChoice) -> int:
    """Return the bytes reserved for LoRA adapters; adapters that cannot be served are refused."""
    if not config.adapters.is_on:
        return 0
    network = network_of(choice)
    return bank_bytes(choice.plan.skeleton, needed_room(config.adapters, network), choice.dtype, network)


def plan_draft(
    resolved: ResolvedConfig,
    choice: LoadChoice,
    machine: MachineMemory,
    find: Callable[[str], ModelHeaders] | None = None,
) -> DraftMemory:
    """Return the memory of the draft model or head; `find` as in `read_draft`."""
    config = resolved.settings
    headers = read_draft(config.speculation, choice.config, choice.headers.source.name, find)
    if headers is None:
        return DraftMemory()
    layout = kv_layout(choice.config, resolved)
    if isinstance(headers, HeadHeaders):
        width = headers.eagle.states_width
        beside = draft_bytes(resolved, headers.config, choice.dtype, layout, width)
        weights = head_bytes(headers.eagle, choice.dtype, packs=choice.weights in PACKED)
        return DraftMemory(headers.source.name, weights, beside)
    load = replace(config.load, quantization="auto", max_seq_len=None, tensor_parallel_size=1,
                   pipeline_parallel_size=1, nnodes=1)  # fmt: skip
    draft = choose_load(replace(config, load=load), headers, machine)
    beside = draft_bytes(resolved, draft.config, draft.dtype, layout)
    return DraftMemory(headers.source.name, weight_bytes(draft.plan), beside)


def plan_memory(
    config: EngineConfig,
    headers: ModelHeaders,
    machine: MachineMemory,
    *,
    choice: LoadChoice | None = None,
    advises: bool = True,
) -> MemoryPlan:
    """Divide the memory of a machine; errors say what would fit if `advises`. `choice`: if already made."""
    choice = choice or choose_load(config, headers, machine)
    max_seq_len, weights = choice.max_seq_len, weight_bytes(choice.plan)
    if headers.tensors:
        plan_moves(choice.plan.skeleton, headers, choice.plan.slices)
    resolved = machine.resolve(config, choice)
    config = resolved.settings
    step = steps_of(resolved, choice)
    activations = step.activations
    layout, bytes_per_token, share = kept_cache(resolved, choice)
    draft = plan_draft(resolved, choice, machine, partial(find_headers, revision=None, show_progress=True))
    num_ranks, adapters = ranks_sharing(config, machine.device), plan_adapters(config, choice)
    stages = stage_bytes(config, choice, machine)
    all_weights = sum(stage.weights for stage in stages) * config.load.tensor_parallel_size
    most = max(stage.weights for stage in stages)  # weights of the largest rank, on its own GPU
    taken = all_weights + adapters * num_ranks if num_ranks > 1 else most + adapters
    beside = machine.unloaded.with_weights(taken + draft.weights)
    left = beside.room // num_ranks
    drafting = f", {format_bytes(draft.total)} of the draft model" if draft.weights else ""
    drafting += f", {format_bytes(adapters)} of LoRA adapters" if adapters else ""
    parts = f"{format_bytes(weights)} of weights{drafting} and {format_bytes(activations)} of activations"
    needed = max(step.total + draft.beside.step, _loading_bytes(choice, machine))
    each = bytes_per_token + draft.beside.per_token
    if (left - needed) / (1 + share) < config.cache.block_size * each:
        needs = f"{in_form(choice.weights)} needs {parts}"
        raise NoRoom(_too_small(config, choice, machine, needs, step, draft) if advises else needs)
    cache = fit_to_memory(resolved, choice, beside, step, draft.beside)
    if machine.kind == "cpu":
        free = left - activations - cache.num_bytes
        check_host_blocks(config.cache, cache, free, each=for_each(num_ranks))
    plan = MemoryPlan(
        choice=choice,
        resolved=resolved,
        machine=machine,
        num_parameters=num_weights(choice.plan.skeleton),
        stored_bytes=sum(tensor.num_bytes for tensor in headers.tensors.values()),
        weights=weights,
        stages=stages,
        draft=draft,
        adapters=adapters,
        step=step,
        graphs=step.total - activations,
        workspace=int(cache.num_bytes * share),
        host_cache=cache.num_host_blocks * cache.bytes_per_block,
        cache=cache,
        layout=layout,
    )
    if config.load.max_seq_len is not None and plan.longest_sequence < max_seq_len:
        ways = [f"max_seq_len={plan.longest_sequence}"]
        is_sized = config.cache.kv_cache_memory or config.cache.num_blocks or config.cache.kv_cache_share
        asked = (plan.kv_bytes(max_seq_len) >> 20) + 1  # MiB
        if not is_sized and (asked << 20) * (1 + share) <= left - needed:
            ways.append(f"kv_cache_memory={asked}MiB")
        raise ConfigError(
            f"one sequence of max_seq_len {max_seq_len} needs {format_bytes(plan.kv_bytes(max_seq_len))} "
            f"of KV cache, but next to {parts} the cache gets {format_bytes(cache.num_bytes)} of "
            f"{format_bytes(plan.memory)}{for_each(num_ranks)}; what would fit: {', or '.join(ways)}"
        )
    return plan


def stage_bytes(config: EngineConfig, choice: LoadChoice, machine: MachineMemory) -> tuple[StageBytes, ...]:
    """Return the stages and the weights of a rank of each; `choice` is for the last stage."""
    stages = stage_layers(choice.config.num_layers, config.load.pipeline_parallel_size)
    plans = [plan_stage(config, choice.headers, machine, stage) for stage in range(len(stages) - 1)]
    found = [weight_bytes(plan) for plan in (*plans, choice.plan)]
    return tuple(map(StageBytes, stages, found))


def steps_of(resolved: ResolvedConfig, choice: LoadChoice) -> StepBytes:
    """Return the bytes that steps take."""
    return compute_step(resolved, choice, scratch_of(choice.plan.skeleton, resolved.scheduler))


def weight_bytes(plan: WeightPlan) -> int:
    """Return the bytes of the weights in memory, and of the tables that the model computes itself."""
    tables = sum(table.numel() * table.element_size() for table in plan.skeleton.buffers())
    return kept_bytes(plan.skeleton) + tables


def _loading_bytes(choice: LoadChoice, machine: MachineMemory) -> int:
    """Return the temporary GPU memory for rounding weights to codes while loading, in bytes."""
    return LOADING_BYTES if choice.plan.has_codes and machine.kind == "gpu" else 0


def _too_small(
    config: EngineConfig,
    choice: LoadChoice,
    machine: MachineMemory,
    parts: str,
    step: StepBytes,
    draft: DraftMemory,
) -> str:
    """Describe the parts that do not fit and the first change that makes them fit, or what is missing."""
    graphs, runtime = step.total - step.activations, machine.runtime
    num_ranks = ranks_sharing(config, machine.device)
    return (
        f"{choice.headers.source.name} {parts}"
        + (f", {format_bytes(graphs)} of graphs and buffers" if graphs else "")
        + (f", and {format_bytes(runtime)} of the GPU's runtime" if runtime else "")
        + f", but there are {format_bytes(machine.memory // num_ranks)}{for_each(num_ranks)}"
        + (f" next to {format_bytes(machine.others)} of other processes" if machine.others else "")
        + f"; {_what_fits(config, choice, machine, draft)}"
    )


def in_form(weight_format: str) -> str:
    """Return the form of weights as words that follow a name."""
    return weight_format if weight_format == AS_STORED else f"in {weight_format}"


def _what_fits(config: EngineConfig, choice: LoadChoice, machine: MachineMemory, draft: DraftMemory) -> str:
    """Describe the first change of knobs that makes the model fit, all forms that do, or what is missing."""
    headers, model, device = choice.headers, choice.config, machine.unloaded
    advice, forms = "give more memory", dict[str, list[str]]()
    for settings, changed in _smaller(config, choice, on_gpu=machine.kind == "gpu"):
        form = settings.load.quantization
        is_rounded = form != config.load.quantization
        if any(form in names for names in forms.values()) or (is_rounded and headers.family.load is not None):
            continue
        choice = choose_load(settings, headers, machine)
        step = steps_of(machine.resolve(settings, choice), choice)
        kept = kept_as(config.cache, choice.dtype).itemsize
        token = kv_bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, kept)
        token += draft.beside.per_token
        beside = max(step.total, _loading_bytes(choice, machine)) + 2 * config.cache.block_size * token
        share = device.share if device.limit is None else 1.0
        adapters = plan_adapters(config, choice)
        needed = weight_bytes(choice.plan) + draft.total + adapters + int(beside / share) + machine.runtime
        if needed <= machine.memory and not is_rounded:
            return f"what would fit: {changed}"
        if needed <= machine.memory:
            forms.setdefault(changed.removeprefix(f"quantization={form}"), []).append(form)
            continue
        missing = format_bytes(needed - machine.memory + max(-device.room, 0))
        held = "" if device.limit is None else f" next to {format_bytes(device.held)} of this process"
        advice = f"with {changed} it needs {format_bytes(needed)}{held}, {missing} more than there is"
    if forms:
        ways = [f"quantization={' or '.join(names)}{also}" for also, names in sorted(forms.items())]
        return f"what would fit: {'; or '.join(ways)}"
    return advice


def _smaller(config: EngineConfig, choice: LoadChoice, *, on_gpu: bool) -> list[tuple[EngineConfig, str]]:
    """Return forms of weights and steps that need less memory, largest first, with their knobs in words."""
    scheduler, dtype, kept = config.scheduler, choice.dtype, choice.plan.rule.label
    width = min(SMALL_BATCH, scheduler.max_batch_size or SMALL_BATCH)
    small = replace(
        config, scheduler=replace(scheduler, max_num_batched_tokens=SMALL_STEP, max_batch_size=width)
    )
    words = f"max_num_batched_tokens={SMALL_STEP}, max_batch_size={width}"
    # without chunked prefill a step must have room for a whole prompt, so it cannot shrink
    can_shrink = scheduler.use_chunked_prefill and config.cache.keeps_cache
    sizes, found = [(config, "")], list[tuple[EngineConfig, str]]()
    if can_shrink:
        sizes.append((small, f", {words}"))
        found.append((small, words))
    if dtype.itemsize > 2 and on_gpu:
        for settings, also in sizes:
            halved = replace(settings, load=replace(settings.load, dtype="bfloat16"))
            found.append((halved, f"dtype=bfloat16{also}"))
    form, forms = config.load.quantization, tuple[str, ...]()
    if on_gpu:
        forms = ("fp8", "int8", "int4") if form in ("auto", "none") else ()
    else:  # int8 and int4 need fewer bytes than bfloat16, and compute in float32
        forms = ("int8", "int4") if form in ("auto", "none", "fp32") and dtype is torch.float32 else ()
    for name in forms[forms.index(kept) + 1 :] if kept in forms else forms:
        for settings, also in sizes:
            rounded = replace(settings, load=replace(settings.load, quantization=name))
            found.append((rounded, f"quantization={name}{also}"))
    return found


# -- the model and the machine ------------------------------------------------------------------------


def find_headers(
    model: str | None, *, revision: str | None, show_progress: bool, model_impl: str = "auto"
) -> ModelHeaders:
    """Return the headers of a model, or of a config.json alone, to plan before downloading.

    From a hub repository only the config is fetched, which is enough for a plan.
    """
    path = None if model is None else Path(model).expanduser()
    if path is not None and path.is_file() and path.suffix == ".json":
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return headers_of_config(path, name, model_impl)
    if path is not None and (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        return headers_of_config(path / "config.json", path.resolve().name, model_impl)
    if model is not None and path is not None and read_hub_id(model) == (model, None) and not path.exists():
        from infer.loader.find import hub

        file = hub.fetch_file(model, "config.json", revision=revision, show_progress=show_progress)
        return headers_of_config(file, model, model_impl)
    return read_headers(resolve_model(model, revision=revision, show_progress=show_progress), model_impl)


def find_machine(device: str, gpu_memory: str | None, device_memory: str | None = None) -> MachineMemory:
    """Return a GPU with the given memory, or the device that would be used here, with its free memory.

    In both cases an engine gets as much as `device_memory` allows.
    """
    if gpu_memory is None:
        return machine_on(choose_device(device), device_memory)
    total = parse_bytes(gpu_memory, "gpu_memory")
    limit = None if device_memory is None else device_limit(device_memory, total)
    found = DeviceMemory(total=total, free=total, held=0, limit=limit, share=GPU_SHARE)
    taken = found.with_weights(GPU_RUNTIME_BYTES)
    return MachineMemory(device=torch.device("cuda"), unloaded=taken, runtime=GPU_RUNTIME_BYTES)


def machine_on(device: torch.device, device_memory: str | None) -> MachineMemory:
    """Return the memory that an engine would find on a device of this machine now."""
    return MachineMemory(device=device, unloaded=look(device, device_memory, free_host=free_host_bytes()))


def plan_stage(config: EngineConfig, headers: ModelHeaders, machine: MachineMemory, stage: int) -> WeightPlan:
    """Plan the weights of a rank of a stage; an absent GPU is assumed to support bfloat16."""
    load, dtype = config.load, config.load.dtype
    if dtype == "auto" and machine.kind == "gpu":
        dtype = next((name for name, each in DTYPES.items() if each is headers.stored), "bfloat16")
    rank = Rank(0, load.tensor_parallel_size, stage, load.pipeline_parallel_size)
    return plan_weights(
        headers, quantization=load.quantization, dtype=dtype, device=machine.device, rank=rank
    )


def choose_load(config: EngineConfig, headers: ModelHeaders, machine: MachineMemory) -> LoadChoice:
    """Return how the model would be loaded there; with several stages, for the last one."""
    load = config.load
    plan = plan_stage(config, headers, machine, load.pipeline_parallel_size - 1)
    plan.check_cuts()
    form = plan.rule.label if plan.has_codes else str(plan.rule.dtype).removeprefix("torch.")
    return LoadChoice(plan=plan, weights=form, max_seq_len=check_length(load.max_seq_len, headers.config))
