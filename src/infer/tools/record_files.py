"""Files of records: the paths that may be written, and the names of a server's files.

infer generate --record run.jsonl     run.jsonl
infer serve --record run.jsonl        run.jsonl of the first engine, run-1.jsonl of the second, ...
an engine starts again, or its file   the file is set aside as run.jsonl.1 and replaces an older one:
has reached its limit                 at most two files for each engine
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from infer.errors import ConfigError


def check_record(path: Path, *, may_replace: bool) -> None:
    """Refuse anything but a plain file, and a file with contents unless it may be replaced.

    A run cannot be reproduced without its record.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot record to {path}: it is not a plain file; give the name of a new one")
    if path.is_file() and path.stat().st_size and not may_replace:
        raise ConfigError(f"{path} is there already; record to another name, or replace it with --overwrite")


def open_record(path: Path, *, is_new: bool = False) -> int:
    """Open a file that only its owner can read and return its descriptor; raises `OSError` on failure."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if is_new else 0), 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):  # an existing file would keep its mode
        os.fchmod(descriptor, 0o600)
    return descriptor


def aside(path: Path) -> Path:
    """Return the name that a file gets when another one takes its place."""
    return path.parent / f"{path.name}.1"


def set_aside(path: Path) -> None:
    """Rename a record to its other name, if it exists and is not empty."""
    if path.is_file() and path.stat().st_size:
        path.replace(aside(path))


class RecordPaths:
    """The files of a server's engines, by the name of their model."""

    def __init__(self, first: Path, *, num_replicas: int, may_replace: bool) -> None:
        self._first, self._num_replicas, self._may_replace = first, num_replicas, may_replace
        self._paths: dict[str, list[Path]] = {}

    def of(self, model: str) -> list[Path]:
        """Return a file for each engine of a model; the first call creates them empty, or refuses them."""
        if model not in self._paths:
            start = len(self._paths) * self._num_replicas
            paths = [self._path(start + number) for number in range(self._num_replicas)]
            for path in paths:
                self._make(path)
            self._paths[model] = paths
        return self._paths[model]

    def _path(self, number: int) -> Path:
        first = self._first
        return first.parent / f"{first.stem}-{number}{first.suffix}" if number else first

    def _make(self, path: Path) -> None:
        for each in (path, aside(path)):
            check_record(each, may_replace=self._may_replace)
        try:
            descriptor = open_record(path)
            os.ftruncate(descriptor, 0)
            os.close(descriptor)
            aside(path).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot record to {path}: {error.strerror}") from None
