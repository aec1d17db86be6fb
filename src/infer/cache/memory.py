"""A memory plan, computed from a model's facts alone, before anything is loaded.

    weights        every parameter once, in the chosen number format, and the tables computed from them
    activations    the largest step: its hidden states, its widest layer, its logits; for weights in codes on
                   a GPU also the largest matrix, unpacked
    graphs         on a GPU the same of the largest step that is captured, and the device half's own buffers
    KV cache       2 * layers * kv heads * head size * bytes, for every token of every block; in 8 bits 4 more
                   bytes for each head: its scale
    workspace      attention gathers the keys and values of one layer at a time: a share of the KV cache

`infer plan` prints this, and a start uses the same figures to size the cache and to refuse what does not fit.
Nothing here is measured: it is arithmetic on sizes, so a plan for another machine is as good as one for this
machine. On a GPU, a start replaces the computed size of the largest step by the measured one
(engine/rehearsal.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from infer.cache.layout import KVLayout, blocks_of_sequence
from infer.config.knobs import parse_bytes
from infer.config.resolve import ResolvedScheduler
from infer.config.settings import CacheConfig
from infer.errors import ConfigError, NoRoom

FLOAT32_BYTES = 4
GRAPH_FACTOR = 1.25  # size of the pool of captured steps, for each byte of the block that they share
GRAPH_WORKSPACE = 32 << 20  # bytes of the matrix library on Hopper, per stream or thread that captures steps
GPU_RUNTIME_BYTES = 896 << 20  # CUDA's context, libraries, nodes of graphs; up to 878 MiB on an H200


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of a device now: its total, its free part, and what this process holds and may hold."""

    total: int
    free: int
    held: int  # bytes that this process holds, its runtime included
    limit: int | None = None  # bytes that this process may hold, where a limit was asked for
    share: float = 1.0  # the part of the free memory that this process may take, where there is no limit

    @property
    def others(self) -> int:
        """Bytes that other processes hold."""
        return max(self.total - self.free - self.held, 0)

    @property
    def room(self) -> int:
        """Bytes that this process may still take; below 0: it has more than it may."""
        if self.limit is not None:
            return min(self.free, self.limit - self.held)
        return int(self.share * self.free)

    def with_weights(self, num_bytes: int) -> DeviceMemory:
        """The memory once this much of it has been taken."""
        return replace(self, free=self.free - num_bytes, held=self.held + num_bytes)

    def describe(self) -> str:
        """Say how much is left, and why it is not more."""
        if self.limit is not None and self.limit <= self.held:
            held = format_bytes(self.held)
            return f"device_memory is {format_bytes(self.limit)}, and {held} are needed already"
        if self.limit is not None and self.limit - self.held < self.free:
            return f"{format_bytes(self.room)} of the {format_bytes(self.limit)} of device_memory are left"
        has_others = self.share < 1 and self.others > 0
        others = f" beside {format_bytes(self.others)} of other processes" if has_others else ""
        return f"{format_bytes(max(self.room, 0))} are free{others}"


class StepBytes(NamedTuple):
    """The bytes that the steps of an engine take in addition to weights and KV cache."""

    layers: int  # bytes of the step with the most tokens, while its layers are computed
    logits: int  # bytes of the step with the most rows, while they are sampled
    graphs: int = 0  # kept by the steps that are captured, all together
    buffers: int = 0  # buffers of the device half, as long as it lives
    scratch: int = 0  # the part of `layers` that fewer tokens need as well

    @property
    def activations(self) -> int:
        """The most that a step takes at any time."""
        return max(self.layers, self.logits)

    @property
    def graph_block(self) -> int:
        """The part of `graphs` that all captured steps share; other streams than theirs have blocks too."""
        return int((self.graphs - GRAPH_WORKSPACE) / GRAPH_FACTOR) + GRAPH_WORKSPACE if self.graphs else 0

    @property
    def total(self) -> int:
        """All bytes that must be left for steps, outside the KV cache."""
        return self.activations + self.graphs + self.buffers


class Scratch(NamedTuple):
    """Bytes that products of the largest step take in addition to those per token: a matrix, unpacked."""

    layers: int = 0  # the largest of them
    head: int = 0


NO_SCRATCH = Scratch()


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The shape the KV cache will have."""

    num_blocks: int
    block_size: int
    bytes_per_token: int  # bytes of a token in the blocks of all tables
    num_tables: int = 1  # blocks that hold a token: one for each group of layers (cache/layout.py)
    num_host_blocks: int = 0  # blocks in host memory

    @property
    def num_tokens(self) -> int:
        """Tokens the whole cache holds in all layers; more, if some layers free blocks that left a window."""
        return self.num_blocks // self.num_tables * self.block_size

    @property
    def bytes_per_block(self) -> int:
        """Memory one block takes."""
        return self.block_size * self.bytes_per_token // self.num_tables

    @property
    def num_bytes(self) -> int:
        """Memory the whole cache takes."""
        return self.num_blocks * self.bytes_per_block


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_element: int) -> int:
    """Bytes of keys and values of one token in all layers; heads in elements of one byte have a scale."""
    scale = FLOAT32_BYTES if bytes_per_element == 1 else 0
    return 2 * num_layers * num_kv_heads * (head_dim * bytes_per_element + scale)


def workspace_share(num_layers: int, *, gathers: bool = True, widening: float = 1.0) -> float:
    """The share of the KV cache's size that attention needs again: one layer, padded to at most its double.

    `widening`: bytes of a gathered element for each byte of a kept one.
    The share is 0 for kernels that read keys and values where they lie: these copy nothing.
    """
    return 2 * widening / num_layers if gathers else 0.0


def graph_pool_bytes(layers: int, logits: int, scratch: int) -> int:
    """Bytes of the pool of captured steps, of which the largest takes these.

    `scratch` of the layers is one tensor, which does not fit into the gaps that smaller ones leave.
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
    """Size the cache for what is free once the weights are loaded and steps and attention have their room.

    A cache whose size was not given takes at most `share` of what is free; one that was asked for must fit.
    `workspace` is the share of its size that attention needs again; `left` says why no more is free.
    """
    if free_bytes <= 0:
        raise NoRoom(
            f"weights and what the process holds already take {format_bytes(-free_bytes)} more than there "
            f"is: {left or 'no more memory is free'}; 'infer plan' shows what fits"
        )
    room = int((free_bytes - step.total) / (1 + workspace))
    left = left or f"{format_bytes(free_bytes)} are free"
    parts = (
        f"{left} once the weights are there, and a step's activations "
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
        # what was asked for must be there, even if sequences could never use all of it
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
    """The largest round size that is not above this one, as a knob takes it."""
    if count >= 1 << 30:
        return f"{count * 10 // 2**30 / 10}GiB"
    return f"{count >> 20}MiB" if count >= 1 << 20 else f"{count}B"


def _asker(cache: CacheConfig) -> str:
    """The knob that sizes the cache, as it was set; nothing if none was."""
    if cache.num_blocks is not None:
        return f"num_blocks={cache.num_blocks}"
    return f"kv_cache_memory={cache.kv_cache_memory}" if cache.kv_cache_memory is not None else ""


def pinned_bytes(num_bytes: int) -> int:
    """Host memory that one pinned tensor takes: PyTorch rounds it up to a power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def check_host_blocks(
    cache: CacheConfig, size: CacheSize, free_bytes: int, *, is_pinned: bool = False, each: str = ""
) -> None:
    """Refuse more blocks in host memory than it holds; `each` names the ranks that have this much each.

    For a GPU they are one pinned tensor; scales of 8-bit blocks are another, and are counted as part of it.
    """
    taken, most_bytes = size.num_host_blocks * size.bytes_per_block, max(free_bytes, 0)
    if is_pinned:
        taken = pinned_bytes(taken)
        most_bytes = pinned_bytes(most_bytes // 2 + 1) if most_bytes else 0  # the power of two below
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
    """Decide how many blocks there are: as told, or as fits, and never more than could be used at once."""
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
        given = _asker(cache) or "what is left for the KV cache"
        if not given.startswith("kv_cache_memory"):  # its text names the amount
            given += f" ({format_bytes(max(num_slots * bytes_per_token // num_tables, 0))})"
        raise ConfigError(
            f"{given} is too little: one {unit} takes {format_bytes(block_size * bytes_per_token)}; "
            + "give it more with kv_cache_memory or num_blocks"
            + (", or lower max_seq_len" if is_contiguous else "")
            + "; 'infer plan' shows what fits"
        )
    size = CacheSize(num_blocks, block_size, bytes_per_token, num_tables)
    keeps_prefixes = cache.use_prefix_caching and cache.kv_cache_backend == "paged"
    if not cache.keeps_cache or (scheduler.preemption == "recompute" and not keeps_prefixes):
        return size  # nothing would go to host memory, so none is taken
    if cache.swap_space is None:
        return replace(size, num_host_blocks=cache.swap_blocks * num_tables)
    num_host_blocks = parse_bytes(cache.swap_space) // size.bytes_per_block
    if num_host_blocks < num_tables:
        raise ConfigError(
            f"swap_space={cache.swap_space} has no room for {block_size} tokens, which take "
            f"{format_bytes(num_tables * size.bytes_per_block)}; give it that at least, or leave it out"
        )
    return replace(size, num_host_blocks=num_host_blocks // num_tables * num_tables)  # the same for all


def format_bytes(count: float) -> str:
    """A size for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
