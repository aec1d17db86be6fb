"""The one line a start says about an engine: what fits into it, and what computes it.

    SmolLM2: context of 8192 tokens, 64 places in the batch, KV cache of 5.6 GiB (130112 tokens),
             computed on cpu with 4 thread(s) and kernels in C, weights int4, the rest float32

Whoever wonders why a prompt is refused, why requests wait, or why it is slow finds the first answer here.
"""

from __future__ import annotations

import torch

from infer.cache.memory import CacheSize, format_bytes
from infer.config.settings import SchedulerConfig
from infer.execution.cpu_step import attention_gathers
from infer.loader.cpu_weights import PACKED
from infer.loader.load import LoadedModel


def describe_engine(
    loaded: LoadedModel, scheduler: SchedulerConfig, size: CacheSize, attention_backend: str
) -> str:
    """The facts that a start has decided, as the line of the log."""
    dtype = str(loaded.dtype).removeprefix("torch.")
    return (
        f"{loaded.name}: context of {loaded.max_seq_len} tokens, {scheduler.width} places in the batch, "
        f"KV cache of {format_bytes(size.num_bytes)} ({size.num_tokens} tokens), "
        f"computed on {_computer(loaded, attention_backend)}, weights {loaded.weights}, the rest {dtype}"
    )


def _computer(loaded: LoadedModel, attention_backend: str) -> str:
    device = loaded.device
    if device.type != "cpu":
        return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    gathers = attention_gathers(attention_backend, device, loaded.dtype, loaded.config.head_dim)
    kernels = "PyTorch's kernels" if gathers and loaded.weights not in PACKED else "kernels in C"
    return f"cpu with {torch.get_num_threads()} thread(s) and {kernels}"
