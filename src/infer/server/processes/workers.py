"""Manage the API processes other than process 0: start them, send them messages, and end them.

A server with one process has no others to manage.

    process 0 ── listening socket, board (shared memory) ──► process 1 ... N-1
       │ ▲            channel: see messages.py                  │
       │ └── /health, /metrics, /admin/..., stored responses ───┘
       └── starts and watches the engines; each engine has a socket to every process

When a process dies, its requests are lost, and the server exits with an error, so that a service manager can
restart all of it. If we restarted only that process, counters would go backwards and engines would still
compute its old requests. An API process dies because of a bug or the machine, not because of load.
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

from infer.client.spawn import give_orders, spawn, spell_end, write_orders
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
PING_INTERVAL = 1.0  # seconds between two pings of a process that owes an answer
PING_TIMEOUT = 10.0  # seconds without an answer to a ping after which a process hangs
STOP_TIMEOUT = 8.0  # seconds: longer than clients have to read finished responses

T = TypeVar("T")


def num_processes(config: ServerConfig, *, on_gpu: bool) -> int:
    """Return the number of API processes: as configured, else one per four cores of a machine with a GPU.

    An engine on a CPU needs the same cores, and one process can send faster than it computes.
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
    is_silent: bool = False  # it did not answer the last scrape or ping

    def note_answer(self, *, has_answered: bool) -> None:
        """Note that it has answered in time, or not; the first time that it has not is logged."""
        if not has_answered and not self.is_silent:
            logger.error("API process does not answer process=%d", self.number)
        self.is_silent = not has_answered


class Workers:
    """All API processes except this one."""

    def __init__(self, config: ServerConfig, board: Board) -> None:
        self.num_processes = board.num_processes
        self._config = config
        self._board = board
        self._processes: list[_Process] = []
        self._engines = itertools.count()
        self._is_closing = False

    @cached_property
    def lost(self) -> asyncio.Future[str]:
        """The reason this server is lost: an API process ended, or (set by the fleet) every engine did."""
        return asyncio.get_running_loop().create_future()

    async def start(
        self, answer: Callable[[ToFirst], Any], listener: socket.socket, models: Sequence[EngineConfig]
    ) -> None:
        """Start the processes, which will serve these models; `answer` handles their messages."""
        for number in range(1, self.num_processes):
            ours, theirs = socket.socketpair()
            launch = messages.WorkerLaunch(
                number=number, num_processes=self.num_processes, server=self._config, models=list(models),
                listener=listener.fileno(), channel=theirs.fileno(), board=self._board.fd,
                log_level=log_level(),
            )  # fmt: skip
            orders, fds = write_orders(launch), (launch.listener, launch.channel, launch.board)
            child = spawn(WORKER_MODULE, pass_fds=fds, is_piped=False)
            theirs.close()
            give_orders(child, orders)
            process = _Process(number, child, Channel(ours, ToFirst, answer))
            await process.channel.open()
            process.running = asyncio.create_task(self._run(process))
            self._processes.append(process)

    # -- messages of the fleet ------------------------------------------------------------

    def new_engines(self, number: int) -> list[int]:
        """Return numbers for engines that are about to be started; they stay the same across restarts."""
        return list(itertools.islice(self._engines, number))

    def tell_spawned(self, engine: int, endpoints: Sequence[str]) -> None:
        """Send each process the endpoint to which a newly started engine will connect."""
        for process, endpoint in zip(self._processes, endpoints, strict=True):
            with contextlib.suppress(EngineStopped):
                process.channel.tell(messages.Spawned(engine, endpoint))

    def tell_down(self, engine: int, reason: str) -> None:
        """Notify every process that an engine has ended."""
        self.tell(messages.Down(engine, reason))

    async def serve(self, model: ServedModel, config: EngineConfig, labels: Sequence[str]) -> None:
        """Have every process serve a model, with these labels for its engines; returns when all do."""
        engines = list(model.engines)
        await self.call(messages.Serve(model.name, config, engines, list(labels), model.created))

    async def unserve(self, model: ServedModel, timeout_s: float) -> int:
        """Have every process stop serving a model; returns how many requests were cut off at the timeout."""
        return sum(await self.call(messages.Unserve(list(model.engines), timeout_s)))

    async def call(self, question: Question[T]) -> list[T]:
        """Send a question to every process, and return all answers.

        Raises `EngineStopped` if a process hangs, once the others have answered. It will carry out the
        question if it ever continues, in the order in which it was told.
        """
        asked = [asyncio.create_task(self._ask_while_alive(process, question)) for process in self._processes]
        await asyncio.gather(*asked, return_exceptions=True)
        try:
            return [answer.result() for answer in asked]
        except EngineStopped:
            if self._is_closing or not any(process.channel.is_closed for process in self._processes):
                raise
            raise EngineLost(await asyncio.shield(self.lost)) from None  # its exit will be noticed soon

    async def _ask_while_alive(self, process: _Process, question: Question[T]) -> T:
        """Return the answer of a process; it may take any time while the process answers pings."""
        try:
            async with asyncio.timeout(None) as limit:
                pinging = asyncio.create_task(self._ping(process, limit))
                try:
                    return await process.channel.call(question)
                finally:
                    pinging.cancel()
        except TimeoutError:
            process.note_answer(has_answered=False)
            name = f"API process {process.number} (pid {process.child.pid})"
            advice = "if it still does not, restart the server"
            raise EngineStopped(f"{name} has not answered for {PING_TIMEOUT:g} s; {advice}") from None

    async def _ping(self, process: _Process, limit: asyncio.Timeout) -> None:
        """Ping a process that owes an answer, and extend `limit` each time."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(EngineStopped):  # the process is gone
            while True:
                await asyncio.sleep(PING_INTERVAL)
                if limit.expired():
                    return
                if not self._board.is_starting:  # else it may still import its modules
                    limit.reschedule(loop.time() + PING_TIMEOUT)
                await process.channel.call(messages.CheckAlive())
                process.note_answer(has_answered=True)

    def tell(self, message: ProcessMessage) -> None:
        """Send every process a message that needs no answer."""
        for process in self._processes:
            with contextlib.suppress(EngineStopped):  # the process is gone
                process.channel.tell(message)

    async def ask_all(self, question: Question[T]) -> list[T]:
        """Return the answers of all processes that answer within SCRAPE_TIMEOUT."""
        asked = [self._ask(process, question) for process in self._processes]
        return [answer for answer in await asyncio.gather(*asked) if answer is not None]

    async def _ask(self, process: _Process, question: Question[T]) -> T | None:
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT):
                answer = await process.channel.call(question)
        except (TimeoutError, EngineStopped):  # it hangs, or its exit will be noticed soon
            process.note_answer(has_answered=False)
            return None
        process.note_answer(has_answered=True)
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
        try:
            await process.channel.run()
        except Exception:
            logger.exception("channel failed process=%d", process.number)
        if self._is_closing:
            return
        how = spell_end(await asyncio.to_thread(_wait, process.child))
        self._board.forget_requests(process.number)
        if not self.lost.done():  # else another one has already ended
            self.lost.set_result(f"API process {process.number} ended with {how}")


def _wait(child: subprocess.Popen[bytes]) -> int:
    try:
        return child.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        return child.wait()
