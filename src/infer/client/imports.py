"""Import PyTorch in half the time, in a process of our own.

Two things make the import slow. The garbage collector repeatedly scans modules that are never freed. And a
third of the rest is `torch._meta_registrations`: the output shapes of all operations on meta tensors, for
PyTorch's compiler. An engine uses meta tensors to count bytes and computes nothing with them.

A third thing doubles the time: in many containers modules have no bytecode, because the installer makes none
and PYTHONDONTWRITEBYTECODE or a read-only folder keeps Python from writing it. All of PyTorch is then
compiled at every start. In that case we store bytecode next to compiled kernels (`keep_bytecode`).
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
    """Defer the parts of PyTorch that no engine needs, and pause the garbage collector during the imports.

    This does nothing if PyTorch is already imported: there is nothing to gain, and there may be garbage to
    collect. If PyTorch does not get imported inside, the placeholder module is removed.
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
    """Defer an import: the module stays an empty placeholder until one of its names is used."""
    empty = ModuleType(name)

    def load(attribute: str) -> object:
        if attribute.startswith("__"):  # the import system asks
            raise AttributeError(attribute)
        if sys.modules.get(name) is empty:  # missing if an earlier import failed: try again
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    vars(empty)["__getattr__"] = load
    sys.modules[name] = empty


def keep_bytecode(of: str = "torch") -> None:
    """Store bytecode in a folder of our own, here and in child processes, if Python does not store it.

    Whether Python does is checked on `of`, a large package that every start imports. A `pycache_prefix` that
    the user has set wins. Our folder has the versions in its name, because a cache may outlive an image, and
    only its owner may access it: bytecode is code.
    """
    spec = PathFinder.find_spec(of)
    if sys.pycache_prefix is not None or spec is None or spec.cached is None or spec.origin is None:
        return
    cannot_write = sys.dont_write_bytecode or not os.access(Path(spec.origin).parent, os.W_OK)
    if cannot_write and not os.path.exists(spec.cached):
        from importlib.metadata import version  # rarely needed, and slow to import

        with suppress(ModelSourceError, OSError, ImportError):  # no home, no write access, unknown version
            python = ".".join(map(str, sys.version_info[:3]))
            versions = f"python-{python}-torch-{version('torch')}-infer-{__version__}"
            folder = models_dir().parent / "bytecode" / versions
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()  # lstat: the target of a link may be open to others
            if found.st_uid == os.geteuid() and not found.st_mode & 0o077 and os.access(folder, os.W_OK):
                sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
                os.environ |= {"PYTHONPYCACHEPREFIX": sys.pycache_prefix, "PYTHONDONTWRITEBYTECODE": ""}
