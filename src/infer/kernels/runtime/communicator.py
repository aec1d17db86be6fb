"""Collective operations of the ranks of one model: the interface between layers and the transports.

    all_reduce    every rank has a share of a sum             ──►  every rank has the sum
    all_gather    every rank has some columns of a matrix     ──►  every rank has all of them

Every rank makes the same calls in the same order, with the same number of rows. Shares are added in rank
order, so all ranks get the same bits. On CPUs the ranks share memory (kernels/cpu/collectives.py), on GPUs
they write to each other's memory (gpu_communicator.py), and between machines NCCL moves the data and adds in
an order of its own (node_communicator.py).

If the layers of a model are split into stages, a `Pipe` moves hidden states from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from infer.kernels.linear.residual import ResidualInput, ResidualSum


class Communicator(Protocol):
    """One of the ranks that compute a model together."""

    rank: int  # its number, from 0
    size: int  # the number of ranks
    can_add: bool = False  # True: `add` sums and adds to the residual stream in one launch

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the tensors of all ranks; `x` may be overwritten with it."""
        ...

    def all_gather(self, x_MN: torch.Tensor, num_columns: int) -> torch.Tensor:
        """The columns of all ranks side by side, [M, num_columns]; the last ranks have fewer than N."""
        ...

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """The bytes of every rank, of equal length, possibly padded with zeros; not part of a step."""
        ...

    def num_parts(self, num_rows: int, size: int) -> int | None:
        """The number of partial sums of squares per row that `add` returns; None: too many rows for `add`."""
        return None

    def add(self, x_MN: torch.Tensor, stream: ResidualInput) -> ResidualSum:
        """Add the sum of the tensors of all ranks to the stream, and start the norm that reads it."""
        raise TypeError(f"{type(self).__name__} has no launch that adds to the stream")


class Pipe(Protocol):
    """One rank of a model whose layers are split into stages, linked to the previous and the next stage."""

    @property
    def stage(self) -> int:
        """The number of its stage, from 0."""
        ...

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        ...

    def take(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Wait for the rows [num_rows, width] of the previous stage and return them."""
        ...

    def pass_on(self, x_MN: torch.Tensor) -> None:
        """Pass rows on to the next stage."""
        ...

    def tick(self) -> None:
        """Report progress to the watchdog: one more layer has been computed."""
        ...


class RankLine(NamedTuple):
    """The state of a rank, as all ranks see it."""

    progress: int  # a number that grows with every exchange, layer, and piece passed on
    waiting: int  # 0: it computes; 1: it waits for other ranks; 2: for a message
    sum_s: float  # seconds spent waiting for sums and columns of other ranks
    stage_s: float  # seconds spent waiting for another stage
    idle_s: float  # seconds spent waiting for messages

    @property
    def needs_others(self) -> bool:
        """True if it waits for a sum, or for rows of another stage."""
        return self.waiting == 1


class RankGroup(Protocol):
    """The ranks of a model as seen by rank 0, which has the engine."""

    communicator: Communicator  # the ranks that have parts of the same layers
    pipe: Pipe | None  # the stages before and after; None: every rank has all layers

    def send(self, kind: int, body: bytes | bytearray) -> None:
        """Send a message to all other ranks."""
        ...

    def wait(self) -> None:
        """Wait until all other ranks have finished a long task: loading, or building their device half."""
        ...

    def lines(self) -> Sequence[RankLine]:
        """The state of each rank, with its waiting times."""
        ...

    def expect(self) -> None:
        """Note that a step on the GPUs is awaited, which either ends soon or never."""
        ...

    def check(self, *, is_idle: bool | None = None) -> None:
        """Raise `DeviceLost` if a rank is gone: no result since then can be used.

        Ranks stay awaited until the next message unless `is_idle`; default: every message has been answered.
        """
        ...

    def watch(self, on_idle_loss: Callable[[], None]) -> None:
        """Call this from a thread when a rank is lost while no step waits; `check` gives the reason."""
        ...

    def close(self, reason: str = "") -> None:
        """Stop all other ranks; with a reason, every later `check` raises it."""
        ...
