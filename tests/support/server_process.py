"""`python -m infer.server` as a user runs it: a process of its own, spoken to over loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
START_S = 60.0
KNOBS = ("--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--block-size", "4")


@dataclass(slots=True)
class ServerProcess:
    """A running server: its process, where it answers, and what it writes."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def children(self) -> list[int]:
        """The ids of the processes it has started."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def metrics(self, key: str = "none") -> dict[str, float]:
        """The page at /metrics as numbers by name; for a server with one engine."""
        text = httpx.get(f"{self.url}/metrics", headers={"authorization": f"Bearer {key}"}).text
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.split("{")[0]: float(value) for name, value in rows}


def command(*arguments: str, module: str = "infer.server") -> list[str]:
    """How a server is started."""
    return [sys.executable, "-m", module, *KNOBS, "--port", "0", *arguments]


@contextmanager
def start_server(directory: Path, *arguments: str, module: str = "infer.server") -> Iterator[ServerProcess]:
    """Start a server and wait until it is ready; kill it at the end if it still runs."""
    log = directory / f"server-{time.monotonic_ns()}.log"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command(*arguments, module=module),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
            cwd=ROOT,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # one line, or the end of the output if it died
        assert line.startswith("ready: "), log.read_text()
        yield ServerProcess(process, line.removeprefix("ready: ").strip(), log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def wait_until(condition: object, timeout_s: float = 60.0) -> None:
    """Look again and again until a condition holds."""
    assert callable(condition)
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not true after {timeout_s} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def cpu_seconds(pid: int) -> float:
    """What a process has used of the processor so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
