"""What tests compile, once: processes that need the same file wait for the first of them to make it.

Files are kept between runs, for all checkouts of a user, under a name that a changed source, flag or compiler
changes too. A file that no test has asked for in a month is removed when the next one is made.
"""

from __future__ import annotations

import fcntl
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infer.kernels.cpu.build import cache_directory

MADE = cache_directory().parent / "tests"
KEPT_S = 30 * 86_400


def made_once(make: Callable[[Path], None], *parts: object) -> Path:
    """The file that `make` writes to a given path; it is made from `parts`, of which a file is its text."""
    digest = hashlib.sha256()
    for part in parts:
        text = (
            part.name.encode() + b"\0" + part.read_bytes() if isinstance(part, Path) else repr(part).encode()
        )
        digest.update(text + b"\0")
    path = MADE / digest.hexdigest()[:24]
    with one_at_a_time(path.name):
        if not path.exists():
            part_of_it = path.with_suffix(".part")
            make(part_of_it)
            part_of_it.replace(path)
            _remove_old()
        path.touch()
    return path


def _remove_old() -> None:
    for path in MADE.iterdir():
        if time.time() - path.stat().st_mtime > KEPT_S:
            path.unlink(missing_ok=True)


@contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """No two processes are within under the same name."""
    MADE.mkdir(parents=True, exist_ok=True)
    with (MADE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        yield
