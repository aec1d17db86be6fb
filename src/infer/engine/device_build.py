"""The parts that every rank of a model makes before it computes: projections, KV store, device half.

    bind        the projections that the model runs with, and its adapters
    rehearse    on a GPU, the memory that steps take
    make_store  keys and values, in the room that rank 0 has found (cache_fit.py)
    make_warm   the device half, and on a GPU what prepares its steps

Rank 0 does this while it builds the engine (build.py), the others on its message (rank_worker.py).
`resolve_for` needs none of the weights, so `memory_plan.check_settings` asks it before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch

from infer.cache.kv_store import KVStore
from infer.cache.memory import GRAPH_WORKSPACE, CacheSize, StepBytes, format_bytes
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
    """Return the decisions for this model on its device; settings that cannot work there are refused."""
    return resolve(settings, machine_of(loaded, settings.cache.device_memory), facts_of(loaded))


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


def join_ranks(settings: EngineConfig, communicator: Communicator, loaded: LoadedModel) -> Communicator:
    """Return what joins the ranks of this model on their devices; all ranks come here together."""
    if is_gpu(loaded.device) and isinstance(communicator, SharedCommunicator):
        kind = NodeCommunicator if settings.load.nnodes > 1 else GpuCommunicator
        return kind(communicator, loaded.device, loaded.dtype)
    return communicator


def probe_rank(loaded: LoadedModel, warm_up: WarmUp | None, num_tokens: int) -> float:
    """Return the seconds that this many prompt tokens take on a rank: in a step, or by themselves."""
    if warm_up is None:
        return prefill_seconds(loaded.model, loaded.device, num_tokens)
    return warm_up.step_seconds(num_tokens)


def shape_of(state: BatchState) -> StateShape:
    """Return the size of the state that a device keeps for a batch."""
    num_tables, num_rows, max_blocks = state.tables.shape
    return StateShape(num_rows, max_blocks, state.block_size, num_tables)


class DeviceBuild(NamedTuple):
    """The parts of a rank that are made before its device half, which makes the rest."""

    config: ResolvedConfig
    loaded: LoadedModel
    bank: AdapterBank | None  # the room for its LoRA adapters
    communicator: Communicator | None  # joins the ranks of the model

    def bind(self, pipe: Pipe | None) -> Callable[[], bool]:
        """Choose what the model multiplies with; call the result before the first step (layers/bind.py)."""
        config, loaded, communicator = self.config, self.loaded, self.communicator
        if isinstance(communicator, DeviceRanks):
            communicator.deterministic = config.deterministic
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
            adapters=self.bank,
        )

    def rehearse(self, wait_for_linears: Callable[[], bool]) -> StepBytes | None:
        """Run the largest step on a GPU, and return the memory that it takes; None: it is only computed."""
        config, loaded = self.config, self.loaded
        if not (config.uses_gpu_device and is_gpu(loaded.device)):
            return None
        cache = config.settings.cache
        enforce_limit(loaded.device, cache.device_memory)
        if config.backends.attention == "flash":  # it cannot attend to padding
            return compute_step(config, loaded)

        def make_warm_up() -> WarmUp:
            num_tables = len(kv_layout(loaded.config, config).windows)
            shape = StateShape(2 * config.scheduler.max_batch_size, 1, cache.block_size, num_tables)
            device = self.make_device(self.make_store(CacheSize(1, cache.block_size, 0)), shape)
            assert isinstance(device, GpuDevice)
            return WarmUp(device)

        def compile_steps(warm_up: WarmUp) -> None:
            warm_up.compile()  # Triton's kernels, while others compile those in CUDA C++
            if not wait_for_linears():
                warm_up.compile()  # Triton's kernels in place of unavailable ones
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

    def make_store(self, size: CacheSize) -> KVStore:
        """Return the memory of keys and values, with as many blocks as rank 0 has found room for."""
        config, loaded = self.config, self.loaded
        layout = kv_layout(loaded.config, config)
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
        except RuntimeError as error:  # free memory was taken since, or the driver's limit is reached
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
        """Return the device half that keeps its state on the GPU, or the one that is plain PyTorch and C.

        `drafter` drafts for it, and follows its steps if it is a head.
        """
        config, loaded = self.config, self.loaded
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
                adapters=self.bank,
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
            adapters=self.bank,
            ranks=loaded.ranks,
            communicator=cast("DeviceRanks | None", self.communicator),
            pipe=loaded.model.pipe,
        )

    def make_warm(
        self,
        store: KVStore,
        shape: StateShape,
        step: StepBytes | None,
        drafter: TorchDevice | GpuDevice | None = None,
    ) -> tuple[TorchDevice | GpuDevice, WarmUp | None]:
        """Return the device half with the memory of its steps, and what prepares it on a GPU."""
        graph_bytes = 0 if step is None else step.graph_block
        device = self.make_device(store, shape, graph_bytes, drafter)
        if not isinstance(device, GpuDevice):
            return device, None
        warm_up = WarmUp(device)
        device.wait_for_compilers()
        if step is not None:  # after the device's own buffers, which would lie in the arena for good
            device.arena = _make_arena(step, self.loaded.device)
        if isinstance(self.communicator, DeviceRanks):  # not while a kernel of one waits for another
            warm_up.load()
        return device, warm_up


def _make_arena(step: StepBytes, device: torch.device) -> Arena:
    workspace = GRAPH_WORKSPACE if step.graphs else 0  # the thread that captures keeps one for good
    try:
        return Arena(step.activations + workspace, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the {format_bytes(step.activations)} that the largest step needs are taken by another "
            f"process ({str(error).splitlines()[0]}); start again, or lower device_memory"
        ) from None
