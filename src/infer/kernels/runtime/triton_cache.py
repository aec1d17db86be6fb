"""Triton's folder of compiled kernels, which may be damaged, full or not writable.

Triton trusts every file that it finds there. A file truncated by a full disk or a crash causes a traceback or
a failure in the driver. Here every file has its checksum next to it, and a file that does not match counts as
missing: the kernel is compiled again. If the folder cannot be written, the kernels of this process go into a
temporary one.

    <TRITON_CACHE_DIR>/<key>/kernel.cubin, kernel.cubin.sha256, ...
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from infer.errors import ConfigError

logger = logging.getLogger(__name__)

SUFFIX = ".sha256"


def install(triton: Any) -> None:
    """Make Triton store kernels this way, unless the user has configured another cache manager."""
    if triton.knobs.cache.manager_class is None:
        triton.knobs.cache.manager_class = _make_manager()


def is_whole(path: str) -> bool:
    """Return True if a file is intact or, written by another program, has no checksum."""
    try:
        told = Path(path + SUFFIX).read_text(encoding="ascii")
    except FileNotFoundError:
        return True
    except (OSError, UnicodeDecodeError):
        return False
    try:
        return told == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return False


@functools.cache
def _temporary_folder() -> str:
    folder = tempfile.mkdtemp(prefix="infer-triton-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _make_manager() -> type:
    from triton.runtime.cache import FileCacheManager

    class CheckedFolder(FileCacheManager):  # type: ignore[misc, unused-ignore]
        """The files of one kernel, each with its checksum."""

        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            try:
                super().__init__(key, override, dump)
            except OSError as error:
                self._move(error)

        def _move(self, error: OSError) -> None:
            """Store the files in a temporary folder from now on."""
            try:
                self.cache_dir = os.path.join(_temporary_folder(), self.key)
                os.makedirs(self.cache_dir, exist_ok=True)
            except OSError:
                raise ConfigError(
                    f"Triton's compiled kernels cannot be kept anywhere ({error}); set TRITON_CACHE_DIR to a "
                    "folder that can be written"
                ) from None
            self.lock_path = os.path.join(self.cache_dir, "lock")
            _say_once(str(error))

        def get_file(self, filename: str) -> str | None:
            """The path of a file, if it is intact."""
            path = super().get_file(filename)
            return path if path is not None and is_whole(path) else None

        def get_group(self, filename: str) -> dict[str, str] | None:
            """The paths of a kernel's files, if all of them are intact."""
            if self.get_file(f"__grp__{filename}") is None:
                return None
            try:
                group: dict[str, str] | None = super().get_group(filename)
            except (OSError, ValueError):
                return None
            return None if group is None or not all(map(is_whole, group.values())) else group

        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            """Write a file and its checksum; returns its path."""
            try:
                return self._put(data, filename)
            except OSError as error:
                self._move(error)
            try:
                return self._put(data, filename)
            except OSError as error:
                raise ConfigError(
                    f"Triton's compiled kernels cannot be written ({error}); set TRITON_CACHE_DIR to a "
                    "folder with room"
                ) from None

        def _put(self, data: Any, filename: str) -> str:
            content = data if isinstance(data, bytes) else str(data).encode()
            path: str = super().put(content, filename)
            super().put(hashlib.sha256(content).hexdigest(), filename + SUFFIX)
            return path

    return CheckedFolder


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("Triton's compiled kernels are not kept for the next start reason=%r", reason)
