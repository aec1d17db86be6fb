"""JSON schemas of every kind: what the masks allow validates, and what cannot be compiled is named."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.constraints.compiler import Grammar
from infer.constraints.description import Structured
from infer.errors import RequestError
from tests.support.walks import walk
from tests.support.words import compiled, ids_of, text_of

OBJECT = {"type": "object", "additionalProperties": False}
PLAIN: list[Any] = [
    True, {}, {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"},
    {"type": "null"}, {"type": "array"}, {"type": "object"}, {"type": ["string", "null"]},
    {"type": ["integer", "array"]},
    {"enum": ["a", 1, None, True, {"b": [1]}]}, {"const": {"x": [1, 2, "ü"]}}, {"const": 'quo"te\\'},
    {"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}, {"minLength": 1, "maxLength": 1},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "pattern": "^[a-z]{2,4}$"}, {"type": "string", "pattern": "b"},
    {"type": "string", "pattern": "^(yes|no)$"}, {"type": "string", "pattern": "^a.*z$"},
    *({"type": "string", "format": name} for name in (
        "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    )),
    {"type": "integer", "minimum": -3}, {"type": "integer", "maximum": 17},
    {"type": "integer", "minimum": 5, "maximum": 12}, {"type": "integer", "exclusiveMinimum": 0},
    {"type": "integer", "exclusiveMaximum": 100, "minimum": 90},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50}, {"type": "number", "minimum": -1.5},
    {"type": "array", "items": {"type": "integer"}}, {"type": "array", "minItems": 2, "maxItems": 3},
    {"type": "array", "items": False}, {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "a"}], "items": {"type": "null"}},
    {"type": "array", "prefixItems": [{"type": "boolean"}], "items": False},
    {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 4},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    OBJECT | {"properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "required": ["b"]},
    OBJECT | {"properties": {"not": {"type": "integer"}, "$ref": {"const": 1}}, "required": ["not", "$ref"]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "required": ["z"]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    {"oneOf": [{"type": "integer"}, {"type": "null"}]},
    {"oneOf": [
        OBJECT | {"properties": {"k": {"const": "a"}, "v": {"type": "integer"}}, "required": ["k", "v"]},
        OBJECT | {"properties": {"k": {"const": "b"}}, "required": ["k"]},
    ]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"], "type": "object"}]},
    {"$defs": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/n"}},
    {"definitions": {"s": {"enum": ["p", "q"]}}, "$ref": "#/definitions/s"},
    {"$defs": {"tree": OBJECT | {
        "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"},
                                                            "maxItems": 2}},
        "required": ["v", "kids"],
    }}, "$ref": "#/$defs/tree"},
    {"title": "T", "description": "d", "default": 1, "examples": [1], "$comment": "c", "type": "integer"},
    {"type": "string", "contentEncoding": "base64"}, {"type": "string", "readOnly": True, "deprecated": True},
]  # fmt: skip
WRAPPERS: list[tuple[str, Any]] = [
    ("alone", lambda schema: schema),
    ("a property", lambda schema: OBJECT | {"properties": {"p": schema}, "required": ["p"]}),
    ("an item", lambda schema: {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}),
    ("a branch", lambda schema: {"anyOf": [{"const": "other branch"}, schema]}),
]
SCHEMAS = [
    (f"{number} {name}", wrap(schema))
    for (name, wrap), (number, schema) in itertools.product(WRAPPERS, enumerate(PLAIN))
    if name == "alone" or "$defs" not in str(schema) and "definitions" not in str(schema)
]

REFUSED = [
    ({"not": {"type": "string"}}, "#/not", "not"),
    ({"properties": {"not": {"not": {}}}}, "#/properties/not/not", "not"),
    ({"items": {"uniqueItems": True}}, "#/items/uniqueItems", "uniqueItems"),
    ({"$defs": {"a/b~": {"contains": {}}}, "$ref": "#/$defs/a~1b~0"}, "#/$defs/a~1b~0/contains", "contains"),
    ({"type": "array", "uniqueItems": True}, "#/uniqueItems", "uniqueItems"),
    ({"if": {"type": "string"}, "then": {"maxLength": 2}}, "#/if", "if"),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, "#/propertyNames", "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "#/dependentRequired", "dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "#/dependentSchemas", "dependentSchemas"),
    ({"type": "object", "unevaluatedProperties": False}, "#/unevaluatedProperties", "unevaluatedProperties"),
    ({"type": "string", "format": "my-format"}, "#/format", "my-format"),
    ({"anyOf": [{"type": "string", "pattern": "(?=a)b"}]}, "#/anyOf/0/pattern", "look-around"),
    ({"patternProperties": {"(?!x)": {}}}, "#/patternProperties", "look-around"),
    ({"$ref": "http://example.com/schema.json"}, "#/$ref", "example.com"),
    ({"properties": {"a": {"$ref": "#/$defs/missing"}}}, "#/properties/a/$ref", "nothing is there"),
    ({"type": "strin"}, "#/type", "strin"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}, "#/oneOf:", "anyOf"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, "", "minimum"),
    ({"properties": {"a": {"pattern": "("}, "b": {"pattern": "x"}}}, "#/properties/a/pattern:", "unclosed"),
    ({"patternProperties": {"a/(": {}}}, "#/patternProperties/a~1(:", "unclosed group"),
    ({"items": {"additionalProperties": True, "minProperties": 2}}, "#/items/minProperties", "at most 1"),
    ({"anyOf": [{"type": "null"}, {"$ref": "#/anyOf/1"}]}, "#/anyOf/1/$ref", "leads back"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "#/not", "not"),
]


def grammar_of(schema: Any) -> Grammar:
    return compiled(Structured(kind="json_schema", text=json.dumps(schema)))  # as it is: objects stay open


def accepts(grammar: Grammar, text: str) -> bool:
    matcher, ids = grammar.lexer.matcher(), ids_of(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def check_walks(schema: Any, seed: object, count: int) -> int:
    """Walk, and validate what has ended; how many have."""
    grammar, validator = grammar_of(schema), jsonschema.Draft202012Validator(schema)
    rng, num_ended = random.Random(f"{seed}"), 0
    for _ in range(count):
        output = walk(grammar, rng)
        if output is not None:
            validator.validate(json.loads(text_of(output)))
            num_ended += 1
    return num_ended


def test_there_are_schemas_of_every_kind() -> None:
    assert len(SCHEMAS) >= 200


@pytest.mark.parametrize("part", range(4))
def test_what_the_masks_allow_validates(part: int) -> None:
    """All schemas are compiled and walked; one that is refused would raise."""
    num_ended = 0
    for name, schema in SCHEMAS[part::4]:
        num_ended += check_walks(schema, name, 2)
    assert num_ended >= 0.9 * 2 * len(SCHEMAS[part::4]), "walks that go on and on show nothing"


@pytest.mark.parametrize(("schema", "place", "word"), REFUSED)
def test_a_schema_that_cannot_be_compiled_is_refused_by_name(schema: Any, place: str, word: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(Structured.json_schema(schema, param="response_format"))
    message = str(caught.value)
    assert caught.value.param == "response_format"
    assert word in message and (f"at {place}" in message or not place), message
    assert "\n" not in message


INSTANCES: list[Any] = [
    None, True, False, 0, 1, -1, 5, 12, 17, 25, 100, 0.5, -1.5, 1e3, "", "a", "ab", "abc", "zz", "yes", "p",
    "abz", "2026-11-16", "12:00:00Z", "a@b.co", "127.0.0.1", "other branch", [], [1], [1, 2], [1, "a", None],
    ["x"], {}, {"a": 1}, {"a": 1, "b": "x"}, {"b": None}, {"x1": 2}, {"p": 1}, {"k": "b"}, {"k": "a", "v": 1},
    {"z": 0}, {"v": 1, "kids": []}, {"v": 1, "kids": [{"v": 2, "kids": []}]}, {"a": "wrong"}, {"c": 1}, [[]],
    [{}],
]  # fmt: skip


def test_instances_that_do_not_validate_are_never_accepted() -> None:
    num_valid = num_accepted = 0
    for _, schema in SCHEMAS[: len(PLAIN)]:
        grammar, validator = grammar_of(schema), jsonschema.Draft202012Validator(schema)
        for instance in INSTANCES:
            is_valid = validator.is_valid(instance)
            is_accepted = accepts(grammar, json.dumps(instance, ensure_ascii=False))
            has_format = isinstance(schema, dict) and "format" in schema  # which a validator only notes
            assert is_valid or not is_accepted, (schema, instance)
            if not has_format:
                num_valid += is_valid
                num_accepted += is_accepted
    assert num_accepted >= 0.97 * num_valid, "only floats that count as integers are refused"


SCALARS = st.sampled_from(
    [{"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "null"}, {"const": "c"},
     {"type": "string", "maxLength": 4}, {"type": "integer", "minimum": 0, "maximum": 99}, {"enum": ["x", 2]},
     {"type": "string", "pattern": "^[ab]+$"}, {"type": "number"}]
)  # fmt: skip
NAMES = st.sampled_from(["name", "age", "items", "a", "b", 'q"uote', "ü", "$ref", "enum"])


@st.composite
def objects(draw: Any, inner: Any) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": draw(st.booleans()),
    }


@st.composite
def arrays(draw: Any, inner: Any) -> dict[str, Any]:
    least = draw(st.integers(0, 2))
    return {
        "type": "array",
        "items": draw(inner),
        "minItems": least,
        "maxItems": least + draw(st.integers(0, 2)),
    }


RANDOM = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each}),
    ),
    max_leaves=8,
)


@given(schema=RANDOM, seed=st.integers(0, 1000))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_random_schemas_and_random_walks(schema: dict[str, Any], seed: int) -> None:
    check_walks(schema, seed, 2)


def test_blanks_between_tokens_are_bounded() -> None:
    grammar = grammar_of({"type": "object"})
    assert accepts(grammar, "{" + " " * 8 + '"a":\n\t1}')
    assert not accepts(grammar, "{" + " " * 9 + '"a": 1}')
    assert not accepts(grammar, " {}") and not accepts(grammar, "{} ")


def test_blanks_may_be_said() -> None:
    compact = compiled(Structured.json_object(whitespace=" ?"))
    assert accepts(compact, '{"a": 1}') and not accepts(compact, '{"a":  1}')


def test_the_order_of_properties_is_the_schema_s() -> None:
    grammar = grammar_of({"properties": {"b": {}, "a": {}}, "required": ["b", "a"], "type": "object"})
    assert accepts(grammar, '{"b": 1, "a": 2}') and not accepts(grammar, '{"a": 2, "b": 1}')
