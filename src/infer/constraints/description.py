"""Descriptions of constraints on the text of an output, which the engine compiles (compiler.py).

    json_object   any JSON object                    regex     a regular expression, of the whole output
    json_schema   a JSON schema                      choice    one of several texts
    grammar       a grammar in Lark's notation

A constraint holds for the whole output, unless it waits for something:

    reasoning ... </think> {"a": 1}         `Reasoning.end_id`: free before it, constrained after it
    text <tool_call>{...}</tool_call> text  `triggers`: free until one of them, and again after each match

    Structured.json_schema(Person)               a class of pydantic, a dict, or JSON text
    Structured.choice(["yes", "no"])
    {"json_schema": {...}}                       the same as a mapping, where parameters are JSON

Sizes are checked on construction; contents are parsed and checked once, by the functions above, in the
process that answers HTTP. Only the engine finds out if a schema can be compiled; otherwise it raises a
`RequestError` with the keyword and its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Literal, get_args

from infer.constraints.grammar_checks import check_grammar, refuse_constant
from infer.constraints.pattern_checks import check_pattern, constraint_error
from infer.constraints.schema_checks import check_keywords, close_objects
from infer.errors import RequestError, show_value

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
KINDS: tuple[str, ...] = get_args(Kind)

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32  # objects and lists inside each other
MAX_REGEX_BYTES = 16 << 10
MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1000
MAX_CHOICE_BYTES = 64 << 10  # bytes of all choices together, as JSON
MAX_TRIGGERS = 64
MAX_TRIGGER_LEN = 256  # characters
MAX_WHITESPACE_LEN = 256  # characters of a pattern
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"  # blanks between JSON tokens: without a limit some models never stop
_LONG_NUMBER = re.compile(r"\d{17}")  # more digits than a JSON number gets by default (numbers.py)
MAX_FORCED = 256  # tokens that end a reasoning early

_MAX_BYTES = {
    "json_object": 0, "json_schema": MAX_SCHEMA_BYTES, "regex": MAX_REGEX_BYTES, "choice": MAX_CHOICE_BYTES,
    "grammar": MAX_GRAMMAR_BYTES,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Structured:
    """A constraint on an output's text, checked for kind and size on construction."""

    kind: Kind
    text: str = ""  # the schema as JSON, the expression, the choices as a JSON list, or the grammar
    triggers: tuple[str, ...] = ()  # texts after which it begins; empty: it holds from the start
    whitespace: str | None = None  # a pattern for blanks between JSON tokens; None: up to 8
    param: str = "structured"  # the client's field, which errors name

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise self._error(
                f"the kind of a constraint must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )
        self._check_text()
        self._check_options()

    @property
    def ends_numbers(self) -> bool:
        """True if the text is JSON or has JSON in it (`%json`), whose numbers are cut off."""
        is_json = self.kind.startswith("json") or (self.kind == "grammar" and "%json" in self.text)
        return is_json and not _LONG_NUMBER.search(self.text)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool | type, **options: Any) -> Structured:
        """JSON that matches a schema: a mapping, JSON text, or a pydantic class (`BaseModel`).

        Objects have only the properties that the schema names, unless it explicitly allows others.
        """
        param = options.get("param", "structured")
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if not isinstance(schema, str | Mapping | bool):
            raise constraint_error(
                f"a JSON schema must be an object or a text with one, got {show_value(schema)}", param
            )
        text = schema if isinstance(schema, str) else _dump(schema, param)
        return cls(kind="json_schema", text=text, **options)._checked(closes=True)

    @classmethod
    def json_object(cls, **options: Any) -> Structured:
        """Any JSON object."""
        return cls(kind="json_object", **options)

    @classmethod
    def regex(cls, pattern: str, **options: Any) -> Structured:
        """Text that a regular expression matches as a whole."""
        return cls(kind="regex", text=pattern, **options)._checked()

    @classmethod
    def choice(cls, choices: Sequence[str], **options: Any) -> Structured:
        """One of several texts."""
        text = _dump(choices, options.get("param", "structured"))
        return cls(kind="choice", text=text, **options)._checked()

    @classmethod
    def grammar(cls, grammar: str, **options: Any) -> Structured:
        """Text of a context-free grammar in Lark's notation (`start: ...`) or in EBNF (`root ::= ...`)."""
        return cls(kind="grammar", text=grammar, **options)._checked()

    @classmethod
    def of(cls, value: object, param: str = "structured") -> Structured:
        """Return a constraint, or make it from a mapping: {"json_schema": {...}}, {"choice": [...]}, ...

        Besides the kind, a mapping may have `whitespace` and `triggers`.
        """
        if isinstance(value, Structured):
            return value
        if not isinstance(value, Mapping):
            raise RequestError.about(
                param,
                f"must be a Structured or a mapping such as {{'json_schema': {{...}}}}, "
                f"got {type(value).__name__}",
            )
        given = {str(name): value[name] for name in value}
        if "kind" in given:  # the fields themselves, as in a record
            names = {field.name for field in fields(cls)}
            if unknown := set(given) - names:
                raise RequestError.about(param, f"has unknown fields {', '.join(sorted(unknown))}")
            return cls(**given)._checked()
        kinds = [name for name in given if name in KINDS]
        options = {name: given.pop(name) for name in ("whitespace", "triggers", "param") if name in given}
        if len(kinds) != 1 or len(given) != 1:
            raise RequestError.about(
                param, f"must have exactly one of {', '.join(KINDS)}, got {', '.join(given) or 'none'}"
            )
        options.setdefault("param", param)
        (kind,) = kinds
        if kind == "json_object":
            if given[kind] not in (True, None, {}):
                raise constraint_error("json_object takes no value but true", options["param"])
            return cls.json_object(**options)
        made: Structured = getattr(cls, kind)(given[kind], **options)
        return made

    @property
    def choices(self) -> list[str]:
        """The texts of a `choice`."""
        found: list[str] = json.loads(self.text)
        return found

    def _error(self, message: str) -> RequestError:
        return constraint_error(message, self.param if isinstance(self.param, str) else "structured")

    def _checked(self, *, closes: bool = False) -> Structured:
        """Check the contents and return the constraint; `closes`: objects get no other properties.

        Construction does not do this: an engine decodes constraints that were checked before, and grammars of
        tools have options that a client may not set.
        """
        if self.kind == "json_schema":
            schema = _parse(self.text, self.param)
            check_schema(schema, self.param)
            is_closed = closes and close_objects(schema)
            check_keywords(schema, param=self.param)
            return replace(self, text=_dump(schema, self.param)) if is_closed else self
        if self.kind == "choice":
            self._check_choices(_parse(self.text, self.param))
        elif self.kind == "regex":
            check_pattern(self.text, param=self.param)
        elif self.kind == "grammar":
            check_grammar(self.text, param=self.param)
        return self

    def _check_text(self) -> None:
        if not isinstance(self.text, str):
            raise self._error(f"a {self.kind} must be text, got {type(self.text).__name__}")
        try:
            size, allowed = len(self.text.encode()), _MAX_BYTES[self.kind]
        except UnicodeEncodeError:
            raise self._error(f"a {self.kind} must be valid unicode; it has half a surrogate pair") from None
        if self.kind == "json_object":
            if self.text:
                raise self._error("a json_object has no text; use json_schema for a schema")
        elif not self.text.strip():
            raise self._error(f"the {self.kind} is empty")
        elif size > allowed:
            raise self._error(f"the {self.kind} has {size} bytes, at most {allowed} are allowed")
        if "\0" in self.text and self.kind != "choice":
            raise self._error(f"the {self.kind} has a NUL character, which no output can have")

    def _check_options(self) -> None:
        if not isinstance(self.param, str) or len(self.param) > MAX_TRIGGER_LEN:
            raise self._error("param must be the name of a field")
        blank = self.whitespace
        if blank is not None and (not isinstance(blank, str) or not 0 < len(blank) <= MAX_WHITESPACE_LEN):
            raise self._error(f"whitespace must be a pattern of 1 to {MAX_WHITESPACE_LEN} characters")
        if blank is not None and not self.kind.startswith("json"):
            raise self._error(f"whitespace belongs to JSON; a {self.kind} says itself where blanks may be")
        triggers = self.triggers
        if isinstance(triggers, str) or not isinstance(triggers, Sequence):
            raise self._error("triggers must be a list of texts")
        object.__setattr__(self, "triggers", tuple(triggers))
        if len(triggers) > MAX_TRIGGERS:
            raise self._error(f"there are {len(triggers)} triggers, at most {MAX_TRIGGERS} are allowed")
        if any(not isinstance(text, str) or not 0 < len(text) <= MAX_TRIGGER_LEN for text in triggers):
            raise self._error(f"a trigger must be a text of 1 to {MAX_TRIGGER_LEN} characters")

    def _check_choices(self, choices: Any) -> None:
        if not isinstance(choices, list) or not 0 < len(choices) <= MAX_CHOICES:
            given = len(choices) if isinstance(choices, list) else show_value(choices)
            raise self._error(f"choice must be a list of 1 to {MAX_CHOICES} texts, got {given}")
        if any(not isinstance(text, str) or not text for text in choices):
            raise self._error("every choice must be a text that is not empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The end of an output's reasoning: the output begins inside it, and a constraint waits for its end."""

    end_id: int  # the token that ends it
    max_tokens: int | None = None  # most tokens of reasoning; `forced` follows as if the model had written it
    forced: tuple[int, ...] = ()  # ids that end it early, including `end_id`; empty: `end_id` alone
    later: tuple[int, ...] = ()  # ids between its end and a constraint; their first also ends it

    def __post_init__(self) -> None:
        for name in ("forced", "later"):
            ids = getattr(self, name)
            if isinstance(ids, str) or not isinstance(ids, Sequence):
                raise RequestError(f"reasoning.{name} must be a list of token ids", param="reasoning")
            object.__setattr__(self, name, tuple(ids))
        object.__setattr__(self, "forced", self.forced or (self.end_id,))
        limit = self.max_tokens
        for number in (self.end_id, *self.forced, *self.later, *(() if limit is None else (limit,))):
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise RequestError.about(
                    "reasoning",
                    "has end_id and max_tokens, and ids in forced and later, which must be integers of at "
                    f"least 0, got {number!r:.80}",
                )
        if self.end_id not in self.forced or max(len(self.forced), len(self.later)) > MAX_FORCED:
            raise RequestError(
                f"reasoning.forced must contain end_id {self.end_id}, and reasoning.forced and "
                f"reasoning.later must have at most {MAX_FORCED} ids each",
                param="reasoning",
            )

    @classmethod
    def of(cls, value: object) -> Reasoning:
        """Return the value, or make it from a mapping of its fields."""
        if isinstance(value, Reasoning):
            return value
        names = {field.name for field in fields(cls)}
        if not isinstance(value, Mapping) or not {"end_id"} <= set(value) <= names:
            raise RequestError.about(
                "reasoning", f"must be a Reasoning or a mapping of {', '.join(sorted(names))}"
            )
        return cls(**value)


def check_schema(schema: object, param: str) -> None:
    """Refuse a value that is not a JSON schema, or is nested too deep; keywords are not checked."""
    if not isinstance(schema, dict | bool):
        raise constraint_error(f"a JSON schema must be an object, got {show_value(schema)}", param)
    level: list[Any] = [schema] if schema is not True and schema is not False else []
    for _ in range(MAX_SCHEMA_DEPTH):
        inner = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return
    raise constraint_error(
        f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep, which is the limit; "
        "name its parts in $defs and refer to them",
        param,
    )


def _parse(text: str, param: str) -> Any:
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        raise constraint_error(
            f"the JSON is nested too deep, at most {MAX_SCHEMA_DEPTH} deep is allowed", param
        ) from None
    except ValueError as error:
        raise constraint_error(f"this is not JSON: {error}", param) from None


def _dump(value: object, param: str) -> str:
    """Return a value as JSON; a value that contains itself, or is not JSON, is the client's mistake."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise constraint_error(f"this cannot be written as JSON: {error}", param) from None
