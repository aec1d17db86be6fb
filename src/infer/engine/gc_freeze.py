"""Objects that were built to stay are kept out of the garbage collector's sight.

Python frees most memory by counting references. For objects that refer to each other in a circle it has a
collector, which now and then walks through *every* object it knows. In a process that has imported PyTorch
and compiled kernels that takes more than a tenth of a second; it comes in the middle of a step, and the
device runs out of work.

`gc.freeze` moves all objects of the moment to where the collector never looks:

    build ──► freeze ──► steps, between which only younger objects are walked ──► engine gone ──► unfreeze
    idle: compile, capture ──► freeze ──┘

Frozen or not, references are counted. But an engine has circles in it (a device half and its graphs), and a
frozen circle would hold its memory for good, the cache of keys and values with it. So an engine that goes
unfreezes everything, and the next collection finds what is left of it. Another engine of the same process is
then in sight, too, until something is built or captured again: slower now and then, never wrong.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable


def freeze() -> None:
    """Collect what is garbage now, and never look again at what is not."""
    gc.collect()
    gc.freeze()


def freeze_with(owner: object) -> None:
    """`freeze`, until this object is gone."""
    weakref.finalize(owner, gc.unfreeze).atexit = False
    freeze()


def collect() -> None:
    """Find what is left of an engine that has gone, and give its memory back to the device and the host."""
    import torch  # here: an engine without a model, and the process around it, need none

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
    """`prepare`, which does a piece of work and says whether it did; after the last one comes a `freeze`."""
    has_worked = False

    def run() -> bool:
        nonlocal has_worked
        was_busy, has_worked = has_worked, prepare()
        if was_busy and not has_worked:
            freeze()
        return has_worked

    return run
