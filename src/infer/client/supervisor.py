"""One engine process from start to exit, and how often a dead one may be replaced.

    EngineProcess.start ──► spawn ──► loading ──► Ready ──► running ──► exit
                             │          │                      │
      private directory,     └──────────┴── exit: the reason, ─┘── exit: `exited` is set, with a reason
      one unix socket                       and the last lines it wrote

The child is spawned, never forked: a fork after torch has started its threads would deadlock one day.
Three things tie it to us: standard input (its lifeline: it ends when we end, however that happens),
standard output and error (one pipe, passed on line by line), and the socket, in a directory that only
this user can enter. Two threads wait for it, one in `waitpid` and one in the pipe; both only sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from infer.client.messages import (
    Command,
    Failure,
    Launch,
    Message,
    Ready,
    Stop,
    decode_message,
    encode,
    to_error,
)
from infer.client.spawn import ENGINE_MODULE, Spawn, spawn_engine
from infer.config.settings import EngineConfig
from infer.errors import EngineError, EngineStopped
from infer.log import LEVELS

logger = logging.getLogger(__name__)

STOP_TIMEOUT = 5.0  # seconds from Stop to SIGKILL: one step in flight may end
MAX_TMP_LEN = 70  # characters: a unix socket's path may have about 100
NUM_LAST_LINES = 20


@dataclass(slots=True)
class RestartPolicy:
    """When to start an engine again: soon at first, then slower, and not for ever."""

    max_restarts: int = 5
    window: float = 600.0  # seconds in which max_restarts count
    first_delay: float = 0.25  # seconds; doubles with each restart in the window
    max_delay: float = 30.0
    _times: deque[float] = field(default_factory=deque)

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before the restart that is due now, or None: it has been tried often enough."""
        while self._times and now - self._times[0] > self.window:
            self._times.popleft()
        if len(self._times) >= self.max_restarts:
            return None
        delay: float = min(self.first_delay * 2.0 ** len(self._times), self.max_delay)
        self._times.append(now)
        return delay


class EngineProcess:
    """A child process with an engine in it. `start` it, `send` to it, and always `close` it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        module: str,
        spawn: Spawn,
        on_log: Callable[[str], None] | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_log = on_log or _write_to_stderr
        self._on_message: Callable[[Message], None] | None = None
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._last_words: Failure | None = None
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self.exited = asyncio.Event()
        self._exit_code: int | None = None

        with contextlib.ExitStack() as resources:
            self.directory = _private_directory(resources)
            endpoint = f"ipc://{self.directory}/engine"
            context = zmq.Context()
            resources.callback(context.term)
            self._link = context.socket(zmq.PAIR)
            resources.callback(self._link.close)
            self._link.set_hwm(0)  # a send must never block the event loop
            self._link.linger = 0
            self._link.bind(endpoint)
            self._process = spawn(module)
            self._loop.add_reader(self._link.fileno(), self.receive)
            resources.callback(self._loop.remove_reader, self._link.fileno())
            self._resources = resources.pop_all()
        self._log_thread = threading.Thread(target=self._pass_lines_on, name="infer-engine-log", daemon=True)
        self._log_thread.start()
        threading.Thread(target=self._wait_for_exit, name="infer-engine-wait", daemon=True).start()
        launch = Launch(endpoint=endpoint, knobs=config.knobs(), log_level=_log_level())
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # dead already: its exit says so
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
            self._process.stdin.flush()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        module: str = ENGINE_MODULE,
        spawn: Spawn = spawn_engine,
        on_log: Callable[[str], None] | None = None,
    ) -> tuple[EngineProcess, Ready]:
        """Spawn an engine and wait until its model is loaded; raises what went wrong in there."""
        process = cls(config, module=module, spawn=spawn, on_log=on_log)
        exited = asyncio.ensure_future(process.exited.wait())
        try:
            events: list[asyncio.Future[Any]] = [process._ready, exited]
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            if not process._ready.done():
                await asyncio.to_thread(process._log_thread.join)
                raise process._start_error()
            return process, process._ready.result()
        except BaseException:
            await process.close(timeout=0.0)
            raise
        finally:
            exited.cancel()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exit_reason(self) -> str:
        """How the process ended, for the clients of its requests: no paths, no traceback."""
        assert self._exit_code is not None, "it is still running"
        if self._last_words is not None and self._last_words.kind == EngineError.__name__:
            return f"the engine process died: {self._last_words.message}"
        if self._exit_code < 0:
            number = -self._exit_code
            return f"the engine process was ended by signal {number} ({signal.strsignal(number)})"
        return f"the engine process ended with exit code {self._exit_code}"

    def listen(self, on_message: Callable[[Message], None]) -> None:
        """Give every message that comes after `Ready` to this function."""
        self._on_message = on_message
        self.receive()

    def send(self, command: Command) -> None:
        """Queue a command; it never blocks."""
        try:
            self._link.send(encode(command), zmq.NOBLOCK)
        except zmq.Again:  # no peer at the other end: its exit is about to be known
            raise EngineStopped("the engine process has ended") from None
        # The descriptor signals edges, and sending may have used one up that was meant for receive().
        if int(self._link.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self.receive)

    def receive(self) -> None:
        """Take every message that has arrived."""
        while not self._link.closed:
            try:
                frame = self._link.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = decode_message(frame)
            if isinstance(message, Failure):
                self._last_words = message
            elif isinstance(message, Ready):
                self._ready.set_result(message)
            elif self._on_message is not None:
                self._on_message(message)

    def kill(self) -> None:
        """End it at once, with all it may have started."""
        if self._exit_code is None:
            with contextlib.suppress(ProcessLookupError):  # gone, but not yet known to be
                os.killpg(self.pid, signal.SIGKILL)  # it leads a group of its own

    async def close(self, *, timeout: float = STOP_TIMEOUT) -> None:
        """Ask it to stop, insist after `timeout` seconds, and leave nothing behind."""
        try:
            if not self.exited.is_set() and timeout > 0:
                with contextlib.suppress(TimeoutError, EngineStopped):
                    self.send(Stop())
                    async with asyncio.timeout(timeout):
                        await self.exited.wait()
        finally:
            self.kill()
            await asyncio.shield(asyncio.ensure_future(self._clean_up()))

    async def _clean_up(self) -> None:
        await self.exited.wait()
        await asyncio.to_thread(self._log_thread.join)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._resources.close()

    def _start_error(self) -> Exception:
        """Why it is gone before it was ready."""
        if self._last_words is not None and self._last_words.kind != EngineError.__name__:
            return to_error(self._last_words)
        lines = "\n".join(self._last_lines)
        return EngineError(f"{self.exit_reason} while it started; its last lines were:\n{lines}")

    # -- threads ----------------------------------------------------------------------------------

    def _pass_lines_on(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for raw in pipe:
                line = raw.decode(errors="replace").rstrip("\n")
                self._last_lines.append(line)
                try:
                    self._on_log(line)
                except (
                    Exception
                ):  # a failing `on_log` must not stop the reading: a full pipe would block the child
                    logger.exception("engine log line not passed on")

    def _wait_for_exit(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what it started; until reaped, its number is not reused
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nothing waits for the exit
            self._loop.call_soon_threadsafe(self._set_exited, code)

    def _set_exited(self, code: int) -> None:
        self._exit_code = code
        self.receive()  # its last words may still be in the socket
        self.exited.set()


def _private_directory(resources: contextlib.ExitStack) -> str:
    base = tempfile.gettempdir()
    directory = tempfile.mkdtemp(prefix="infer-", dir=base if len(base) <= MAX_TMP_LEN else "/tmp")  # 0700
    resources.callback(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _log_level() -> str:
    level = logging.getLogger("infer").getEffectiveLevel()
    return next((name for name in reversed(LEVELS) if getattr(logging, name.upper()) <= level), LEVELS[0])


def _write_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
