"""How many of its threads PyTorch may use to sample on a CPU.

PyTorch shares an operation among OpenMP's threads and waits until every one of them has been seen. A thread
that has done its share then looks for the next one in a loop, for about ten milliseconds, before it sleeps.

Sampling one token is a dozen such operations on one row of logits, a bad bargain: on an idle machine the
loop takes a core from the next step, and on a busy one each operation waits until the system has given the
other thread its turn. One token can then take longer to sample than fifty take to compute. Many rows are
worth it:

    rows to sample      1 .. 8     9 .. 16     17 .. 24     ...
    threads, at most       1          2           3
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ROWS_PER_THREAD = 8


@contextmanager
def threads_for(num_rows: int) -> Iterator[None]:
    """Let PyTorch use as many of its threads as `num_rows` rows of logits are worth."""
    usual = torch.get_num_threads()
    torch.set_num_threads(min(usual, max(1, -(-num_rows // ROWS_PER_THREAD))))  # half a microsecond
    try:
        yield
    finally:
        torch.set_num_threads(usual)
