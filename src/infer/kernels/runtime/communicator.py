"""Joint operations of the ranks of one model: the one protocol between layers and whatever joins processes.

    all_reduce    every rank has a share of a sum             ──►  every rank has the sum
    all_gather    every rank has some columns of a matrix     ──►  every rank has all of them

Every rank makes the same calls in the same order, with the same number of rows. Shares are added in the
order of the ranks, so all ranks have the same bits. On CPUs the ranks share memory
(kernels/cpu/collectives.py), on GPUs they write to each other's (gpu_communicator.py).
"""

from __future__ import annotations

from typing import Protocol

import torch


class Communicator(Protocol):
    """One rank of several that compute one model."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the tensors of all ranks; `x` may be overwritten with it."""
        ...

    def all_gather(self, x_MN: torch.Tensor, num_columns: int) -> torch.Tensor:
        """The columns of all ranks side by side, [M, num_columns]; the last ranks have fewer than N."""
        ...
