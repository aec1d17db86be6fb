"""A model's weights on their way from the disk while the process that will load them imports PyTorch.

The system is asked to have them in its page cache; what is there already costs nothing. Where codes were kept
that had been made of these weights (code_cache.py), they are asked for first: a start reads them, and the
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

MAX_BYTES = 4 << 30  # about what a disk reads meanwhile; more could push out what is to be read first
CHUNK_BYTES = 1 << 20  # the system cuts what is asked for at once to about as much


def start_reading_ahead(source: ModelSource) -> threading.Thread:
    """Read ahead in a thread, for a disk may make it wait; no exit waits for the thread."""
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
    """Return where codes of weights are kept."""
    return models_dir().parent / "codes"


def codes_prefix(source: ModelSource) -> str:
    """Return how the names of files begin whose codes were made of these weights."""
    found = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in source.weight_files]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:8]
