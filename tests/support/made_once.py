"""What tests compile, once: processes that need the same file wait for the first of them to make it.

Files are kept between runs, under a name that a changed source, flag or compiler changes too.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MADE = Path(__file__).parents[2] / ".pytest_cache" / "made"


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
    return path


@contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """No two processes are within under the same name."""
    MADE.mkdir(parents=True, exist_ok=True)
    with (MADE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        yield
