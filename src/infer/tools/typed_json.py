"""Parse a file's JSON into a typed struct, with errors that name the place, the value and what is allowed.

    day.jsonl line 3: 'prompt_len' is 0, expected `int` >= 1

The types are the specification: a struct's annotations say what a file may contain, and msgspec checks it
while parsing. msgspec's errors do not include the value, so it is looked up again when a check has failed.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar, get_args

import msgspec

from infer.errors import ConfigError, closest

T = TypeVar("T")

_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*?)`(?: - at `\$\.(.*)`)?$")
_AT = re.compile(r"^(.*?) - at `(.*)`$", re.DOTALL)


def read_json(data: bytes, decoder: msgspec.json.Decoder[T], where: str) -> T:
    """Return the struct in `data`; raises a ConfigError that begins with `where`."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explain(data, decoder.type, str(error))}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None


def shown(value: object) -> str:
    """Return a value as JSON, shortened if it is long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def _explain(data: bytes, kind: Any, message: str) -> str:
    if field := _FIELD.match(message):
        name = f"{field[3]}.{field[2]}" if field[3] else field[2]
        if field[1].startswith("missing"):
            return f"{name!r} is missing"
        is_struct = isinstance(kind, type) and not field[3]
        known = [each.encode_name for each in msgspec.structs.fields(kind)] if is_struct else []
        return f"unknown key {name!r}{closest(name, known, listed='known')}"
    if (found := _AT.match(message)) is None:
        return message[:1].lower() + message[1:]
    rule, path = found[1], found[2].removeprefix("$.")
    if rule.startswith("Invalid value"):  # the tag of a union
        tags = [str(member.__struct_config__.tag) for member in get_args(kind)]
        rule = f"expected one of {', '.join(tags)}"
    elif rule.startswith("Number out of range"):
        rule = "expected a number in range"
    return f"{path!r} is {shown(_look_up(data, path))}, {rule[:1].lower()}{rule[1:]}"


def _look_up(data: bytes, path: str) -> Any:
    """Return the value at a path such as `request.prompt[3]`, or the last one that exists along it."""
    value = json.loads(data)
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            value = value[int(index) if index else name]
        except (LookupError, TypeError):
            break
    return value
