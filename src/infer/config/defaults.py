"""The defaults that depend on the device and on the size of the model.

A knob whose default is None is decided here once, by `resolve.py`. The help texts of `settings.py` quote
these numbers.
"""

from __future__ import annotations

from typing import NamedTuple


class StepDefaults(NamedTuple):
    """The size of a device's steps unless a knob says otherwise: long enough to be efficient.

    A sequence that decodes waits for the whole step. On a CPU 512 tokens of a prompt take nearly a second. On
    a GPU they take a small model three milliseconds, and more tokens at once take less each: it computes all
    prompts that are there. A large model takes twelve: it gets short chunks, unless many wait.
    """

    batch_size: int
    batched_tokens: int
    chunk_size: int | None  # None: as long as the step
    mixed_tokens: int | None  # prompt tokens of a step in which others decode; None: no limit of their own
    busy_tokens: int = 0  # all tokens of a short step, where hurried ones are frequent; 0: never short
    packed_tokens: int | None = None  # prompt tokens of a step with many short prompts; None: no such limit


CPU_STEPS = StepDefaults(batch_size=64, batched_tokens=512, chunk_size=512, mixed_tokens=128)
GPU_STEPS = StepDefaults(
    batch_size=256, batched_tokens=8192, chunk_size=None, mixed_tokens=128, busy_tokens=1024
)
LARGE_GPU_STEPS = GPU_STEPS._replace(batched_tokens=16384)  # the host launches half as many kernels per token
LARGE_GPU_BYTES = 64 << 30
TIGHT_GPU_STEPS = GPU_STEPS._replace(batch_size=32, batched_tokens=1024, busy_tokens=0)  # of a large model
TIGHT_GPU_BYTES = 12 << 30  # with no more, what large steps need is worth more as KV cache
SMALL_MODEL_MIXED_TOKENS, SMALL_MODEL_BUSY_TOKENS = 8192, 4096  # on a GPU
LAUNCHED_LAYER = 1e11  # weights times tokens: what a large GPU multiplies while the CPU launches a layer
PACKED_TOKENS = 4096  # where that is less than a layer: steps with more would wait for their launches
SMALL_MODEL_WEIGHTS = 1_500_000_000  # of all layers that one token meets; a model with more is not small
SIMULATED_STEPS = StepDefaults(batch_size=64, batched_tokens=2048, chunk_size=512, mixed_tokens=None)

STEPS_AHEAD = 3
"""Steps that may be launched before one is read, of a small model on a GPU while all sequences decode.

A step of a small model takes half a millisecond, and a host that another thread or the system delays by one
or two of them would leave the GPU without work. The price: the first step of a new request is queued behind
those already launched, and a sequence that stops at an id has as many tokens computed in vain. Where a step
takes several milliseconds no host is that late, and the price is felt: there it is 1.
"""

CPU_SHARE = 0.25  # of the memory that is free, for the KV cache of a model on the CPU
GPU_SHARE = 0.9  # of a GPU's free memory once the weights are there, for steps and KV cache
SERVER_MAX_QUEUE = 512  # sequences that may wait for an engine of a server
