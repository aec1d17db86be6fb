"""A constraint as text: what is accepted, and what each limit says."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from infer import Structured
from infer.constraints.description import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_TRIGGERS,
    Reasoning,
)
from infer.constraints.schema_checks import _KEYWORDS, UNSUPPORTED, check_keywords
from infer.errors import RequestError
from infer.sampling.params import SamplingParams
from tests.support import words


class Person(BaseModel):
    name: str
    age: int


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_a_schema_may_be_a_dict_a_text_or_a_class() -> None:
    schema = Person.model_json_schema()
    made = [Structured.json_schema(each) for each in (schema, json.dumps(schema), Person)]
    assert all(json.loads(each.text) == schema | {"additionalProperties": False} for each in made)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"json_object": True}, "json_object"),
        ({"regex": "[0-9]+"}, "regex"),
        ({"choice": ["yes", "no"]}, "choice"),
        ({"grammar": 'start: "a"'}, "grammar"),
    ],
)
def test_sampling_params_take_a_mapping(given: Any, kind: str) -> None:
    made = SamplingParams(structured=given).structured
    assert made is not None and made.kind == kind
    assert made == Structured.of(given)


def test_parameters_survive_a_record_and_the_wire() -> None:
    params = SamplingParams(
        structured=Structured.choice(["a", "ü"], triggers=("<tool>",), param="tools"),
        reasoning=Reasoning(end_id=3, max_tokens=5, forced=(7, 3)),
    )
    assert SamplingParams(**json.loads(json.dumps(asdict(params)))) == params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


BAD = [
    (lambda: Structured.of({}), "exactly one of"),
    (lambda: Structured.of({"regex": "a", "choice": ["a"]}), "exactly one of"),
    (lambda: Structured.of({"regx": "a"}), "exactly one of"),
    (lambda: Structured.of(3), "got int"),
    (lambda: Structured.of({"kind": "regex", "text": "a", "colour": 1}), "colour"),
    (lambda: Structured.of({"kind": "xml", "text": "a"}), "'xml'"),
    (lambda: Structured.of({"kind": "regex", "text": "(a{999}){999}"}), "repeat less often"),
    (lambda: Structured.of({"kind": "json_schema", "text": '{"not": {}}'}), "'not'"),
    (lambda: Structured.of({"kind": "grammar", "text": "start: /(a{999}){999}/"}), "repeat less often"),
    (lambda: Structured.of({"json_object": {"a": 1}}), "takes no value"),
    (lambda: Structured.json_schema("{"), "not JSON"),
    (lambda: Structured.json_schema('{"const": NaN}'), "NaN"),
    (lambda: Structured.json_schema('{"minLength": 1e400}'), "got inf"),
    (lambda: Structured.json_schema('{"minLength": 1%s}' % ("0" * 5_000)), "not JSON"),
    (lambda: Structured.grammar('start: %json {"minLength": NaN}'), "not followed by a JSON schema"),
    (lambda: Structured.json_schema("[]"), r"got \[\]"),
    (lambda: Structured.json_schema(int), "got <class 'int'>"),
    (lambda: Structured.json_schema({"const": "x" * MAX_SCHEMA_BYTES}), f"at most {MAX_SCHEMA_BYTES}"),
    (lambda: Structured.json_schema(nested(MAX_SCHEMA_DEPTH + 1)), f"more than {MAX_SCHEMA_DEPTH} deep"),
    (lambda: Structured.json_schema('{"a":' * 9000 + "1" + "}" * 9000), "deep"),
    (lambda: Structured.json_schema({"const": {1, 2}}), "written as JSON"),
    (lambda: Structured.regex(""), "is empty"),
    (lambda: Structured.regex("a" * (MAX_REGEX_BYTES + 1)), f"{MAX_REGEX_BYTES + 1} bytes, at most"),
    (lambda: Structured.regex("\ud800"), "surrogate"),
    (lambda: Structured.regex(7), "must be text, got int"),  # type: ignore[arg-type]
    (lambda: Structured.regex("a", whitespace=" "), "belongs to JSON"),
    (lambda: Structured.grammar("x" * (MAX_GRAMMAR_BYTES + 1)), "bytes, at most"),
    (lambda: Structured.choice([]), f"1 to {MAX_CHOICES}"),
    (lambda: Structured.choice(["a"] * (MAX_CHOICES + 1)), f"got {MAX_CHOICES + 1}"),
    (lambda: Structured.choice(["a", ""]), "not empty"),
    (lambda: Structured.choice("ab"), "list of 1 to"),
    (lambda: Structured.json_object(triggers="<"), "list of texts"),
    (lambda: Structured.json_object(triggers=["<"] * (MAX_TRIGGERS + 1)), f"at most {MAX_TRIGGERS}"),
    (lambda: Structured.json_object(triggers=[""]), "1 to"),
    (lambda: Structured.json_object(whitespace=""), "whitespace"),
]


@pytest.mark.parametrize(("make", "words"), BAD)
def test_what_is_refused_says_why(make: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words.replace("(", r"\(")) as caught:
        make()
    assert caught.value.param == "structured"


def test_the_deepest_schema_that_is_allowed() -> None:
    Structured.json_schema(nested(MAX_SCHEMA_DEPTH))


def test_an_error_names_the_field_of_the_client() -> None:
    with pytest.raises(RequestError) as caught:
        Structured.of({"regex": ""}, "guided_regex")
    assert caught.value.param == "guided_regex"


@pytest.mark.parametrize("knob", ["use_beam_search", "ignore_eos"])
def test_combinations_that_have_no_meaning_are_refused(knob: str) -> None:
    with pytest.raises(RequestError, match=f"{knob} cannot be combined") as caught:
        structured = Structured.json_object(param="response_format")
        SamplingParams.from_knobs(temperature=0.0, structured=structured, **{knob: True})
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    "given",
    [{"end_id": -1}, {"end_id": 1, "max_tokens": -2}, {"end_id": 1, "forced": (2,)}, {"max_tokens": 3},
     {"end_id": True}, {"end_id": 1, "forced": "ab"}, {"end_id": 1, "colour": 2}, 5],
)  # fmt: skip
def test_reasoning_that_cannot_be_is_refused(given: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(reasoning=given)
    assert caught.value.param == "reasoning"


def test_without_a_limit_or_a_constraint_reasoning_guides_nothing() -> None:
    assert not SamplingParams(reasoning=Reasoning(end_id=1)).is_guided
    assert SamplingParams(reasoning=Reasoning(end_id=1, max_tokens=0)).is_guided
    assert SamplingParams(reasoning=Reasoning(end_id=1), structured=Structured.json_object()).is_guided
    assert Reasoning(end_id=1).forced == (1,)


WORDS = sorted((_KEYWORDS - UNSUPPORTED.keys()) | {"$defs", "const", "x-guidance", "a"})
TEXTS = st.text(max_size=8) | st.sampled_from(
    ["#", "#/$defs/a", "#/a/0", "string", "date", "a{2}", "(", "\ud800"]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)


@given(value=VALUES, is_lenient=st.booleans())
@example(value=[[]], is_lenient=False)
@example(value={"a": {}}, is_lenient=False)
@example(value=float("inf"), is_lenient=False)
def test_whatever_stands_behind_a_keyword_is_taken_or_refused(value: Any, is_lenient: bool) -> None:
    for keyword in WORDS:
        part = {keyword: value}
        for schema in (part, {"$defs": {"a": part, "b": {"properties": {}, keyword: value}}}):
            text = json.dumps(schema)
            for make in (
                lambda: check_keywords(schema, param="x", is_lenient=is_lenient),  # noqa: B023
                lambda: Structured.json_schema(text),  # noqa: B023
                lambda: Structured.grammar(f"start: %json {text}"),  # noqa: B023
            ):
                with contextlib.suppress(RequestError):
                    make()


def test_a_schema_is_read_once_on_its_way_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the client's mapping, over the wire, to an engine that compiles it."""
    read, loads = list[str](), json.loads

    def count(text: str, **options: Any) -> Any:
        read.append(text)
        return loads(text, **options)

    monkeypatch.setattr(json, "loads", count)
    for schema in ({"properties": {"a": {"type": "integer"}}}, '{"properties": {"a": {"type": "integer"}}}'):
        read.clear()
        params = SamplingParams(structured=Structured.json_schema(schema))
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
        assert sent.structured is not None and sent.structured == params.structured
        words.compiled(sent.structured)
        assert len(read) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"const": NaN}', '{"a":' * 9000 + "1" + "}" * 9000])
def test_a_text_that_nothing_has_checked_is_refused_when_it_is_compiled(text: str) -> None:
    with pytest.raises(RequestError, match="structured: the schema cannot be compiled"):
        words.compiled(Structured(kind="json_schema", text=text))
