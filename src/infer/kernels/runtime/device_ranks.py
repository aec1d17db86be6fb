"""The common base of ranks on GPUs, independent of transport: their numbering, and steps computed alone.

Each rank computes a step of padding alone and at any time: warm-ups and rehearsals exchange nothing
(`alone`). A capture records exchanges without running them.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from struct import Struct
from typing import Final, NamedTuple

import torch

from infer.errors import ConfigError, DeviceLost
from infer.kernels.cpu.collectives import SharedCommunicator
from infer.kernels.runtime.communicator import Communicator
from infer.kernels.runtime.cuda_build import index_of
from infer.kernels.runtime.dispatch import device_kind, is_gpu

WAIT_S: Final = 60.0  # seconds after which a rank that does not answer counts as lost
_FACTS: Final = Struct("<BQ63s")  # index of a GPU, its free bytes, the start of its name


class RankFacts(NamedTuple):
    """The facts about the GPU of a rank."""

    card: int  # index of the GPU on its machine
    free: int  # free bytes of its memory, once the weights are loaded
    name: str

    @classmethod
    def of(cls, device: torch.device) -> RankFacts:
        """The facts about a device of this process."""
        if not is_gpu(device):
            return cls(0, 0, device_kind(device))
        free, _ = torch.cuda.mem_get_info(device)
        return cls(index_of(device), free, torch.cuda.get_device_name(device))

    @classmethod
    def read(cls, text: bytes) -> RankFacts:
        """Parse the facts that `to_bytes` wrote."""
        card, free, name = _FACTS.unpack_from(text)
        return cls(card, free, name.rstrip(b"\0").decode())

    def to_bytes(self) -> bytes:
        """The facts in a fixed number of bytes."""
        return _FACTS.pack(self.card, self.free, self.name.encode())


def have_room(ranks: Sequence[RankFacts]) -> bool:
    """True if kernels may start while another one waits for a rank: at most two ranks share a GPU."""
    return max(Counter(each.card for each in ranks).values()) <= 2


class DeviceRanks(Communicator):
    """One of several ranks on GPUs; if the layers are split into stages, also its `Pipe` to other stages.

    Stages are numbered from the first layers, ranks from the last stage: rank 0 belongs to it, and samples.
    """

    deterministic = False  # True: sums have the same bits for any number of rows

    def __init__(self, shared: SharedCommunicator, device: torch.device, dtype: torch.dtype) -> None:
        """`shared` joins the same ranks on the host; `dtype` is the type of sums and hidden states."""
        self.rank, self.size, everyone = shared.rank, shared.size, shared.everyone()
        self._everyone, self._device, self._dtype, self._is_alone = everyone, device, dtype, False
        self.num_stages = everyone.size // self.size
        self.stage = self.num_stages - 1 - everyone.rank // self.size
        self.shortage = 0  # bytes that another rank's GPU has less free than this rank's GPU

    def _meet(self, mine: bytes) -> tuple[list[bytes], list[RankFacts]]:
        """Gather the bytes of every rank and the facts about its GPU; all GPUs must be of one kind."""
        facts = RankFacts.of(self._device).to_bytes()
        found = self.gather_bytes(facts + mine)
        ranks = [RankFacts.read(each) for each in found]
        check_alike([each.name for each in ranks])
        return [each[len(facts) : len(facts) + len(mine)] for each in found], ranks

    def _note_shortage(self, ranks: Sequence[RankFacts]) -> None:
        """Note how much less free memory another rank has, if each rank has its own GPU."""
        self.shortage = max(ranks[self._everyone.rank].free - min(each.free for each in ranks), 0)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Exchange nothing inside the block, except in captured steps; results are meaningless."""
        before, self._is_alone = self._is_alone, True
        try:
            yield
        finally:
            self._is_alone = before

    @property
    def _exchanges(self) -> bool:
        return not self._is_alone or (is_gpu(self._device) and torch.cuda.is_current_stream_capturing())

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """The bytes of every rank of every stage, exchanged through the host."""
        return self._everyone.gather_bytes(mine)

    @abstractmethod
    def first(self, x: torch.Tensor) -> None:
        """Replace a tensor of 8-byte ids by the tensor of rank 0 of all stages, which samples."""

    @abstractmethod
    def take(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows [num_rows, width] from the previous stage; the GPU waits for them."""

    @abstractmethod
    def pass_on(self, x_MN: torch.Tensor) -> None:
        """Pass rows on to the next stage; the GPU waits if that stage is far behind."""

    def pass_ids(self, ids_N: torch.Tensor) -> None:
        """Note that this stage has drawn, or a later one will draw, the ids of a step; `first` fetches them.

        The call is not part of a captured step. `ids_N` is the memory of all ids that a step may draw.
        """

    def tick(self) -> None:
        """Do nothing: a step on a GPU is watched as a whole (client/rank_group.py)."""


def check_alike(names: Sequence[str]) -> None:
    """Reject ranks on GPUs of different kinds: kernels and sizes are chosen for rank 0's GPU."""
    if len(set(names)) > 1:
        found = ", ".join(f"rank {rank} has {name}" for rank, name in enumerate(names))
        raise ConfigError(
            f"{len(names)} ranks need GPUs of one kind, but {found}; select equal ones with "
            "CUDA_VISIBLE_DEVICES, or use one rank"
        )


def wait_for_all(shared: SharedCommunicator, wait_s: float, hint: str, thread: threading.Thread) -> None:
    """Wait for a thread that ends when all ranks have joined."""
    end = time.monotonic() + wait_s
    while thread.is_alive():
        thread.join(0.1)
        if shared.is_aborted or time.monotonic() > end:
            raise DeviceLost(f"ranks did not come together for NCCL within {wait_s:.0f} s{hint}")
