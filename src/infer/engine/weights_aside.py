"""The weights of a model whose engine is gone: in host memory, until another engine is built on them.

A tensor is a view of a *storage*. When a model's engine is gone, the storages that are left are the weights,
as they were loaded: rounded, joined and put in order. On a GPU each is copied into pinned host memory and its
own memory is freed; the tensors stay, with nothing behind them. Coming back means memory for each storage and
one copy over the bus, and every view of it is what it was:

    engine ──► gone ──► storages ──► pinned host memory, the device's is free ──► storages again ──► engine

On a CPU the weights are in host memory already and stay where they are.
"""

from __future__ import annotations

import gc

import torch

from infer.cache.memory import pinned_bytes
from infer.engine.gc_freeze import collect, empty_host_cache
from infer.kernels.runtime.dispatch import is_gpu


class WeightsAside:
    """All tensors that this process has when its engine is gone."""

    def __init__(self) -> None:
        """Find the tensors; no reference to the engine is left."""
        gc.unfreeze()  # what is frozen is neither collected nor found
        collect()
        found: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
        for thing in gc.get_objects():
            # by its type: some things warn when they are asked for their class
            if issubclass(type(thing), torch.Tensor) and not thing.is_meta and thing.layout == torch.strided:
                storage = thing.untyped_storage()
                found[storage.device, storage.data_ptr()] = storage
        self._storages = [storage for storage in found.values() if storage.nbytes()]
        self._copies: list[torch.Tensor] = []
        # bytes that the weights take in host memory
        self.num_bytes = sum(
            pinned_bytes(storage.nbytes()) if is_gpu(storage.device) else storage.nbytes()
            for storage in self._storages
        )

    def leave_device(self) -> None:
        """Copy what is on a GPU to pinned memory, and give its memory back."""
        self._storages = [storage for storage in self._storages if is_gpu(storage.device)]
        for storage in self._storages:
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
            self._copies.append(copy.copy_(_bytes_of(storage), non_blocking=True))
        if self._storages:
            torch.cuda.synchronize()
        for storage in self._storages:
            storage.resize_(0)
        collect()

    def come_back(self) -> None:
        """Put everything back where it was."""
        for number, storage in enumerate(self._storages):  # no name holds a copy longer than the list does
            storage.resize_(self._copies[number].nbytes)
            _bytes_of(storage).copy_(self._copies[number], non_blocking=True)
        if self._storages:
            torch.cuda.synchronize()  # the copies may go now
        self._copies.clear()
        empty_host_cache()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A view of a storage, whatever it is a storage of."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
