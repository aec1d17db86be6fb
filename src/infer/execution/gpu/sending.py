"""Copies to the device for which the host does not wait.

Everything is sent through fresh pinned memory, which torch's allocator keeps until the copy has run, however
many steps come before it.

The driver needs device memory to pin host memory. If another process has taken all device memory, a copy goes
through pageable memory, and the host waits for it. `reserve_pinned` makes that rare: blocks that were pinned
once stay in the allocator's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from infer.kernels.runtime.dispatch import is_gpu

ALIGNMENT = 16  # bytes
# bytes of the blocks that are pinned ahead of the first step; the allocator rounds up to powers of two
RESERVED_SIZES = tuple(1 << power for power in range(9, 20))
NUM_RESERVED = 8  # blocks of each size


def send_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy small arrays to the device in one transfer, because most of the cost is per copy.

    Each begins at a multiple of 16 bytes, like a separate tensor: kernels are compiled for this alignment,
    and would have to be compiled again without it.
    """
    if len(arrays) == 1:
        return [send(torch.from_numpy(arrays[0]), device)]
    sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in arrays]
    packed = bytearray().join([part.tobytes().ljust(size) for part, size in zip(arrays, sizes, strict=True)])
    sent = send(torch.frombuffer(packed, dtype=torch.int64), device)
    views = {np.dtype(np.int64): sent, np.dtype(np.int32): sent.view(torch.int32)}
    return [  # one call each; slicing, casting and reshaping would be three
        views[part.dtype].as_strided(
            part.shape, [stride // part.itemsize for stride in part.strides], start // part.itemsize
        )
        for part, start in zip(arrays, accumulate(sizes, initial=0), strict=False)
    ]


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on the device, without waiting for it; `values` may be freed at once."""
    if not is_gpu(device):
        return values
    return _pinned(values).to(device, non_blocking=True)  # the allocator keeps pinned memory until then


def send_into(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy `values` straight into `target`, which must be contiguous, without waiting for it."""
    assert target.is_contiguous(), "a target with gaps must be filled from a copy on the device: send"
    target.copy_(_pinned(values) if is_gpu(target.device) else values, non_blocking=True)


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """Start to copy a tensor from a GPU to new host memory; an event after it says when it is there."""
    try:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except torch.AcceleratorError as error:
        _check_is_no_memory(error)
        return tensor.cpu()
    return copy.copy_(tensor, non_blocking=True)


def reserve_pinned() -> None:
    """Pin blocks for later steps, as many as there is memory for, and leave them to the allocator."""
    held: list[torch.Tensor] = []
    try:
        for size in RESERVED_SIZES * NUM_RESERVED:
            held.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
    except torch.AcceleratorError as error:
        _check_is_no_memory(error)


def _pinned(values: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, or the values themselves if no more memory can be pinned."""
    try:
        return values.pin_memory()
    except torch.AcceleratorError as error:
        _check_is_no_memory(error)
        return values


def _check_is_no_memory(error: torch.AcceleratorError) -> None:
    """Raise any error except "out of memory", after which the device still works."""
    if "out of memory" not in str(error):
        raise error
