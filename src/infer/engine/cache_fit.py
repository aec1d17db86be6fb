"""The size of the KV cache on this machine: the free memory, less the memory that steps need.

The arithmetic is the same as in `infer plan` (cache/memory.py). A start computes the size twice. Before the
weights are read, their bytes are subtracted from the free memory, so that a cache that cannot fit is refused
early. After they are loaded, a GPU uses the measured memory of the largest step (rehearsal.py).
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
    graph_pool_bytes,
    kv_bytes_per_token,
    workspace_share,
)
from infer.config.defaults import CPU_SHARE
from infer.config.knobs import format_bytes
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

ALLOCATOR_FACTOR = 2  # factor on a layer's bytes: allowance for matrix libraries and the allocator
SPLITS_PER_ROW = 16  # splits of a decoding row's attention, merged at the end
SAMPLER_BYTES = 6  # bytes per vocabulary id of a row: its adjusted logit and its use count


class DraftBytes(NamedTuple):
    """The bytes that a draft model takes in addition to its weights."""

    per_token: int = 0  # bytes of its keys and values per token, in as many blocks as the model has
    step: int = 0  # bytes of its largest step, graphs and buffers


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
    """Return the size of the cache on this device now; a cache that does not fit is refused.

    `weight_bytes` are subtracted from the free memory: weights still to be loaded, or the memory that the
    fullest rank lacks. `step`: measured bytes of steps; None: they are computed, with `scratch` for a model
    that is not loaded yet. `draft`: bytes of the draft model.
    """
    free_host = free_host_bytes()
    memory = look(loaded.device, config.settings.cache.device_memory, free_host=free_host)
    step = step or compute_step(config, loaded, scratch)
    num_ranks = ranks_sharing(config.settings, loaded.device)
    if is_gpu(loaded.device):  # `device_memory` covers all ranks on this GPU; each holds the same amount
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
    """Return the size of the cache in `memory`, from which the weights are already subtracted."""
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
    """Return the number of a model's ranks that share this device's memory; on a CPU, all local ranks."""
    shares = not is_gpu(device) or settings.load.names_gpu
    return settings.load.num_local_ranks if shares else 1


def for_each(num_ranks: int) -> str:
    """Return " for each of N ranks" for a message about memory; "" for a single rank."""
    return f" for each of {num_ranks} ranks" if num_ranks > 1 else ""


def cache_share(device: torch.device) -> float:
    """Return the default share of the memory left by weights and steps that a cache takes."""
    return 1.0 if is_gpu(device) else CPU_SHARE


def compute_step(
    config: ResolvedConfig, loaded: LoadedModel | LoadChoice, scratch: Scratch = NO_SCRATCH
) -> StepBytes:
    """Compute the bytes of the largest steps; for a loaded model, `scratch` is computed too."""
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
    """Return the bytes of the largest steps that this scheduler may plan.

    `graph_tokens`: prompt tokens of the largest captured step; None: no graphs and no state on the device.
    Sampling a row takes its logits in the model's dtype, and in float32 the scaled logits, noise and the sum.
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
    """Return the elements per token that are live at the same time in a layer.

    Four vectors of the hidden size (a block's input and output, the residual stream before and after), and
    either the MLP's gate, up, activated gate and product, or attention's q, k, v, rotated q and k, and its
    result.
    """
    widest_mlp = max(model.mlp_size(layer) for layer in range(model.num_layers))
    if model.experts is not None:  # each chosen expert has a separate result until they are added
        widest_mlp += model.experts.num_choices * model.hidden_size
    heads = 3 * (model.num_heads + model.num_kv_heads) * model.head_dim
    if model.delta is not None:  # channels, before and after the convolution, and gates and results
        values = model.delta.num_value_heads * model.delta.value_dim
        gated = heads + 3 * model.num_heads * model.head_dim
        heads = max(gated, 4 * model.delta.num_channels + 6 * values)
    return 4 * model.hidden_size + max(4 * widest_mlp, heads)


def scratch_of(model: Model, scheduler: ResolvedScheduler) -> Scratch:
    """Return the bytes for unpacking quantized weights, in the layers and in the head."""
    matrices = [layer.stored for layer in model.modules() if isinstance(layer, Projected)]
    head, num_tokens = model.head.stored, scheduler.max_num_batched_tokens
    layers = (matrix.scratch_bytes(num_tokens) for matrix in matrices if matrix is not head)
    return Scratch(max(layers, default=0), head.scratch_bytes(scheduler.max_batch_size))


def graph_tokens(config: ResolvedConfig, model: ModelConfig) -> int | None:
    """Return the prompt tokens of the largest captured step; None: no step is captured."""
    if not config.use_cuda_graphs:
        return None
    most, busy = config.scheduler.max_num_batched_tokens, config.scheduler.busy_step_tokens
    return captured_tokens(model, most, busy, config.profile.graphs)


class KeptCache(NamedTuple):
    """The layout of a model's keys and values, and their bytes per token."""

    layout: KVLayout
    bytes_per_token: int
    workspace: float  # memory that attention needs in addition, as a share of the cache's size


def kept_cache(config: ResolvedConfig, loaded: LoadedModel | LoadChoice) -> KeptCache:
    """Return the layout and bytes of this model's cache; attention that gathers also unpacks codes."""
    model, dtype, cache = loaded.config, loaded.dtype, config.settings.cache
    layout, kept = kv_layout(model, config), kept_as(cache, dtype)
    widening = dtype.itemsize / kept.itemsize + (kept != dtype)
    heads = layout.plane_heads(model.num_kv_heads, model.head_dim)
    per_token = kv_bytes_per_token(layout.num_layers, *heads, kept.itemsize)
    state = state_size(model)
    if state is not None:  # every block also stores a tail of the convolution
        per_token += -(-layout.num_layers * state.num_tail * dtype.itemsize // cache.block_size)
    return KeptCache(
        layout, per_token, workspace_share(layout.num_planes, gathers=config.gathers_kv, widening=widening)
    )


def kept_as(cache: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the cache keeps keys and values of a model in `dtype`."""
    codes = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
    return codes.get(cache.kv_cache_dtype.removesuffix("_per_token_head"), dtype)


def state_size(model: ModelConfig) -> StateSize | None:
    """Return the size of the recurrent state of linear-attention layers; None: the model has none."""
    delta = model.delta
    if delta is None:
        return None
    tail = delta.num_taps - 1, delta.num_channels
    return StateSize(delta.num_value_heads, (delta.key_dim, delta.value_dim), tail)


def kv_layout(model: ModelConfig, config: ResolvedConfig) -> KVLayout:
    """Return the layout of a model's cache; only a paged cache can free blocks that left a window.

    Pipeline stages all have the same number of planes and the same tables. A draft model shares the first
    table and reads whole texts, so that table frees no blocks.
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
