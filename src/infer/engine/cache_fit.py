"""The size of the KV cache on this machine, from the memory that is free now.

The arithmetic is that of `infer plan` (cache/memory.py). A start asks twice: before the weights are read,
with their bytes taken off what is free, to refuse early; and once they are loaded.
"""

from __future__ import annotations

import torch

from infer.cache.memory import (
    CacheSize,
    LayerSizes,
    check_host_blocks,
    fit_cache,
    free_host_bytes,
)
from infer.config.defaults import CPU_SHARE, GPU_SHARE
from infer.config.resolve import ResolvedConfig
from infer.loader.load import LoadChoice, LoadedModel
from infer.models.config import ModelConfig


def fit_to_device(
    config: ResolvedConfig, loaded: LoadedModel | LoadChoice, *, weight_bytes: int = 0
) -> CacheSize:
    """Return the size of the cache here and now; a cache that does not fit is refused.

    `weight_bytes` are of weights that will be loaded: what is free now is free less these.
    """
    is_gpu = loaded.device.type == "cuda"
    free_host = free_host_bytes() - (0 if is_gpu else weight_bytes)
    cache = config.settings.cache
    size = fit_cache(
        cache,
        config.scheduler,
        layer_sizes(loaded.config),
        max_seq_len=config.max_seq_len,
        bytes_per_element=loaded.dtype.itemsize,
        free_bytes=torch.cuda.mem_get_info(loaded.device)[0] - weight_bytes if is_gpu else free_host,
        share=cache.kv_cache_share or (GPU_SHARE if is_gpu else CPU_SHARE),
        gathers=config.gathers_kv,
    )
    check_host_blocks(cache.swap_blocks, size, free_host if is_gpu else free_host - size.num_bytes)
    return size


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
