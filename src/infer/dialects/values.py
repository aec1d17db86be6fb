"""Convert values that models write as raw text, `<parameter=days>3</parameter>`, to JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


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
        value = WORDS[stripped] if stripped in WORDS else json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types and not any(_is_of(value, name) for name in types):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value) if stripped in WORDS else stripped


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_of(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES.get(name, ()))
