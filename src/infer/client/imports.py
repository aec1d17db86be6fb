"""Importing PyTorch in half its time, in a process that is ours alone.

Two things make it slow. The garbage collector walks again and again through modules that stay for good. And a
third of the rest is `torch._meta_registrations`: the shapes of all operations on tensors without numbers, for
PyTorch's compiler. An engine makes such tensors to count bytes and computes nothing with them.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def quick_imports() -> Iterator[None]:
    """Put off what no engine needs of PyTorch, and keep the collector away from what is imported.

    Where PyTorch is imported already, nothing is to be won, and garbage may be lying about.
    """
    if "torch" in sys.modules:
        yield
        return
    put_off("torch._meta_registrations")
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def put_off(name: str) -> None:
    """Let an import of this module bring an empty one, which becomes the module when asked for a name."""
    empty = ModuleType(name)

    def load(attribute: str) -> object:
        if attribute.startswith("__"):  # a question of the import system
            raise AttributeError(attribute)
        if sys.modules.get(name) is empty:  # none, where an import failed: it is tried again
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    vars(empty)["__getattr__"] = load
    sys.modules[name] = empty
