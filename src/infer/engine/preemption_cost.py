"""The cost of work on this machine, measured once when an engine is built: preemption, and prompts."""

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

PROBE_TOKENS = 64  # tokens of the prefill that measures what recomputing costs
GPU_PROBE_TOKENS = 512  # tokens of it on a GPU, where a shorter one measures launches
PROBE_BLOCKS = 16  # blocks that are copied to measure what swapping costs
NUM_PROBES = 3  # the best counts: another process may disturb one


@torch.inference_mode()
def measure_cost(
    prefill: Callable[[int], float], model: Model, store: KVStore, block_size: int, max_tokens: int
) -> PreemptionCost:
    """Time some blocks' way to host memory and a short `prefill` of the model, and return both per token.

    `max_tokens`: tokens of the largest step; there is memory for no more.
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
    """The seconds that the model takes for one prompt, launched kernel by kernel; the best of three."""

    def prefill() -> None:
        step = WholeSequence(attend_sdpa, device)
        step.advance(num_tokens)
        model(tokens_T, step)

    tokens_T = torch.arange(num_tokens, device=device) % model.config.vocab_size
    return min(_seconds(prefill, device) for _ in range(NUM_PROBES))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    work()  # the first time pays for allocations
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start
