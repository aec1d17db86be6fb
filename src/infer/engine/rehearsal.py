"""The GPU memory that the steps of an engine take, measured by running the largest possible one.

Before the KV cache takes the rest of the memory, a device half with a minimal cache computes the largest step
that the settings allow: `max_num_batched_tokens` tokens, then the logits of `max_batch_size` rows, which are
sampled. All of it is padding, so nothing is written. The peaks of both parts, a little more for the gaps that
tensors of other sizes leave, are the arena of all later steps (device_memory.py). The step also compiles the
kernels that the first prompts need.

Captured steps have their own pool, for their layers and their sampling: one block, which is allocated when
the first of them is captured (execution/gpu/graphs.py). The largest of them has fewer tokens than the largest
step, and its share of the tokens is its share of the memory; but a matrix that is unpacked for a product
(`StepBytes.scratch`) has the same size for any number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from infer.cache.memory import GRAPH_WORKSPACE, StepBytes, format_bytes, graph_pool_bytes
from infer.config.resolve import ResolvedScheduler
from infer.engine import device_memory
from infer.engine.gc_freeze import collect
from infer.errors import ConfigError, NoRoom
from infer.execution.gpu.warm_up import WarmUp

GAP_FACTOR = 1.25  # bytes of an arena for tensors of all sizes, for each byte of the largest step


def rehearse(
    make_warm_up: Callable[[], WarmUp],
    compile_steps: Callable[[WarmUp], None],
    device: torch.device,
    scheduler: ResolvedScheduler,
    computed: StepBytes,
    graph_tokens: int | None,
    asked: str | None,
) -> StepBytes:
    """Return what steps take, as measured; for logits at least what is `computed`. `asked`: device_memory."""
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
        compile_steps(warm_up)  # its memory is free again, and not part of the buffers
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
    collect()  # the next part looks at how much is free
    graphs = 0
    if graph_tokens is not None:
        share = min((num_rows + graph_tokens) / num_tokens, 1.0)
        scratch = min(computed.scratch, layers)
        graphs = graph_pool_bytes(scratch + int((layers - scratch) * share), logits, scratch)
        buffers += GRAPH_WORKSPACE  # workspace of the thread that captures them
    # the host's sampler, for requests that need it, copies the logits more often than the device's
    return StepBytes(
        int(GAP_FACTOR * layers), int(GAP_FACTOR * max(logits, computed.logits)), graphs, buffers
    )
