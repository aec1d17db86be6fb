"""The system's limits for this process, reported in one line before and after it hits one.

C++ libraries abort the process when file descriptors or address space run out, with a message that mentions
neither. So limits under which nothing works are rejected up front; a shortage that occurs later, in Python,
is recognised by its exception.
"""

from __future__ import annotations

import errno

from infer.errors import ConfigError, InferError

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

MIN_FILES = 64  # an engine process, its sockets and pipes, an event loop, and files that are being read
MIN_ADDRESSES = 2**30  # bytes: PyTorch alone maps about 0.8 GB
_NO_FILES = (errno.EMFILE, errno.ENFILE)
_NO_DISK = (errno.ENOSPC, errno.EDQUOT)
_NO_MEMORY = (
    "can't start new thread",
    "not enough memory",
    "failed to map segment",
    "Cannot allocate memory",
)


def check_limits() -> None:
    """Reject limits under which no model can be loaded."""
    if resource is None:
        return
    files, addresses = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS))
    if files != resource.RLIM_INFINITY and files < MIN_FILES:
        raise ConfigError(
            f"this process may open {files} files at once, and at least {MIN_FILES} are needed; raise the "
            f"limit: ulimit -n {16 * MIN_FILES}"
        )
    if addresses != resource.RLIM_INFINITY and addresses < MIN_ADDRESSES:
        raise ConfigError(
            f"this process may use {addresses >> 20} MiB of address space, and at least "
            f"{MIN_ADDRESSES >> 20} MiB are needed; raise the limit: ulimit -v unlimited"
        )


def spell_shortage(error: BaseException) -> str | None:
    """Return one line about the resource that has run out; None if the error has another cause."""
    if isinstance(error, InferError):
        return None
    if isinstance(error, OSError) and error.errno in _NO_FILES:
        return "too many open files; raise the limit: ulimit -n 1024"
    if isinstance(error, OSError) and error.errno in _NO_DISK and error.filename is not None:
        return f"the disk is full: {error.filename} cannot be written; free some space, or set XDG_CACHE_HOME"
    if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):
        return "no temporary file can be written; free some space, or set TMPDIR to a folder that has some"
    is_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if is_memory or any(words in str(error) for words in _NO_MEMORY):
        return "memory or address space has run out; free some, raise ulimit -v, or take a smaller model"
    return None
