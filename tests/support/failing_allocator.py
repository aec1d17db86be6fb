"""An allocator that fails on demand: a dispatch mode plays the part of the GPU's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infer.engine.engine import Engine


class FailingAllocator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises OutOfMemoryError at the allocations with these numbers, counted while it is on.

    Each operation that makes a tensor of its own counts, and so does a copy with gaps from one memory to
    another, which is gathered on the way.
    """

    def __init__(self, fails: Callable[[int], bool] = lambda number: False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fails = fails
        self.count = self.num_failed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        allocates = any(value.alias_info is None for value in func._schema.returns)
        if func._schema.name == "aten::copy_":
            is_within = args[0].untyped_storage().data_ptr() == args[1].untyped_storage().data_ptr()
            allocates = not (is_within or args[0].is_contiguous() and args[1].is_contiguous())
        if allocates:
            self.count += 1
            if self._fails(self.count):
                self.num_failed += 1
                raise torch.OutOfMemoryError(f"allocation {self.count}")
        return func(*args, **(kwargs or {}))


class FailingEngine:
    """An engine whose steps, and nothing else, run under the allocator."""

    def __init__(self, engine: Engine, allocator: FailingAllocator) -> None:
        self.engine = engine
        device: Any = engine._device
        self._allocator, self._is_on = allocator, False
        for name in ("run", "draft"):
            if hasattr(device, name):
                setattr(device, name, functools.partial(self._run, getattr(device, name)))

    def _run(self, inner: Callable[..., Any], *args: Any) -> Any:
        if self._is_on:  # a half of a step
            return inner(*args)
        self._is_on = True
        try:
            with self._allocator:
                return inner(*args)
        finally:
            self._is_on = False
