"""Python functions as tools: their schemas for a model, and calls with the arguments that it wrote.

    def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> dict[str, float]:
        \"\"\"Look up the weather of a city.\"\"\"

    tool = PythonTool(get_weather)
    tool.schema                     {"type": "function", "function": {"name": "get_weather", ...}}
    tool.call(tool.read('{"city": "Bern"}'))                              get_weather(city="Bern")

An annotation decides two things: the JSON schema that the model sees, and how a JSON value becomes the
argument. Both are made together, in `_kind`, so they cannot disagree. The docstring's first paragraph
describes the tool, the entries of its section `Args:` describe the parameters. A type that is not in
`ALLOWED` is refused when the tool is made; the error names the function, its line and the parameter.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Required,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from infer.dialects.events import TOOL_NAME
from infer.errors import RequestError

ALLOWED = (
    "str, int, float, bool, list[T], dict[str, T], Literal, Enum, TypedDict, a dataclass, "
    "T | None, and Annotated[T, 'description']"
)
Tools: TypeAlias = Sequence[Mapping[str, Any] | Callable[..., object]]  # tools in wire form, or functions
_SECTION = re.compile(r"(Args|Arguments|Parameters):")
_ENTRY = re.compile(r"(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_SCALARS: dict[object, tuple[str, str, Any]] = {  # the JSON type, its name in words, the Python types
    str: ("string", "a text", (str,)),
    int: ("integer", "a whole number", (int,)),
    float: ("number", "a number", (int, float)),
    bool: ("boolean", "true or false", (bool,)),
    NoneType: ("null", "null", (NoneType,)),
}


class _Kind(NamedTuple):
    """A type: its JSON schema for the model, and the reader of its values."""

    schema: dict[str, Any]
    read: Callable[[Any, str], Any]  # (a JSON value, its place) to the argument; ValueError if unfit


class _Field(NamedTuple):
    """A parameter of a function, or a field of an object."""

    kind: _Kind
    is_required: bool


class PythonTool:
    """A function that a model may call."""

    def __init__(self, function: Callable[..., object]) -> None:
        """Refuse, with a `RequestError`, a function that cannot be described to a model."""
        self.function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        if TOOL_NAME.fullmatch(self.name) is None:
            raise self._refusal(f"its name {self.name!r} must be 1 to 64 of A-Z, a-z, 0-9, '_' and '-'")
        said = _read_docstring(inspect.getdoc(function) or "")
        self.description = said.pop("", "")
        self._fields = self._read_signature(said)
        described = {"description": self.description} if self.description else {}
        parameters = _object_schema(self._fields)
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.name, **described, "parameters": parameters},
        }

    def read(self, arguments: str) -> dict[str, Any]:
        """Return the keyword arguments from the JSON that the model wrote; ValueError says what is wrong."""
        try:
            given = json.loads(arguments.strip() or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments are not JSON: {error}") from None
        return _read_object(self._fields, given, "")

    def call(self, keywords: Mapping[str, Any]) -> str:
        """Call the function and return its result as text: a string as it is, any other value as JSON."""
        result = self.function(**keywords)
        if inspect.iscoroutine(result):
            import asyncio  # here: the command line starts without it

            result = asyncio.run(result)
        if isinstance(result, str):
            return result
        try:
            return json.dumps(result, ensure_ascii=False, default=_plain)
        except (TypeError, ValueError, RecursionError):  # keys that are not strings, a list inside itself
            return str(result)

    def _read_signature(self, descriptions: Mapping[str, str]) -> dict[str, _Field]:
        try:
            hints = get_type_hints(self.function, include_extras=True)
        except (NameError, TypeError, AttributeError, SyntaxError) as error:
            raise self._refusal(f"a type cannot be read: {error}") from None
        fields = {}
        for name, parameter in inspect.signature(self.function).parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                shown = str(parameter).partition(":")[0]
                raise self._refusal(f"parameter '{shown}' cannot be passed by name; use plain parameters")
            if name not in hints:
                raise self._refusal(f"parameter '{name}' has no type; allowed are {ALLOWED}")
            try:
                kind = _kind(hints[name])
            except (TypeError, NameError) as error:
                raise self._refusal(f"parameter '{name}': {error}") from None
            notes: dict[str, Any] = {"description": descriptions[name]} if name in descriptions else {}
            default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
            if isinstance(default, str | int) or (isinstance(default, float) and math.isfinite(default)):
                notes["default"] = default
            kind = kind._replace(schema=kind.schema | notes)
            fields[name] = _Field(kind, parameter.default is parameter.empty)
        return fields

    def _refusal(self, what: str) -> RequestError:
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        where = "" if code is None else f"{Path(code.co_filename).name}, line {code.co_firstlineno}: "
        return RequestError(f"{where}{self.name} cannot be a tool: {what}", param="tools")


def as_schemas(tools: Tools | None) -> Sequence[Mapping[str, Any]] | None:
    """Return tools in wire form: a function becomes its schema, other entries stay as they are."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise RequestError.about(
            "tools", f"must be a list of functions or schemas, got {type(tools).__name__}"
        )
    return [PythonTool(tool).schema if callable(tool) else tool for tool in tools]


def as_choice(tool_choice: object) -> object:
    """Return a choice in wire form; `tool_choice` may be the name of a tool."""
    if not isinstance(tool_choice, str) or tool_choice in ("auto", "none", "required"):
        return tool_choice
    return {"type": "function", "function": {"name": tool_choice}}


def _kind(hint: Any) -> _Kind:
    """Return a type as the model and Python see it; TypeError if it is not among `ALLOWED`."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        return _scalar(hint)
    if origin is Annotated:
        kind = _kind(args[0])
        said = [note for note in args[1:] if isinstance(note, str)]
        return kind._replace(schema=kind.schema | {"description": " ".join(said)}) if said else kind
    if origin is Literal:
        return _one_of({value: value for value in args})
    if origin in (Union, UnionType):
        return _union([_kind(each) for each in args])
    if hint is list or origin is list:
        return _list(*map(_kind, args))
    if hint is dict or (origin is dict and args[0] is str):
        return _dict(*map(_kind, args[1:]))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _one_of({member.value: member for member in hint})
    if is_typeddict(hint) or (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        try:
            return _record(hint)
        except RecursionError:
            raise TypeError(f"{hint.__name__} contains itself; recursive types are not allowed") from None
    shown = hint.__name__ if isinstance(hint, type) and not args else hint
    raise TypeError(f"type {shown} is not known; allowed are {ALLOWED}")


def _scalar(hint: Any) -> _Kind:
    json_type, words, types = _SCALARS[hint]

    def read(value: Any, where: str) -> Any:
        if hint is int and isinstance(value, float) and value.is_integer():
            return int(value)  # 3.0 is an integer to JSON
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise _unfit(where, words, value)
        return float(value) if hint is float else value

    return _Kind({"type": json_type}, read)


def _one_of(members: Mapping[Any, Any]) -> _Kind:
    """Return the kind of a value out of `members`; the model writes one of the keys."""
    if not members or not all(isinstance(value, str | int | NoneType) for value in members):
        raise TypeError("the values of a Literal or an Enum must be strings, whole numbers, bools or None")
    kinds = (bool, int, str, NoneType)  # the first match counts: True is an int as well
    types = {next(_SCALARS[kind][0] for kind in kinds if isinstance(value, kind)) for value in members}
    schema = {"enum": list(members)}

    def read(value: Any, where: str) -> Any:
        for key, member in members.items():
            if type(key) is type(value) and key == value:  # True is not 1
                return member
        raise _unfit(where, f"one of {json.dumps(list(members), ensure_ascii=False)}", value)

    return _Kind({"type": types.pop(), **schema} if len(types) == 1 else schema, read)


def _union(kinds: Sequence[_Kind]) -> _Kind:
    def read(value: Any, where: str) -> Any:
        refusals = []
        for kind in kinds:
            try:
                return kind.read(value, where)
            except ValueError as error:
                refusals.append(str(error))
        raise ValueError("; or ".join(refusals))

    return _Kind({"anyOf": [kind.schema for kind in kinds]}, read)


_ANY = _Kind({}, lambda value, where: value)


def _list(item: _Kind = _ANY) -> _Kind:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise _unfit(where, "a list", value)
        return [item.read(each, f"{where}[{i}]") for i, each in enumerate(value)]

    return _Kind({"type": "array"} | ({"items": item.schema} if item.schema else {}), read)


def _dict(item: _Kind = _ANY) -> _Kind:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _unfit(where, "an object", value)
        return {key: item.read(each, f"{where}.{key}") for key, each in value.items()}

    return _Kind({"type": "object"} | ({"additionalProperties": item.schema} if item.schema else {}), read)


def _record(cls: Any) -> _Kind:
    """Return the kind of a TypedDict or a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    if is_typeddict(cls):
        required = {name for name in cls.__required_keys__ if get_origin(hints[name]) is not NotRequired}
        hints = {
            name: get_args(hint)[0] if get_origin(hint) in (Required, NotRequired) else hint
            for name, hint in hints.items()
        }
    else:
        members = [field for field in dataclasses.fields(cls) if field.init]
        missing = dataclasses.MISSING
        required = {field.name for field in members if field.default is field.default_factory is missing}
        hints = {field.name: hints[field.name] for field in members}
    fields = {name: _Field(_kind(hint), name in required) for name, hint in hints.items()}
    return _Kind(_object_schema(fields), lambda value, where: cls(**_read_object(fields, value, where)))


def _object_schema(fields: Mapping[str, _Field]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: field.kind.schema for name, field in fields.items()},
        "required": [name for name, field in fields.items() if field.is_required],
        "additionalProperties": False,
    }


def _read_object(fields: Mapping[str, _Field], value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _unfit(where or "the arguments", "an object", value)
    inside = f"{where}." if where else ""
    missing = [name for name, field in fields.items() if field.is_required and name not in value]
    unknown = [name for name in value if name not in fields]
    if missing or unknown:
        what = f"{inside}{missing[0]} is missing" if missing else f"{inside}{unknown[0]} is not known"
        raise ValueError(f"{what}; the names are {', '.join(fields) or 'none'}")
    return {name: fields[name].kind.read(each, inside + name) for name, each in value.items()}


def _unfit(where: str, words: str, value: Any) -> ValueError:
    return ValueError(f"{where} must be {words}, got {json.dumps(value, ensure_ascii=False)}")


def _plain(value: object) -> object:
    """Return a JSON value in place of a value that JSON cannot hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.value if isinstance(value, Enum) else str(value)


def _read_docstring(text: str) -> dict[str, str]:
    """Return the first paragraph under "", and each entry of the section `Args:` under its name."""
    head = itertools.takewhile(lambda line: line and not _SECTION.fullmatch(line), text.splitlines())
    said = {"": " ".join(line.strip() for line in head)}
    lines = iter(text.splitlines())
    if not any(_SECTION.fullmatch(line) for line in lines):  # stops after the title
        return said
    indent, name = "", ""
    for line in lines:
        if line and not line.startswith(" "):
            break
        entry = _ENTRY.fullmatch(line)
        if entry is not None and (not name or entry[1] == indent):
            indent, name = entry[1], entry[2]
            said[name] = entry[3]
        elif name:
            said[name] = f"{said[name]} {line.strip()}".strip()
    return said
