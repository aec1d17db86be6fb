"""The ranks of a model as threads of one process: they compute the same, and nothing has to be started.

They cannot run recorded steps, which hold the lock of the one pool of threads while they wait for each other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch

from infer.client.load import load_part
from infer.config.settings import EngineConfig
from infer.engine import machine
from infer.engine.rank_worker import serve_rank
from infer.errors import DeviceLost
from infer.kernels.runtime.communicator import Communicator, Pipe
from infer.loader.find.source import resolve_model
from infer.loader.headers import read_headers
from infer.loader.load import LoadedModel
from tests.support.rank_nodes import open_nodes


class RankThreads:
    """Stands in for `RankProcesses` (client/rank_group.py)."""

    def __init__(self, config: EngineConfig, num_threads: int, device: torch.device) -> None:
        size = config.load.num_ranks
        self._changed, self._num_done, self._num_parts = threading.Condition(), [0] * size, 0
        self._reason = "a rank is gone"
        self._error: BaseException | None = None
        headers = read_headers(resolve_model(config.load.model))
        self._nodes = open_nodes(
            size, config.load.pipeline_parallel_size, config.load.nnodes,
            meets_all=machine.has_gpu_kernels(device),
        )  # fmt: skip
        self._links = self._nodes.links
        self.communicator: Communicator = self._links[0].communicator
        self.pipe: Pipe | None = self._links[0].pipe
        self.lines = self._links[0].lines
        self._threads = []
        for rank in range(1, size):
            loaded = load_part(config, headers, rank)
            thread = threading.Thread(target=self._serve, args=(loaded, rank), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, loaded: LoadedModel, rank: int) -> None:
        try:
            with contextlib.suppress(DeviceLost):
                serve_rank(loaded, self._links[rank], lambda: self._count(rank))
        except BaseException as error:
            self._error = error
            self.close(f"rank {rank} failed: {error!r}")

    def _count(self, rank: int) -> None:
        with self._changed:
            self._num_done[rank] += 1
            self._changed.notify_all()

    def send(self, kind: int, body: bytes | bytearray) -> None:
        self._links[0].send(kind, body)

    def wait(self) -> None:
        self._num_parts += 1
        with self._changed:
            while min(self._num_done[1:]) < self._num_parts and not self._links[0].communicator.is_aborted:
                self._changed.wait(1.0)
        self.check()

    def expect(self) -> None:
        pass

    def check(self, *, is_idle: bool = True) -> None:
        if self._links[0].communicator.is_aborted:
            raise DeviceLost(self._reason) from self._error

    def watch(self, on_idle_loss: Callable[[], None]) -> None:
        pass

    def close(self, reason: str = "the engine was closed") -> None:
        self._reason = reason
        self._nodes.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def __del__(self) -> None:
        self._nodes.close()
