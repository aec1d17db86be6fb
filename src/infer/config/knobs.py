"""What a knob is: a field of a frozen dataclass that carries everything needed to set it.

    block_size: int = knob(16, "tokens per KV-cache block", aliases=("page_size",))
        │                  │             │                             └─ spellings of other engines
        │                  │             └─ help, in --help and in docs/knobs.md
        │                  └─ default, and with the annotation the type that a value must have
        └─ flag --block-size, YAML key block_size, keyword of `LLM`

`settings.py` declares the knobs; `knob_rows` makes the table from which flags, files and docs are read.
Flags, files and keywords all pass through `own_names`, so a spelling that one of them takes is taken by all,
and the log says once what the knob is called here.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import types
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from infer.errors import ConfigError, closest

logger = logging.getLogger(__name__)


def knob(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    opposites: tuple[str, ...] = (),
    formerly: tuple[str, ...] = (),
    is_size: bool = False,
) -> Any:
    """Return a dataclass field that is a knob.

    `aliases` are what other engines call it, `opposites` what they call its reverse, `formerly` its names in
    the release before this one.
    """
    metadata = {"help": help, "choices": choices, "aliases": aliases, "opposites": opposites}
    return field(default=default, metadata=metadata | {"formerly": formerly, "is_size": is_size})


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobRow:
    """One knob, as flags, the YAML reader and the docs need it."""

    name: str
    section: str
    kind: type  # bool, int, float or str
    is_optional: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    opposites: tuple[str, ...] = ()
    formerly: tuple[str, ...] = ()
    is_many: bool = False  # a tuple: the flag may be given several times
    is_size: bool = False  # a text that `parse_bytes` reads; a number stands for its digits

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every name but its own under which the knob is taken."""
        return (*self.aliases, *self.opposites, *self.formerly)


@functools.cache
def knob_rows(section: str, section_type: type) -> tuple[KnobRow, ...]:
    """Return one row for every field of a section, in their order."""
    hints = get_type_hints(section_type)
    return tuple(_row(section, knob_field, hints[knob_field.name]) for knob_field in fields(section_type))


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
    """Return a value from YAML or a keyword in the knob's type; another type is refused."""
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


NOT_BUILT: Mapping[str, tuple[object, str]] = {
    "speculative_decoding": (False, "speculative decoding"),
    "draft_model": (None, "speculative decoding"),
    "spec_length": (0, "speculative decoding"),
    "tensor_parallel_size": (1, "an engine on several GPUs"),
    "pipeline_parallel_size": (1, "an engine on several GPUs"),
}
"""Settings of other engines for what this one cannot do yet: the one value that is taken, and what it is."""


def own_names(
    given: Mapping[str, Any], table: Mapping[str, KnobRow], *, says_own_name: bool = True
) -> dict[str, Any]:
    """Return the knobs under their own names; a name that is unknown or given twice is refused."""
    spelled = {other: row for row in table.values() for other in row.spellings}
    knobs: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name in NOT_BUILT:
            _check_not_built(name, value)
            continue
        row = table.get(name) or spelled.get(name)
        if row is None:
            others = {other: row.name for other, row in spelled.items()}
            raise ConfigError(f"unknown knob {key!r}{closest(name, table, aliases=others, listed='known')}")
        if row.name in knobs:
            raise ConfigError(f"{row.name} is given twice, once as {name}; give it once")
        if says_own_name and name != row.name:
            _say_own_name(name, row.name, is_old=name in row.formerly)
        if name in row.opposites and isinstance(value, bool):
            value = not value
        knobs[row.name] = value
    return knobs


def _check_not_built(name: str, value: object) -> None:
    only, what = NOT_BUILT[name]
    if str(value).lower() not in {str(only).lower(), *(("none", "0") if not only else ())}:
        raise ConfigError(f"{name} must be {only}, got {value!r}: {what} is not built yet; leave it out")


@functools.cache  # once in a process
def _say_own_name(given: str, own: str, *, is_old: bool) -> None:
    if is_old:
        logger.warning("knob was renamed; the next release refuses the old name old=%s new=%s", given, own)
    else:
        logger.info("knob has another name here given=%s own=%s", given, own)


LEAST_BARE = 2**20  # bytes that may be written without their unit

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(text: str, name: str = "a size") -> int:
    """Return the bytes of a size such as 512MiB, 4GiB or 1.5GB; `name` is the knob's, for the error.

    A number alone is bytes if it is large: 4 is likelier to mean 4 GiB than 4 bytes, which is written 4B.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    size = float(match[1]) * unit if match is not None and unit is not None else 0.0
    if not 1 <= size < 2**63:
        raise ConfigError(f"{name} must be a size above 0, such as 512MiB or 4GiB, got {text!r}")
    if size < LEAST_BARE and match is not None and not match[2]:
        raise ConfigError(f"{name} needs a unit, such as {match[1]}MiB or {match[1]}GiB, got {text!r}")
    return int(size)


def parse_memory(text: str, total: int, name: str) -> int:
    """Return the bytes of a size such as 12GiB, or of a share of `total` such as 0.9."""
    if re.fullmatch(r"\s*(0?\.\d+|1(\.0*)?)\s*", text) and float(text) > 0:
        return int(float(text) * total)
    try:
        return parse_bytes(text, name)
    except ConfigError:
        raise ConfigError(
            f"{name} must be a size such as 12GiB, or a share of the device's memory above 0 and at most 1 "
            f"such as 0.9, got {text!r}"
        ) from None


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
