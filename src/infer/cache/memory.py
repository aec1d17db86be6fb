"""How much memory goes where, computed from a model's facts alone, before anything is loaded.

    weights        every parameter once, in the chosen number format
    KV cache       2 * layers * kv heads * head size * bytes, for every token of every block
    activations    the largest step: its hidden states, its widest layer, its logits

`infer plan` prints this; start-up uses the same figures to size the cache and to say what does not fit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from infer.config import CacheConfig, SchedulerConfig, parse_bytes
from infer.errors import ConfigError

CPU_SHARE = 0.25  # of the memory that is free, for the KV cache of a model on the CPU
GPU_SHARE = 0.9  # of a GPU's free memory once the weights are there


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The shape the KV cache will have."""

    num_blocks: int
    block_size: int
    bytes_per_token: int

    @property
    def num_tokens(self) -> int:
        """Tokens the whole cache holds."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Memory the whole cache takes."""
        return self.num_tokens * self.bytes_per_token


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_element: int) -> int:
    """Bytes of keys and values of one token in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_element


def size_cache(
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    max_seq_len: int,
    bytes_per_token: int,
    free_bytes: int,
) -> CacheSize:
    """Decide how many blocks there are: as told, or as fits, and never more than could be used at once."""
    if cache.num_blocks is not None:
        num_tokens = cache.num_blocks * cache.block_size
    else:
        budget = parse_bytes(cache.kv_cache_memory) if cache.kv_cache_memory is not None else free_bytes
        wanted = scheduler.max_batch_size * (-(-max_seq_len // cache.block_size) * cache.block_size)
        num_tokens = min(budget // bytes_per_token, wanted)
    is_contiguous = cache.kv_cache_backend == "contiguous"
    block_size = max_seq_len if is_contiguous else cache.block_size
    num_blocks = num_tokens // block_size
    if is_contiguous:
        num_blocks = min(num_blocks, scheduler.max_batch_size)
    if num_blocks < 1:
        needed = block_size * bytes_per_token
        unit = "sequence" if is_contiguous else "block"
        raise ConfigError(
            f"the KV cache would hold {num_tokens} tokens, but one {unit} "
            f"needs {block_size} ({format_bytes(needed)}); give it more with kv_cache_memory or num_blocks"
            + (", or lower max_seq_len" if is_contiguous else "")
        )
    return CacheSize(num_blocks, block_size, bytes_per_token)


def free_host_bytes() -> int:
    """Memory of this machine that can be taken without swapping, as far as the system tells."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def format_bytes(count: float) -> str:
    """A size for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
