"""A terminal for tests: a program in a pty, the keys it gets, and what it writes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x07")
LOCAL_MODES = 3
READY = "<ready>"  # stands for what an editor says first: that pastes are to be marked


class Terminal:
    """A process whose standard streams are a pty of this many columns."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], columns: int = 80, timeout_s: float = 60.0
    ) -> None:
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.modes = termios.tcgetattr(self._slave)
        self.timeout_s = timeout_s
        self.written = ""
        self._seen = 0  # up to where `wait_for` has looked

        def own_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it off

        streams = {"stdin": self._slave, "stdout": self._slave, "stderr": self._slave}
        self.process = subprocess.Popen(
            [*command],
            env={name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")}
            | {"TERM": "xterm"}
            | dict(env),
            preexec_fn=own_terminal,
            **streams,  # type: ignore[call-overload]
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    @property
    def text(self) -> str:
        """What was written, without the sequences that move a cursor or set a colour."""
        return ESCAPES.sub("", self.written.replace("\x1b[?2004h", READY)).replace("\r\n", "\n")

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self._slave)[LOCAL_MODES] & termios.ECHO)

    @property
    def is_as_before(self) -> bool:
        return termios.tcgetattr(self._slave) == self.modes

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def paste(self, text: str) -> None:
        """Send a text as terminals do where bracketed paste is on."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def wait_for(self, text: str) -> str:
        """Wait until this is written, after what was waited for before; returns what came until then."""
        ends = time.monotonic() + self.timeout_s
        while (found := self.text.find(text, self._seen)) < 0:
            self._read(ends, text)
        before = self.text[self._seen : found]
        self._seen = found + len(text)
        return before

    def wait_prompt(self) -> str:
        """Wait until the editor is ready for keys; returns what came until then."""
        ends = time.monotonic() + self.timeout_s
        before = self.wait_for(READY)
        while self.echoes:
            assert time.monotonic() < ends
            time.sleep(0.01)
        return before

    def ask(self, line: str) -> str:
        """Type a line and return everything that comes until the next prompt."""
        self.type(line + "\r")
        return self.wait_prompt()

    def end(self) -> int:
        """Wait for the end of the process; its exit code."""
        ends = time.monotonic() + self.timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < ends, f"still running after {self.text!r}"
            self._read(time.monotonic() + 0.05, None)
        self._read(time.monotonic() + 0.05, None)
        return int(self.process.returncode)

    def _read(self, ends: float, wanted: str | None) -> None:
        left = ends - time.monotonic()
        ready, _, _ = select.select([self._master], [], [], max(0.0, left))
        if ready:
            self.written += os.read(self._master, 1 << 16).decode(errors="replace")
        elif wanted is not None:
            raise AssertionError(f"{wanted!r} did not come in {self.timeout_s} s, but {self.text!r}")


def infer_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "infer", *arguments]
