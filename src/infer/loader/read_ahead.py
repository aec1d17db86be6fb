"""Prefetch a model's weights from disk while the process that will load them imports PyTorch.

The kernel is asked to read them into the page cache; pages that are already there cost nothing. If codes made
from these weights are cached (code_cache.py), the codes are prefetched first: loading needs only them, unless
the weights are kept in another form this time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from pathlib import Path

from infer.errors import ModelSourceError
from infer.loader.find.default_model import models_dir
from infer.loader.find.source import ModelSource

MAX_BYTES = 4 << 30  # about what a disk reads in that time; more could evict what is needed first
CHUNK_BYTES = 1 << 20  # about the most that the kernel reads for one request


def start_reading_ahead(source: ModelSource) -> threading.Thread:
    """Read ahead in a daemon thread, because the requests may block; the process can exit without it."""
    thread = threading.Thread(target=read_ahead, args=(source,), name="infer-read-ahead", daemon=True)
    thread.start()
    return thread


def read_ahead(source: ModelSource, max_bytes: int = MAX_BYTES) -> None:
    """Request the first `max_bytes` of a model's weights, in loading order."""
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError, ModelSourceError):  # loading will report what is wrong with a file
        names = f"{codes_prefix(source)}-*.safetensors"
        kept = sorted(codes_dir().glob(names), key=lambda file: file.stat().st_mtime)
        for file in (*kept[-1:], *source.weight_files):
            with open(file, "rb") as handle:
                size = min(os.fstat(handle.fileno()).st_size, max_bytes)
                for start in range(0, size, CHUNK_BYTES):
                    os.posix_fadvise(handle.fileno(), start, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
            max_bytes -= size


def codes_dir() -> Path:
    """Return the directory of cached codes."""
    return models_dir().parent / "codes"


def codes_prefix(source: ModelSource) -> str:
    """Return the prefix of the names of files with codes made from these weights."""
    found = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in source.weight_files]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:8]
