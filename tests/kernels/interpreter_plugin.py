"""A plugin of pytest that makes interpreted kernels four times as fast; results are the same without it.

Triton's interpreter puts its own functions into `triton.language` before a launch and again before every call
of a device function in it, which takes longer than most of these functions: once per launch is enough. It
builds a table of types for every value, and does integer arithmetic twice to see whether it overflows, which
indices of such small tensors cannot.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter

_put: Any = interpreter._patch_lang
_launch: Any = interpreter.GridExecutor.__call__
_find_type: Any = interpreter._get_np_dtype
_types: dict[str, Any] = {}
_done: set[int] = set()  # whose globals have seen their language patched in this launch


def _put_once(function: Any) -> Any:
    key = id(function.__globals__)
    if key in _done:
        return SimpleNamespace(restore=lambda: None)
    _done.add(key)
    return _put(function)


def _launch_anew(self: Any, *args: Any, **options: Any) -> Any:
    _done.clear()
    return _launch(self, *args, **options)


def _type_of(dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in _types:
        _types[name] = _find_type(dtype)
    return _types[name]


interpreter._patch_lang = _put_once
interpreter.GridExecutor.__call__ = _launch_anew
interpreter._get_np_dtype = _type_of
_builder: Any = interpreter.interpreter_builder
_builder.options = dataclasses.replace(_builder.options, sanitize_overflow=False)
