"""Convert values that models write in another notation to JSON.

<parameter=days>3</parameter>     XML holds raw text, whose type is in the tool's schema
f(city="Paris", metric=True)      Python literals, and nothing that would have to be run
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


MAX_PYTHON = 1 << 16  # characters of one call in Python's notation, which is parsed at once


def whole_characters(text: str) -> str:
    """The text with surrogate pairs, which JSON escapes leave, joined; a single surrogate becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def schema_types(schema: Mapping[str, Any] | None) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset((given,))
    if isinstance(given, list):
        return frozenset(each for each in given if isinstance(each, str))
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            parts = [schema_types(part) for part in schema[name]]
            return frozenset().union(*parts) if all(parts) else frozenset()
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return frozenset(("string",))
    return frozenset()


def is_text(schema: Mapping[str, Any] | None) -> bool:
    """Return True if a value can only be a string."""
    return schema_types(schema) == {"string"}


def read_value(text: str, schema: Mapping[str, Any] | None) -> str:
    """The JSON of raw text: a value of the schema's type if it reads as one, else a string."""
    types = schema_types(schema)
    stripped = text.strip()
    try:
        value = _WORDS[stripped] if stripped in _WORDS else json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types and not any(_is_of(value, name) for name in types):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value) if stripped in _WORDS else stripped


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_of(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES.get(name, ()))


def python_call(text: str, parameters: Mapping[str, Sequence[str]]) -> tuple[str, str] | None:
    """The name and the JSON arguments of `f(a, k=v)`; None if it is not a call of literals.

    `parameters` has the parameters of each tool in order, for positional arguments.
    """
    if len(text) > MAX_PYTHON:
        return None
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and "print" not in parameters:
            (node,) = node.args
        if not isinstance(node, ast.Call):
            return None
        name = ast.unparse(node.func)
        if not name.replace(".", "").isidentifier():
            return None
        given: dict[str, Any] = {}
        for key, value in zip(parameters.get(name, ())[: len(node.args)], node.args, strict=True):
            given[key] = _literal(value)
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in given:
                return None
            given[keyword.arg] = _literal(keyword.value)
        return name, json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """A Python literal; JSON's names for true, false and null are read as well."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) for key in node.keys if key is not None]
        if len(keys) != len(node.values) or not all(isinstance(key, str) for key in keys):
            raise ValueError("no JSON object")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, bool | int | float) or value is None:
        return value
    raise ValueError("no JSON value")
