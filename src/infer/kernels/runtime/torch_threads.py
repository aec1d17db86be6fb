"""The number of threads that PyTorch uses on a CPU: for small operations, one is better than all.

PyTorch shares an operation among OpenMP's threads and waits until every one of them has reported. A thread
that has done its share then looks for the next one in a loop, for about ten milliseconds, before it sleeps.

Sampling one token is a dozen of these operations on one row of logits, and unpacking a matrix of a GGUF file
hundreds on a few rows. That is a bad bargain: on an idle machine the loop takes a core from the next step,
and on a busy one each operation waits until the system has given the other thread its turn. One token can
then take longer to sample than fifty take to compute. Many rows are worth all threads. Nothing between one
and all is used: OpenMP ends the threads that it does not need for once, and starts others when it needs more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

FEW_ROWS = 8


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use one thread, and afterwards as many as before."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)  # half a microsecond
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def threads_for(num_rows: int) -> AbstractContextManager[None]:
    """A context with one PyTorch thread for few rows of logits, and all threads for many."""
    return one_thread() if num_rows <= FEW_ROWS else nullcontext()
