"""The memory plan of an engine, computed from a model's config before anything is loaded.

    weights        every parameter once, in the chosen number format, and the tables computed from them
    activations    the largest step: its hidden states, its widest layer, its logits; with quantized weights
                   on a GPU also the largest matrix, unpacked
    graphs         on a GPU the same for the largest captured step, and the device half's buffers
    KV cache       2 * layers * kv heads * head size * bytes, for every token of every block; in 8 bits 4 more
                   bytes for each head: its scale
    workspace      attention gathers the keys and values of one layer at a time: a share of the KV cache

`infer plan` prints this plan, and a start uses the same figures to size the cache and to refuse settings that
do not fit. Nothing here is measured, so a plan can be made for any machine. On a GPU, a start replaces the
computed size of the largest step with the measured one (engine/rehearsal.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from infer.cache.layout import KVLayout, blocks_of_sequence
from infer.config.knobs import format_bytes, parse_bytes
from infer.config.resolve import ResolvedScheduler
from infer.config.settings import CacheConfig
from infer.errors import ConfigError, NoRoom

FLOAT32_BYTES = 4
GRAPH_FACTOR = 1.25  # size of the graph pool relative to the block that captured steps share
GRAPH_WORKSPACE = 32 << 20  # cuBLAS workspace on Hopper, per stream or thread that captures steps
GPU_RUNTIME_BYTES = 896 << 20  # CUDA context, libraries and graph nodes; up to 878 MiB on an H200


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The current memory of a device, and the part of it that this process may use."""

    total: int
    free: int
    held: int  # bytes that this process holds, including the CUDA runtime
    limit: int | None = None  # most bytes that this process may hold; None: no limit is set
    share: float = 1.0  # share of the free memory that this process may take if no limit is set

    @property
    def others(self) -> int:
        """The bytes that other processes hold."""
        return max(self.total - self.free - self.held, 0)

    @property
    def room(self) -> int:
        """The bytes that this process may still take; negative: it exceeds its limit."""
        if self.limit is not None:
            return min(self.free, self.limit - self.held)
        return int(self.share * self.free)

    def with_weights(self, num_bytes: int) -> DeviceMemory:
        """Return the memory after `num_bytes` more have been taken."""
        return replace(self, free=self.free - num_bytes, held=self.held + num_bytes)

    def describe(self) -> str:
        """Return how much is left and why, for a message."""
        if self.limit is not None and self.limit <= self.held:
            held = format_bytes(self.held)
            return f"device_memory is {format_bytes(self.limit)}, and {held} are needed already"
        if self.limit is not None and self.limit - self.held < self.free:
            return f"{format_bytes(self.room)} of the {format_bytes(self.limit)} of device_memory are left"
        has_others = self.share < 1 and self.others > 0
        others = f" next to {format_bytes(self.others)} of other processes" if has_others else ""
        return f"{format_bytes(max(self.room, 0))} are free{others}"


class StepBytes(NamedTuple):
    """The bytes that the steps of an engine take in addition to weights and KV cache."""

    layers: int  # bytes for the layers of the step with the most tokens
    logits: int  # bytes for sampling the step with the most rows
    graphs: int = 0  # bytes of the pool of all captured steps
    buffers: int = 0  # bytes of the device half's permanent buffers
    scratch: int = 0  # part of `layers` that does not depend on the number of tokens

    @property
    def activations(self) -> int:
        """The most bytes that a step takes at any time."""
        return max(self.layers, self.logits)

    @property
    def graph_block(self) -> int:
        """The part of `graphs` that all captured steps share; other streams have separate blocks."""
        return int((self.graphs - GRAPH_WORKSPACE) / GRAPH_FACTOR) + GRAPH_WORKSPACE if self.graphs else 0

    @property
    def total(self) -> int:
        """The bytes that must be left for steps, outside the KV cache."""
        return self.activations + self.graphs + self.buffers


class Scratch(NamedTuple):
    """The bytes of an unpacked weight matrix, which do not depend on the number of tokens."""

    layers: int = 0  # bytes of the largest matrix of the layers
    head: int = 0


NO_SCRATCH = Scratch()


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size of the KV cache."""

    num_blocks: int
    block_size: int
    bytes_per_token: int  # bytes of a token in the blocks of all tables
    num_tables: int = 1  # block tables of a sequence (cache/layout.py)
    num_host_blocks: int = 0  # blocks in host memory

    @property
    def num_tokens(self) -> int:
        """The tokens that the cache holds in all layers; layers that free blocks early allow more."""
        return self.num_blocks // self.num_tables * self.block_size

    @property
    def bytes_per_block(self) -> int:
        """The bytes of one block."""
        return self.block_size * self.bytes_per_token // self.num_tables

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole cache."""
        return self.num_blocks * self.bytes_per_block


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_element: int) -> int:
    """Return the bytes of keys and values of a token in all layers; 8-bit heads also have a scale."""
    scale = FLOAT32_BYTES if bytes_per_element == 1 else 0
    return 2 * num_layers * num_kv_heads * (head_dim * bytes_per_element + scale)


def workspace_share(num_layers: int, *, gathers: bool = True, widening: float = 1.0) -> float:
    """Return attention's workspace as a share of the KV cache: one layer, padded to at most its double.

    `widening`: bytes of a gathered element for each byte of a cached one.
    The share is 0 for kernels that read keys and values in place.
    """
    return 2 * widening / num_layers if gathers else 0.0


def graph_pool_bytes(layers: int, logits: int, scratch: int) -> int:
    """Return the bytes of the pool of captured steps, given the bytes of the largest one.

    `scratch`, a part of `layers`, is one tensor, which does not fit into the gaps left by smaller ones.
    """
    return int(GRAPH_FACTOR * (layers + logits + scratch // 3)) + GRAPH_WORKSPACE


def fit_cache(
    cache: CacheConfig,
    scheduler: ResolvedScheduler,
    step: StepBytes,
    *,
    max_seq_len: int,
    bytes_per_token: int,
    free_bytes: int,
    share: float,
    workspace: float = 0.0,
    left: str = "",
    layout: KVLayout | None = None,
) -> CacheSize:
    """Return the size of the cache in the memory left by weights, steps and attention's workspace.

    A cache of unspecified size takes at most `share` of the free memory; a specified size must fit.
    `workspace`: see `workspace_share`; `left` explains in messages why no more is free.
    """
    if free_bytes <= 0:
        raise NoRoom(
            f"the weights and the memory in use by this process take {format_bytes(-free_bytes)} more than "
            f"there is: {left or 'no more memory is free'}; 'infer plan' shows what fits"
        )
    room = int((free_bytes - step.total) / (1 + workspace))
    left = left or f"{format_bytes(free_bytes)} are free"
    parts = (
        f"{left} once the weights are loaded, and a step's activations "
        f"take up to {format_bytes(step.activations)}"
    )
    if step.total > step.activations:
        parts += f", graphs and buffers {format_bytes(step.total - step.activations)}"
    if room < cache.block_size * bytes_per_token:
        missing = format_bytes(cache.block_size * bytes_per_token - room)
        raise NoRoom(
            f"there is no room for a KV cache: {parts}; {missing} are missing for its first block: lower "
            "max_num_batched_tokens and max_batch_size, or without chunked prefill max_seq_len; "
            "'infer plan' shows what fits"
        )
    size = size_cache(
        cache,
        scheduler,
        max_seq_len=max_seq_len,
        bytes_per_token=bytes_per_token,
        free_bytes=min(int(free_bytes * share), room),
        layout=layout,
    )
    asked = size.num_bytes
    if cache.num_blocks is None and cache.kv_cache_memory is not None:
        # a requested size must be available, even if sequences could never use all of it
        asked = parse_bytes(cache.kv_cache_memory)
    if asked > room:
        knob, _, _ = _asker(cache).partition("=")
        if knob == "num_blocks":
            given, most = f" ({format_bytes(asked)})", str(room // (cache.block_size * bytes_per_token))
        else:
            given, most = "", _floor_bytes(room)
        raise ConfigError(
            f"{_asker(cache)}{given} is more than there is: {parts}; set {knob}={most} or less, or leave it "
            "out to have the size chosen"
        )
    return size


def _floor_bytes(count: int) -> str:
    """Return `count` rounded down to a short form that knobs accept."""
    if count >= 1 << 30:
        return f"{count * 10 // 2**30 / 10}GiB"
    return f"{count >> 20}MiB" if count >= 1 << 20 else f"{count}B"


def _asker(cache: CacheConfig) -> str:
    """Return the setting that sizes the cache, as knob=value; "": none is set."""
    if cache.num_blocks is not None:
        return f"num_blocks={cache.num_blocks}"
    return f"kv_cache_memory={cache.kv_cache_memory}" if cache.kv_cache_memory is not None else ""


def pinned_bytes(num_bytes: int) -> int:
    """Return the host memory that a pinned tensor takes: PyTorch rounds it up to a power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def check_host_blocks(
    cache: CacheConfig, size: CacheSize, free_bytes: int, *, is_pinned: bool = False, each: str = ""
) -> None:
    """Refuse more host blocks than fit into host memory; `each` names the ranks that have this much each.

    For a GPU they are one pinned tensor; the scales of 8-bit blocks are another, counted as part of it.
    """
    taken, most_bytes = size.num_host_blocks * size.bytes_per_block, max(free_bytes, 0)
    if is_pinned:
        taken = pinned_bytes(taken)
        most_bytes = pinned_bytes(most_bytes // 2 + 1) if most_bytes else 0  # rounded down
    if taken > free_bytes:
        name, most = "swap_space", format_bytes(most_bytes).replace(" ", "")
        if cache.swap_space is None:
            name, most = "swap_blocks", str(most_bytes // (size.bytes_per_block * size.num_tables))
        rounded = " (rounded up to a power of two)" if is_pinned else ""
        raise ConfigError(
            f"{name}={getattr(cache, name)} takes {format_bytes(taken)} of host memory{rounded}, but "
            f"{format_bytes(free_bytes)} are free{each}; set {name}={most} or less"
        )


def size_cache(
    cache: CacheConfig,
    scheduler: ResolvedScheduler,
    *,
    max_seq_len: int,
    bytes_per_token: int,
    free_bytes: int,
    layout: KVLayout | None = None,
) -> CacheSize:
    """Return the number of blocks: as specified, or as many as fit and could be used at once."""
    layout = layout or KVLayout.whole(1)
    num_tables = len(layout.windows)
    if cache.num_blocks is not None:
        num_slots = cache.num_blocks * cache.block_size * num_tables
    else:
        budget = parse_bytes(cache.kv_cache_memory) if cache.kv_cache_memory is not None else free_bytes
        blocks_each = blocks_of_sequence(layout.windows, max_seq_len, cache.block_size, scheduler.max_chunk)
        wanted = scheduler.max_batch_size * blocks_each * cache.block_size
        num_slots = min(budget * num_tables // bytes_per_token, wanted)
    is_contiguous = cache.kv_cache_backend == "contiguous"
    block_size = max_seq_len if is_contiguous else cache.block_size
    num_blocks = num_slots // block_size // num_tables * num_tables
    if is_contiguous:
        num_blocks = min(num_blocks, scheduler.max_batch_size)
    if num_blocks < 1:
        unit = f"sequence of max_seq_len {max_seq_len}" if is_contiguous else f"block of {block_size} tokens"
        given = _asker(cache) or "the memory left for the KV cache"
        if not given.startswith("kv_cache_memory"):  # this setting already names the amount
            given += f" ({format_bytes(max(num_slots * bytes_per_token // num_tables, 0))})"
        raise ConfigError(
            f"{given} is too little: one {unit} takes {format_bytes(block_size * bytes_per_token)}; "
            + "give the cache more with kv_cache_memory or num_blocks"
            + (", or lower max_seq_len" if is_contiguous else "")
            + "; 'infer plan' shows what fits"
        )
    size = CacheSize(num_blocks, block_size, bytes_per_token, num_tables)
    keeps_prefixes = cache.use_prefix_caching and cache.kv_cache_backend == "paged"
    if not cache.keeps_cache or (scheduler.preemption == "recompute" and not keeps_prefixes):
        return size  # host blocks would never be used
    if cache.swap_space is None:
        return replace(size, num_host_blocks=cache.swap_blocks * num_tables)
    num_host_blocks = parse_bytes(cache.swap_space) // size.bytes_per_block
    if num_host_blocks < num_tables:
        raise ConfigError(
            f"swap_space={cache.swap_space} has no room for {block_size} tokens, which take "
            f"{format_bytes(num_tables * size.bytes_per_block)}; set it to that or more, or leave it out"
        )
    return replace(size, num_host_blocks=num_host_blocks // num_tables * num_tables)  # equal for all tables
