"""Joint operations of the ranks of one model: the one protocol between layers and whatever joins processes.

    all_reduce    every rank has a share of a sum             ──►  every rank has the sum
    all_gather    every rank has some columns of a matrix     ──►  every rank has all of them

Every rank makes the same calls in the same order, with the same number of rows. Shares are added in the
order of the ranks, so all ranks have the same bits. On CPUs the ranks share memory
(kernels/cpu/collectives.py), on GPUs they write to each other's (gpu_communicator.py), and between machines
NCCL carries what they exchange, in an order of its own (node_communicator.py).

Where the layers of a model are in stages, a `Pipe` takes hidden states from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from infer.kernels.linear.residual import ResidualInput, ResidualSum


class Communicator(Protocol):
    """One rank of several that compute one model."""

    rank: int  # its number, from 0
    size: int  # the number of ranks
    can_add: bool = False  # a sum may be added to the residual stream in the same launch, by `add`

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the tensors of all ranks; `x` may be overwritten with it."""
        ...

    def all_gather(self, x_MN: torch.Tensor, num_columns: int) -> torch.Tensor:
        """The columns of all ranks side by side, [M, num_columns]; the last ranks have fewer than N."""
        ...

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """The bytes of every rank, each as many, perhaps followed by zeros; not part of a step."""
        ...

    def num_parts(self, num_rows: int, size: int) -> int | None:
        """The parts of squares that `add` leaves for this many rows; None: it is for fewer rows."""
        return None

    def add(self, x_MN: torch.Tensor, stream: ResidualInput) -> ResidualSum:
        """Add the sum of the tensors of all ranks to the stream, and begin the norm that reads it."""
        raise TypeError(f"{type(self).__name__} has no launch that adds to the stream")


class Pipe(Protocol):
    """One rank of a model whose layers are in stages, and its ways from the stage before and to the next."""

    @property
    def stage(self) -> int:
        """The number of its stage, from 0."""
        ...

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        ...

    def take(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows [num_rows, width] that the stage before passes on, which are waited for."""
        ...

    def pass_on(self, x_MN: torch.Tensor) -> None:
        """Pass rows on to the next stage."""
        ...

    def tick(self) -> None:
        """Say that another layer is computed, for those who watch."""
        ...


class RankLine(NamedTuple):
    """The state of a rank, as all ranks see it."""

    progress: int  # a number that grows with every exchange, layer, and piece passed on
    waiting: int  # 0: it computes; 1: it waits for other ranks; 2: for a message
    sum_s: float  # seconds that it has waited for sums and columns of other ranks
    stage_s: float  # seconds that it has waited for another stage
    idle_s: float  # seconds that it has waited for messages

    @property
    def needs_others(self) -> bool:
        """True if it waits for a sum, or for rows of another stage."""
        return self.waiting == 1


class RankGroup(Protocol):
    """The ranks of a model as rank 0, which has the engine, sees them."""

    communicator: Communicator  # the ranks that have parts of the same layers
    pipe: Pipe | None  # the stages before and after; None: every rank has all layers

    def send(self, kind: int, body: bytes | bytearray) -> None:
        """Send all other ranks a message."""
        ...

    def wait(self) -> None:
        """Wait until all other ranks have finished a long task: loading, or building what runs steps."""
        ...

    def lines(self) -> Sequence[RankLine]:
        """The state of each rank, and how long it has waited."""
        ...

    def expect(self) -> None:
        """Say that a step is waited for which the GPUs compute, and which ends soon or never."""
        ...

    def check(self, *, is_idle: bool | None = None) -> None:
        """Raise `DeviceLost` if a rank is gone: no result since then can be used.

        Until the next message they are waited for unless `is_idle`, by default if this answers the last one.
        """
        ...

    def watch(self, on_idle_loss: Callable[[], None]) -> None:
        """Have a thread call this when a rank is gone that no step waits for: `check` knows why."""
        ...

    def close(self, reason: str = "") -> None:
        """End all other ranks; with a reason, every further `check` raises it."""
        ...
