"""Measures, while an engine is built, what preemption and prompts cost on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from infer.cache.kv_store import KVStore
from infer.cache.layout import TransferKind
from infer.kernels.attention.reference import attend_sdpa
from infer.kernels.runtime.dispatch import is_gpu, synchronize
from infer.layers.whole_sequence import WholeSequence
from infer.models.model import Model
from infer.scheduling.preemption import PreemptionCost

PROBE_TOKENS = 64  # tokens of the prefill that measures recomputation
GPU_PROBE_TOKENS = 512  # tokens of this prefill on a GPU, where a shorter one would measure kernel launches
PROBE_BLOCKS = 16  # blocks that are copied to measure swapping
NUM_PROBES = 3  # runs, of which the fastest counts: another process may slow one down


@torch.inference_mode()
def measure_cost(
    prefill: Callable[[int], float], model: Model, store: KVStore, block_size: int, max_tokens: int
) -> PreemptionCost:
    """Time copies of blocks to host memory and a short prefill; return the seconds per token of both.

    `prefill` runs a prompt of a given length. `max_tokens`: tokens of the largest step that fits in memory.
    """
    probe = GPU_PROBE_TOKENS if is_gpu(store.device) else PROBE_TOKENS
    num_tokens, num_tables = min(probe, max_tokens, model.config.context_len), max(store.tables) + 1
    blocks = range(min(PROBE_BLOCKS, store.num_host_blocks))
    moves = [(TransferKind.SWAP_OUT, 0, block) for block in blocks]
    swap = _seconds(lambda: store.transfer(moves), store.device) * num_tables / (len(blocks) * block_size)
    recompute = prefill(num_tokens) / num_tokens
    return PreemptionCost(swap_seconds=swap, recompute_seconds=recompute)


@torch.inference_mode()
def prefill_seconds(model: Model, device: torch.device, num_tokens: int) -> float:
    """Return the seconds that the model takes for one prompt without graphs; the best of three runs."""

    def prefill() -> None:
        step = WholeSequence(attend_sdpa, device)
        step.advance(num_tokens)
        model(tokens_T, step)

    tokens_T = torch.arange(num_tokens, device=device) % model.config.vocab_size
    return min(_seconds(prefill, device) for _ in range(NUM_PROBES))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    work()  # the first run includes allocations
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start
