"""Measures the GPU memory of an engine's steps by running the largest possible step.

Before the KV cache takes the rest of the memory, a device half with a minimal cache computes the largest step
that the settings allow: `max_num_batched_tokens` tokens, then the logits of `max_batch_size` rows, which are
sampled. All tokens are padding, so nothing is written. The peak memory of both parts, plus an allowance for
fragmentation, is the size of the arena (device_memory.py). The step also compiles the kernels that the first
prompts need.

Captured steps have their own pool for layers and sampling: one block, allocated when the first step is
captured (execution/gpu/graphs.py). Its size is the measured memory times the largest captured step's share of
the tokens, except for matrices that are unpacked for a product (`StepBytes.scratch`): their size does not
depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from infer.cache.memory import GRAPH_WORKSPACE, StepBytes, graph_pool_bytes
from infer.config.knobs import format_bytes
from infer.config.resolve import ResolvedScheduler
from infer.engine import device_memory
from infer.engine.gc_freeze import collect
from infer.errors import ConfigError, NoRoom
from infer.execution.gpu.warm_up import WarmUp

GAP_FACTOR = 1.25  # arena size relative to the measured peak, to allow for fragmentation


def rehearse(
    make_warm_up: Callable[[], WarmUp],
    compile_steps: Callable[[WarmUp], None],
    device: torch.device,
    scheduler: ResolvedScheduler,
    computed: StepBytes,
    graph_tokens: int | None,
    asked: str | None,
) -> StepBytes:
    """Return the measured bytes of steps, for logits at least `computed`. `asked`: device_memory."""
    torch.cuda.empty_cache()
    memory = device_memory.look(device, asked)
    if memory.room <= 0:
        raise NoRoom(
            f"the weights take {format_bytes(-memory.room)} more than there is: the limit, device_memory, is "
            f"{format_bytes(memory.limit or memory.total)}, and other processes hold "
            f"{format_bytes(memory.others)}; 'infer plan' shows what fits"
        )
    num_rows, num_tokens = scheduler.max_batch_size, scheduler.max_num_batched_tokens
    try:
        made: list[WarmUp] = []
        buffers = device_memory.peak_of(lambda: made.append(make_warm_up()), device)
        warm_up = made.pop()
        compile_steps(warm_up)  # outside the measurement: its memory is freed again
        layers = device_memory.peak_of(warm_up.compute_padding, device)
        logits = device_memory.peak_of(warm_up.sample_padding, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of max_num_batched_tokens={num_tokens} and max_batch_size={num_rows} does not fit "
            f"next to the weights: {memory.describe()} ({str(error).splitlines()[0]}); set "
            "max_num_batched_tokens="
            f"{max(num_tokens // 4, 1)} and max_batch_size={max(num_rows // 4, 1)}, or raise device_memory"
        ) from None
    del warm_up
    collect()  # the free memory is measured next
    graphs = 0
    if graph_tokens is not None:
        share = min((num_rows + graph_tokens) / num_tokens, 1.0)
        scratch = min(computed.scratch, layers)
        graphs = graph_pool_bytes(scratch + int((layers - scratch) * share), logits, scratch)
        buffers += GRAPH_WORKSPACE  # workspace of the thread that captures them
    # `computed.logits` covers the host's sampler, which copies the logits more often than the device's
    return StepBytes(
        int(GAP_FACTOR * layers), int(GAP_FACTOR * max(logits, computed.logits)), graphs, buffers
    )
