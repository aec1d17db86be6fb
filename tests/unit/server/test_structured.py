"""The fields that ask for an answer of a certain form: what each becomes, and what is refused by name."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from infer.constraints.description import Structured
from infer.errors import MalformedRequest, RequestError
from infer.frontend.llm import LLM
from infer.scheduling.request import Request, StepOutput
from infer.server.protocol import translate
from infer.server.protocol.schemas import MAX_CONSTRAINT_BYTES, SamplingBody
from infer.server.protocol.structured import CONSTRAINTS, NO_BLANKS, read_structured
from infer.server.routes import json_route
from infer.server.routes.json_route import (
    MAX_FIELD_BYTES,
    MAX_REST_BYTES,
    PIECE,
    BodyCounts,
    check_body,
    check_fields,
)
from tests.support.wire import ScriptedClient, Wire, invalid, make_state, outputs_of

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA | {"additionalProperties": False}, separators=(",", ":"))  # closed
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the river"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Who are you?"}]},
}


def openai(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | more}


def read(**fields: Any) -> Structured | None:
    return read_structured(SamplingBody.model_validate(fields))


SPELLINGS: list[tuple[dict[str, Any], Structured | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None}, None),
    (
        {"response_format": {"type": "json_object", "schema": None}},
        Structured(kind="json_object", param="response_format"),
    ),
    *(
        (
            {"response_format": given},
            Structured(kind="json_schema", text=TEXT, param="response_format"),
        )
        for given in (
            openai(),
            openai(strict=True, description="an answer"),
            openai(strict=False),
            openai(strict=None),
            openai(SCHEMA | {"additionalProperties": False}),
            {"type": "json_schema", "schema": SCHEMA},
            {"type": "json_schema", "schema": SCHEMA, "json_schema": None},
            {"type": "json_schema", "schema": SCHEMA, "name": "answer", "strict": True},
        )
    ),
    *(
        (
            {"response_format": {"type": "json_object", name: SCHEMA}},
            Structured(kind="json_schema", text=TEXT, param=f"response_format.{name}"),
        )
        for name in ("schema", "value")
    ),
    *(
        (
            {"structured_outputs": {"json": given}},
            Structured(kind="json_schema", text=TEXT, param="structured_outputs.json"),
        )
        for given in (SCHEMA, TEXT)
    ),
    (
        {
            "structured_outputs": {
                "json": SCHEMA,
                "whitespace_pattern": "[ \n]{0,3}",
                "disable_fallback": True,
            }
        },
        Structured(kind="json_schema", text=TEXT, whitespace="[ \n]{0,3}", param="structured_outputs.json"),
    ),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "json": None}},
        Structured(kind="json_object", whitespace=NO_BLANKS, param="structured_outputs.json_object"),
    ),
    (
        {"structured_outputs": {"regex": "[0-9]+", "json_object": False, "disable_any_whitespace": False}},
        Structured(kind="regex", text="[0-9]+", param="structured_outputs.regex"),
    ),
    (
        {"structured_outputs": {"choice": ["yes", "no"]}},
        Structured.choice(["yes", "no"], param="structured_outputs.choice"),
    ),
    (
        {"structured_outputs": {"grammar": 'start: "a"'}},
        Structured(kind="grammar", text='start: "a"', param="structured_outputs.grammar"),
    ),
    ({"guided_json": SCHEMA}, Structured(kind="json_schema", text=TEXT, param="guided_json")),
    ({"guided_json": TEXT}, Structured(kind="json_schema", text=TEXT, param="guided_json")),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": r"[\n\t ]*"},
        Structured(kind="json_schema", text=TEXT, whitespace=r"[\n\t ]*", param="guided_json"),
    ),
    ({"guided_regex": "a|b"}, Structured(kind="regex", text="a|b", param="guided_regex")),
    ({"guided_choice": ["a", "b"]}, Structured.choice(["a", "b"], param="guided_choice")),
    (
        {"guided_grammar": "start: %json {} x\nx: %json\n{}"},
        Structured(kind="grammar", text="start: %json {} x\nx: %json\n{}", param="guided_grammar"),
    ),
]


@pytest.mark.parametrize(("fields", "wanted"), SPELLINGS)
def test_every_spelling_becomes_one_constraint(fields: dict[str, Any], wanted: Structured | None) -> None:
    assert read(**fields) == wanted


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {}}, "response_format.type", "is missing"),
    ({"response_format": {"type": "xml"}}, "response_format", "got 'xml'"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "got 'structural_tag'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "has no schema; give {"),
    ({"response_format": openai(None)}, "response_format", "has no schema"),
    ({"response_format": openai([])}, "response_format", "got []"),
    ({"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format", "must be an object"),
    ({"response_format": openai(stric=True)}, "response_format.json_schema.stric", "did you mean 'strict'?"),
    (
        {"response_format": {"type": "text", "foo": 1}},
        "response_format.foo",
        "unknown field 'response_format.foo'",
    ),
    (
        {"response_format": openai({"properties": {"a": {"not": {}}}})},
        "response_format",
        "the keyword 'not' of the schema at #/properties/a/not is not supported",
    ),
    *(
        (
            {"response_format": {"type": "json_object", **schemas}},
            f"response_format.{[*schemas][-1]}",
            words,
        )
        for schemas, words in (
            ({"json_schema": {"schema": SCHEMA}}, "needs the type 'json_schema', got 'json_object'"),
            ({"schema": SCHEMA, "value": SCHEMA}, "is a second schema; leave out schema"),
        )
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": SCHEMA}},
        "response_format.schema",
        "is a second schema; leave out json_schema",
    ),
    (
        {"response_format": {"type": "text", "schema": SCHEMA}},
        "response_format.schema",
        "needs the type 'json_schema' or 'json_object', got 'text'",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "must have one of json, regex, choice, grammar"),
    (
        {"structured_outputs": {"regex": "a", "json": {}}},
        "structured_outputs",
        "got json and regex",
    ),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "did you mean 'json'?"),
    (
        {"structured_outputs": {"regex": "a", "structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "use tools",
    ),
    (
        {"structured_outputs": {"json_object": 1}},
        "structured_outputs.json_object",
        "must be true or false, got 1",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "give one of them",
    ),
    (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        "structured_outputs.whitespace_pattern",
        "says nothing about regex",
    ),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "must be text, got int"),
    ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice", "list of 1 to"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "list of 1 to"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
    ({"structured_outputs": {"json": 3}}, "structured_outputs.json", "got 3"),
    ({"guided_json": "[" * 100_000}, "guided_json", "bytes, at most"),
    (
        {"guided_json": '{"a":' * 5_000 + "1" + "}" * 5_000},
        "guided_json",
        " deep",
    ),  # JSON, or too deep to tell
    ({"guided_json": '{"a":' * 40 + "1" + "}" * 40}, "guided_json", "guided_json: the schema is nested"),
    ({"guided_choice": []}, "guided_choice", "guided_choice: choice must be a list of 1 to"),
    ({"guided_regex": ""}, "guided_regex", "is empty"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
    ({"guided_regex": "(a{999}){999}"}, "guided_regex", "repeat less often"),
    ({"guided_grammar": 'start: %json {"not": {}}'}, "guided_grammar", "'not'"),
    ({"guided_grammar": "start: %json x"}, "guided_grammar", "not followed by a JSON schema"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
    (
        {"guided_regex": "a", "guided_whitespace_pattern": " "},
        "guided_whitespace_pattern",
        "says nothing about regex",
    ),
    *(
        ({"guided_json": {}, "guided_whitespace_pattern": bad}, "guided_whitespace_pattern", "blanks of JSON")
        for bad in ("x", "", r"\s*", "[ x]", "( )*", " " * 201, ".")
    ),
    (
        {"guided_json": {}, "response_format": {"type": "json_object"}},
        "guided_json",
        "response_format and guided_json each say what the answer must match; give one of them",
    ),
    ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "guided_regex and guided_choice each"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_is_refused_names_the_field_of_the_client(
    fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert words in str(caught.value)
    assert caught.value.param == param
    assert param.partition(".")[0] in str(caught.value)


async def speak(request: Request) -> AsyncGenerator[StepOutput, None]:
    for output in outputs_of(request, [40, 41]):
        yield output


@pytest.fixture
def engine() -> ScriptedClient:
    return ScriptedClient(speak)


@pytest.fixture
def scripted(oracle: LLM, engine: ScriptedClient) -> Wire:
    return Wire(make_state(oracle.encoder, engine))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_constraint_reaches_the_engine(
    scripted: Wire, engine: ScriptedClient, route: str, is_stream: bool
) -> None:
    response = scripted.post(
        route, ROUTES[route] | {"response_format": openai(), "stream": is_stream, "max_tokens": 2}
    )
    assert response.status_code == 200, response.text
    assert engine.requests[0].params.structured == Structured(
        kind="json_schema", text=TEXT, param="response_format"
    )


@pytest.mark.parametrize("route", ROUTES)
def test_refusals_name_the_field_and_nothing_is_generated(
    scripted: Wire, engine: ScriptedClient, route: str
) -> None:
    error = scripted.refused(route, ROUTES[route] | {"response_format": openai({"not": {}})}, invalid(route))
    assert error["param"] == "response_format"
    assert "at #/not is not supported" in error["message"]
    assert scripted.refused(route, ROUTES[route] | {"guided_regex": 3}, 400)["param"] == "guided_regex"
    error = scripted.refused(route, ROUTES[route] | {"guided_decoding_backend": "outlines"}, invalid(route))
    assert error["param"] == "guided_decoding_backend"
    assert engine.requests == []
    scripted.ok(route, ROUTES[route] | {"guided_decoding_backend": "guidance", "guided_regex": "a"})


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_the_compiler_refuses_is_a_status_and_not_a_broken_stream(
    oracle: LLM, route: str, is_stream: bool
) -> None:
    async def refuse(request: Request) -> AsyncGenerator[StepOutput, None]:
        structured = request.params.structured
        assert structured is not None
        raise RequestError(f"{structured.param}: this cannot be compiled", param=structured.param)
        yield

    wire = Wire(make_state(oracle.encoder, ScriptedClient(refuse)))
    body = ROUTES[route] | {"guided_regex": "a", "stream": is_stream}
    error = wire.refused(route, body, invalid(route))
    assert error["param"] == "guided_regex"
    assert error["message"] == "guided_regex: this cannot be compiled"


def test_a_constraint_leaves_room_for_calls_where_it_is_json(scripted: Wire, engine: ScriptedClient) -> None:
    body = ROUTES["/v1/chat/completions"] | {"tools": [TOOL], "max_tokens": 2}
    error = scripted.refused("/v1/chat/completions", body | {"guided_regex": "a+"}, 400)
    assert error["param"] == "guided_regex"
    assert "set tool_choice to 'none'" in error["message"]
    for more in ({}, {"tool_choice": "none"}, {"response_format": {"type": "text"}}):
        scripted.ok("/v1/chat/completions", body | {"response_format": openai()} | more)
    made = [request.params.structured for request in engine.requests]
    assert [each and each.kind for each in made] == ["grammar", "json_schema", None]


def test_a_field_too_large_is_refused_before_it_is_parsed() -> None:
    assert set(CONSTRAINTS) <= set(MAX_FIELD_BYTES)
    big: list[list[int]] = [[]] * (MAX_CONSTRAINT_BYTES // 3 + 1)
    body = json.dumps({"prompt": "a", "response_format": big}, separators=(",", ":")).encode()
    with pytest.raises(RequestError, match="response_format has .* bytes, at most 262144") as caught:
        check_fields(body)
    assert caught.value.param == "response_format"
    for name in ("text", "output_config", "output_format"):  # what /v1/responses and /v1/messages call it
        with pytest.raises(RequestError, match=f"{name} has"):
            check_fields(body.replace(b"response_format", name.encode()))
    check_fields(json.dumps({"prompt": "response_format" * 100_000}).encode())


def test_what_is_in_no_measured_field_is_counted_together() -> None:
    junk = b"[" + b"[]," * (MAX_REST_BYTES // 3) + b"[]]"
    for body in (
        b'{"tools": %s, "prompt": "a", "tools": []}' % junk,  # the last one is read
        b'{"messages": %s, "messages": []}' % junk,
        b'{"zzz": %s}' % junk,
        b"{%s}" % b",".join(b'"z%d": %s' % (i, junk[:9] + b"]") for i in range(MAX_REST_BYTES // 16)),
        b'{"%s": 1}' % (b"z" * MAX_REST_BYTES),
    ):
        with pytest.raises(RequestError, match=f"given twice; at most {MAX_REST_BYTES}"):
            check_fields(body)
    for name in (b"input", b"instructions", b"messages", b"prompt", b"system", b"tokens"):
        check_fields(b'{"%s": %s, "model": "m"}' % (name, junk))


@pytest.mark.parametrize("body", [b'{"zzz": [[]', b"[[]]", b'{"prompt": "a"} x', b'"a"', b"[" * 9999])
def test_a_large_body_that_is_no_object_is_not_parsed(body: bytes) -> None:
    with pytest.raises(MalformedRequest, match="the body is not a JSON object"):
        check_fields(body)


NASTY = ['"', "\\", "\\\\", '\\"', "{[,]}", "é\n\t", "a" * 9, "", '\\\\"', "😀"]


def random_json(source: random.Random, depth: int = 0) -> Any:
    """A value whose texts look like structure."""
    kind = source.randrange(5 if depth < 4 else 3)
    if kind == 0:
        return "".join(source.choices(NASTY, k=source.randrange(4)))
    if kind < 3:
        return source.choice([None, True, 1, -2.5e7])
    inner = [random_json(source, depth + 1) for _ in range(source.randrange(5))]
    return inner if kind == 3 else {f"{i}{source.choice(NASTY)}": each for i, each in enumerate(inner)}


def count_parsed(value: Any) -> tuple[int, int]:
    """The strings, objects and lists of a value, and the commas between values, by walking through it."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [count_parsed(each) for each in (value.values() if isinstance(value, dict) else value)]
    num_keys = len(value) if isinstance(value, dict) else 0
    return 1 + num_keys + sum(n for n, _ in inner), max(len(value) - 1, 0) + sum(n for _, n in inner)


def test_the_values_of_a_body_are_counted_as_a_parser_finds_them() -> None:
    source = random.Random(4)
    for number in range(300):
        value = random_json(source)
        body = json.dumps(value, ensure_ascii=number % 2 == 0, indent=source.choice([None, 1])).encode()
        counts, start = BodyCounts(), 0
        while start < len(body):
            end = start + source.randrange(1, 9)
            counts.add(body[start:end])
            start = end
        assert (counts.num_values, counts.num_commas) == count_parsed(value), body
        assert counts.num_escapes == len(re.findall(rb"\\.", body)), body


def body_of(messages: bytes) -> bytes:
    return b'{"model": "m", "messages": [%s]}' % messages


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (body_of(b",".join([b'{"role":"user","content":"x"}'] * 90_000)), "strings, objects and lists"),
        (body_of(b",".join([b"{}"] * 900_000)), "strings, objects and lists"),
        (body_of(b",".join([b"1"] * 1_500_000)), "values in lists and objects"),
        (body_of(b'{"role":"user","content":"%s"}' % (b"\\n" * 1_600_000)), "written with a backslash"),
    ],
)
def test_a_body_that_takes_long_to_parse_is_refused_piece_by_piece(
    body: bytes, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop does other work between pieces, and what is behind the limit is not looked at."""
    sizes, add = list[int](), BodyCounts.add

    def noted_add(self: BodyCounts, piece: bytes) -> None:
        sizes.append(len(piece))
        add(self, piece)

    monkeypatch.setattr(BodyCounts, "add", noted_add)
    monkeypatch.setattr(json_route, "check_fields", lambda body: pytest.fail("all of it at once"))

    async def run() -> int:
        num_turns = 0

        async def count_turns() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(count_turns())
        with pytest.raises(RequestError, match=what):
            await check_body(body)
        other.cancel()
        return num_turns

    assert asyncio.run(run()) >= len(sizes) - 1
    assert max(sizes) <= PIECE and sum(sizes) < len(body)


def test_bodies_of_real_clients_are_parsed() -> None:
    code = "if (a[i] == '\\\\') { print(\"x, y\"); }\n" * 60
    turn = {"role": "assistant", "content": [{"type": "text", "text": code}, {"type": "text", "text": "b"}]}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": code})}}
    turns = [turn, {"role": "assistant", "tool_calls": [call] * 3}, {"role": "tool", "content": code}] * 500
    for body in (
        {"messages": turns},
        {"prompt": [*range(131_072)]},
        {"input": ["a text"] * 4096},
        {"prompt": "{[,]}" * 1_000_000},
    ):
        asyncio.run(check_body(json.dumps(body).encode()))


@pytest.mark.parametrize("route", ROUTES)
def test_a_large_schema_is_refused_over_http(scripted: Wire, route: str) -> None:
    schema = {"enum": [f"value {i}" for i in range(100_000)]}
    error = scripted.refused(route, ROUTES[route] | {"response_format": openai(schema)}, invalid(route))
    assert error["param"] == "response_format"
    assert "at most 262144" in error["message"]


def test_a_constraint_is_read_beside_the_event_loop(scripted: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader waits for a heart that beats on the loop; on the loop itself it would wait in vain."""
    is_alive = threading.Event()

    def wait_and_read(body: SamplingBody) -> Structured | None:
        assert is_alive.wait(30), "the event loop stood still while a schema was read"
        return read_structured(body)

    monkeypatch.setattr(translate, "read_structured", wait_and_read)

    async def beat() -> None:
        for _ in range(20):
            await asyncio.sleep(0.001)
        is_alive.set()

    async def both() -> None:
        transport = httpx.ASGITransport(scripted.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": "a", "max_tokens": 2, "response_format": openai()}
            answer, _ = await asyncio.gather(client.post("/v1/completions", json=body), beat())
            assert answer.status_code == 200, answer.text

    asyncio.run(both())


def test_a_schema_that_is_too_large_is_never_parsed(scripted: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser would hold Python's lock, in a thread too, for a second at 8 MiB of this."""
    parsed: list[int] = []
    monkeypatch.setattr(json_route.JsonRequest, "json", lambda self: parsed.append(1))
    content = b'{"prompt":"a","response_format":{"enum":[' + b"[]," * 200_000 + b"1]}}"
    response = scripted.request(
        "POST", "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 422
    assert parsed == []
