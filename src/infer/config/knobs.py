"""What a knob is: a field of a frozen dataclass that carries everything people need to set it.

    block_size: int = knob(16, "tokens per KV-cache block")
        │                  │             └─ help, in --help and in docs/knobs.md
        │                  └─ default, and with the annotation the type that a value must have
        └─ flag --block-size, YAML key block_size, keyword of `LLM`

`settings.py` declares the knobs; `knob_rows` makes the table from which flags, files and docs are read, and
the checks below give every section's mistakes the same words.
"""

from __future__ import annotations

import os
import re
import types
from dataclasses import Field, dataclass, field, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from infer.errors import ConfigError


def knob(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    is_size: bool = False,
) -> Any:
    """Declare a field that people may set; `aliases` are extra flag names, without the dashes."""
    metadata = {"help": help, "choices": choices, "aliases": aliases, "is_size": is_size}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobRow:
    """What the flag, the YAML reader and the docs need to know about one knob."""

    name: str
    section: str
    kind: type  # bool, int, float or str
    is_optional: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    aliases: tuple[str, ...]
    is_many: bool = False  # a tuple: the flag may be given several times
    is_size: bool = False  # a text that `parse_bytes` reads; a number stands for its digits


def knob_rows(section: str, section_type: type) -> list[KnobRow]:
    """One row for every field of a section, in their order."""
    hints = get_type_hints(section_type)
    return [_row(section, knob_field, hints[knob_field.name]) for knob_field in fields(section_type)]


def _row(section: str, knob_field: Field[Any], hint: Any) -> KnobRow:
    is_union = get_origin(hint) in (Union, types.UnionType)
    is_many = get_origin(hint) is tuple
    members = [t for t in get_args(hint) if t not in (type(None), ...)] if is_union or is_many else [hint]
    assert len(members) == 1, f"knob {knob_field.name} must have one type, optionally None; got {hint}"
    return KnobRow(
        name=knob_field.name,
        section=section,
        kind=members[0],
        is_optional=is_union,
        is_many=is_many,
        default=knob_field.default,
        **knob_field.metadata,
    )


def parse_knob(row: KnobRow, value: Any) -> Any:
    """Check a value from YAML or from a keyword against the knob's type, or say what is allowed."""
    if value is None and row.is_optional:
        return None
    if isinstance(value, int) and value.bit_length() > 63:  # what a tensor and every wire format can hold
        raise ConfigError(
            f"{row.name} must be from -2^63 + 1 to 2^63 - 1, got a number of {value.bit_length()} bits"
        )
    if row.kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if row.is_many:
        values = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(each, row.kind) for each in values):
            raise ConfigError(f"{row.name} must be {row.kind.__name__} values, got {value!r}")
        return tuple(values)
    if row.kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if row.is_size and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # whether it needs a unit is for the section to say
    if not isinstance(value, row.kind) or (row.kind is int and isinstance(value, bool)):
        raise ConfigError(f"{row.name} must be {row.kind.__name__}, got {value!r}")
    return value


LEAST_BARE = 2**20  # bytes that may be written without their unit

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(text: str, name: str = "a size") -> int:
    """Read a size such as 512MiB, 4GiB or 1.5GB; `name` is whose it is, for the error.

    A number alone is bytes, if there are many of them: nobody means 4 bytes by 4, who does writes 4B.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    size = float(match[1]) * unit if match is not None and unit is not None else 0.0
    if not 1 <= size < 2**63:
        raise ConfigError(f"{name} must be a size above 0, such as 512MiB or 4GiB, got {text!r}")
    if size < LEAST_BARE and match is not None and not match[2]:
        raise ConfigError(f"{name} needs a unit, such as {match[1]}MiB or {match[1]}GiB, got {text!r}")
    return int(size)


def check_choice(section: Any, name: str) -> None:
    """Refuse a value that is not among the knob's choices."""
    choices = next(f for f in fields(section) if f.name == name).metadata["choices"]
    value = getattr(section, name)
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_positive(section: Any, *names: str) -> None:
    """Refuse what is neither unset nor an integer from 1 on."""
    for name in names:
        value = getattr(section, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name} must be a positive integer, got {value!r}")
