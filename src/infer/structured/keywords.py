"""Where a keyword of a JSON schema stands, for errors: the library says which one it cannot compile.

A name under `properties` is no keyword, nor is anything inside a value such as `enum`, so the walk follows
the places where schemas can be:

    {"properties": {"not": {"not": {}}}}        the second `not` is a keyword: #/properties/not/not
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_SCHEMA = (
    "items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "propertyNames",
    "unevaluatedProperties", "not", "if", "then", "else",
)  # fmt: skip
_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def find_keyword(
    schema: object, keyword: str, is_it: Callable[[Any], bool] = lambda value: True
) -> str | None:
    """The JSON pointer of a keyword, the first whose value is the one looked for; None: there is none."""
    for pointer, found in _schemas(schema, "#"):
        if keyword in found and is_it(found[keyword]):
            return f"{pointer}/{_escape(keyword)}"
    return None


def _schemas(schema: object, pointer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object that stands where a schema may, outer ones first."""
    if not isinstance(schema, dict):
        return
    yield pointer, schema
    for name in _SCHEMA:
        yield from _schemas(schema.get(name), f"{pointer}/{name}")
    for name in _SCHEMAS:
        inner = schema.get(name)
        for number, each in enumerate(inner if isinstance(inner, list) else ()):
            yield from _schemas(each, f"{pointer}/{name}/{number}")
    for name in _NAMED:
        inner = schema.get(name)
        for key, each in (inner if isinstance(inner, dict) else {}).items():
            yield from _schemas(each, f"{pointer}/{_escape(name)}/{_escape(key)}")


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
