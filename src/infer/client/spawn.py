"""Start engine processes before there is anything for them to do: importing PyTorch takes seconds.

    infer serve      parse ──► SpareEngines ──► import FastAPI, bind the port ──► find the model ──► orders
                                    │                                                                  │
    engine process                  └──► import PyTorch ···························· (process.py) ◄────┘

The orders are one line of JSON. A process that waits for them costs only memory. It exits when its standard
input closes, so it never outlives the server, however the server ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from infer.errors import ConfigError, EngineError

T = TypeVar("T")

STDIN = 0
EXIT_ORPHANED = 3
ENGINE_MODULE = "infer.client.process"
Spawn = Callable[[str], subprocess.Popen[bytes]]  # name of a module -> the process that runs it


def spawn(
    module: str, *, pass_fds: Sequence[int] = (), is_piped: bool = True, leads: bool = True
) -> subprocess.Popen[bytes]:
    """Start a process that runs a module; its output goes to a pipe if `is_piped`, else where ours goes.

    It waits for its orders on standard input. If it `leads`, it has a session and process group of its own.
    """
    # -P and our own path: the child imports the same modules, never from the working directory
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if is_piped else None,
        stderr=subprocess.STDOUT if is_piped else None,
        pass_fds=pass_fds,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=leads,  # Ctrl-C reaches only us, and `killpg` its children
    )


def write_orders(orders: object) -> bytes:
    """Encode a line of orders; a path that is not UTF-8 is refused, because JSON cannot hold it."""
    try:
        return msgspec.json.encode(orders) + b"\n"
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the name {error.object!r} is not UTF-8, so no other process can be given it; rename the file"
        ) from None


def give_orders(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Write the first line of a process's standard input; ignore a process that is already dead."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()


def take_orders(kind: type[T], on_orphaned: Callable[[T], None] = lambda orders: None) -> T:
    """Read the first line of standard input, in a process that `spawn` started.

    From here on the server handles signals, and this process exits when its standard input closes: when the
    server ends, for whatever reason. `on_orphaned` then cleans up in the server's place.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = bytearray()
    while not line.endswith(b"\n"):  # unbuffered: a daemon thread reads the rest
        piece = os.read(STDIN, 1)
        if not piece:
            os._exit(EXIT_ORPHANED)
        line += piece
    try:
        orders = read_orders(line, kind)
    except EngineError as error:
        raise SystemExit(f"error: {error}") from None

    def wait_for_the_end() -> None:
        while os.read(STDIN, 4096):
            pass
        on_orphaned(orders)
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=wait_for_the_end, name="infer-lifeline", daemon=True).start()
    return orders


def read_orders(line: bytes | bytearray, kind: type[T]) -> T:
    """Decode a line of orders."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:  # its text has names and types, and no keys or secrets
        raise EngineError(f"{len(line)} bytes of orders are not a {kind.__name__}: {error}") from None


def spell_end(exit_code: int) -> str:
    """Describe how a process ended; a negative exit code is a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    cause = ", which the system also sends when memory runs out: see dmesg, and 'infer plan' for what fits"
    return f"signal {-exit_code} ({signal.strsignal(-exit_code)}){cause * (exit_code == -signal.SIGKILL)}"


def is_stopped(pid: int) -> bool:
    """Return True if a signal, not a debugger, has stopped a process; False if the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        return stat.rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


class SpareEngines(contextlib.AbstractContextManager["SpareEngines"]):
    """Engine processes that wait for their orders. Unused ones are killed when the context ends."""

    def __init__(self, number: int) -> None:
        self._waiting = [spawn(ENGINE_MODULE) for _ in range(number)]

    def take(self, module: str) -> subprocess.Popen[bytes]:
        """Return a waiting process, or a new one if none is left or `module` is another one."""
        return self._waiting.pop(0) if self._waiting and module == ENGINE_MODULE else spawn(module)

    def __exit__(self, *error: object) -> None:
        for process in self._waiting:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
            process.communicate()
        self._waiting.clear()
