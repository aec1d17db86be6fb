"""The number of threads that PyTorch uses on a CPU: for small operations, one is better than all.

PyTorch splits an operation among OpenMP's threads and waits for all of them. A thread that has finished its
share then spins for about ten milliseconds, waiting for more work, before it sleeps.

Sampling one token is a dozen operations on one row of logits, and unpacking a matrix of a GGUF file hundreds
of operations on a few rows. All threads are a bad trade there: on an idle machine, the spinning takes a core
from the next step, and on a busy one, each operation waits until the system schedules the other threads.
Sampling one token can then take longer than computing fifty. Many rows are worth all threads. Nothing between
one and all is used: OpenMP ends threads that it does not need at the moment, and starts others later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

FEW_ROWS = 8


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch with one thread inside the block, and restore the number of threads afterwards."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)  # takes half a microsecond
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def threads_for(num_rows: int) -> AbstractContextManager[None]:
    """A context with one PyTorch thread for few rows of logits, and all threads for many."""
    return one_thread() if num_rows <= FEW_ROWS else nullcontext()
