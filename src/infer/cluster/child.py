"""A replica's process: an ordinary server that gets its orders on standard input, which is also its lifeline.

    python -m infer.cluster.child  <──  one line of JSON: a `ReplicaLaunch`

So keys are neither on a command line nor in a file. When standard input closes, the parent has ended or wants
this process to end: it drains and exits, as at SIGTERM. Standard output gets one line once the server accepts
requests. It shares a pipe with the log; the parent reads the pipe to its end, or it would fill up.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from functools import partial

import msgspec

from infer.client.messages import TOKEN, NodeLaunch
from infer.client.spawn import give_orders, read_orders, spawn, write_orders
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import InferError
from infer.log import setup_logging

READY = "replica ready: "
NUM_LAST_LINES = 20
STOP_S = 15.0  # seconds beyond drain_timeout


class ReplicaLaunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a replica's process: the first line of its standard input, as JSON."""

    models: dict[str, EngineConfig]
    server: ServerConfig
    log_level: str
    token: str = ""  # the secret of the nodes, for ranks on several


def main() -> int:
    """Serve until standard input closes or a signal comes."""
    try:
        launch = read_orders(sys.stdin.buffer.readline(), ReplicaLaunch)
        setup_logging(launch.log_level)
        if launch.token:
            os.environ[TOKEN] = launch.token
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        from infer.server.serve import loop_factory, serve

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            announce = partial(print, READY, sep="", flush=True)
            runner.run(serve(launch.models, launch.server, announce=announce))
    except InferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _end_with_stdin() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns at the end of file
    os.kill(os.getpid(), signal.SIGTERM)


class ReplicaProcess:
    """A replica's process on this machine, to start, await and end. For an actor's threads."""

    def __init__(self, launch: ReplicaLaunch | NodeLaunch, module: str = "infer.cluster.child") -> None:
        """Start a module of this package with these settings."""
        self._drain_s = launch.server.drain_timeout if isinstance(launch, ReplicaLaunch) else 0.0
        self._last: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._url = ""
        self._is_told = threading.Event()  # set once the process serves or has ended
        orders = write_orders(launch)
        self._process = spawn(module)
        give_orders(self._process, orders)
        threading.Thread(target=self._pass_log_on, daemon=True).start()

    def wait_ready(self) -> str:
        """Return the URL once the model is loaded; raise `RuntimeError` if the process ends before."""
        self._is_told.wait()
        if not self._url:
            self._process.wait()
            raise RuntimeError("a replica could not start:\n" + "\n".join(self._last))
        return self._url

    def wait_end(self) -> str:
        """Wait until the process ends; returns how it ended."""
        code = self._process.wait()
        last_line = f": {self._last[-1]}" if code > 0 and self._last else ""
        return f"its process ended with code {code}{last_line}"

    def stop(self) -> None:
        """Let the process drain and end; kill it if it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(self._drain_s + STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def has_ended(self) -> bool:
        """True if the process has ended."""
        return self._process.poll() is not None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def _pass_log_on(self) -> None:
        assert self._process.stdout is not None and self._process.stdin is not None
        with self._process.stdout as lines:
            for raw in lines:
                line = raw.decode(errors="replace").rstrip()
                line, is_ready, url = line.partition(READY)  # a progress bar may not have ended its line
                if is_ready and not self._url:
                    self._url = url
                    self._is_told.set()
                    if not line:
                        continue
                self._last.append(line)
                with suppress(OSError, ValueError):  # the log cannot be written, but the pipe must be read
                    print(line, file=sys.stderr, flush=True)
        self._is_told.set()
        self._process.wait()
        with suppress(BrokenPipeError):
            self._process.stdin.close()


if __name__ == "__main__":
    raise SystemExit(main())
