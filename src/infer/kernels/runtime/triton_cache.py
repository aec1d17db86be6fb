"""Triton's folder of compiled kernels, which may be damaged, full or not writable.

Triton reads what it finds there. A file that was cut short, by a full disk or a machine that went down, ends
in a traceback or in the driver. Here every file has its checksum next to it, and a file that does not match
counts as not found: it is compiled again. If nothing can be written, the kernels of this process go into a
temporary folder.

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
    """Let Triton keep kernels this way, unless the user has chosen another one."""
    if triton.knobs.cache.manager_class is None:
        triton.knobs.cache.manager_class = _make_manager()


def is_whole(path: str) -> bool:
    """Return True if a file is what was written; one without a checksum is from another program."""
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
            """Keep the files in a temporary folder from now on."""
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
            """The path of a file, if it is whole."""
            path = super().get_file(filename)
            return path if path is not None and is_whole(path) else None

        def get_group(self, filename: str) -> dict[str, str] | None:
            """The paths of a kernel's files, if all of them are whole."""
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
    logger.warning("compiled kernels of Triton are not kept reason=%r", reason)
