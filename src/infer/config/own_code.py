"""The user's own code, named in a knob, replaces a policy, proposer or allocator without a fork.

    --scheduler-policy my_policy.py:urgency          a name in a file
    --speculative-method my_package.drafts:Drafts    a name in an installed module

A knob that takes code lists its built-in choices and accepts the name of code as well. The code runs in the
engine with all rights of the server, so only whoever starts the server can name it: a request, a checkpoint
or an admin route cannot.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from infer.errors import ConfigError


def names_code(value: object) -> bool:
    """Return True for `module:Name` and `path/to/file.py:Name`."""
    if not isinstance(value, str):
        return False
    module, colon, name = value.rpartition(":")
    is_module = all(part.isidentifier() for part in module.split("."))
    return bool(colon) and name.isidentifier() and (module.endswith(".py") or is_module)


def load_code(value: str, knob: str) -> object:
    """Return the object that a knob names; a `ConfigError` says why it cannot be loaded."""
    place, _, name = value.rpartition(":")
    try:
        module = load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{knob}={value}: {place} cannot be imported ({reason})") from error
    try:
        found: object = getattr(module, name)
    except AttributeError:
        known = ", ".join(key for key in vars(module) if not key.startswith("_")) or "nothing"
        raise ConfigError(f"{knob}={value}: {place} has no {name!r}; it has {known}") from None
    return found


def load_file(path: Path) -> ModuleType:
    """Return a file as a module; the file is run once in a process."""
    path = path.resolve()
    key = f"infer_own_code.{path.as_posix()}"
    if key in sys.modules:
        return sys.modules[key]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module
