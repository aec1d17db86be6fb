"""The memory that a model needs on a machine besides its cache, from its config and headers alone.

Parameters and their bytes are counted on the skeleton of a weight plan, a model without memory, so they equal
what would be loaded, including fused matrices and tied heads (loader/weight_plan.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from infer.cache.host_bytes import free_host_bytes
from infer.cache.memory import GPU_RUNTIME_BYTES, DeviceMemory, StepBytes
from infer.config.defaults import GPU_SHARE
from infer.config.knobs import format_bytes, parse_bytes
from infer.config.resolve import ResolvedConfig, resolve
from infer.config.settings import EngineConfig
from infer.engine.adapters import needed_room, network_of
from infer.engine.cache_fit import NO_DRAFT, DraftBytes, compute_step, kv_layout, ranks_sharing, scratch_of
from infer.engine.device_memory import device_limit, look
from infer.engine.machine import facts_of, machine_of
from infer.engine.speculation_build import HeadHeaders, draft_bytes, read_draft
from infer.kernels.runtime.dispatch import is_gpu
from infer.layers.adapted import bank_bytes
from infer.loader.dtype import DTYPES
from infer.loader.eagle import head_bytes
from infer.loader.find.source import read_hub_id, resolve_model
from infer.loader.headers import ModelHeaders, headers_of_config, read_headers
from infer.loader.load import LoadChoice, check_length, choose_device
from infer.loader.quantization import PACKED
from infer.loader.slices import Rank
from infer.loader.weight_plan import WeightPlan, kept_bytes, plan_weights
from infer.quant.gpu_schemes import LOADING_BYTES


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """The parts of a rank's memory besides its cache; all sizes in bytes."""

    resolved: ResolvedConfig
    choice: LoadChoice
    machine: MachineMemory
    weights: int
    draft: DraftMemory
    adapters: int  # room for LoRA adapters
    step: StepBytes

    @property
    def num_ranks(self) -> int:
        """The number of ranks that share the device in equal parts."""
        return ranks_sharing(self.resolved.settings, self.machine.device)

    @property
    def memory(self) -> int:
        """The device memory for this rank."""
        return self.machine.memory // self.num_ranks

    @property
    def graphs(self) -> int:
        """The bytes of captured graphs and of the GPU's step buffers."""
        return self.step.total - self.step.activations

    @property
    def loading(self) -> int:
        """The temporary GPU memory for rounding weights to codes while loading."""
        return LOADING_BYTES if self.choice.plan.has_codes and self.machine.kind == "gpu" else 0

    def describe(self) -> str:
        """Return the largest parts, for a message."""
        also = f", {format_bytes(self.draft.total)} of the draft model" if self.draft.weights else ""
        also += f", {format_bytes(self.adapters)} of LoRA adapters" if self.adapters else ""
        activations = format_bytes(self.step.activations)
        return f"{format_bytes(self.weights)} of weights{also} and {activations} of activations"


def find_needs(
    resolved: ResolvedConfig, choice: LoadChoice, machine: MachineMemory, draft: DraftMemory
) -> MemoryNeeds:
    """Return the needs of a model that would be loaded in this way, together with its draft model."""
    return MemoryNeeds(
        resolved=resolved, choice=choice, machine=machine, weights=weight_bytes(choice.plan), draft=draft,
        adapters=plan_adapters(resolved.settings, choice),
        step=compute_step(resolved, choice, scratch_of(choice.plan.skeleton, resolved.scheduler)),
    )  # fmt: skip


def weight_bytes(plan: WeightPlan) -> int:
    """Return the bytes of the weights in memory, and of the tables that the model computes itself."""
    tables = sum(table.numel() * table.element_size() for table in plan.skeleton.buffers())
    return kept_bytes(plan.skeleton) + tables


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
