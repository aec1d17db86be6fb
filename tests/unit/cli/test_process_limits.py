"""Too few file descriptors, addresses or bytes of disk: one line that says so, no abort and no traceback."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from infer.client.process_limits import spell_shortage
from infer.config.knobs import parse_bytes
from infer.kernels.cpu import build
from infer.kernels.cpu.build import CBuildError, build_library


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ("ulimit -n 20", "may open 20 files at once, and at least 64 are needed; raise the limit: ulimit -n"),
        ("ulimit -v 400000", "may use 390 MiB of address space, and at least 1024 MiB are needed"),
        ("ulimit -v 120000", "address space"),
    ],
)
@pytest.mark.parametrize("command", ["serve --port 0", "generate hi"])
def test_a_low_limit_is_named_in_one_line(tmp_path: Path, limit: str, says: str, command: str) -> None:
    line = f"{limit}; exec {sys.executable} -m infer {command} --model {tmp_path}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stderr
    (said,) = result.stderr.strip().splitlines()
    assert said.startswith("infer: error: ") and says in said


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (MemoryError(), "has run out"),
        (RuntimeError("can't start new thread"), "has run out"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "ulimit -v"),
        (OSError(errno.ENOSPC, "No space left on device", "/cache/kernel.so"), "/cache/kernel.so"),
        (OSError(errno.ENOSPC, "No space left on device"), None),  # standard output
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "TMPDIR"),
        (RuntimeError("something else"), None),
    ],
)
def test_what_runs_out_later_is_recognised(error: Exception, says: str | None) -> None:
    said = spell_shortage(error)
    assert said is None if says is None else says in str(said)


def test_a_disk_that_is_full_at_the_last_step_of_a_build_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'ld: final link failed: No space left on device' >&2\n"
        "echo 'collect2: error: ld returned 1 exit status' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "find_compiler", lambda: str(compiler))
    with pytest.raises(CBuildError, match="No space left on device"):
        build_library(directory=tmp_path / "kernels")


def test_petabytes_are_a_size() -> None:
    assert parse_bytes("1PiB") == 2**50 and parse_bytes("2 PB") == 2 * 10**15
