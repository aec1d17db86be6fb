"""Engine processes are started before there is anything for them to do: importing PyTorch takes seconds.

    infer serve      parse ──► SpareEngines ──► import FastAPI, take the port ──► find the model ──► orders
                                    │                                                                  │
    engine process                  └──► import PyTorch ···························· (process.py) ◄────┘

A process that waits for its orders costs only memory. It ends when its standard input does, so it
never outlives the server, however that ends.
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

T = TypeVar("T")

STDIN = 0
EXIT_ORPHANED = 3
ENGINE_MODULE = "infer.client.process"
Spawn = Callable[[str], subprocess.Popen[bytes]]  # the module that runs in it -> the process


def spawn(
    module: str, *, pass_fds: Sequence[int] = (), is_piped: bool = True, leads: bool = True
) -> subprocess.Popen[bytes]:
    """Start a process that runs a module, with its output in a pipe or going where ours goes.

    It waits for its orders on standard input. It `leads` a group of its own, or is ended with ours.
    """
    # -P and our own path: the child imports what we import, never from the working directory
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if is_piped else None,
        stderr=subprocess.STDOUT if is_piped else None,
        pass_fds=pass_fds,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=leads,  # Ctrl-C in a terminal is for us, and `kill` reaches its children
    )


def give_orders(process: subprocess.Popen[bytes], orders: object) -> None:
    """Write the first line of a process's standard input; one that is dead already is left alone."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(orders) + b"\n")
        process.stdin.flush()


def take_orders(kind: type[T], on_orphaned: Callable[[T], None] = lambda orders: None) -> T:
    """Read the first line of standard input, in a process that `spawn` started.

    From here on signals are the server's business, and the process ends when its standard input does: when
    the server ends, for whatever reason. `on_orphaned` then cleans up in its place.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = bytearray()
    while not line.endswith(b"\n"):  # unbuffered: a daemon thread reads on from there
        piece = os.read(STDIN, 1)
        if not piece:
            os._exit(EXIT_ORPHANED)
        line += piece
    orders = msgspec.json.decode(line, type=kind)

    def wait_for_the_end() -> None:
        while os.read(STDIN, 4096):
            pass
        on_orphaned(orders)
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=wait_for_the_end, name="infer-lifeline", daemon=True).start()
    return orders


def spell_end(exit_code: int) -> str:
    """The way a process ended, for people; a negative exit code is a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    cause = ", which the system also sends when memory runs out: see dmesg, and 'infer plan' for what fits"
    return f"signal {-exit_code} ({signal.strsignal(-exit_code)}){cause * (exit_code == -signal.SIGKILL)}"


def is_stopped(pid: int) -> bool:
    """True if a signal has stopped a process, and no debugger has; False where the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        return stat.rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


class SpareEngines(contextlib.AbstractContextManager["SpareEngines"]):
    """Engine processes that wait for their orders. Unused ones end with the context."""

    def __init__(self, number: int) -> None:
        self._waiting = [spawn(ENGINE_MODULE) for _ in range(number)]

    def take(self, module: str) -> subprocess.Popen[bytes]:
        """Return a process that waits, or a new one if none is left or another module is to run."""
        return self._waiting.pop(0) if self._waiting and module == ENGINE_MODULE else spawn(module)

    def __exit__(self, *error: object) -> None:
        for process in self._waiting:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
            process.communicate()
        self._waiting.clear()
