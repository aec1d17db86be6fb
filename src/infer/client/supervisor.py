"""Supervise one engine process from start to exit, and limit how often a dead one is replaced.

    EngineProcess.start ──► spawn ──► loading ──► Ready ──► running ──► exit
                             │          │                      │
      private directory,     └──────────┴── exit: the reason, ─┘── exit: `exited` is set, with a reason
      one unix socket                       and the last lines it wrote

The child is spawned, never forked, because a fork after torch has started its threads can deadlock. Three
things connect it to us: standard input (its lifeline: the child exits when we do, however that happens),
standard output and error (one pipe, forwarded line by line), and the socket, in a directory that only this
user can enter. Two threads wait for the child, one in `waitid` and one on the pipe; both only sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from infer.client.link import EngineLink
from infer.client.messages import ALONE, Launch, Ready, RecordOrders, Replica, Stop, to_error
from infer.client.spawn import ENGINE_MODULE, Spawn, give_orders, is_stopped, spawn, spell_end, write_orders
from infer.config.settings import EngineConfig
from infer.errors import EngineError, EngineStopped
from infer.log import LEVELS

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 1.0  # seconds between two checks of an engine that starts or is silent
STOP_TIMEOUT = 5.0  # seconds from Stop to SIGKILL: the step in flight may end
MAX_TMP_LEN = 70  # characters: a unix socket's path may have about 100
DIRECTORY_PREFIX = "infer-run-"
NUM_LAST_LINES = 20


@dataclass(slots=True)
class RestartPolicy:
    """The times at which an engine is restarted: exponential backoff, up to a limit."""

    max_restarts: int = 5
    window: float = 600.0  # seconds in which at most max_restarts are allowed
    first_delay: float = 0.25  # seconds; doubles with each restart in the window
    max_delay: float = 30.0
    _times: deque[float] = field(default_factory=deque)

    def next_delay(self, now: float) -> float | None:
        """Return the seconds to wait before the next restart; None: too many restarts."""
        while self._times and now - self._times[0] > self.window:
            self._times.popleft()
        if len(self._times) >= self.max_restarts:
            return None
        num_doublings = min(len(self._times), 64)  # avoids overflow: the delay is at its maximum long before
        delay: float = min(self.first_delay * 2.0**num_doublings, self.max_delay)
        self._times.append(now)
        return delay


def _write_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """The settings of an engine process: how it is started, and how and when it is restarted."""

    module: str = ENGINE_MODULE  # module that the child runs
    spawn: Spawn = spawn  # returns a child that runs it, perhaps started earlier
    on_log: Callable[[str], None] = _write_to_stderr  # gets each line of its output, in a thread
    num_links: int = 1  # above 1, other processes use the same engine, too
    on_spawn: Callable[[Sequence[str]], None] = lambda endpoints: None  # gets the others' endpoints
    on_down: Callable[[str], None] = lambda reason: None  # gets the reason each time the engine goes down
    replica: Replica = ALONE  # its number among several engines
    num_stories: int = 0  # finished requests that can still be explained
    record: RecordOrders | None = None  # settings of the record of its run
    stuck_timeout: float = 120.0  # seconds without progress after which it is killed; 0: never
    restart: bool = True  # restart it when it dies; False for clients whose engine another process restarts
    policy: RestartPolicy = field(default_factory=RestartPolicy)  # the times of restarts


class EngineProcess(EngineLink):
    """A child process that runs an engine. `start` it, `send` to it, and always `close` it."""

    def __init__(self, config: EngineConfig, options: ProcessOptions) -> None:
        self._on_log = options.on_log
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._exit_code: int | None = None

        with contextlib.ExitStack() as resources:
            self.directory = _private_directory(resources)
            self.endpoints = [f"ipc://{self.directory}/engine-{n}" for n in range(options.num_links)]
            launch = Launch(
                endpoints=self.endpoints,
                config=config,
                log_level=log_level(),
                spawned_at=perf_counter(),
                replica=options.replica,
                num_stories=options.num_stories,
                record=options.record,
            )
            orders = write_orders(launch)
            super().__init__(self.endpoints[0])
            resources.callback(self._resources.close)
            self._process = options.spawn(options.module)
            self._resources = resources.pop_all()
        self._log_thread = threading.Thread(target=self._pass_lines_on, name="infer-engine-log", daemon=True)
        self._log_thread.start()
        threading.Thread(target=self._wait_for_exit, name="infer-engine-wait", daemon=True).start()
        give_orders(self._process, orders)

    @classmethod
    async def start(cls, config: EngineConfig, options: ProcessOptions) -> tuple[EngineProcess, Ready]:
        """Spawn an engine and wait until its model is loaded; raises the error of the child."""
        process = cls(config, options)
        options.on_spawn(process.endpoints[1:])
        exited, has_stopped = asyncio.ensure_future(process.exited.wait()), False
        try:
            events: list[asyncio.Future[Any]] = [process.ready, exited]
            while not (
                await asyncio.wait(events, timeout=CHECK_INTERVAL, return_when=asyncio.FIRST_COMPLETED)
            )[0]:
                had_stopped, has_stopped = has_stopped, is_stopped(process.pid)
                if had_stopped and has_stopped and options.stuck_timeout > 0:
                    raise EngineStopped("while it started, the engine was stopped by a signal and was ended")
            if not process.ready.done():
                await asyncio.to_thread(process._log_thread.join)
                raise process._start_error()
            return process, process.ready.result()
        except BaseException:
            await process.close(timeout=0.0)
            raise
        finally:
            exited.cancel()

    @property
    def pid(self) -> int:
        """The id of the child process."""
        return self._process.pid

    @property
    def exit_reason(self) -> str:
        """The reason the process ended, for clients of its requests: no paths, no traceback."""
        assert self._exit_code is not None, "it is still running"
        if self.last_words is not None and isinstance(to_error(self.last_words), EngineError):
            return f"the engine process died: {self.last_words.message}"
        return f"the engine process ended with {spell_end(self._exit_code)}"

    def kill(self) -> None:
        """Kill the process and everything that it may have started."""
        if self._exit_code is None:
            with contextlib.suppress(ProcessLookupError):  # gone, but not yet noticed
                os.killpg(self.pid, signal.SIGKILL)  # it leads a group of its own

    async def close(self, *, timeout: float = STOP_TIMEOUT) -> None:
        """Ask the process to stop, kill it after `timeout` seconds, and clean up."""
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
        """Return the error of a process that exited before it was ready."""
        if self.last_words is not None and self.last_words.kind != EngineError.__name__:
            return to_error(self.last_words)
        if self._exit_code is not None and self._exit_code < 0:  # a signal: another try may succeed
            return EngineStopped(f"while it started, {self.exit_reason}")
        told = [f"while it started, {self.exit_reason}; its last lines were:", *self._last_lines]
        return EngineError("\n".join(told))

    # -- threads ----------------------------------------------------------------------------------

    def _pass_lines_on(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for raw in pipe:
                line = raw.decode(errors="replace").rstrip("\n")
                self._last_lines.append(line)
                try:
                    self._on_log(line)
                except Exception:  # must not stop reading: a full pipe blocks the child
                    logger.exception("engine log line not passed on")

    def _wait_for_exit(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # its children; its id is not reused until it is reaped
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for the exit
            self._loop.call_soon_threadsafe(self._set_exited, code)

    def _set_exited(self, code: int) -> None:
        self._exit_code = code
        self.receive_all()  # its last message may still be in the socket
        self.exited.set()


_directories: set[str] = set()  # socket directories of the engine processes of this process


def _directory_base() -> str:
    base = tempfile.gettempdir()
    return base if len(base) <= MAX_TMP_LEN else "/tmp"


def _private_directory(resources: contextlib.ExitStack) -> str:
    """Create a directory for this user only, locked while this process lives; empty until it is locked."""
    directory = tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=_directory_base())  # 0700
    _directories.add(directory)
    resources.callback(_directories.discard, directory)
    resources.callback(shutil.rmtree, directory, ignore_errors=True)
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    resources.callback(os.close, lock)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return directory


def remove_stale_directories() -> None:
    """Remove the directories of killed processes of this user, which are no longer locked."""
    try:
        entries = list(os.scandir(_directory_base()))
    except OSError:  # a directory that is writable but cannot be listed
        return
    for entry in entries:
        with contextlib.suppress(OSError):  # locked, or gone by now
            if (
                not entry.name.startswith(DIRECTORY_PREFIX)
                or entry.stat(follow_symlinks=False).st_uid != os.geteuid()
            ):
                continue
            lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.listdir(lock):  # an empty one may not be locked yet
                    shutil.rmtree(entry.path)
                    logger.info("directory of a killed server removed path=%s", entry.path)
            finally:
                os.close(lock)


def remove_directories() -> None:
    """Remove the directories of all engine processes, before this process exits without closing them."""
    for directory in _directories:
        shutil.rmtree(directory, ignore_errors=True)


def log_level() -> str:
    """Return the level of our log, for a child process."""
    level = logging.getLogger("infer").getEffectiveLevel()
    return next((name for name in reversed(LEVELS) if getattr(logging, name.upper()) <= level), LEVELS[0])
