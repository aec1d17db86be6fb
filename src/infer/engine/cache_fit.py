"""The size of the KV cache on this machine, from the memory that is free now and the memory of steps.

The arithmetic is the same as in `infer plan` (cache/memory.py). A start computes the size twice: before the
weights are read, with their bytes subtracted from the free memory, to refuse early; and after they are
loaded, on a GPU with the measured memory of the largest step (rehearsal.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from infer.cache.host_bytes import free_host_bytes
from infer.cache.kv_store import crossing_bytes
from infer.cache.layout import STATE, KVLayout, StateSize
from infer.cache.memory import (
    FLOAT32_BYTES,
    GRAPH_WORKSPACE,
    NO_SCRATCH,
    CacheSize,
    DeviceMemory,
    Scratch,
    StepBytes,
    check_host_blocks,
    fit_cache,
    format_bytes,
    graph_pool_bytes,
    kv_bytes_per_token,
    workspace_share,
)
from infer.config.defaults import CPU_SHARE
from infer.config.resolve import ResolvedConfig, ResolvedScheduler
from infer.config.settings import CacheConfig, EngineConfig
from infer.engine.device_memory import look
from infer.execution.gpu.graphs import captured_tokens
from infer.kernels.runtime.dispatch import is_gpu
from infer.layers.linear import Projected
from infer.layers.stages import stage_layers
from infer.loader.load import LoadChoice, LoadedModel
from infer.models.config import ModelConfig
from infer.models.model import Model

ALLOCATOR_FACTOR = 2  # factor on a layer's bytes: matrix libraries and allocators need room of their own
SPLITS_PER_ROW = 16  # parts of a decoding row's attention that are added up
SAMPLER_BYTES = 6  # bytes for each id of a row: its adjusted logit, and how often it was used


class DraftBytes(NamedTuple):
    """The bytes that a model that drafts takes in addition to its weights."""

    per_token: int = 0  # bytes of keys and values, in as many blocks as the model has
    step: int = 0  # its largest steps, their graphs and buffers


NO_DRAFT = DraftBytes()


def fit_to_device(
    config: ResolvedConfig,
    loaded: LoadedModel | LoadChoice,
    *,
    weight_bytes: int,
    step: StepBytes | None = None,
    scratch: Scratch = NO_SCRATCH,
    draft: DraftBytes,
) -> CacheSize:
    """Return the size of the cache here and now; a cache that does not fit is refused.

    `weight_bytes` are taken off what is free: weights still to be loaded, or what another rank has
    less of. `step` is what steps were measured to take; without it, it is computed, with this `scratch` of a
    model not loaded yet. `draft` is what another model that drafts takes.
    """
    free_host = free_host_bytes()
    memory = look(loaded.device, config.settings.cache.device_memory, free_host=free_host)
    step = step or compute_step(config, loaded, scratch)
    num_ranks = ranks_sharing(config.settings, loaded.device)
    if is_gpu(loaded.device):  # `device_memory` is for all ranks on a GPU, which hold as much as this one
        memory = replace(memory, held=num_ranks * memory.held)
    size = fit_to_memory(config, loaded, memory.with_weights(weight_bytes), step, draft)
    free_host -= 0 if is_gpu(loaded.device) else weight_bytes + size.num_bytes * num_ranks
    free_each = free_host // config.settings.load.num_local_ranks
    each = for_each(config.settings.load.num_ranks)
    check_host_blocks(config.settings.cache, size, free_each, is_pinned=is_gpu(loaded.device), each=each)
    return size


def fit_to_memory(
    config: ResolvedConfig,
    loaded: LoadedModel | LoadChoice,
    memory: DeviceMemory,
    step: StepBytes,
    draft: DraftBytes,
) -> CacheSize:
    """Return the size of the cache in this memory, from which the weights have been taken off already."""
    cache = config.settings.cache
    kept = kept_cache(config, loaded)
    crossing, num_ranks = 0, ranks_sharing(config.settings, loaded.device)
    room, left = memory.room // num_ranks, memory.describe()
    if num_ranks > 1:
        left = f"{format_bytes(max(room, 0))} are left{for_each(num_ranks)} ({left})"
    if cache.has_host_memory and is_gpu(loaded.device):
        block_bytes = cache.block_size * kept.bytes_per_token // len(kept.layout.windows)
        crossing = crossing_bytes(block_bytes)
    return fit_cache(
        cache,
        config.scheduler,
        step._replace(buffers=step.buffers + draft.step + crossing),
        max_seq_len=config.max_seq_len,
        bytes_per_token=kept.bytes_per_token + draft.per_token,
        free_bytes=room,
        share=cache.kv_cache_share or cache_share(loaded.device),
        workspace=kept.workspace,
        left=left,
        layout=kept.layout,
    )


def ranks_sharing(settings: EngineConfig, device: torch.device) -> int:
    """Return how many ranks of a model take their memory from this device: on a CPU, all on this machine."""
    shares = not is_gpu(device) or ":" in settings.load.device  # all ranks share a GPU that was named
    return settings.load.num_local_ranks if shares else 1


def for_each(num_ranks: int) -> str:
    """Return the words that follow an amount of memory that each of several ranks has; "": there is one."""
    return f" for each of {num_ranks} ranks" if num_ranks > 1 else ""


def cache_share(device: torch.device) -> float:
    """Return the default share that a cache takes of the memory left by weights and steps."""
    return 1.0 if is_gpu(device) else CPU_SHARE


def compute_step(
    config: ResolvedConfig, loaded: LoadedModel | LoadChoice, scratch: Scratch = NO_SCRATCH
) -> StepBytes:
    """Return what the largest steps take, by arithmetic; a model that is loaded has its own `scratch`."""
    if isinstance(loaded, LoadedModel):
        scratch = scratch_of(loaded.model, config.scheduler)
    return step_bytes(
        config.scheduler,
        loaded.config,
        max_seq_len=config.max_seq_len,
        bytes_per_element=loaded.dtype.itemsize,
        graph_tokens=graph_tokens(config, loaded.config),
        scratch=scratch,
    )


def step_bytes(
    scheduler: ResolvedScheduler,
    model: ModelConfig,
    *,
    max_seq_len: int,
    bytes_per_element: int,
    graph_tokens: int | None = None,
    scratch: Scratch = NO_SCRATCH,
) -> StepBytes:
    """Return what the steps that this scheduler may plan take.

    At most `graph_tokens` of prompts are captured; None: nothing is, and no state is kept on the device.
    Sampling a row takes its logits as the model has them, and in float32 the scaled ones, noise and the sum.
    """
    num_rows, each = scheduler.max_batch_size, bytes_per_element
    num_tokens = min(scheduler.max_num_batched_tokens, num_rows * max_seq_len)
    layers = ALLOCATOR_FACTOR * num_tokens * token_elements(model) * each + scratch.layers
    logits = num_rows * model.vocab_size * (each + 3 * FLOAT32_BYTES) + scratch.head
    if graph_tokens is None:
        return StepBytes(layers, logits, scratch=scratch.layers)
    captured = (num_rows + graph_tokens) * token_elements(model) * each + scratch.layers
    splits = SPLITS_PER_ROW * num_rows * model.num_heads * model.head_dim * FLOAT32_BYTES
    return StepBytes(
        layers,
        logits,
        graphs=graph_pool_bytes(captured, num_rows * model.vocab_size * each + scratch.head, scratch.layers),
        buffers=splits + num_rows * model.vocab_size * SAMPLER_BYTES + GRAPH_WORKSPACE,
        scratch=scratch.layers,
    )


def token_elements(model: ModelConfig) -> int:
    """Return the numbers of one token that live at the same time, layer after layer.

    Four vectors of the hidden size (a block's input and output, the residual stream before and after), and
    either the MLP's gate, up, activated gate and product, or attention's q, k, v, the turned q and k and the
    result.
    """
    widest_mlp = max(model.mlp_size(layer) for layer in range(model.num_layers))
    if model.experts is not None:  # each of a token's experts has a result of its own until they are added
        widest_mlp += model.experts.num_choices * model.hidden_size
    heads = 3 * (model.num_heads + model.num_kv_heads) * model.head_dim
    if model.delta is not None:  # projected and in order, gates, mixed, seen
        values = model.delta.num_value_heads * model.delta.value_dim
        gated = heads + 3 * model.num_heads * model.head_dim
        heads = max(gated, 4 * model.delta.num_channels + 6 * values)
    return 4 * model.hidden_size + max(4 * widest_mlp, heads)


def scratch_of(model: Model, scheduler: ResolvedScheduler) -> Scratch:
    """Return what unpacking this model's weights takes in the largest step and in its logits."""
    matrices = [layer.stored for layer in model.modules() if isinstance(layer, Projected)]
    head, num_tokens = model.head.stored, scheduler.max_num_batched_tokens
    layers = (matrix.scratch_bytes(num_tokens) for matrix in matrices if matrix is not head)
    return Scratch(max(layers, default=0), head.scratch_bytes(scheduler.max_batch_size))


def graph_tokens(config: ResolvedConfig, model: ModelConfig) -> int | None:
    """Return how many tokens of prompts the largest captured step has; None: none is captured."""
    if not config.use_cuda_graphs:
        return None
    most, busy = config.scheduler.max_num_batched_tokens, config.scheduler.busy_step_tokens
    return captured_tokens(model, most, busy, config.profile.graphs)


class KeptCache(NamedTuple):
    """The layout of a model's keys and values, and the bytes of a token."""

    layout: KVLayout  # layers that share blocks
    bytes_per_token: int
    workspace: float  # share of the cache's size that attention needs again


def kept_cache(config: ResolvedConfig, loaded: LoadedModel | LoadChoice) -> KeptCache:
    """Return what a cache of this model takes; attention that gathers unpacks codes and keeps both."""
    model, dtype, cache = loaded.config, loaded.dtype, config.settings.cache
    layout, kept = kv_layout(model, config), kept_as(cache, dtype)
    widening = dtype.itemsize / kept.itemsize + (kept != dtype)
    heads = layout.plane_heads(model.num_kv_heads, model.head_dim)
    per_token = kv_bytes_per_token(layout.num_layers, *heads, kept.itemsize)
    state = state_size(model)
    if state is not None:  # every block has room for a tail, too
        per_token += -(-layout.num_layers * state.num_tail * dtype.itemsize // cache.block_size)
    return KeptCache(
        layout, per_token, workspace_share(layout.num_planes, gathers=config.gathers_kv, widening=widening)
    )


def kept_as(cache: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the type that keys and values of a model in `dtype` are kept in."""
    codes = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
    return codes.get(cache.kv_cache_dtype.removesuffix("_per_token_head"), dtype)


def state_size(model: ModelConfig) -> StateSize | None:
    """Return the size of what layers keep in place of keys and values; None: all have keys and values."""
    delta = model.delta
    if delta is None:
        return None
    tail = delta.num_taps - 1, delta.num_channels
    return StateSize(delta.num_value_heads, (delta.key_dim, delta.value_dim), tail)


def kv_layout(model: ModelConfig, config: ResolvedConfig) -> KVLayout:
    """Return the layout of a model's cache; only a paged cache has tables that can let go of blocks.

    Where layers are in stages, each has as many planes, and the same tables.
    A model that drafts shares the first table and catches up with whole texts, so that one lets go of none.
    """
    stages = stage_layers(model.num_layers, config.settings.load.pipeline_parallel_size)
    whole = KVLayout.of([None] * model.num_layers, config.max_seq_len, stages=stages)
    if config.settings.cache.kv_cache_backend != "paged":
        return whole
    layers = range(model.num_layers)
    windows = [STATE if model.has_state(layer) else model.window(layer) for layer in layers]
    sources = [spec.kv_layer for spec in model.layer_specs]
    layout = KVLayout.of(windows, config.max_seq_len, model.kv_heads, sources, stages=stages)
    speculation = config.settings.speculation
    is_drafted = speculation.is_on and speculation.draft_model is not None
    return whole if is_drafted and layout.windows[0] is not None else layout
