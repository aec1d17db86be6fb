"""The size of the KV cache on this machine, from the memory that is free now.

The arithmetic is that of `infer plan` (cache/memory.py). A start asks twice: before the weights are read,
with their bytes taken off what is free, to refuse early; and once they are loaded, on a GPU with what the
largest step was seen to take (rehearsal.py).
"""

from __future__ import annotations

import torch

from infer.cache.layout import KVLayout
from infer.cache.memory import (
    NO_SCRATCH,
    CacheSize,
    LayerSizes,
    Scratch,
    StepBytes,
    check_host_blocks,
    fit_cache,
    free_host_bytes,
    kv_bytes_per_token,
    step_bytes,
    workspace_share,
)
from infer.config.defaults import CPU_SHARE
from infer.config.resolve import ResolvedConfig, ResolvedScheduler
from infer.config.settings import CacheConfig
from infer.engine.device_memory import look
from infer.execution.gpu.graphs import most_tokens
from infer.kernels.runtime.dispatch import is_gpu
from infer.layers.linear import Projected
from infer.loader.load import LoadChoice, LoadedModel
from infer.models.config import ModelConfig
from infer.models.model import Model


def fit_to_device(
    config: ResolvedConfig,
    loaded: LoadedModel | LoadChoice,
    *,
    weight_bytes: int = 0,
    step: StepBytes | None = None,
    scratch: Scratch = NO_SCRATCH,
) -> CacheSize:
    """Return the size of the cache here and now; a cache that does not fit is refused.

    `weight_bytes` are of weights that will be loaded: what is free now is free less these. `step` is what
    steps were measured to take; without it, it is computed, with this `scratch` of a model not loaded yet.
    """
    on_gpu = is_gpu(loaded.device)
    free_host = free_host_bytes()
    cache, model = config.settings.cache, loaded.config
    layout, kept = kv_layout(model, cache, config.max_seq_len), kept_as(cache, loaded.dtype)
    memory = look(loaded.device, cache.device_memory, free_host=free_host).with_weights(weight_bytes)
    size = fit_cache(
        cache,
        config.scheduler,
        step or compute_step(config, loaded, scratch),
        max_seq_len=config.max_seq_len,
        bytes_per_token=kv_bytes_per_token(
            layout.num_layers, model.num_kv_heads, model.head_dim, kept.itemsize
        ),
        free_bytes=memory.room,
        share=cache.kv_cache_share or (1.0 if on_gpu else CPU_SHARE),
        workspace=workspace_share(
            layout.num_planes,
            gathers=config.gathers_kv,
            widening=gathered_bytes(kept, loaded.dtype) / kept.itemsize,
        ),
        left=memory.describe(),
        layout=layout,
    )
    free_host -= 0 if on_gpu else weight_bytes + size.num_bytes
    check_host_blocks(cache.swap_blocks, size, free_host)
    return size


def compute_step(
    config: ResolvedConfig, loaded: LoadedModel | LoadChoice, scratch: Scratch = NO_SCRATCH
) -> StepBytes:
    """Return what the largest steps take, by arithmetic; a model that is loaded has its own `scratch`."""
    if isinstance(loaded, LoadedModel):
        scratch = scratch_of(loaded.model, config.scheduler)
    return step_bytes(
        config.scheduler,
        layer_sizes(loaded.config),
        max_seq_len=config.max_seq_len,
        bytes_per_element=loaded.dtype.itemsize,
        graph_tokens=graph_tokens(config, loaded.config),
        scratch=scratch,
    )


def scratch_of(model: Model, scheduler: ResolvedScheduler) -> Scratch:
    """Return what unpacking the weights of this model takes of the largest step and of its logits."""
    matrices = [layer.stored for layer in model.modules() if isinstance(layer, Projected)]
    head, num_tokens = model.head.stored, scheduler.max_num_batched_tokens
    layers = (matrix.scratch_bytes(num_tokens) for matrix in matrices if matrix is not head)
    return Scratch(max(layers, default=0), head.scratch_bytes(scheduler.max_batch_size))


def graph_tokens(config: ResolvedConfig, model: ModelConfig) -> int | None:
    """Return how many tokens of prompts the largest captured step has; None: none is captured."""
    if not config.use_cuda_graphs:
        return None
    return most_tokens(model, config.scheduler.max_num_batched_tokens)


def kept_as(cache: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the type that keys and values of a model in `dtype` are kept in."""
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(cache.kv_cache_dtype, dtype)


def gathered_bytes(kept: torch.dtype, dtype: torch.dtype) -> int:
    """Return what an element takes that attention gathers: in `dtype`, of codes beside its code."""
    return dtype.itemsize + (kept.itemsize if kept != dtype else 0)


def kv_layout(model: ModelConfig, cache: CacheConfig, max_seq_len: int) -> KVLayout:
    """Return which layers share blocks; only a paged cache has tables that can let go of some."""
    if cache.kv_cache_backend != "paged":
        return KVLayout.whole(model.num_layers)
    return KVLayout.of([model.window(layer) for layer in range(model.num_layers)], max_seq_len)


def layer_sizes(config: ModelConfig) -> LayerSizes:
    """Return the sizes that decide how much memory a step needs."""
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
