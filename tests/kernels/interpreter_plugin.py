"""A plugin of pytest that makes interpreted kernels eight times as fast; results are the same without it.

Triton's interpreter puts its own functions into `triton.language` before a launch and again before every call
of a device function in it, which takes longer than most of these functions: once per launch is enough. It
builds a table of types for every value, and does integer arithmetic twice to see whether it overflows, which
indices of such small tensors cannot. It also describes the shape of every value anew, as constants with types
of their own, several times per operation: a shape is described once here, and two values of the same
shape need no comparison before they are added.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

from triton._utils import validate_block_shape
from triton.language import core, semantic
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


_unwrap: Any = core._unwrap_if_constexpr
_field: Any = core.tuple.__getattr__
_broadcast: Any = semantic.TritonSemantic.broadcast_impl_value
_plain = frozenset({int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type})
_shapes: dict[tuple[int, ...], tuple[Any, int]] = {}  # of a block's type
_described: dict[tuple[int, ...], tuple[Any, Any]] = {}  # of a tensor: as constants


def _unwrap_quickly(value: Any) -> Any:
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind in _plain else _unwrap(value)


def _begin_tuple(self: Any, args: Any, type: Any = None) -> None:
    self.values = list(args)
    if type is not None:
        self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)


def _field_or_type(self: Any, name: str) -> Any:
    if name == "type":  # hardly ever asked for
        self.type = core._type_for_tuple_values(self.values)
        return self.type
    return _field(self, name)


def _begin_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    key = tuple(_unwrap_quickly(size) for size in _unwrap_quickly(shape))
    if key not in _shapes:
        if not key:
            raise TypeError("0d block_type is forbidden")
        _shapes[key] = core.tuple(key), validate_block_shape(key)
    self.element_ty = element_ty
    self.shape, self.numel = _shapes[key]


def _begin_tensor(self: Any, handle: Any, type: Any) -> None:
    key = tuple(type.shape.values) if type.is_block() else ()
    if key not in _described:
        _described[key] = core.tuple([core.constexpr(size) for size in key]), core.constexpr(math.prod(key))
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _described[key]


def _broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> Any:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


core._unwrap_if_constexpr = _unwrap_quickly
core.tuple.__init__ = _begin_tuple
core.tuple.__getattr__ = _field_or_type
core.block_type.__init__ = _begin_block_type
core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
core.tensor.__init__ = _begin_tensor
semantic.TritonSemantic.broadcast_impl_value = _broadcast_unequal
interpreter._patch_lang = _put_once
interpreter.GridExecutor.__call__ = _launch_anew
interpreter._get_np_dtype = _type_of
_builder: Any = interpreter.interpreter_builder
_builder.options = dataclasses.replace(_builder.options, sanitize_overflow=False)
