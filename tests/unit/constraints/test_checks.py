"""Keywords that no constraint can follow, with their place; held against the compiler's own opinion."""

from __future__ import annotations

import copy
import itertools
import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from infer.constraints import pattern_checks, schema_checks
from infer.constraints.grammar_checks import check_grammar, is_ebnf
from infer.constraints.pattern_checks import check_pattern
from infer.constraints.schema_checks import FORMATS, TYPES, UNSUPPORTED, check_keywords, close_objects
from infer.errors import RequestError

BYTES = LLTokenizer("byte")
KEYWORDS = frozenset(
    (
        *UNSUPPORTED,
        *("$anchor", "$comment", "$defs", "$id", "$ref", "$schema", "$vocabulary", "additionalItems"),
        *("additionalProperties", "allOf", "anyOf", "const", "contentEncoding", "contentMediaType"),
        *("contentSchema", "default", "definitions", "deprecated", "description", "enum", "examples"),
        *("exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maximum"),
        *("maxProperties", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "oneOf"),
        *("pattern", "patternProperties", "prefixItems", "properties", "readOnly", "required", "title"),
        *("type", "writeOnly"),
    )
)


def compile_error(schema: Any) -> str:
    """What the compiler says of a schema; nothing if it takes it."""
    said: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)), BYTES)
    return said


def accepts(schema: Any, text: str) -> bool:
    """Whether a text is one of a schema's."""
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    return bool(
        matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()
    )


def refusal(schema: Any) -> str:
    with pytest.raises(RequestError) as caught:
        check_keywords(schema, param="response_format")
    assert caught.value.param == "response_format"
    return str(caught.value)


def at_a(**keywords: Any) -> dict[str, Any]:
    """A schema whose property a/b has these keywords."""
    return {"type": "object", "properties": {"a/b": keywords}}


def test_the_unsupported_keywords_are_the_compilers() -> None:
    refused = {name for name in KEYWORDS if "Unimplemented keys" in compile_error({name: {}})}
    assert refused == set(UNSUPPORTED)


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_an_unsupported_keyword_is_named_with_its_place_and_a_way_out(keyword: str) -> None:
    message = refusal(at_a(**{keyword: {}}))
    assert message == (
        f"response_format: the keyword {keyword!r} of the schema at #/properties/a~1b/{keyword} "
        f"is not supported; {UNSUPPORTED[keyword]}"
    )


@pytest.mark.parametrize("name", ["not", "if", "uniqueItems", "$ref", "type", "pattern", "format"])
def test_a_property_may_have_the_name_of_a_keyword(name: str) -> None:
    schema = {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
    check_keywords(schema, param="x")
    assert not compile_error(schema)


def test_the_formats_are_the_compilers() -> None:
    more = ("byte", "color", "idn-email", "int32", "iri", "json-pointer", "password", "path", "regex")
    taken = {name for name in (*FORMATS, *more) if not compile_error({"type": "string", "format": name})}
    assert taken == FORMATS
    for name in FORMATS:
        check_keywords(at_a(type="string", format=name), param="x")
    assert "#/properties/a~1b/format must be one of date," in refusal(at_a(type="string", format="path"))
    check_keywords(at_a(type="integer", format="int32"), param="x")  # of a number it says nothing
    assert not compile_error(at_a(type="integer", format="int32"))


def test_the_types_are_the_compilers() -> None:
    for name in TYPES:
        check_keywords({"type": name}, param="x")
        assert not compile_error({"type": name})
    assert compile_error({"type": "strin"})


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (at_a(type="strin"), "'type' of the schema at #/properties/a~1b/type must be one of array, "),
        (at_a(type=["string", 3]), "/type must be one of"),
        (at_a(type={}), "got {}"),
        (at_a(minLength=-1), "/minLength must be a whole number of at least 0, got -1"),
        (at_a(maxItems=1.5), "got 1.5"),
        (at_a(minLength=float("inf")), "/minLength must be a whole number of at least 0, got inf"),
        (at_a(minLength=float("nan")), "got nan"),
        (at_a(maximum=float("-inf")), "/maximum must be a number, got -inf"),
        (at_a(format=["date"]), "/format must be one of date, "),
        (at_a(format={}), "got {}"),
        (at_a(maxItems=True), "got true"),
        (at_a(minimum="3"), "/minimum must be a number, got '3'"),
        (at_a(multipleOf=10_001), "must be at most 10000"),
        (at_a(required="a"), "/required must be a list of names"),
        (at_a(enum="a"), "/enum must be a list"),
        (
            at_a(enum=[]),
            "'enum' of the schema at #/properties/a~1b/enum must be a list of at least one value",
        ),
        (at_a(type=[]), "'type' of the schema at #/properties/a~1b/type is an empty list"),
        (at_a(multipleOf=0), "/multipleOf must be above 0, got 0"),
        (at_a(pattern=3), "/pattern must be a string"),
        (at_a(anyOf=[]), "/anyOf must be a list of schemas"),
        (at_a(anyOf=[3]), "the schema at #/properties/a~1b/anyOf/0 must be an object, true or false, got 3"),
        (at_a(properties=[]), "/properties must be an object"),
        (at_a(items=3), "/items must be an object, true or false"),
        (at_a(items=[{"not": {}}]), "#/properties/a~1b/items/0/not"),
        (at_a(prefixItems=[{}, {"not": {}}]), "#/properties/a~1b/prefixItems/1/not"),
        (at_a(additionalProperties={"not": {}}), "/additionalProperties/not"),
        (at_a(patternProperties={"^x": {"not": {}}}), "/patternProperties/^x/not"),
        (at_a(patternProperties={"(?=x)": {}}), "look-around"),
        (at_a(oneOf=[{}, {"allOf": [{"not": {}}]}]), "#/properties/a~1b/oneOf/1/allOf/0/not"),
        (at_a(**{"$id": "http://a"}), "/$id is not supported below the root"),
        ({"$ref": "http://a/b.json"}, "'$ref' of the schema at #/$ref must point into this schema, such as"),
        ({"$ref": "other.json#/a"}, "must point into this schema"),
        ({"$ref": "#anchor", "$anchor": "anchor"}, "must point into this schema"),
        ({"$ref": "#/$defs/a", "$defs": {}}, "nothing is there, got '#/$defs/a'"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, "at #/$defs/a/not"),
        ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"not": {}}}}, "not supported"),
        ([], "the schema at # must be an object"),
        (None, "got null"),
    ],
)
def test_what_means_nothing_is_refused_with_its_place(schema: Any, words: str) -> None:
    assert words in refusal(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}, "unused": {"not": {}}}},
        {
            "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}},
            "$ref": "#/$defs/n",
        },
        {"type": "object", "properties": {"again": {"$ref": "#"}}},
        {"$id": "http://example.com/a", "$ref": "#/definitions/a", "definitions": {"a": {"type": "null"}}},
        at_a(type=["string", "null"], enum=["a", None], default={"not": 1}, examples=[{"if": 1}]),
        at_a(type="integer", minimum=1, exclusiveMaximum=10, multipleOf=3),
        at_a(type="array", items={"type": "string"}, minItems=1, maxItems=3),
        at_a(type="array", prefixItems=[{"type": "string"}], items=False),
        at_a(type="object", patternProperties={"^x-": {"type": "string"}}, additionalProperties=False),
        at_a(type="string", pattern=r"^\d{3}-[a-z\]]+(?:x|y)?$", nullable=True, foo="bar"),
        at_a(anyOf=[{"type": "string", "maxLength": 5}, {"type": "null"}]),
        at_a(oneOf=[{"type": "string"}, {"type": "number"}]),
        at_a(allOf=[{"type": "string"}, {"minLength": 2}]),
    ],
)
def test_what_the_compiler_takes_is_taken(schema: Any) -> None:
    check_keywords(schema, param="x")
    assert not compile_error(schema)


def chain(length: int) -> dict[str, Any]:
    """Objects that refer to each other, each once: no deep JSON, and yet a deep schema."""
    inner = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": inner | {f"a{length}": {"type": "string"}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "integer"}]}
    return schema


def products(num: int, width: int = 4) -> dict[str, Any]:
    """Alternatives that a compiler multiplies out."""
    return {"allOf": [{"anyOf": [{"title": f"{i} {j}"} for j in range(width)]} for i in range(num)]}


def shared_key(num: int) -> dict[str, Any]:
    """The same, one level down: objects of one key."""
    union = {"anyOf": [{"minLength": 1}, {"maxLength": 7}, {"pattern": "a"}, {"pattern": "b"}]}
    return {"allOf": [{"properties": {"k": union}} for _ in range(num)]}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (nested(101), "is 101 schemas deep, at most 100 are allowed"),
        (chain(10_000), "is 101 schemas deep"),
        (products(5), "combines more than 256 alternatives"),
        (products(40, 2), "combines more than 256 alternatives"),
        (shared_key(5), "combines more than 256 alternatives"),
        (at_a(enum=list(range(10_001))), "has 10001 values, together with other enums; at most 10000"),
        (at_a(anyOf=[{"enum": list(range(100))} for _ in range(101)]), "has 10100 values"),
        (at_a(items=[{} for _ in range(20_000)]), "the schema at # holds more than 20000 schemas"),
        ({"properties": {str(i): {} for i in range(1_001)}}, "has 1001 properties; at most 1000"),
        (at_a(oneOf=[{"const": i} for i in range(1_001)]), "has 1001 schemas; at most 1000"),
        (at_a(pattern="(a|b|cd){0,5000}" * 3), "written out, are 60120 characters long"),
        (at_a(pattern="((a{99}){99}){99}"), "repeat less often"),
        (at_a(pattern=".*" * 501), "with 40 for each part that may be left out"),
        (at_a(pattern="(.?)(?:a|b)" * 900), "repeat less often"),
        (at_a(anyOf=[{"pattern": ".?" * 400} for _ in range(100)]), "of all patterns, written out"),
        (at_a(pattern="a" * 10_001), "has 10001 characters; at most 10000"),
    ],
)
def test_bombs_are_refused_before_anything_is_built(schema: Any, words: str) -> None:
    assert words in refusal(schema)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "integer", "minimum": -1e20, "maximum": -1e19}, "#/maximum"),  # crashed the compiler
        ({"type": "integer", "exclusiveMinimum": -(2**53)}, "#/exclusiveMinimum"),
        ({"allOf": [{"minimum": 2**53}, {"type": "integer"}]}, "#/allOf/0/minimum"),
        ({"type": "string", "minLength": 2**64}, "#/minLength"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "#/minimum"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "#/minLength"),
    ],
)
def test_bounds_are_exact_numbers_with_something_between_them(schema: Any, place: str) -> None:
    assert f"at {place} " in refusal(schema)


@pytest.mark.parametrize("number", [2**53 - 1, -(2**53 - 1)])
def test_the_largest_bounds_are_followed_to_the_last_digit(number: int) -> None:
    schema = {"type": "integer", "minimum": number, "maximum": number}
    check_keywords(schema, param="response_format")
    for value in (number - 1, number, number + 1):
        matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        text = str(value).encode()
        is_taken = matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()
        assert is_taken == (value == number)


def test_optional_properties_are_as_many_as_a_step_can_follow() -> None:
    names = {f"k{i}": {"type": "null"} for i in range(401)}
    said = refusal({"type": "object", "properties": names})
    assert "has 401 properties that are not required; require some; at most 400 are allowed" in said
    for schema in ({"properties": names, "required": ["k7"]}, {"properties": dict(list(names.items())[1:])}):
        check_keywords({"type": "object", **schema}, param="response_format")
        grammar = LLMatcher.grammar_from_json_schema(json.dumps({"additionalProperties": False, **schema}))
        matcher = LLMatcher(BYTES, grammar)
        matcher.try_consume_tokens(list(b'{"'))
        matcher.compute_bitmask()
        assert not matcher.is_error()


def test_the_largest_that_are_taken() -> None:
    check_keywords(nested(100), param="x")
    check_keywords(chain(48), param="x")
    check_keywords(products(4), param="x")
    check_keywords(at_a(enum=list(range(10_000))), param="x")
    check_keywords(at_a(anyOf=[{"const": i} for i in range(1_000)]), param="x")
    check_pattern("(a|b|cd){0,4990}", param="x")


def count_visits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places of the schemas that are looked at."""
    visits: list[str] = []
    visit = schema_checks._SchemaCheck._visit_new

    def counted(self: Any, schema: Any, where: str, depth: int) -> int:
        visits.append(where)
        return visit(self, schema, where, depth)

    monkeypatch.setattr(schema_checks._SchemaCheck, "_visit_new", counted)
    return visits


def test_a_schema_that_refers_to_the_same_twice_at_every_level_is_walked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visits = count_visits(monkeypatch)
    two = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}, "not_": 1} for i in range(30)}
    for i in range(30):
        two[f"a{i}"]["properties"] = {"x": {"$ref": f"#/$defs/a{i + 1}"}}
    check_keywords({"$ref": "#/$defs/a0", "$defs": two | {"a30": {}}}, param="x")
    assert len(visits) < 300  # not 2 ** 30


def test_a_reference_that_is_spelled_in_many_ways_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = count_visits(monkeypatch)
    spelled = ["".join(pair) for pair in itertools.product(*[(c, f"%{ord(c):x}") for c in "abcdef"])]
    target: dict[str, Any] = {"prefixItems": [{} for _ in range(500)]}
    refs = [
        {"$ref": f"#/$defs/{name}"} for name in (*spelled, *(f"{name}/prefixItems/3" for name in spelled))
    ]
    check_keywords({"anyOf": [{"$ref": "#"}, *refs], "$defs": {"abcdef": target}}, param="x")
    assert len(visits) == 1 + 1 + len(refs) + 1 + 500  # not 64 times 500


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("(?=a)b", "look-around"),
        ("a(?!b)", "look-around"),
        ("(?<=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", r"the back-reference \1"),
        (r"\bword\b", r"the word boundary \b"),
        (r"\Bx", r"the word boundary \B"),
        ("(?x)(a{999}) {999}", "the flag x"),
        ("(a (?i-s:b)(?ix-s:c)", "the flag x"),
    ],
)
def test_what_a_pattern_cannot_ask_for(pattern: str, found: str) -> None:
    assert "flag" in found or compile_error({"type": "string", "pattern": pattern})
    with pytest.raises(RequestError, match=re.escape(f"guided_regex: the pattern uses {found}")):
        check_pattern(pattern, param="guided_regex")


@pytest.mark.parametrize(
    "pattern",
    [
        r"\\b\(?=",
        "[(?=]",
        r"[\](?!]",
        "[]a(?=]",
        "[^](?=]",
        "(?:a|b)(?P<name>c)",
        r"\p{Greek}{2}",
        r"\x{1F600}",
        r"a{3}{2}\{99999\}",
        "a{,}",
        "(?i)abc",
    ],
)
def test_patterns_that_only_look_like_it(pattern: str) -> None:
    check_pattern(pattern, param="x")


@pytest.mark.parametrize(
    "pattern", ["(a{ 999}){ 999}", "(a{0000000999}){0000000999}", "a{" + "9" * 5_000 + "}"]
)
def test_a_repetition_is_seen_however_its_number_is_written(pattern: str) -> None:
    with pytest.raises(RequestError, match="repeat less often"):
        check_pattern(pattern, param="x")


@pytest.mark.parametrize(
    ("pattern", "size"),
    [("", 0), ("abc", 3), ("a{3}", 3), ("[abc]{2,5}", 5), ("(ab){3}", 6), ("((ab){3}c){2}", 14)]
    + [
        ("a*b+c?", 83),
        (r"(?:a|b)(c\?)", 5),
        (r"\d{4}", 4),
        (r"\x{41}", 1),
        ("(a|bc){9,}", 27),
        (")", 1),
        ("(ab", 2),
        ("a{4", 3),
    ]
    + [("a{ 3}", 3), ("(a{ 3 , 4 }){\n2}", 8), ("a{000000000000003}", 3), ("([[])]a]b{3}){2}", 8)],
)
def test_repetitions_are_counted_as_if_written_out(pattern: str, size: int) -> None:
    assert pattern_checks._written_out(pattern) == size


def rules(num: int, name: str) -> str:
    """Rules that refer to each other; a compiler that calls itself for each overflows its stack."""
    return "\n".join(f"{name}{i}: {name}{i + 1}" for i in range(num)) + f'\n{name}{num}: "x"'


@pytest.mark.parametrize("name", ["a", "A", " ?a", "!_a", "a-"])
def test_a_grammar_of_too_many_rules_is_refused(name: str) -> None:
    check_grammar(rules(999, name), param="x")
    with pytest.raises(RequestError, match="has 1001 rules, at most 1000 are allowed"):
        check_grammar(rules(1_000, name), param="x")


def test_rules_are_counted_and_texts_with_colons_are_not() -> None:
    schema = json.dumps({"type": "object", "properties": {str(i): {} for i in range(400)}}, indent=1)
    alternatives = "\n".join(f'    | "a: {i}"' for i in range(3_000))
    check_grammar(f'start: "b:"\n{alternatives}\n    | j\nj: %json {schema}', param="x")


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("start: /(a{999}){999}/", "the pattern, written out, are 998001 characters"),
        ("start: /a\\/(b\n{999}){999}/", "repeat less often"),
        ('start: "/" /(a{999}){999}/ // "', "repeat less often"),
        ("start: /(a{99}) {999}/x", "uses the flag x"),
        ("start: /a(?=b)/", "look-around"),
        ('start: A\nA: B{999}\nB: C{ 999 }\nC: "a"', "the terminal A, written out, are 998001 characters"),
        ('start: A\nA.5: (B "x")~9..999\nB: /a{999}/', "the terminal A, written out, are 999000 characters"),
        ('start: a\na[lazy, stop="]"]: B{999}\nB: /a{999}/', "the terminal a, written out"),
        ("start: %lark {start: A\nA: B{999}\nB: /a{999}/}", "the terminal A, written out"),
        ("start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(99)) + '\nA99: "a"', "A8"),
        ("start: A\nA: " + "B " * 60 + "\nB: /" + ".?" * 10 + "/", "the terminal A, written out"),
        ("start: " + " | ".join(["/(a{140}){140}/"] * 60), "of all expressions, written out, are 1176000"),
        ("\n".join(f"A{i}: /a/{{19000}}" for i in range(60)), "of all terminals, written out"),
        ('start: %json {"x-guidance": {"whitespace_pattern": " *"}}', "x-guidance"),
        ("start: %json // {}", "%json is not followed by a JSON schema"),
        ("A: B\nB: A A{" + "9" * 5_000 + "}", "repeat less often"),
    ],
)
def test_expressions_of_a_grammar_are_checked(grammar: str, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        check_grammar(grammar, param="x")


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "/(a{999}){999}/" // /(a{999}){999}/\n# /(?=a)/',
        'start: "%json" /\\/\\/ %json/ a\na: "b"',
        'start: a{1000}\na: b{1000}\nb: "a"',
        'start: A\nA: ("ab" | /[a-z]{5}/)~1..99 B?\nB: "c"{2,}',
        'start: %json {"pattern": "/a", "const": "/"}',
    ],
)
def test_what_only_looks_like_an_expression_is_taken(grammar: str) -> None:
    check_grammar(grammar, param="x")


def test_ebnf_is_told_from_lark_and_held_to_less() -> None:
    assert is_ebnf('root ::= "a"') and is_ebnf('# a comment\n  root-2\t::= "a"')
    assert not is_ebnf('start: "x ::= y"') and not is_ebnf('start: a\na: "b"\n    | "c ::="')
    rule = "root ::= a\n" + "\n".join(f'a{i} ::= "x"' for i in range(199))
    check_grammar(rule, param="x")
    with pytest.raises(RequestError, match="has 201 rules, at most 200 are allowed"):
        check_grammar(rule + '\nb ::= "y"', param="x")
    with pytest.raises(RequestError, match="at most 16384 are allowed in EBNF; write it in Lark's notation"):
        check_grammar(f'root ::= "{"a" * 16_384}"', param="x")


A: dict[str, Any] = {"type": "string"}
B: dict[str, Any] = {"properties": {"b": {}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": A}},
        {"properties": {"a": {"properties": {"b": A}}}, "required": ["a"]},
        {"items": {"properties": {"a": A}}},
        {"anyOf": [{"properties": {"a": A}}, {"type": "null"}]},
        {"$defs": {"x": {"properties": {"a": A}}}, "properties": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}},
    ],
)
def test_objects_are_closed_where_the_schema_does_not_say(schema: dict[str, Any]) -> None:
    closed = copy.deepcopy(schema)
    assert close_objects(closed)
    assert json.dumps(closed).count('"additionalProperties": false') == json.dumps(schema).count(
        '"properties"'
    )
    assert not compile_error(closed)
    assert not close_objects(closed), "and only once"


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"patternProperties": {"^x": A}}, '{"x1": "v"}', '{"y": "v"}'),
        ({"properties": {"a": A}, "patternProperties": {"^x": A}}, '{"a": "", "x": ""}', '{"b": ""}'),
        ({"properties": {"a": A}, "required": ["z"]}, '{"a": "", "z": 1}', '{"z": 1, "b": 1}'),
        ({"patternProperties": {"^x": A}, "required": ["xy"]}, '{"xy": "", "xz": ""}', '{"xy": 3}'),
        ({"properties": {"a": A, "b": A}, "minProperties": 1}, '{"b": ""}', '{"c": ""}'),
        ({"properties": {"a": {"type": "object"}}}, '{"a": {"k": 1}}', '{"b": 1}'),
    ],
)
def test_an_object_with_names_or_patterns_has_only_those(schema: Any, allowed: str, refused: str) -> None:
    schema = {"type": "object", **schema}
    close_objects(schema)
    check_keywords(schema, param="x")
    assert accepts(schema, allowed) and not accepts(schema, refused)


FREE = {"additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        (FREE | {"minProperties": 3, "maxProperties": 3}, "minProperties", "must be at most 1"),
        (FREE | {"required": ["a"], "minProperties": 3}, "minProperties", "must be at most 2, one more"),
        (FREE | {"required": ["a", "a"], "minProperties": 3}, "minProperties", "must be at most 2, one more"),
        ({"patternProperties": {"^x$": {}}, "minProperties": 2}, "minProperties", "must be at most 1"),
        (FREE | {"properties": {"a": {}}, "minProperties": 1}, "minProperties", "needs all properties to be"),
        (FREE | {"properties": {"a": {}}, "maxProperties": 9}, "maxProperties", "needs all properties to be"),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 2}, "minProperties", "must be at most 1"),
        ({"properties": {"a": {}}, "minProperties": 2}, "minProperties", "is above 1, the number of"),
        ({"required": ["a", "b"], "maxProperties": 1}, "maxProperties", "is below the 2 that are required"),
        ({"properties": {"a": False}, "required": ["a"]}, "required", "names a forbidden property"),
        ({"additionalProperties": False, "required": ["a"]}, "required", "names a forbidden property"),
    ],
)
def test_properties_that_cannot_be_counted_or_be_there_are_refused(
    schema: Any, place: str, words: str
) -> None:
    schema = {"type": "object", **copy.deepcopy(schema)}
    close_objects(schema)
    assert f"{place!r} of the schema at #/{place} {words}" in refusal(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "minProperties": 1},
        {
            "type": "object",
            "patternProperties": {"^x$": {}},
            "additionalProperties": False,
            "minProperties": 1,
        },
        FREE | {"type": "object", "required": ["a"], "minProperties": 2},
        FREE | {"type": "object", "required": ["a"], "maxProperties": 2},
    ],
)
def test_one_free_key_can_be_counted_on(schema: Any) -> None:
    check_keywords(schema, param="x")
    assert not accepts(schema, "{}")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#"}, "#/$ref"),
        ({"allOf": [{"$ref": "#"}]}, "#/allOf"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "b/$ref"),
        (
            {
                "$ref": "#/$defs/b",
                "$defs": {
                    "a": {"$ref": "#/$defs/b"},
                    "b": {"items": {"$ref": "#/$defs/a"}, "$ref": "#/$defs/a"},
                },
            },
            "/$ref",
        ),
    ],
)
def test_a_schema_that_is_said_to_be_itself_is_refused(schema: Any, place: str) -> None:
    assert f"{place} leads back to its own schema" in refusal(schema)


def test_false_allows_nothing() -> None:
    assert "the schema at # is false, which allows nothing" in refusal(False)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"properties": {"properties": A}, "additionalProperties": True},
        {"properties": {"a": A}, "additionalProperties": A},
        {"patternProperties": {"^x": A}, "additionalProperties": A},
        {"type": "object", "required": ["z"]},
        {"patternProperties": {"^x": A}, "anyOf": [B, {"properties": {"c": A}}]},
        {"allOf": [{"properties": {"a": A}}, B]},
        {"properties": {"a": A}, "anyOf": [B, {"properties": {"c": A}}]},
        {"properties": {"a": A}, "allOf": [B]},
        {"$defs": {"x": B}, "properties": {"a": A}, "$ref": "#/$defs/x"},
        {"enum": [{"properties": {"a": 1}}], "default": {"properties": {}}},
    ],
)
def test_objects_stay_open_where_closing_could_change_what_a_schema_means(schema: Any) -> None:
    before = copy.deepcopy(schema)
    assert not close_objects(schema)
    assert schema == before
