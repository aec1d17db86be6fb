"""Keeps the weights of a deleted engine in host memory until another engine is built on them.

A tensor is a view of a *storage*. After an engine is deleted, the remaining storages are its weights in their
loaded form: quantized, fused and reordered. On a GPU, each storage is copied to pinned host memory and
resized to zero bytes; the tensors stay and point to the empty storage. To come back, each storage is resized
and filled with one copy over the bus, and all its views are valid again:

    engine deleted ──► storages ──► pinned host memory, GPU memory freed ──► storages ──► new engine

Allocating pinned memory takes far longer than copying, so the next engine may keep it for its own weights.

On a CPU the weights are in host memory already and stay where they are.
"""

from __future__ import annotations

import gc
from collections import defaultdict

import torch

from infer.cache.memory import pinned_bytes
from infer.engine.gc_freeze import collect, empty_host_cache
from infer.kernels.runtime.dispatch import is_gpu


class WeightsAside:
    """All tensors that this process has after its engine was deleted, and pinned memory for them."""

    def __init__(self) -> None:
        self._storages: list[torch.UntypedStorage] = []
        self._copies: list[torch.Tensor] = []
        self.num_bytes = 0  # bytes that the weights take in host memory

    def find(self) -> None:
        """Find the tensors; no reference to the engine may be left."""
        gc.unfreeze()  # frozen objects are neither collected nor listed
        collect()
        pinned = {copy.data_ptr() for copy in self._copies}
        found: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
        for thing in gc.get_objects():
            # `type()`, not `isinstance`: some objects warn when their __class__ is read
            if issubclass(type(thing), torch.Tensor) and not thing.is_meta and thing.layout == torch.strided:
                storage = thing.untyped_storage()
                found[storage.device, storage.data_ptr()] = storage
        storages = (storage for storage in found.values() if storage.nbytes())
        self._storages = [each for each in storages if is_gpu(each.device) or each.data_ptr() not in pinned]
        self.num_bytes = sum(
            pinned_bytes(storage.nbytes()) if is_gpu(storage.device) else storage.nbytes()
            for storage in self._storages
        )

    def leave_device(self) -> None:
        """Copy the storages on GPUs to pinned memory, and free their GPU memory."""
        self._storages = [storage for storage in self._storages if is_gpu(storage.device)]
        kept = defaultdict[int, list[torch.Tensor]](list)
        for copy in self._copies:
            kept[copy.nbytes].append(copy)
        self._copies = []
        for storage in self._storages:
            size = storage.nbytes()
            copy = (kept[size] or [torch.empty(size, dtype=torch.uint8, pin_memory=True)]).pop()
            self._copies.append(copy.copy_(_bytes_of(storage), non_blocking=True))
        if self._storages:
            torch.cuda.synchronize()
        for storage in self._storages:
            storage.resize_(0)
        kept.clear()  # copies whose sizes no storage has any more
        collect()

    def come_back(self) -> None:
        """Copy the storages back to their GPUs; the pinned memory is kept."""
        for number, storage in enumerate(self._storages):  # no loop variable may keep a copy alive
            storage.resize_(self._copies[number].nbytes)
            _bytes_of(storage).copy_(self._copies[number], non_blocking=True)
        if self._storages:
            torch.cuda.synchronize()  # the copies may be dropped or reused from here on

    @property
    def num_pinned(self) -> int:
        """The bytes of pinned memory."""
        return sum(pinned_bytes(copy.nbytes) for copy in self._copies)

    def drop_pinned(self) -> None:
        """Free the pinned memory; the weights must be back."""
        self._copies.clear()
        empty_host_cache()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
