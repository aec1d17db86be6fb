"""Cubins on disk, so that a server's next start does not compile again.

    ~/.cache/infer/kernels/<key>.cubin        32 bytes of checksum, then the cubin

The C kernels use the same folder and scheme (kernels/cpu/build.py): the key is a hash of everything a cubin
depends on, so nothing is ever stale, and a file is renamed into place when it is complete. A file that is
unreadable or corrupt is compiled again; a folder that cannot be written is not an error. If several processes
need the same cubin, such as the replicas of a server, one compiles it and the others wait, up to a time
limit, so that a process that hangs does not keep the others from starting.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from infer.kernels.cpu.build import CBuildError, cache_directory

logger = logging.getLogger(__name__)

_CHECKSUM_BYTES = hashlib.sha256().digest_size
_POLL_SECONDS = 0.02
_LONG_SECONDS = 10.0  # a longer wait is logged
_MAX_SECONDS = 180.0  # longest wait, more than a compilation takes; then this process compiles, too


def cached(key: Sequence[bytes], make: Callable[[], bytes]) -> bytes:
    """The bytes stored on disk for this key; if there are none, call `make` and store its result."""
    try:
        path = cache_directory() / f"{_digest(key)}.cubin"
    except CBuildError:  # no home directory, so nowhere to store it
        return make()
    if (found := _read(path)) is not None:
        return found
    with one_at_a_time(key):
        if (found := _read(path)) is None:
            found = make()
            _write(path, found)
    return found


@contextlib.contextmanager
def one_at_a_time(key: Sequence[bytes]) -> Iterator[None]:
    """Hold the lock of this key against other processes and threads; go on without it after a time limit.

    Without a folder there is no lock. If a result cannot be stored, all waiters may make it at the same time.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, CBuildError):
            path = cache_directory() / f"{_digest(key)}.lock"
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.open("wb"))
            stack.callback(_forget, path)  # waiting processes have the file open and will find the result
            _wait_for(lock, path)
        yield


def _wait_for(lock: IO[bytes], path: Path) -> None:
    """Lock an open file, or give up after a time limit; a long wait is logged."""
    start, is_said = time.monotonic(), False
    while (waited := time.monotonic() - start) < _MAX_SECONDS:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if waited > _LONG_SECONDS and not is_said:
            logger.info("waiting for another process to compile lock=%s seconds=%.0f", path, waited)
            is_said = True
        time.sleep(_POLL_SECONDS)
    logger.warning("another process has not finished compiling, so this one compiles too lock=%s", path)


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _digest(key: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in key)).hexdigest()[:24]


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, cubin = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == checksum else None


def _write(path: Path, cubin: bytes) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            made.write_bytes(hashlib.sha256(cubin).digest() + cubin)
            os.replace(made, path)
