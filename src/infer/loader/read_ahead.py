"""A model's weights on their way from the disk while the process that will load them imports PyTorch.

The system is asked to have them in its page cache; pages that are there already cost nothing. If codes made
from these weights were kept (code_cache.py), the codes are asked for first: a start reads them, and reads the
weights only if it keeps them in another form this time.
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

MAX_BYTES = 4 << 30  # about what a disk reads in that time; more could push out what is read first
CHUNK_BYTES = 1 << 20  # about the most that the system reads for one request


def start_reading_ahead(source: ModelSource) -> threading.Thread:
    """Read ahead in a thread, because the disk may make it wait; no exit waits for the thread."""
    thread = threading.Thread(target=read_ahead, args=(source,), name="infer-read-ahead", daemon=True)
    thread.start()
    return thread


def read_ahead(source: ModelSource, max_bytes: int = MAX_BYTES) -> None:
    """Ask for the first `max_bytes` of a model's weights, in the order in which they are loaded."""
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError, ModelSourceError):  # loading will say what is wrong with a file
        names = f"{codes_prefix(source)}-*.safetensors"
        kept = sorted(codes_dir().glob(names), key=lambda file: file.stat().st_mtime)
        for file in (*kept[-1:], *source.weight_files):
            with open(file, "rb") as handle:
                size = min(os.fstat(handle.fileno()).st_size, max_bytes)
                for start in range(0, size, CHUNK_BYTES):
                    os.posix_fadvise(handle.fileno(), start, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
            max_bytes -= size


def codes_dir() -> Path:
    """Return the directory of kept codes."""
    return models_dir().parent / "codes"


def codes_prefix(source: ModelSource) -> str:
    """Return the beginning of the names of files with codes made from these weights."""
    found = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in source.weight_files]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:8]
