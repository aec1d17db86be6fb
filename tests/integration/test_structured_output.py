"""Answers of a given form over HTTP: every spelling, every kind, and bombs that disturb nothing.

The model is tiny and its weights are random: what it says is of the form because it cannot say anything else.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

from scripts.make_checkpoint import make_checkpoint
from tests.support.live_server import LiveServer, serve_model


class Answer(BaseModel):
    """An answer that ends soon, whatever a model says."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=4)
    kind: Literal["river", "city"]
    depths: list[Annotated[int, Field(ge=0, le=99)]] = Field(min_length=1, max_length=2)


SCHEMA = Answer.model_json_schema()
MESSAGES: Any = [{"role": "user", "content": "Where is the river?"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the river"},
    "/v1/chat/completions": {"messages": MESSAGES},
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = tmp_path_factory.mktemp("tiny-llama")
    make_checkpoint("llama", directory)
    with serve_model(directory, max_n=4) as server:
        yield server


@pytest.fixture
def client(live: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.base_url, api_key="any", max_retries=0, timeout=60) as made:
        yield made


def texts_of(live: LiveServer, route: str, **fields: Any) -> list[str]:
    """The texts of all choices; the stream's joined pieces, if it is one."""
    body = ROUTES[route] | {"max_tokens": 150, "seed": 5} | fields
    response = httpx.post(live.url + route, json=body, timeout=60)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        choices = response.json()["choices"]
        assert {choice["finish_reason"] for choice in choices} == {"stop"}, response.text
        return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    texts = [""] * fields.get("n", 1)
    for line in response.text.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += (
                choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            )
    return texts


def is_answer(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    Answer.model_validate_json(text)
    return text == text.strip()


def is_compact(text: str) -> bool:
    return is_answer(text) and not re.search(r"[ \n\t]", re.sub(r'"[^"]*"', "", text))


FORMS: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, is_answer),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, is_answer),
    ({"structured_outputs": {"json": SCHEMA}}, is_answer),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, is_compact),
    ({"structured_outputs": {"regex": "[a-c]{3,5}-(x|y)"}}, re.compile("[a-c]{3,5}-(x|y)").fullmatch),
    ({"structured_outputs": {"choice": ["yes", "no", "it is ü"]}}, ["yes", "no", "it is ü"].__contains__),
    (
        {"structured_outputs": {"grammar": 'start: "a" b\nb: "(" b ")" | "c"'}},
        re.compile(r"a\(*c\)*").fullmatch,
    ),
    ({"structured_outputs": {"grammar": 'root ::= "a" b\nb ::= "x" | "y"'}}, ["ax", "ay"].__contains__),
    ({"guided_json": json.dumps(SCHEMA)}, is_answer),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": r"[ \n]{0,2}"}, is_answer),
    ({"guided_regex": r"\d{4}-\d{2}"}, re.compile(r"\d{4}-\d{2}").fullmatch),
    ({"guided_choice": ["left", "right"]}, ["left", "right"].__contains__),
    ({"guided_grammar": 'start: %json {"type": "boolean"}'}, ["true", "false"].__contains__),
]


@pytest.mark.parametrize(("form", "is_right"), FORMS, ids=[next(iter(form)) for form, _ in FORMS])
def test_every_spelling_gives_what_it_asks_for(
    live: LiveServer, form: dict[str, Any], is_right: Callable[[str], object]
) -> None:
    whole = texts_of(live, "/v1/chat/completions", n=2, **form)
    assert len(whole) == 2 and all(map(is_right, whole)), whole
    assert texts_of(live, "/v1/chat/completions", n=2, stream=True, **form) == whole
    (continued,) = texts_of(live, "/v1/completions", temperature=1.5, **form)
    assert is_right(continued), continued


def test_any_object_is_an_object_when_it_ends(live: LiveServer) -> None:
    form = {"response_format": {"type": "json_object"}, "logit_bias": {}}
    response = httpx.post(
        live.base_url + "/chat/completions", json={"messages": MESSAGES, "max_tokens": 40, **form}, timeout=60
    ).json()["choices"][0]
    text = response["message"]["content"]
    assert text.startswith("{")
    assert response["finish_reason"] == "length" or isinstance(json.loads(text), dict)


def test_max_tokens_cuts_json_and_says_so(live: LiveServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "guided_json": SCHEMA}
    choice = httpx.post(f"{live.base_url}/chat/completions", json=body, timeout=60).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice["message"]["content"])


def test_logprobs_come_for_every_token_of_a_constrained_answer(live: LiveServer, client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=live.model,
        messages=MESSAGES,
        max_tokens=150,
        logprobs=True,
        top_logprobs=2,
        extra_body={"guided_json": SCHEMA},
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert answer.usage is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    spelled = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert spelled.decode().startswith(choice.message.content or "?")


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = tmp_path_factory.mktemp("tiny-qwen3")
    make_checkpoint("qwen3", directory)
    with serve_model(directory) as server:
        yield server


def test_the_form_begins_behind_the_thinking(thinking: LiveServer) -> None:
    body = {"messages": MESSAGES, "guided_json": SCHEMA, "max_reasoning_tokens": 9, "max_tokens": 140}
    answer = httpx.post(f"{thinking.base_url}/chat/completions", json=body, timeout=60).json()
    message = answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "stop", answer
    assert is_answer(message["content"].strip())
    assert message["reasoning_content"], "a model that may think does, or its answer would be free"
    assert "</think>" not in message["content"]


# -- clients' libraries ------------------------------------------------------------------------------


def test_openai_parse_gives_an_object_of_the_class(live: LiveServer, client: OpenAI) -> None:
    for parse in (client.chat.completions.parse, client.beta.chat.completions.parse):
        parsed = parse(model=live.model, messages=MESSAGES, response_format=Answer, max_tokens=150, n=2)
        assert [type(choice.message.parsed) for choice in parsed.choices] == [Answer, Answer]


def test_openai_streams_what_it_parses(live: LiveServer, client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=live.model, messages=MESSAGES, response_format=Answer, max_tokens=150
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Answer)
    assert kinds.count("content.delta") > 3
    assert kinds.count("content.done") == 1


def test_openai_parse_says_when_the_answer_was_cut(live: LiveServer, client: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=live.model, messages=MESSAGES, response_format=Answer, max_tokens=3
        )


def test_openai_parse_of_a_class_that_cannot_be_followed_says_where(live: LiveServer, client: OpenAI) -> None:
    class Tags(BaseModel):
        tags: set[str]

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.parse(model=live.model, messages=MESSAGES, response_format=Tags)
    assert caught.value.param == "response_format"
    assert "'uniqueItems' of the schema at #/properties/tags/uniqueItems" in caught.value.message


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_only_the_compiler_knows_is_refused_too(live: LiveServer, is_stream: bool) -> None:
    both = [{"type": "string"}, {"type": "string", "minLength": 3}]
    for form, param in (
        ({"guided_json": {"oneOf": both}}, "guided_json"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"guided_regex": "(a"}, "guided_regex"),
    ):
        body = {"messages": MESSAGES, "stream": is_stream, **form}
        response = httpx.post(f"{live.base_url}/chat/completions", json=body, timeout=60)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert "cannot be compiled" in response.json()["error"]["message"]


# -- bombs -------------------------------------------------------------------------------------------


def nested(depth: int) -> str:
    return '{"anyOf":[' * depth + "{}" + "]}" * depth


def chain(length: int) -> dict[str, Any]:
    parts: dict[str, Any] = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(length)
    }
    return {"$ref": "#/$defs/a0", "$defs": parts | {f"a{length}": {"type": "string"}}}


def unions(num: int) -> dict[str, Any]:
    parts = [
        {"anyOf": [{"type": "object", "properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(4)]}
        for i in range(num)
    ]
    return {"allOf": parts}


RULES = "\n".join(f"a{i}: a{i + 1}" for i in range(3_500))
RECURSIVE: dict[str, Any] = {
    "$defs": {"n": {"type": "object", "properties": {c: {"$ref": "#/$defs/n"} for c in "abcdefgh"}}},
    "$ref": "#/$defs/n",
}
BOMBS: dict[str, tuple[bytes, tuple[int, ...]]] = {  # the field of a body, and which statuses will do
    "deep anyOf": (b'"guided_json":' + nested(90).encode(), (400,)),
    "1e5 nested arrays": (b'"guided_json":' + b"[" * 100_000 + b"]" * 100_000, (400,)),
    "1e5 nested arrays as text": (b'"guided_json":"' + b"[" * 100_000 + b'"', (400,)),
    "enum of 100k": (b'"guided_json":' + json.dumps({"enum": list(range(100_000))}).encode(), (400,)),
    "enum of 9k": (b'"guided_json":' + json.dumps({"enum": list(range(9_000))}).encode(), (200, 400)),
    "8 MB of brackets": (b'"guided_json":{"enum":[' + b"[]," * 2_600_000 + b"1]}", (400,)),
    "8 MB of text": (b'"guided_json":{"const":"' + b"a" * 8_000_000 + b'"}', (400,)),
    "chain of references": (b'"guided_json":' + json.dumps(chain(700)).encode(), (400,)),
    "recursion": (b'"guided_json":' + json.dumps(RECURSIVE).encode(), (200, 400)),
    "products": (b'"guided_json":' + json.dumps(unions(6)).encode(), (400,)),
    "repetitions": (b'"guided_regex":"((a|b){0,5000}c){0,5000}"', (400,)),
    "one repetition": (b'"guided_regex":"(a|b|cd){0,5000}x"', (200, 400)),
    "remainders": (b'"guided_json":{"type":"integer","multipleOf":999999937}', (400,)),
    "chain of rules": (b'"guided_grammar":' + json.dumps(f"start: a0\n{RULES}").encode(), (400,)),
    "ambiguity": (b'"guided_grammar":"start: start start | \\"a\\" | \\"\\""', (200, 400)),
    "a tool's references": (
        b'"tool_choice":"required","tools":'
        + json.dumps([{"type": "function", "function": {"name": "f", "parameters": chain(700)}}]).encode(),
        (200, 400),
    ),
    "many blanks": (b'"guided_json":{},"guided_whitespace_pattern":"[ ]*[ ]*[ ]*[ ]*"', (200, 400)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_bounded_and_streams_go_on(live: LiveServer, name: str) -> None:
    field, statuses = BOMBS[name]
    bomb = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":8,' + field + b"}"

    async def run() -> tuple[int, list[str]]:
        async with httpx.AsyncClient(base_url=live.base_url, timeout=60) as http:
            free = {"prompt": "the river", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
            streams = [asyncio.create_task(http.post("/completions", json=free)) for _ in range(3)]
            answers = await asyncio.gather(
                *(
                    http.post("/chat/completions", content=bomb, headers={"content-type": "application/json"})
                    for _ in range(3)
                )
            )
            free_answers = [(await stream).json()["choices"][0]["text"] for stream in streams]
            assert {answer.status_code for answer in answers} <= set(statuses), answers[0].text[:500]
            return answers[0].status_code, free_answers

    status, texts = asyncio.run(run())
    assert len(set(texts)) == 1 and len(texts[0]) > 40, "neighbours say what they say alone"
    error = (
        {}
        if status == 200
        else httpx.post(
            f"{live.base_url}/chat/completions",
            content=bomb,
            headers={"content-type": "application/json"},
            timeout=60,
        ).json()["error"]
    )
    assert len(json.dumps(error)) < 2_000, "the error does not repeat the bomb"
