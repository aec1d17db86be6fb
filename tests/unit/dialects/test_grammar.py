"""Grammars of tool calls, walked at random: what they allow parses back into calls that follow the schema."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
import tracemalloc
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from infer.constraints.description import Structured
from infer.dialects.answer import AnswerFormat, Tool
from infer.dialects.events import CallDelta, CallStart, ContentDelta
from infer.dialects.grammar import constraint
from infer.dialects.parser import AnswerParser
from infer.dialects.table import BY_NAME, GEMMA_QUOTE, HARMONY_MARKERS, KEYED_MARKERS, THINK, THINKS, Dialect
from infer.errors import RequestError
from infer.tokenizer.gguf_vocab import read_gguf_vocabulary
from infer.tokenizer.tokenizer import Tokenizer
from tests.support.thinned import thinned
from tests.unit.tokenizer.vocabularies import gpt2_metadata

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "units": {"type": "string", "enum": ["C", "°F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 99},
            "spots": {"type": "array", "items": {"$ref": "#/$defs/spot"}, "maxItems": 2},
            "exact": {"type": "boolean"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {
            "spot": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "name": {"type": ["string", "null"]}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    is_strict=True,
)
NOW = Tool(name="now", parameters={"type": "object", "properties": {}, "additionalProperties": False})
PICK = Tool(
    name="pick",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "integer"}, "c": {"type": "null"}},
        "additionalProperties": False,
    },
)
TOOLS = (WEATHER, NOW, PICK)
MARKERS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>",
    "<|tool_call|>", "<|/tool_call|>", "<function_calls>", "</function_calls>",
    "<|tool_call>", "<tool_call|>", '<|"|>', *HARMONY_MARKERS, *KEYED_MARKERS,
)  # fmt: skip


@functools.cache
def vocabulary(*, is_special: bool) -> tuple[Tokenizer, LLTokenizer]:
    """A vocabulary in which markers are special tokens, or which has none of them."""
    metadata = gpt2_metadata(("<|endoftext|>", *(MARKERS if is_special else ()), "<|im_end|>"))
    core = read_gguf_vocabulary(metadata).core
    tokenizer = Tokenizer.from_gguf(metadata)
    return tokenizer, LLTokenizer(core.to_str(), eos_token=sorted(tokenizer.eos_ids))


def allowed_ids(matcher: LLMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


WAYS_OUT = [
    "<|im_end|>",
    "<tool_call|>",
    '<|"|>',
    '"',
    "}",
    "]",
    ")",
    "</tool_call>",
    "</arg_value>",
    "</function_calls>",
    "<",
    ":",
    "\n",
    "`",
    "0",
]


def _next_of_end(text: str, end: str) -> str:
    written = next((n for n in range(len(end) - 1, 0, -1) if text.endswith(end[:n])), 0)
    return end[written]


def walk(form: AnswerFormat, seed: int, *, is_special: bool, prefix: str = "") -> str:
    """A text that the grammar allows, drawn at random; it is led towards an end once it is long."""
    tokenizer, ll = vocabulary(is_special=is_special)
    structured = constraint(form, tokenizer)
    assert structured is not None
    matcher = LLMatcher(ll, LLMatcher.grammar_from_lark(structured.text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    draw, text, written = random.Random(seed), prefix, list[int]()
    for step in itertools.count():
        assert step < 2000, text
        if matcher.is_stopped():
            break
        ids = allowed_ids(matcher)
        assert ids, text
        spelled = {tokenizer.token_text(i): i for i in ids}
        if step > 60:  # the shortest way out
            is_raw = len(ids) > 90 and "\n" in spelled  # the text of a parameter in XML
            end = {"gemma4": GEMMA_QUOTE, "glm45": KEYED_MARKERS[-1]}.get(
                form.dialect.name if form.dialect is not None else "", "</parameter>\n"
            )
            order = [GEMMA_QUOTE, KEYED_MARKERS[-1], _next_of_end(text, end)] if is_raw else WAYS_OUT
            chosen = next((spelled[each] for each in order if each in spelled), draw.choice(ids))
        else:
            printable = [i for each, i in spelled.items() if each.isprintable() or each == "\n"]
            chosen = draw.choice(printable or ids)
        if chosen in tokenizer.eos_ids:
            assert matcher.is_accepting()
            break
        assert matcher.consume_token(chosen), (text, tokenizer.token_text(chosen))
        text += tokenizer.token_text(chosen)
        written.append(chosen)
    return prefix + tokenizer.decode(written, skip_special=False)


def read(form: AnswerFormat, text: str) -> tuple[list[tuple[str, Any]], str]:
    parser = AnswerParser(form)
    events = parser.push(text) + parser.finish()
    names = [event.name for event in events if isinstance(event, CallStart)]
    calls = [
        (name, json.loads("".join(e.arguments for e in events if isinstance(e, CallDelta) and e.index == i)))
        for i, name in enumerate(names)
    ]
    return calls, "".join(event.text for event in events if isinstance(event, ContentDelta))


def check(calls: list[tuple[str, Any]], text: str) -> None:
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    for name, arguments in calls:
        try:
            jsonschema.validate(arguments, schemas[name])
        except jsonschema.ValidationError as error:
            raise AssertionError(f"{text!r}: {error.message}") from None


@pytest.mark.parametrize(("dialect", "is_special"), thinned(BY_NAME, (True, False), keep=2))
def test_required_calls_parse_back(dialect: str, is_special: bool) -> None:
    form = AnswerFormat(dialect=BY_NAME[dialect], tools=TOOLS, choice="required")
    names: set[str] = set()
    for seed in range(6):
        text = walk(form, seed, is_special=is_special)
        calls, content = read(form, text)
        assert calls and not content, text
        check(calls, text)
        names.update(name for name, _ in calls)
    assert len(names) > 1


@pytest.mark.parametrize("dialect", BY_NAME.values(), ids=BY_NAME)
def test_a_named_tool_is_called_once(dialect: Dialect) -> None:
    form = AnswerFormat(dialect=dialect, tools=TOOLS, choice="get_weather", max_calls=1)
    for seed in range(3):
        text = walk(form, seed, is_special=True)
        calls, content = read(form, text)
        assert [name for name, _ in calls] == ["get_weather"] and not content, text
        check(calls, text)


TRIGGERED = [each for each in BY_NAME.values() if each.name not in ("pythonic", "glm4")]


@pytest.mark.parametrize("dialect", TRIGGERED)
def test_strict_tools_are_enforced_behind_a_trigger(dialect: Dialect) -> None:
    form = AnswerFormat(dialect=dialect, tools=TOOLS)
    structured = constraint(form, vocabulary(is_special=True)[0])
    assert structured is not None
    (trigger,) = structured.triggers
    for seed in range(3):
        text = walk(form, seed, is_special=True, prefix=trigger)
        calls, content = read(form, text)
        assert calls and not content, text
        check(calls, text)


@pytest.mark.parametrize("dialect", TRIGGERED)
def test_only_allowed_tools_are_called_behind_a_trigger(dialect: Dialect) -> None:
    form = AnswerFormat(dialect=dialect, tools=(NOW, PICK), allowed=("pick",))
    structured = constraint(form, vocabulary(is_special=True)[0])
    assert structured is not None
    (trigger,) = structured.triggers
    for seed in range(6):
        calls, _ = read(form, walk(form, seed, is_special=True, prefix=trigger))
        assert {name for name, _ in calls} == {"pick"}


def test_free_text_is_not_constrained_without_strict_tools() -> None:
    form = AnswerFormat(dialect=BY_NAME["hermes"], tools=(NOW, PICK))
    assert constraint(form, vocabulary(is_special=True)[0]) is None


def test_a_call_may_follow_reasoning_after_blanks() -> None:
    form = AnswerFormat(dialect=BY_NAME["hermes"], tools=(NOW,), choice="required", think=THINK)
    tokenizer, ll = vocabulary(is_special=True)
    structured = constraint(form, tokenizer)
    assert structured is not None
    matcher = LLMatcher(ll, LLMatcher.grammar_from_lark(structured.text), log_level=0)
    ids = tokenizer.encode(
        '\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', parse_special=True
    )
    assert matcher.validate_tokens(ids) == len(ids)


@pytest.mark.parametrize("is_special", [True, False])
def test_a_harmony_answer_is_a_call_or_the_final_message_behind_its_analysis(is_special: bool) -> None:
    form = AnswerFormat(dialect=BY_NAME["harmony"], tools=(NOW,), think=THINKS["harmony"], in_reasoning=True)
    tokenizer, ll = vocabulary(is_special=is_special)
    schema = Structured(kind="json_schema", text='{"type": "integer"}', param="response_format")
    structured = constraint(form, tokenizer, schema)
    assert structured is not None
    begin = "<|start|>assistant<|channel|>"
    for rest in (
        "commentary to=functions.now <|constrain|>json<|message|>{}",
        "final <|constrain|>json<|message|>17",
    ):
        matcher = LLMatcher(ll, LLMatcher.grammar_from_lark(structured.text), log_level=0)
        ids = tokenizer.encode(begin + rest, parse_special=True, add_special=False)
        assert matcher.validate_tokens(ids) == len(ids), rest
        calls, content = read(form, "hm<|end|>" + begin + rest)
        assert (calls, content) in (([("now", {})], ""), ([], "17"))


def test_strict_is_refused_where_it_cannot_be_enforced() -> None:
    tokenizer, _ = vocabulary(is_special=True)
    with pytest.raises(RequestError, match="have no marker"):
        constraint(AnswerFormat(dialect=BY_NAME["pythonic"], tools=TOOLS), tokenizer)
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}
    tool = Tool(name="f", parameters=schema, is_strict=True)
    with pytest.raises(RequestError, match="pattern of the parameter 'a'"):
        constraint(AnswerFormat(dialect=BY_NAME["qwen3_coder"], tools=(tool,)), tokenizer)
    dashed = Tool(name="get-time")
    with pytest.raises(RequestError, match="'get-time'"):
        constraint(AnswerFormat(dialect=BY_NAME["gemma3"], tools=(dashed,), choice="required"), tokenizer)


WILD = {
    "not": {"type": "string", "not": {"const": "x"}},
    "format": {"type": "string", "format": "color"},
    "pattern": {"type": "string", "pattern": "(?=a)b"},
    "$ref": {"$ref": "https://example.com/schema"},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "{0,500}": {"type": "string", "pattern": "(a{0,500}b){0,500}"},
}


@pytest.mark.parametrize("keyword", WILD)
def test_a_schema_that_cannot_be_followed_is_refused_only_if_strict(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": WILD[keyword], "not": {"type": "integer"}}}
    tokenizer, ll = vocabulary(is_special=True)
    loose, strict = (
        AnswerFormat(
            dialect=BY_NAME["hermes"],
            tools=(Tool(name="f", parameters=schema, is_strict=each),),
            choice="f",
        )
        for each in (False, True)
    )
    structured = constraint(loose, tokenizer)
    assert structured is not None
    matcher = LLMatcher(ll, LLMatcher.grammar_from_lark(structured.text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters: .*#/properties/a") as caught:
        constraint(strict, tokenizer)
    assert caught.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_a_tool_without_parameters_is_called_without_arguments(parameters: dict[str, Any]) -> None:
    form = AnswerFormat(
        dialect=BY_NAME["hermes"], tools=(Tool(name="f", parameters=parameters),), choice="f", max_calls=1
    )
    assert read(form, walk(form, 1, is_special=True)) == ([("f", {})], "")


def test_no_object_of_a_forced_call_has_properties_that_its_schema_does_not_name() -> None:
    inner = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a", "b"]}
    form = AnswerFormat(
        dialect=BY_NAME["hermes"], tools=(Tool(name="f", parameters=schema),), choice="f", max_calls=1
    )
    for seed in range(5):
        ((name, arguments),), _ = read(form, walk(form, seed, is_special=True))
        assert (name, set(arguments), set(arguments["a"])) == ("f", {"a", "b"}, {"n"})
    assert "additionalProperties" not in inner, "what the model is shown is as it was sent"


def test_what_only_describes_a_schema_is_left_out() -> None:
    described = {"type": "string", "title": "T", "description": "D" * 9999, "enum": ["title"]}
    schema = {"type": "object", "properties": {"description": described, "title": {"type": "integer"}}}
    form = AnswerFormat(
        dialect=BY_NAME["hermes"], tools=(Tool(name="f", parameters=schema),), choice="required"
    )
    structured = constraint(form, vocabulary(is_special=True)[0])
    assert structured is not None
    assert "DDD" not in structured.text
    assert '"description":{"type":"string","enum":["title"]},"title":{"type":"integer"}' in structured.text


def test_tools_that_are_too_large_together_are_refused_before_they_are_looked_at() -> None:
    schema = {
        "properties": {"a": {"prefixItems": [{} for _ in range(900)], "not": {}, "description": "x" * 99_999}}
    }
    tools = tuple(Tool(name=f"t{i}", parameters=schema) for i in range(30))
    tokenizer, _ = vocabulary(is_special=True)
    form = AnswerFormat(dialect=BY_NAME["hermes"], tools=tools[:20], choice="required")
    assert constraint(form, tokenizer) is not None
    with pytest.raises(RequestError, match="the parameters of all tools have 8.... characters"):
        constraint(dataclasses.replace(form, tools=tools), tokenizer)


PARTED = [each for each in BY_NAME.values() if each.form in ("xml", "pythonic")]


def forced(dialect: Dialect, schema: dict[str, Any], *, is_strict: bool = False) -> AnswerFormat:
    return AnswerFormat(
        dialect=dialect,
        tools=(Tool(name="f", parameters=schema, is_strict=is_strict),),
        choice="f",
        max_calls=1,
    )


@pytest.mark.parametrize("dialect", PARTED, ids=lambda each: each.name)
def test_a_grammar_too_large_is_refused_while_it_is_written(dialect: Dialect) -> None:
    tokenizer, _ = vocabulary(is_special=True)
    big = {f"d{i}": {"enum": [f"value {i} {j}" for j in range(20)]} for i in range(100)}
    refs = {"anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(100)]}
    properties = {f"p{i}": refs | {"minItems": i} for i in range(300)}
    schema = {"type": "object", "properties": properties, "$defs": big}
    with pytest.raises(RequestError, match="the parameters of all tools have"):
        constraint(forced(dialect, schema), tokenizer)
    schema["properties"] = {f"p{i}": {"$ref": "#/$defs/all", "minItems": i} for i in range(300)}
    schema["$defs"] = big | {"all": refs}
    tracemalloc.start()
    with pytest.raises(RequestError, match="the grammar of these tools has more than"):
        constraint(forced(dialect, schema), tokenizer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("dialect", PARTED, ids=lambda each: each.name)
def test_definitions_are_written_where_they_are_reached(dialect: Dialect) -> None:
    tokenizer, _ = vocabulary(is_special=True)
    schema = {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/list"},
            "b": {"$ref": "#/$defs/list"},
            "c": {"type": "integer", "minimum": 1, "maximum": 9},
            "d": {"type": "array", "maxItems": 1, "items": {"$ref": "#/definitions/x~1y%20z"}},
        },
        "required": ["a", "b", "c", "d"],
        "$defs": {
            "list": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 2},
            "item": {"enum": [1, 2]},
            "unused": {"enum": ["never"]},
        },
        "definitions": {"x/y z": {"type": "boolean"}},
    }
    form = forced(dialect, schema, is_strict=True)
    structured = constraint(form, tokenizer)
    assert structured is not None
    assert "never" not in structured.text
    assert structured.text.count('"enum":[1,2]') == 1
    for seed in range(4):
        ((_, arguments),), content = read(form, walk(form, seed, is_special=True))
        jsonschema.validate(arguments, schema)
        assert not content


@pytest.mark.parametrize("ref", ["#/properties/a", "#"])
@pytest.mark.parametrize("dialect", PARTED, ids=lambda each: each.name)
def test_a_reference_to_another_argument_cannot_be_followed(dialect: Dialect, ref: str) -> None:
    tokenizer, ll = vocabulary(is_special=True)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"$ref": ref}}},
    }
    structured = constraint(forced(dialect, schema), tokenizer)
    assert structured is not None
    matcher = LLMatcher(ll, LLMatcher.grammar_from_lark(structured.text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    with pytest.raises(RequestError, match="a \\$ref of the strict tool 'f' cannot be followed") as caught:
        constraint(forced(dialect, schema, is_strict=True), tokenizer)
    assert caught.value.param == "tools"
