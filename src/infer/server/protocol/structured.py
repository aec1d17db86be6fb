r"""The fields by which clients constrain an answer; each becomes a `Structured`.

    OpenAI      response_format       {"type": "json_object"}
                                      {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}
                                      {"type": "json_schema", "schema": {...}}
    llama.cpp                         {"type": "json_object", "schema": {...}}
    Hugging Face                      {"type": "json_object", "value": {...}}
    vLLM        structured_outputs    {"json" | "regex" | "choice" | "grammar" | "json_object": ...}
    older vLLM  guided_json, guided_regex, guided_choice, guided_grammar
    SGLang      json_schema, regex, ebnf

Two different constraints are rejected, and so is an option that does not apply to the given one. The same
constraint under two names, for different servers, counts as one. `Structured` checks the contents of a
constraint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from infer.constraints.description import Structured
from infer.errors import MalformedRequest, RequestError, field_of, show_value
from infer.server.protocol.body import Neutral, account_for
from infer.server.protocol.schemas import SamplingBody

FORMATS = ("text", "json_object", "json_schema")
FORMAT_KEYS = ("type", "json_schema", "schema", "name", "strict", "description", "value")
SCHEMA_KEYS = ("name", "schema", "strict", "description")
SCHEMA_TYPES = {  # keys of a format with its schema: the types that have them
    "json_schema": ("json_schema",), "schema": ("json_schema", "json_object"), "value": ("json_object",),
}  # fmt: skip

KINDS: Mapping[str, Callable[..., Structured]] = {  # vLLM's names; a schema may be JSON text
    "json": Structured.json_schema,
    "regex": Structured.regex,
    "choice": Structured.choice,
    "grammar": Structured.grammar,
}
OPTIONS = ("json_object", "whitespace_pattern", "disable_any_whitespace")
NEUTRAL = {
    "disable_additional_properties": Neutral((True, False), "a schema that says nothing has none"),
    "disable_fallback": Neutral((True, False), "there is one compiler of constraints"),
    "structural_tag": Neutral((), "use tools, whose calls are constrained"),
}
GUIDED = {f"guided_{kind}": kind for kind in KINDS}
SGLANG = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
BLANKS = "guided_whitespace_pattern"
# the fields of a body that may have a constraint, or an option of one
CONSTRAINTS = ("response_format", "structured_outputs", *GUIDED, *SGLANG, BLANKS)

NO_BLANKS = " {0}"
_BLANK = r"[ \n\r\t]|\\[nrt]|\\x(?:20|09|0[aAdD])"
_BLANKS = re.compile(rf"(?:(?:{_BLANK}|\[(?:{_BLANK})+\])(?:[*+?]|\{{\d{{0,4}}(?:,\d{{0,4}})?\}})?)+")


def read_structured(body: SamplingBody) -> Structured | None:
    """Return the constraint of a body, checked; None if it has none."""
    formats = _read_response_format(body.response_format), _read_structured_outputs(body.structured_outputs)
    found = [made for made in (*formats, *_read_fields(body)) if made is not None]
    for other in found[1:]:
        if replace(other, param=found[0].param) != found[0]:
            first, second = found[0].param, other.param
            raise RequestError(
                f"{first} and {second} each say what the answer must match; give one of them", param=second
            )
    return found[0] if found else None


def _read_response_format(given: Mapping[str, Any] | None) -> Structured | None:
    """Return the constraint of a `response_format`; None for text."""
    if given is None:
        return None
    param = "response_format"
    kind = field_of(given, "type", param)
    if kind not in FORMATS:
        error = RequestError if isinstance(kind, str) else MalformedRequest
        allowed = ", ".join(map(repr, FORMATS))
        raise error(f"{param}.type must be one of {allowed}, got {show_value(kind)}", param=param)
    account_for(given, FORMAT_KEYS, where=f"{param}.")
    schemas = [name for name in SCHEMA_TYPES if given.get(name) is not None]
    for name in schemas:
        if kind not in SCHEMA_TYPES[name]:
            types = " or ".join(map(repr, SCHEMA_TYPES[name]))
            raise RequestError.about(f"{param}.{name}", f"needs the type {types}, got {show_value(kind)}")
    if len(schemas) > 1:
        raise RequestError.about(f"{param}.{schemas[1]}", f"is a second schema; leave out {schemas[0]}")
    if kind == "text":
        return None
    if kind == "json_object":
        if schemas:
            return Structured.json_schema(given[schemas[0]], param=f"{param}.{schemas[0]}")
        return Structured.json_object(param=param)
    described = given if given.get("json_schema") is None else given["json_schema"]
    if not isinstance(described, dict):
        raise MalformedRequest(
            f"{param}.json_schema must be an object, got {show_value(described)}", param=param
        )
    if described is not given:
        account_for(described, SCHEMA_KEYS, where=f"{param}.json_schema.")
    _check_has_schema(described, param, '"json_schema": {"name": ..., "schema": {...}}')
    return Structured.json_schema(described["schema"], param=param)


def nested(given: dict[str, Any], param: str, form: str) -> dict[str, Any]:
    """Return a flat format as a chat writes it, one level deeper; `form` shows how the route writes one."""
    if given.get("type") != "json_schema":
        return given
    _check_has_schema(given, param, form)
    return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}


def _check_has_schema(given: Mapping[str, Any], param: str, form: str) -> None:
    """Reject a format without a schema."""
    if given.get("schema") is None:
        raise MalformedRequest.about(param, f'has no schema; give {{"type": "json_schema", {form}}}')


def _read_structured_outputs(given: Mapping[str, Any] | None) -> Structured | None:
    if given is None:
        return None
    param = "structured_outputs"
    account_for(given, (*KINDS, *OPTIONS), NEUTRAL, where=f"{param}.")
    for name in ("json_object", "disable_any_whitespace"):
        if not isinstance(given.get(name), bool | None):
            raise MalformedRequest.about(
                f"{param}.{name}", f"must be true or false, got {show_value(given[name])}"
            )
    asked = [name for name in KINDS if given.get(name) is not None]
    asked += ["json_object"] if given.get("json_object") else []
    if len(asked) != 1:
        allowed = ", ".join((*KINDS, "json_object"))
        raise RequestError.about(param, f"must have one of {allowed}, got {' and '.join(asked) or 'none'}")
    blanks = given.get("whitespace_pattern")
    if given.get("disable_any_whitespace"):
        if blanks is not None:
            raise RequestError(
                f"{param}.disable_any_whitespace leaves no room for whitespace_pattern; give one of them",
                param=f"{param}.whitespace_pattern",
            )
        blanks = NO_BLANKS
    options = _blanks(blanks, f"{param}.whitespace_pattern", asked[0])
    if asked == ["json_object"]:
        return Structured.json_object(param=f"{param}.json_object", **options)
    return KINDS[asked[0]](given[asked[0]], param=f"{param}.{asked[0]}", **options)


def _read_fields(body: SamplingBody) -> Iterator[Structured]:
    """Yield the constraints in fields of the body itself."""
    blanks = body.guided_whitespace_pattern
    if blanks is not None and all(getattr(body, name) is None for name in GUIDED):
        raise RequestError.about(BLANKS, "needs guided_json")
    for name, kind in (GUIDED | SGLANG).items():
        if (value := getattr(body, name)) is not None:
            options = _blanks(blanks, BLANKS, kind) if name in GUIDED else {}
            yield KINDS[kind](value, param=name, **options)


def _blanks(pattern: Any, param: str, kind: str) -> dict[str, str]:
    """Return the option for the whitespace between JSON tokens, checked, if there is one."""
    if pattern is None:
        return {}
    if not kind.startswith("json"):
        raise RequestError.about(param, f"is about blanks in JSON and says nothing about {kind}")
    if not isinstance(pattern, str):
        raise MalformedRequest.about(param, f"must be a string, got {show_value(pattern)}")
    if len(pattern) > 200 or not _BLANKS.fullmatch(pattern):
        raise RequestError.about(
            param, f"must match blanks of JSON only, such as '[ \\n\\t]{{0,8}}', got {show_value(pattern)}"
        )
    return {"whitespace": pattern}
