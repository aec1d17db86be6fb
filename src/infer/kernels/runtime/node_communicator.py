"""Ranks on several machines, each with its own GPU, that exchange everything through NCCL (nccl.py).

    sums   the ranks of a stage: sums, columns of logits, and the drawn ids of the stage's first rank
    rows   one rank of each stage: hidden states, sent to the next stage
    ids    the same ranks, on a separate stream: drawn ids, from the last stage to all others

NCCL may block a sender until the receiver is ready. Rows go one way, so a chain of stages cannot deadlock.
Ids go the other way while later rows are in flight, so both ends start their broadcast on the side when a
step is launched, and a stage waits for the ids when it needs them. Captured steps contain sums and rows. A
captured exchange must be captured on all its ranks, so the broadcast of ids is never captured.

NCCL adds in an order that depends on the number of rows. With `deterministic`, all ranks gather all shares
instead and add them in rank order.

Shapes:  M rows, N columns of a rank, V columns of all, R ranks of a stage.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import torch

from infer.kernels.cpu.collectives import SharedCommunicator, column_share
from infer.kernels.runtime.device_ranks import WAIT_S, DeviceRanks, wait_for_all
from infer.kernels.runtime.nccl import NAME_BYTES, NcclGroup, load_nccl, make_name, nccl_version

NUM_SLOTS: Final = 64  # more than the steps and parts of steps whose ids are in flight at once
HINT: Final = (
    "; NCCL_SOCKET_IFNAME names the network interface by which the machines reach each other, and NCCL_DEBUG="
    "INFO says which one was taken"
)


class Group(Protocol):
    """One rank of a group; all ranks of the group make each call, on the current stream."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace a tensor by the sum over all ranks."""
        ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Concatenate the tensors of all ranks."""
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace a tensor by the first rank's."""
        ...

    def broadcast_aside(self, x: torch.Tensor) -> Callable[[], None]:
        """Start a broadcast next to the current stream; calling the result makes the stream wait for it."""
        ...

    def send(self, x: torch.Tensor, rank: int) -> None:
        """Send a tensor to a rank, which must receive it."""
        ...

    def receive(self, x: torch.Tensor, rank: int) -> None:
        """Replace a tensor by the next tensor that a rank sends."""
        ...

    def abort(self) -> None:
        """Abort all pending exchanges, from any thread."""
        ...


class Groups(Protocol):
    """The library with which ranks form groups."""

    def name(self) -> bytes:
        """Create a name for a new group, on its first rank; NAME_BYTES at most."""
        ...

    def join(self, name: bytes, rank: int, size: int) -> Group:
        """Join the group of that name; waits for all other ranks."""
        ...


class NcclGroups(Groups):
    """Groups of NCCL."""

    def __init__(self, shared: SharedCommunicator, device: torch.device, wait_s: float = WAIT_S) -> None:
        nccl_version()  # raises if NCCL is missing
        self._nccl, self._device = load_nccl(), device
        self._wait = partial(wait_for_all, shared, wait_s, HINT)

    def name(self) -> bytes:
        """Create a name, which contains the address of this rank."""
        return make_name(self._nccl)

    def join(self, name: bytes, rank: int, size: int) -> Group:
        """Join a group of GPUs."""
        return NcclGroup(self._nccl, name, rank, size, self._device, self._wait)


class NodeCommunicator(DeviceRanks):
    """One rank that exchanges through groups; all ranks must construct theirs at the same time."""

    def __init__(
        self,
        shared: SharedCommunicator,
        device: torch.device,
        dtype: torch.dtype,
        groups: Groups | None = None,
    ) -> None:
        """`groups` are NCCL's groups, unless given."""
        super().__init__(shared, device, dtype)
        groups = groups or NcclGroups(shared, device)
        number, size, num_stages = self._everyone.rank, self.size, self.num_stages
        # the first rank of a stage names its group of sums; ranks of the last stage name rows and ids
        leads = size > 1 and self.rank == 0, *(num_stages > 1 and number < size,) * 2
        names = [groups.name() if is_first else b"" for is_first in leads]
        found, ranks = self._meet(b"".join(name.ljust(NAME_BYTES, b"\0") for name in names))
        self._note_shortage(ranks)
        self._place = number // size  # rank in the groups with one rank of each stage; 0: the last stage
        self._groups: list[Group] = []
        shared.on_abort.append(self._abort)

        def join(which: int, first: int, rank: int, count: int) -> Group:
            name = found[first][which * NAME_BYTES : (which + 1) * NAME_BYTES]
            self._groups.append(groups.join(name, rank, count))
            return self._groups[-1]

        if size > 1:
            self._sums = join(0, number - self.rank, self.rank, size)
        if num_stages > 1:
            self._rows, self._ids = (join(each, self.rank, self._place, num_stages) for each in (1, 2))
            if self.stage:  # connects the stages before a step is captured
                self.take(1, 1, dtype)
            if self._place:
                self.pass_on(torch.zeros((1, 1), dtype=dtype, device=device))
        self._slots_SN: torch.Tensor | None = None
        self._ends: list[Callable[[], None]] = [lambda: None] * NUM_SLOTS  # waits for the ids of each slot
        self._num_passed = 0  # steps whose ids have been passed
        self._coming: deque[int] = deque()  # slots of ids that an earlier stage has not consumed yet

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the tensors of all ranks, in the memory of `x` where possible."""
        shares = x.contiguous()
        if not self.deterministic:
            if self._exchanges:
                self._sums.all_reduce(shares)
            return shares
        first, *others = self._gather(shares)
        total = first.to(torch.float32)
        for other in others:
            total += other
        return shares.copy_(total)

    def all_gather(self, x_MN: torch.Tensor, num_columns: int) -> torch.Tensor:
        """The columns of all ranks side by side, without gaps; the last ranks have fewer than the others."""
        missing = column_share(num_columns, self.size) - x_MN.shape[1]
        found_RMN = self._gather(torch.nn.functional.pad(x_MN, (0, missing)).contiguous())
        return found_RMN.transpose(0, 1).flatten(1)[:, :num_columns].contiguous()

    def first(self, x: torch.Tensor) -> None:
        """Replace a tensor of 8-byte ids by the tensor of rank 0 of all stages, which samples."""
        if not self._exchanges:
            return
        if self._place:
            slot = self._coming.popleft()
            self._ends[slot]()
            assert self._slots_SN is not None
            x.copy_(self._slots_SN[slot, : len(x)])
        elif self.size > 1:
            self._sums.broadcast(x)

    @torch.inference_mode()
    def pass_ids(self, ids_N: torch.Tensor) -> None:
        """Start to send the ids of a step to earlier stages, where `first` returns them."""
        if self.num_stages == 1 or self._is_alone:
            return
        if self._slots_SN is None:
            self._slots_SN = ids_N.new_zeros((NUM_SLOTS, len(ids_N)))
        slot, self._num_passed = self._num_passed % NUM_SLOTS, self._num_passed + 1
        self._ends[slot]()
        if self._place:
            self._coming.append(slot)
            assert len(self._coming) < NUM_SLOTS, "ids are taken before their slot is needed again"
        else:
            self._slots_SN[slot] = ids_N
        self._ends[slot] = self._ids.broadcast_aside(self._slots_SN[slot])

    def take(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows [num_rows, width] from the previous stage; the GPU waits for them."""
        new = torch.empty if self._exchanges else torch.zeros
        x_MN = new((num_rows, width), dtype=dtype, device=self._device)
        if self._exchanges:
            self._rows.receive(x_MN, self._place + 1)
        return x_MN

    def pass_on(self, x_MN: torch.Tensor) -> None:
        """Pass rows on to the next stage; the GPU may wait until that stage takes them."""
        if self._exchanges:
            self._rows.send(x_MN.contiguous(), self._place - 1)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, concatenated; zeros if nothing is exchanged."""
        found = (x.new_empty if self._exchanges else x.new_zeros)((self.size, *x.shape))
        if self._exchanges:
            self._sums.all_gather(x, found)
        return found

    def _abort(self) -> None:
        """Abort all groups in parallel: one may wait for another."""
        for group in self._groups:
            threading.Thread(target=group.abort, name="infer-group-abort", daemon=True).start()
