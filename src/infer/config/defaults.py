"""Defaults that were decided, not measured; measured defaults, by device, are in `profiles/`.

The help texts of `settings.py` quote these numbers.
"""

from __future__ import annotations

from infer.config.profiles.profile import StepDefaults

SIMULATED_STEPS = StepDefaults(batch_size=64, batched_tokens=2048, chunk_size=512, mixed_tokens=None)

CPU_SHARE = 0.25  # share of the free memory that the KV cache of a model on the CPU takes
GPU_SHARE = 0.9  # share of a GPU's memory, free after the weights are loaded, for steps and KV cache
SERVER_MAX_QUEUE = 512  # sequences that may wait for an engine of a server
MAX_SEQUENCES = 128  # n, best_of or beams of one request; a server's max_n may allow fewer
