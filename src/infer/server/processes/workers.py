"""Manages the API processes other than process 0: starts them, sends them news and questions, and ends them.

A server of one process has no others to manage.

    process 0 ── listening socket, board (shared memory) ──► process 1 ... N-1
       │ ▲            channel: see messages.py                  │
       │ └── /health, /metrics, /admin/..., stored responses ───┘
       └── starts and watches the engines; each engine has a socket to every process

When a process dies, its requests are lost, and the server ends with a line that says so, for a service
manager to restart all of it. Restarting one process would have to explain counts that went backwards and
requests that an engine still computes for it. An API process dies because of a bug or the machine, not
because of load.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from infer.client.spawn import give_orders, spawn, spell_end
from infer.client.supervisor import log_level
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import EngineLost, EngineStopped
from infer.server.processes import messages
from infer.server.processes.board import Board
from infer.server.processes.channel import Channel
from infer.server.processes.messages import ProcessMessage, Question, ToFirst
from infer.server.state import ServedModel

logger = logging.getLogger(__name__)

WORKER_MODULE = "infer.server.processes.worker"
CORES_PER_PROCESS = 4
MAX_DEFAULT = 8
SCRAPE_TIMEOUT = 2.0  # seconds
STOP_TIMEOUT = 8.0  # seconds: longer than answers that are finished may take to be read

T = TypeVar("T")


def num_processes(config: ServerConfig, *, on_gpu: bool) -> int:
    """The number of API processes: as configured, else one for every four cores of a machine with a GPU.

    An engine on a CPU computes with the same cores, and no faster than one process can send.
    """
    if config.api_processes is not None:
        return config.api_processes
    if config.in_process or not on_gpu or config.model_memory is not None:
        return 1
    return max(1, min(MAX_DEFAULT, len(os.sched_getaffinity(0)) // CORES_PER_PROCESS))


@dataclass(slots=True, eq=False)
class _Process:
    number: int
    child: subprocess.Popen[bytes]
    channel: Channel[ToFirst]
    running: asyncio.Task[None] | None = None
    is_silent: bool = False  # it did not answer the last scrape


class Workers:
    """All API processes but this one."""

    def __init__(self, config: ServerConfig, board: Board) -> None:
        self.num_processes = board.num_processes
        self._config = config
        self._board = board
        self._processes: list[_Process] = []
        self._engines = itertools.count()
        self._is_closing = False

    @cached_property
    def lost(self) -> asyncio.Future[str]:
        """Why this server cannot go on: one of its processes has ended, or (says its fleet) every engine."""
        return asyncio.get_running_loop().create_future()

    async def start(
        self, answer: Callable[[ToFirst], Any], listener: socket.socket, knobs: Sequence[dict[str, Any]]
    ) -> None:
        """Start the processes, which will serve models with these knobs; `answer` answers their questions."""
        for number in range(1, self.num_processes):
            ours, theirs = socket.socketpair()
            fds = {"listener": listener.fileno(), "channel": theirs.fileno(), "board": self._board.fd}
            child = spawn(WORKER_MODULE, pass_fds=tuple(fds.values()), is_piped=False)
            theirs.close()
            launch = {
                "number": number,
                "num_processes": self.num_processes,
                "config": self._config,
                "models": list(knobs),
                "log_level": log_level(),
                **fds,
            }
            give_orders(child, launch)
            process = _Process(number, child, Channel(ours, ToFirst, answer))
            await process.channel.open()
            process.running = asyncio.create_task(self._run(process))
            self._processes.append(process)

    # -- what the fleet tells and asks ----------------------------------------------------

    def new_engines(self, number: int) -> list[int]:
        """Numbers for engines that are about to be started; their restarts keep them."""
        return list(itertools.islice(self._engines, number))

    def tell_spawned(self, engine: int, endpoints: Sequence[str]) -> None:
        """Tell each process the endpoint that an engine, started a moment ago, will connect to."""
        for process, endpoint in zip(self._processes, endpoints, strict=True):
            with contextlib.suppress(EngineStopped):
                process.channel.tell(messages.Spawned(engine, endpoint))

    def tell_down(self, engine: int, reason: str) -> None:
        """Tell every process that an engine has ended."""
        self.tell(messages.Down(engine, reason))

    async def serve(self, model: ServedModel, config: EngineConfig, labels: Sequence[str]) -> None:
        """Let every process serve a model and count its engines under these labels; returns when all do."""
        knobs, engines = config.knobs(), list(model.engines)
        await self.call(messages.Serve(model.name, knobs, engines, list(labels), model.created))

    async def unserve(self, model: ServedModel, timeout_s: float) -> int:
        """Let no process serve a model; returns how many requests were cut off after that many seconds."""
        return sum(await self.call(messages.Unserve(list(model.engines), timeout_s)))

    async def call(self, question: Question[T]) -> list[T]:
        """Ask every process."""
        try:
            return await asyncio.gather(*(process.channel.call(question) for process in self._processes))
        except EngineStopped:
            if self._is_closing or not any(process.channel.is_closed for process in self._processes):
                raise
            raise EngineLost(await asyncio.shield(self.lost)) from None  # how it ended is about to be known

    def tell(self, message: ProcessMessage) -> None:
        """Tell every process something that wants no answer."""
        for process in self._processes:
            with contextlib.suppress(EngineStopped):  # one that is gone needs no news
                process.channel.tell(message)

    async def ask_all(self, question: Question[T]) -> list[T]:
        """The answer of each process; one that does not answer within SCRAPE_TIMEOUT is left out."""
        asked = [self._ask(process, question) for process in self._processes]
        return [answer for answer in await asyncio.gather(*asked) if answer is not None]

    async def _ask(self, process: _Process, question: Question[T]) -> T | None:
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT):
                answer = await process.channel.call(question)
        except (TimeoutError, EngineStopped):  # it hangs, or its end is about to be known
            if not process.is_silent:
                logger.error("API process does not answer, counts left out process=%d", process.number)
            process.is_silent = True
            return None
        process.is_silent = False
        return answer

    async def close(self) -> None:
        """End every process, and kill the ones that do not end."""
        self._is_closing = True
        self.tell(messages.End())
        waits = [asyncio.to_thread(_wait, process.child) for process in self._processes]
        await asyncio.gather(*waits)
        running = [process.running for process in self._processes if process.running is not None]
        await asyncio.gather(*running, return_exceptions=True)

    # -- life and death -----------------------------------------------------------------------------

    async def _run(self, process: _Process) -> None:
        await process.channel.run()
        if self._is_closing:
            return
        how = spell_end(await asyncio.to_thread(_wait, process.child))
        self._board.forget_requests(process.number)
        if not self.lost.done():  # else another one has ended meanwhile
            self.lost.set_result(f"API process {process.number} ended with {how}")


def _wait(child: subprocess.Popen[bytes]) -> int:
    try:
        return child.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        return child.wait()
