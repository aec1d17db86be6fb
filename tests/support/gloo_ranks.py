"""Ranks of several machines without a GPU: Gloo in the place of NCCL, and the device half on a CPU.

    python -m tests.support.gloo_ranks          a rank, as client/rank_process.py
    python -m tests.support.gloo_ranks serve …  a node, as `infer serve …`

The same communicator, device half and processes run as on GPUs; kernels are their references. NCCL may let a
sender wait for its receiver, so a sender does here, and what waits in a circle is found.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed as dist

from infer.client import rank_group
from infer.engine import build, machine, rank_worker
from infer.kernels.cpu.collectives import SharedCommunicator
from infer.kernels.runtime.communicator import Communicator
from infer.kernels.runtime.node_communicator import Group, Groups, NodeCommunicator

MODULE: Final = "tests.support.gloo_ranks"
FOLDER: Final = "INFER_TEST_GLOO"  # directory of the files by which groups find each other
TIMEOUT: Final = timedelta(seconds=60)


class GlooGroup(Group):
    """One rank of a group of processes, or of threads."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        gloo: Any = dist
        self._group = gloo.ProcessGroupGloo(gloo.FileStore(path, size), rank, size, TIMEOUT)

    def all_reduce(self, x: torch.Tensor) -> None:
        self._group.allreduce([x]).wait()

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._group.allgather([list(out.unbind())], [x]).wait()

    def broadcast(self, x: torch.Tensor) -> None:
        self._group.broadcast(x, 0).wait()

    def broadcast_aside(self, x: torch.Tensor) -> Callable[[], None]:
        work = self._group.broadcast(x, 0)
        return lambda: None if work.wait() else None

    def send(self, x: torch.Tensor, rank: int) -> None:
        self._group.send([x], rank, 0).wait()
        self._group.recv([torch.zeros(1)], rank, 1).wait()  # it has come

    def receive(self, x: torch.Tensor, rank: int) -> None:
        self._group.recv([x], rank, 0).wait()
        self._group.send([torch.zeros(1)], rank, 1).wait()

    def abort(self) -> None:
        """Let the wait of this process fail when the others are gone, which is soon."""


class GlooGroups(Groups):
    """Groups that find each other through a file, which stays if a process is killed."""

    def name(self) -> bytes:
        folder = os.environ.get(FOLDER, tempfile.gettempdir())
        return tempfile.mktemp(prefix="infer-gloo-", dir=folder).encode()

    def join(self, name: bytes, rank: int, size: int) -> Group:
        return GlooGroup(name.rstrip(b"\0").decode(), rank, size)


def join_by_gloo(settings: Any, communicator: Communicator, loaded: Any) -> Communicator:
    """What joins ranks that would be on GPUs of several machines."""
    if not isinstance(communicator, SharedCommunicator):
        return communicator
    return NodeCommunicator(communicator, loaded.device, loaded.dtype, GlooGroups())


def install(put: Callable[[object, str, Any], None] = setattr) -> None:
    """Let all ranks that this process starts, and its own, be of this kind."""
    put(rank_group, "RANK_MODULE", MODULE)
    put(machine, "has_gpu_kernels", lambda device: True)
    put(build, "join_ranks", join_by_gloo)
    put(rank_worker, "join_ranks", join_by_gloo)


if __name__ == "__main__":
    install()
    if len(sys.argv) > 1:
        from infer.cli.main import main

        sys.exit(main())
    from infer.client.rank_process import main as serve_rank

    sys.exit(serve_rank())
