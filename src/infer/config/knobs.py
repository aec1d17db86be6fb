"""A knob: a field of a frozen dataclass that carries everything needed to set it.

    block_size: int = knob(16, "tokens per KV-cache block", aliases=("page_size",))
        │                  │             │                             └─ spellings of other engines
        │                  │             └─ help, in --help and in docs/knobs.md
        │                  └─ default, and with the annotation the type that a value must have
        └─ flag --block-size, YAML key block_size, keyword of `LLM`

`settings.py` declares the knobs; `knob_rows` makes the table that flags, files and docs are made from.
Flags, files and keywords all pass through `own_names`, so all of them accept the same spellings, and the log
says once what the knob is called here.
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import math
import os
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from infer.config.foreign import FOREIGN, check_foreign
from infer.config.own_code import names_code
from infer.errors import ConfigError, nearest

logger = logging.getLogger(__name__)


def knob(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    same_as: Mapping[str, str] = types.MappingProxyType({}),
    least: int | None = None,
    most: int | None = None,
    aliases: tuple[str, ...] = (),
    opposites: tuple[str, ...] = (),
    formerly: tuple[str, ...] = (),
    is_size: bool = False,
    is_json: bool = False,
    takes_code: bool = False,
    takes_several: bool = False,
) -> Any:
    """Return a dataclass field that is a knob.

    `aliases` are other engines' names of the knob, `opposites` their names of its negation, `formerly` its
    names in the previous release. `same_as` has other spellings of choices, `least` and `most` the bounds of
    a number; without `least` it must be above 0. `takes_code`: the name of the user's own code (own_code.py)
    is a choice too. `takes_several`: a use of the flag takes several values, and a keyword may be a mapping.
    """
    metadata: dict[str, Any] = {"help": help, "aliases": aliases, "opposites": opposites}
    metadata |= {"choices": (*choices, *same_as), "same_as": same_as, "least": least, "most": most}
    metadata |= {"formerly": formerly, "is_size": is_size, "is_json": is_json, "takes_code": takes_code}
    metadata["takes_several"] = takes_several
    return field(default=default, metadata=metadata)


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
    same_as: Mapping[str, str] = field(default_factory=dict)  # the choice that each other spelling stands for
    least: int | None = None  # the smallest number; None: all above 0
    most: int | None = None
    aliases: tuple[str, ...] = ()
    opposites: tuple[str, ...] = ()
    formerly: tuple[str, ...] = ()
    is_many: bool = False  # a tuple: the flag may be given several times
    is_size: bool = False  # a string for `parse_bytes`; a number stands for its digits
    is_json: bool = False  # a string that holds a JSON object; a mapping stands for its JSON
    takes_code: bool = False  # True if `module:Name` of the user's own code is allowed as well
    takes_several: bool = False  # a flag is followed by one value or more; a mapping stands for NAME=VALUE

    @property
    def spellings(self) -> tuple[str, ...]:
        """The other names under which the knob is accepted."""
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
    """Return a value from YAML or a keyword in the knob's type; another type is refused.

    None leaves a knob open: a knob that may be None, or whose choice `auto` means the same.
    """
    if value is None and (row.is_optional or row.default == "auto"):
        return row.default if row.default == "auto" else None
    if isinstance(value, int) and value.bit_length() > 63:  # more than a tensor or a wire format can hold
        raise ConfigError(
            f"{row.name} must be from -2^63 + 1 to 2^63 - 1, got a number of {value.bit_length()} bits"
        )
    if row.kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if row.takes_several and isinstance(value, Mapping):
        if not all(isinstance(each, str | os.PathLike) for each in value.values()):
            raise ConfigError(f"{row.name} must map names to paths, got {value!r}")
        value = [f"{name}={os.fspath(each)}" for name, each in value.items()]
    if row.is_many:
        values = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(each, row.kind) for each in values):
            raise ConfigError(f"{row.name} must be {row.kind.__name__} values, got {value!r}")
        return tuple(values)
    if row.kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if row.is_size and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # the section decides whether it needs a unit
    if row.is_json and isinstance(value, Mapping):
        value = json.dumps(value)
    if not isinstance(value, row.kind) or (row.kind is int and isinstance(value, bool)):
        raise ConfigError(f"{row.name} must be {row.kind.__name__}, got {value!r}")
    return value


def own_names(
    given: Mapping[str, Any],
    table: Mapping[str, KnobRow],
    *,
    elsewhere: Mapping[str, KnobRow] | None = None,
    says_own_name: bool = True,
) -> dict[str, Any]:
    """Return the knobs under their own names; a name that is unknown or given twice is refused.

    `elsewhere` has the knobs of the server, for the error message.
    """
    spelled = _by_spelling(table)
    knobs: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name in FOREIGN and name not in spelled:
            check_foreign(name, value)
            continue
        row = spelled.get(name)
        if row is None:
            raise ConfigError(_unknown(name, spelled, elsewhere or {}))
        if row.name in knobs:
            names = [name, *(str(key).replace("-", "_") for key in given)]
            other = next((n for n in names if n in row.spellings), name)
            raise ConfigError(f"{row.name} is given twice, once as {other}; give it once")
        if says_own_name and name != row.name and len(name) > SHORT:
            _say_own_name(name, row.name, is_old=name in row.formerly)
        if name in row.opposites and isinstance(value, bool):
            # an opposite that is turned off asks for nothing: a knob that can be open stays open
            value = None if not value and row.is_optional else not value
        knobs[row.name] = value
    return knobs


def _by_spelling(table: Mapping[str, KnobRow]) -> dict[str, KnobRow]:
    """Return the knobs of the table by every name under which they are accepted."""
    return {name: row for row in table.values() for name in (*row.spellings, row.name)}


def _unknown(name: str, spelled: Mapping[str, KnobRow], elsewhere: Mapping[str, KnobRow]) -> str:
    """Return the message about a name that no knob has: where it is a knob, or which knobs resemble it."""
    if (row := _by_spelling(elsewhere).get(name)) is not None:
        also = "" if name == row.name else f" ({row.name})"
        return f"{name}{also} is a knob of the server; give it to infer serve"
    begun = f"unknown knob {name!r}"
    if match := nearest(name, spelled):
        return f"{begun}; did you mean {spelled[match].name!r}?"
    alike = dict.fromkeys(spelled[each].name for each in difflib.get_close_matches(name, spelled, n=3))
    return f"{begun}; similar: {', '.join(alike)}" if alike else f"{begun}; docs/knobs.md lists all knobs"


def given_names(given: Mapping[str, Any], table: Mapping[str, KnobRow]) -> dict[str, str]:
    """Return the spelling of each knob that was not given under its own name."""
    names = {str(key).replace("-", "_"): str(key) for key in given}
    return {row.name: names[name] for row in table.values() for name in row.spellings if name in names}


def spell_as_given(message: str, names: Mapping[str, str]) -> str:
    """Return an error message that adds to each knob's own name the name that it was given under."""
    for own, given in names.items():
        pattern = rf"(?<![\w-])(?:--)?{own.replace('_', '[-_]')}(?![\w-])"
        if given.lstrip("-").replace("-", "_") not in message:
            message = re.sub(pattern, f"{given} ({own})", message, count=1)
    return message


def read_config_file(
    path: Path, table: Mapping[str, KnobRow], *, elsewhere: Mapping[str, KnobRow] | None = None
) -> dict[str, Any]:
    """Return the knobs of a YAML file: a flat mapping, its keys written with dashes or underscores.

    `elsewhere` has the knobs of the server, for the error message.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        raw, node = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"config file {path} must be a mapping of knob to value, got {type(raw).__name__}")
    keys = [key.value for key, _ in node.value]  # `raw` holds only the last of several equal keys
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"config file {path}: {key} is given {keys.count(key)} times; give it once")
    try:
        named = own_names(raw, table, elsewhere=elsewhere)
        return {name: parse_knob(table[name], value) for name, value in named.items()}
    except ConfigError as error:
        message = spell_as_given(str(error), given_names(raw, table))
        raise ConfigError(f"config file {path}: {message}") from None


@functools.cache  # once in a process
def _say_own_name(given: str, own: str, *, is_old: bool) -> None:
    if is_old:
        logger.warning("knob was renamed; the next release refuses the old name old=%s new=%s", given, own)
    else:
        logger.info("knob has another name here given=%s own=%s", given, own)


SHORT = 2  # most letters of an abbreviation such as -tp, which is not another engine's name
LEAST_BARE = 2**20  # bytes that may be written without their unit

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50}
_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}


def parse_bytes(text: str, name: str = "a size") -> int:
    """Return the bytes of a size such as 512MiB, 4GiB or 1.5GB; `name` is the knob's, for the error.

    A large number without a unit is bytes. A small one is refused: 4 is likelier to mean 4 GiB than 4B.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    size = float(match[1]) * unit if match is not None and unit is not None else 0.0
    if not 1 <= size < 2**63:
        raise ConfigError(f"{name} must be a size above 0, such as 512MiB or 4GiB, got {text!r}")
    if size < LEAST_BARE and match is not None and not match[2]:
        raise ConfigError(f"{name} needs a unit, such as {match[1]}MiB or {match[1]}GiB, got {text!r}")
    return int(size)


def format_bytes(count: float) -> str:
    """Return a size in words: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def host_size(text: str, name: str) -> str | None:
    """Return a size of host memory with its unit; a small number alone is GiB, zero in any unit is None."""
    size = text.strip()
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([a-zA-Z]*)", size)
    if match is not None and match[2].lower() in _UNITS:
        if float(match[1]) == 0:
            return None
        if not match[2] and float(match[1]) < LEAST_BARE:
            size += "GiB"
    parse_bytes(size, name)
    return size


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


_NUMBERS = {int: ("an integer", "a positive integer"), float: ("a number", "a number above 0")}


def check_knobs(section: Any) -> None:
    """Refuse values that knobs do not take, and give every choice its usual spelling."""
    section_type: type = type(section)
    for row in knob_rows("", section_type):
        value = getattr(section, row.name)
        if row.choices:
            if value not in row.choices and not (row.takes_code and names_code(value)):
                also = " (or code of your own, as module:Name or file.py:Name)" if row.takes_code else ""
                taken = ", ".join(choice for choice in row.choices if choice not in row.same_as)
                others = f"; other names of these: {', '.join(row.same_as)}" if row.same_as else ""
                raise ConfigError(f"{row.name} must be one of {taken}{also}, got {value!r}{others}")
            object.__setattr__(section, row.name, row.same_as.get(value, value))
        elif row.kind in _NUMBERS and value is not None:
            kind, positive = _NUMBERS[row.kind]
            is_number = isinstance(value, int | row.kind) and not isinstance(value, bool)
            least = math.ulp(0.0) if row.least is None else row.least  # the smallest number above 0
            if not is_number or not least <= value < math.inf:
                what = positive if row.least is None else f"{kind} >= {row.least}"
                raise ConfigError(f"{row.name} must be {what}, got {value!r}")
            if row.most is not None and value > row.most:
                raise ConfigError(f"{row.name} must be at most {row.most}, got {value}")


def refuse(faults: Iterable[str]) -> None:
    """Raise the first of the faults, if there is any; the later ones may rely on the rules before them."""
    for fault in faults:
        raise ConfigError(fault)
