"""Hides long-lived objects from Python's garbage collector.

Python frees most memory by counting references. For reference cycles it has a collector, which now and then
walks through *every* object it tracks. In a process that has imported PyTorch and compiled kernels that takes
more than a tenth of a second. If it happens in the middle of a step, the device runs out of work.

`gc.freeze` moves all current objects to a generation that is never collected:

    build ──► freeze ──► steps: only younger objects are walked ──► engine deleted ──► unfreeze
    idle: compile, capture ──► freeze ──┘

Reference counting still works on frozen objects. But an engine contains cycles (a device half and its
graphs), and a frozen cycle would never free its memory, including the KV cache. So deleting an engine
unfreezes everything, and the next collection frees the engine. Another engine of the same process is then
unfrozen too, until something is built or captured again: its steps may be slower, never wrong.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable


def freeze() -> None:
    """Collect the current garbage, and exclude all remaining objects from later collections."""
    gc.collect()
    gc.freeze()


def freeze_with(owner: object) -> None:
    """Freeze all objects until `owner` is deleted."""
    weakref.finalize(owner, gc.unfreeze).atexit = False
    freeze()


def collect() -> None:
    """Free the memory of a deleted engine, on the device and on the host."""
    import torch  # imported late: a simulated engine needs no torch

    gc.collect()
    torch.cuda.empty_cache()  # nothing where there is no GPU
    empty_host_cache()


def empty_host_cache() -> None:
    """Give unused pinned memory back to the system; without CUDA, do nothing."""
    import torch

    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if in_use and hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


def freezing(prepare: Callable[[], bool]) -> Callable[[], bool]:
    """Return a `prepare` that calls `freeze` after its last piece of work; True: it did a piece."""
    has_worked = False

    def run() -> bool:
        nonlocal has_worked
        was_busy, has_worked = has_worked, prepare()
        if was_busy and not has_worked:
            freeze()
        return has_worked

    return run
