"""A model's weights on their way from the disk while the process that will load them imports PyTorch.

The system is asked to have them in its page cache; what is there already costs nothing. They are
asked for in vain if codes are kept for them (code_cache.py), which only PyTorch and the model's layers tell.
"""

from __future__ import annotations

import contextlib
import os
import threading

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
    files = [source.path] if source.is_gguf else sorted(source.path.glob("*.safetensors"))
    with contextlib.suppress(OSError):  # loading will say what is wrong with a file
        for file in files:
            with open(file, "rb") as handle:
                size = min(os.fstat(handle.fileno()).st_size, max_bytes)
                for start in range(0, size, CHUNK_BYTES):
                    os.posix_fadvise(handle.fileno(), start, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
            max_bytes -= size
