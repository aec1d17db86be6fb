"""Importing PyTorch in half its time, in a process that is ours alone.

Two things make it slow. The garbage collector walks again and again through modules that stay for good. And a
third of the rest is `torch._meta_registrations`: the shapes of all operations on tensors without numbers, for
PyTorch's compiler. An engine makes these tensors to count bytes and computes nothing with them.

A third one doubles it: in many containers modules come without bytecode, because the installer makes none
and PYTHONDONTWRITEBYTECODE, or a folder that cannot be written, keeps Python from making it. Then all of
PyTorch is compiled at every start. There, bytecode is kept where compiled kernels are (`keep_bytecode`).
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from infer import __version__
from infer.errors import ModelSourceError
from infer.loader.find.default_model import models_dir

PUT_OFF = "torch._meta_registrations"


@contextmanager
def quick_imports() -> Iterator[None]:
    """Put off the parts of PyTorch that no engine needs, and keep the collector away from the imports.

    Where PyTorch is imported already there is nothing to gain, and there may be garbage to collect. Where it
    has not come at all, nothing of it is left.
    """
    if "torch" in sys.modules:
        yield
        return
    put_off(PUT_OFF)
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
        if "torch" not in sys.modules:
            sys.modules.pop(PUT_OFF, None)


def put_off(name: str) -> None:
    """Let an import of this module give an empty one, which becomes the module when asked for a name."""
    empty = ModuleType(name)

    def load(attribute: str) -> object:
        if attribute.startswith("__"):  # a question of the import system
            raise AttributeError(attribute)
        if sys.modules.get(name) is empty:  # none, where an import failed: it is tried again
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    vars(empty)["__getattr__"] = load
    sys.modules[name] = empty


def keep_bytecode(of: str = "torch") -> None:
    """Let this process, and those it starts, keep bytecode in a folder of ours where Python keeps none.

    A large package that every start imports shows whether Python does. A folder of the user's choice stays.
    Ours has the versions in its name, because a cache may outlive an image, and only its owner may use it:
    bytecode is code.
    """
    spec = PathFinder.find_spec(of)
    if sys.pycache_prefix is not None or spec is None or spec.cached is None or spec.origin is None:
        return
    cannot_write = sys.dont_write_bytecode or not os.access(Path(spec.origin).parent, os.W_OK)
    if cannot_write and not os.path.exists(spec.cached):
        from importlib.metadata import version  # seldom needed, and slow to import

        with suppress(ModelSourceError, OSError, ImportError):  # no home, no folder there, an unknown PyTorch
            python = ".".join(map(str, sys.version_info[:3]))
            versions = f"python-{python}-torch-{version('torch')}-infer-{__version__}"
            folder = models_dir().parent / "bytecode" / versions
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()  # lstat: others may use the target of a link
            if found.st_uid == os.geteuid() and not found.st_mode & 0o077 and os.access(folder, os.W_OK):
                sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
                os.environ |= {"PYTHONPYCACHEPREFIX": sys.pycache_prefix, "PYTHONDONTWRITEBYTECODE": ""}
