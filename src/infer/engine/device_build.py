"""The parts that every rank of a model builds: projections, KV store, device half.

    bind        chooses the model's projections and adds its adapters
    rehearse    measures the memory of steps on a GPU
    make_store  allocates keys and values, with the number of blocks that rank 0 has found (cache_fit.py)
    make_warm   builds the device half, and on a GPU its warm-up

Rank 0 does this while it builds the engine (build.py), the others when rank 0 tells them (rank_worker.py).
`resolve_for` needs no weights, so `memory_plan.check_settings` calls it before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch

from infer.cache.kv_store import KVStore
from infer.cache.memory import GRAPH_WORKSPACE, CacheSize, StepBytes
from infer.config.knobs import format_bytes
from infer.config.resolve import ResolvedConfig, resolve
from infer.config.settings import EngineConfig
from infer.config.speculation import WINDOW_TOKENS
from infer.engine.adapters import needed_room, network_of
from infer.engine.cache_fit import compute_step, for_each, graph_tokens, kept_as, kv_layout, state_size
from infer.engine.device_memory import Arena, enforce_limit
from infer.engine.machine import facts_of, machine_of
from infer.engine.preemption_cost import prefill_seconds
from infer.engine.rehearsal import rehearse
from infer.errors import ConfigError
from infer.execution.device import StateShape
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.launcher import StepLauncher
from infer.execution.gpu.warm_up import WarmUp
from infer.execution.torch_device import TorchDevice, TorchHead
from infer.kernels.cpu.collectives import SharedCommunicator
from infer.kernels.runtime.communicator import Communicator, Pipe
from infer.kernels.runtime.device_ranks import DeviceRanks
from infer.kernels.runtime.dispatch import is_gpu
from infer.kernels.runtime.gpu_communicator import GpuCommunicator
from infer.kernels.runtime.node_communicator import NodeCommunicator
from infer.layers.adapted import AdapterBank
from infer.layers.bind import bind
from infer.loader.load import LoadChoice, LoadedModel
from infer.scheduling.batch_state import BatchState


def resolve_for(settings: EngineConfig, loaded: LoadedModel | LoadChoice) -> ResolvedConfig:
    """Return the decisions for this model on its device; settings that do not work there are refused."""
    return resolve(settings, machine_of(loaded, settings.cache.device_memory), facts_of(loaded))


def make_bank(settings: EngineConfig, loaded: LoadedModel) -> AdapterBank | None:
    """Return the memory for the LoRA adapters of a model; None: LoRA is off."""
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


def join_ranks(settings: EngineConfig, communicator: Communicator, loaded: LoadedModel) -> Communicator:
    """Return the communicator of this model's ranks on their devices; all ranks call this together."""
    if is_gpu(loaded.device) and isinstance(communicator, SharedCommunicator):
        kind = NodeCommunicator if settings.load.nnodes > 1 else GpuCommunicator
        return kind(communicator, loaded.device, loaded.dtype)
    return communicator


def probe_rank(loaded: LoadedModel, warm_up: WarmUp | None, num_tokens: int) -> float:
    """Return the seconds of a `num_tokens` prompt on this rank: as a step, or eagerly without `warm_up`."""
    if warm_up is None:
        return prefill_seconds(loaded.model, loaded.device, num_tokens)
    return warm_up.step_seconds(num_tokens)


def shape_of(state: BatchState) -> StateShape:
    """Return the shape of the state that a device keeps for a batch."""
    num_tables, num_rows, max_blocks = state.tables.shape
    return StateShape(num_rows, max_blocks, state.block_size, num_tables)


class DeviceBuild(NamedTuple):
    """Builds the parts of one rank."""

    config: ResolvedConfig
    loaded: LoadedModel
    bank: AdapterBank | None  # memory for LoRA adapters
    communicator: Communicator | None  # connects the model's ranks; None: there is one rank

    def bind(self, pipe: Pipe | None) -> Callable[[], bool]:
        """Choose the model's matrix products; call the result before the first step (layers/bind.py)."""
        config, loaded, communicator = self.config, self.loaded, self.communicator
        if isinstance(communicator, DeviceRanks):
            communicator.deterministic = config.deterministic
            pipe = communicator if communicator.num_stages > 1 else None
        loaded.model.pipe = pipe
        if communicator is not None and communicator.size == 1:  # the only rank of its stage
            communicator = None
        return bind(
            loaded.model, loaded.device, deterministic=config.deterministic, mlp_backend=config.backends.mlp,
            cpu_products=config.settings.run.cpu_products, communicator=communicator,
            vocab_size=loaded.config.vocab_size, adapters=self.bank,
        )  # fmt: skip

    def rehearse(self, wait_for_linears: Callable[[], bool]) -> StepBytes | None:
        """Run the largest step on a GPU and return the memory it takes; None: not measured, on a CPU."""
        config, loaded = self.config, self.loaded
        if not (config.uses_gpu_device and is_gpu(loaded.device)):
            return None
        cache = config.settings.cache
        enforce_limit(loaded.device, cache.device_memory)
        if config.backends.attention == "flash":  # FlashAttention cannot attend to padding
            return compute_step(config, loaded)

        def make_warm_up() -> WarmUp:
            num_tables = len(kv_layout(loaded.config, config).windows)
            shape = StateShape(2 * config.scheduler.max_batch_size, 1, cache.block_size, num_tables)
            device = self.make_device(self.make_store(CacheSize(1, cache.block_size, 0)), shape)
            assert isinstance(device, GpuDevice)
            return WarmUp(device)

        def compile_steps(warm_up: WarmUp) -> None:
            warm_up.compile()  # Triton's kernels, while the CUDA C++ kernels compile in threads
            if not wait_for_linears():
                warm_up.compile()  # Triton's kernels in place of CUDA kernels that failed to compile
            warm_up.launcher.wait_for_compilers()

        return rehearse(
            make_warm_up, compile_steps, loaded.device, config.scheduler, compute_step(config, loaded),
            graph_tokens(config, loaded.config), cache.device_memory,
        )  # fmt: skip

    def make_store(self, size: CacheSize) -> KVStore:
        """Allocate the memory of keys and values, with the number of blocks that rank 0 has found."""
        config, loaded = self.config, self.loaded
        layout = kv_layout(loaded.config, config)
        num_kv_heads, head_dim = layout.plane_heads(loaded.config.num_kv_heads, loaded.config.head_dim)
        try:
            return KVStore(
                layout=layout, num_blocks=size.num_blocks, block_size=size.block_size,
                num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=loaded.dtype, device=loaded.device,
                num_host_blocks=size.num_host_blocks, kept_as=kept_as(config.settings.cache, loaded.dtype),
                fixed=loaded.kv_scales if config.has_fixed_kv_scales else None,
                state=state_size(loaded.config),
            )  # fmt: skip
        except RuntimeError as error:  # another process took the memory, or the driver's limit is reached
            raise ConfigError(
                f"a KV cache of {format_bytes(size.num_bytes)} and {size.num_host_blocks} blocks in host "
                f"memory could not be allocated{for_each(config.settings.load.num_ranks)} "
                f"({str(error).splitlines()[0]}); ask for less with kv_cache_memory, num_blocks, "
                "swap_blocks or swap_space"
            ) from error

    def make_device(
        self,
        store: KVStore,
        shape: StateShape,
        graph_bytes: int = 0,
        drafter: TorchDevice | GpuDevice | None = None,
    ) -> TorchDevice | GpuDevice:
        """Return the device half: `GpuDevice` keeps its state on a GPU, `TorchDevice` is plain PyTorch and C.

        `drafter`: the device half of the draft model; an EAGLE head runs after each of its steps.
        """
        config, loaded = self.config, self.loaded
        if not config.uses_gpu_device:
            return TorchDevice(
                loaded.model, store, shape, max_batch_size=config.scheduler.max_batch_size,
                attention_backend=config.backends.attention,
                decode_attention_backend=config.backends.decode_attention,
                record_cpu_step=config.record_cpu_step, ranks=loaded.ranks, pipe=loaded.model.pipe,
                head=drafter if isinstance(drafter, TorchHead) else None, adapters=self.bank,
            )  # fmt: skip
        scheduler, speculation = config.scheduler, config.settings.speculation
        launcher = StepLauncher(
            loaded.model, store, shape, max_batch_size=scheduler.max_batch_size,
            max_tokens=scheduler.max_num_batched_tokens, max_seq_len=config.max_seq_len,
            use_cuda_graphs=config.use_cuda_graphs, attention_backend=config.backends.attention,
            decode_attention_backend=config.backends.decode_attention, graph_bytes=graph_bytes,
            busy_tokens=scheduler.busy_step_tokens, window_tokens=WINDOW_TOKENS if speculation.is_on else 0,
            drafter=drafter.launcher if isinstance(drafter, GpuDevice) else None,
            has_trees=speculation.is_on and speculation.method == "tree", adapters=self.bank,
            communicator=cast("DeviceRanks | None", self.communicator), pipe=loaded.model.pipe,
        )  # fmt: skip
        return GpuDevice(launcher, steps_ahead=config.steps_ahead, ranks=loaded.ranks)

    def make_warm(
        self,
        store: KVStore,
        shape: StateShape,
        step: StepBytes | None,
        drafter: TorchDevice | GpuDevice | None = None,
    ) -> tuple[TorchDevice | GpuDevice, WarmUp | None]:
        """Return the device half with the memory of its steps, and on a GPU its warm-up."""
        graph_bytes = 0 if step is None else step.graph_block
        device = self.make_device(store, shape, graph_bytes, drafter)
        if not isinstance(device, GpuDevice):
            return device, None
        warm_up = WarmUp(device)
        device.launcher.wait_for_compilers()
        if step is not None:  # after the device's permanent buffers, which must not occupy the arena
            device.arena = _make_arena(step, self.loaded.device)
        if isinstance(self.communicator, DeviceRanks):  # loading must not block on a waiting kernel
            warm_up.load()
        return device, warm_up


def _make_arena(step: StepBytes, device: torch.device) -> Arena:
    workspace = GRAPH_WORKSPACE if step.graphs else 0  # held permanently by the thread that captures
    try:
        return Arena(step.activations + workspace, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"another process has taken the {format_bytes(step.activations)} that the largest step needs "
            f"({str(error).splitlines()[0]}); start again, or lower device_memory"
        ) from None
