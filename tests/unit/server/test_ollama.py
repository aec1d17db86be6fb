"""Ollama's API through the whole application: bodies as its clients send them, lines, limits and errors."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from infer.errors import EngineError, QueueFull, RequestError
from infer.frontend.llm import LLM
from infer.frontend.prompts import PromptEncoder
from infer.scheduling.request import Request, StepOutput
from infer.server.protocol.ollama_to_chat import OllamaChat, ollama_to_chat
from infer.server.protocol.schemas import ChatRequest
from infer.server.routes.ollama import check_abilities
from infer.server.routes.ollama_models import tagged
from tests.support.app import Site
from tests.support.fake_client import FakeClient
from tests.support.wire import ScriptedClient, outputs_of

CHAT, GENERATE = "/api/chat", "/api/generate"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def saying(oracle: LLM, text: str, error: Exception | None = None) -> ScriptedClient:
    """An engine that says a text, and then fails where there is an error."""
    ids = oracle.tokenizer.encode(text, add_special=False)

    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        for output in outputs_of(request, ids, "stop" if error is None else None):
            yield output
        if error is not None:
            raise error

    return ScriptedClient(script)


def ask(oracle: LLM, path: str, body: Any, client: Any = None) -> tuple[httpx.Response, Any]:
    """The answer to a body, and the engine client that was asked."""
    client = client or saying(oracle, "hello there")
    return Site(client, encoder=oracle.encoder).request("POST", path, json=body), client


def lines_of(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


# as Open WebUI, VS Code's Continue and the JavaScript package send them
CAPTURED: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    (
        CHAT,
        {
            "model": "fake:latest",
            "messages": [{"role": "user", "content": "hi"}],
            "options": {"num_ctx": 2048, "temperature": 0.5, "repeat_last_n": 64},
            "stream": True,
            "keep_alive": "5m",
        },
        {"temperature": 0.5, "max_tokens": None},
        "keep_alive, options.num_ctx, options.repeat_last_n",
    ),
    (
        CHAT,
        {
            "model": "fake",
            "messages": [{"role": "user", "content": "hi", "images": []}],
            "options": {
                "num_predict": 12,
                "top_k": 40,
                "top_p": 0.9,
                "min_p": 0.05,
                "seed": 7,
                "stop": ["x"],
            },
            "format": "",
            "think": False,
            "raw": None,
        },
        {"max_tokens": 12, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": 7, "stop": ("x",)},
        None,
    ),
    (
        GENERATE,
        {
            "model": "fake",
            "prompt": "hi",
            "suffix": "",
            "system": "",
            "template": "",
            "raw": False,
            "options": {"num_predict": -1, "seed": -1, "repeat_penalty": 1.1, "presence_penalty": 0.5},
            "stream": False,
        },
        {"max_tokens": None, "seed": None, "repetition_penalty": 1.1, "presence_penalty": 0.5},
        None,
    ),
    (
        GENERATE,
        {"model": "fake", "prompt": "Once", "raw": True, "options": {"num_predict": 4, "num_thread": 8}},
        {"max_tokens": 4},
        "options.num_thread",
    ),
    (GENERATE, {"model": "fake", "prompt": "Once", "raw": True}, {"max_tokens": None}, None),
    (
        CHAT,
        {"model": "fake", "messages": MESSAGES, "options": {"num_predict": 100_000}},
        {"max_tokens": None},  # more than the context holds: up to its end
        None,
    ),
]


@pytest.mark.parametrize(("path", "body", "params", "ignored"), CAPTURED)
def test_a_captured_body_reaches_the_engine(
    oracle: LLM, path: str, body: dict[str, Any], params: dict[str, Any], ignored: str | None
) -> None:
    body = {name: value for name, value in body.items() if value is not None}
    answer, client = ask(oracle, path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-infer-ignored") == ignored
    (request,) = client.requests
    assert {name: getattr(request.params, name) for name in params} == params


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (GENERATE, {"options": {"num_ctx": 4096, "seed": 1}, "system": "b"}, "options, system"),
        (CHAT, {"options": {"num_ctx": 4096}, "messages": []}, "options"),
        (GENERATE, {"prompt": "", "options": {}, "stream": False}, None),
    ],
)
def test_fields_of_a_body_that_only_loads_are_named_as_ignored(
    oracle: LLM, path: str, fields: dict[str, Any], ignored: str | None
) -> None:
    answer, client = ask(oracle, path, {"model": "fake", **fields})
    assert (answer.status_code, answer.json()["done_reason"], client.requests) == (200, "load", [])
    assert answer.headers.get("x-infer-ignored") == ignored


def test_a_stream_is_the_default_and_joins_to_the_whole_answer(oracle: LLM) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), (GENERATE, {"prompt": "hi"})):
        lines = lines_of(ask(oracle, path, {"model": "fake", **body})[0])
        whole = ask(oracle, path, {"model": "fake", "stream": False, **body})[0].json()
        *pieces, last = lines
        said = [line["message"]["content"] if path == CHAT else line["response"] for line in lines]
        assert "".join(said) == "hello there"
        assert (whole["message"]["content"] if path == CHAT else whole["response"]) == "hello there"
        assert all(
            set(line) == {"model", "created_at", "done"} | ({*line} & {"message", "response"})
            for line in pieces
        )
        assert [line["done"] for line in lines] == [False] * len(pieces) + [True]
        assert {*last} == {*whole}
        for end in (last, whole):
            assert (end["model"], end["done_reason"]) == ("fake", "stop")
            assert end["eval_count"] == len(oracle.tokenizer.encode("hello there", add_special=False))
            names = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
            assert all(isinstance(end[name], int) and end[name] >= 0 for name in names)
            assert end["prompt_eval_duration"] + end["eval_duration"] <= end["total_duration"]


def talk(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": MESSAGES, **fields}


def write(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": "a", **fields}


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (CHAT, {"messages": MESSAGES}, 400, "the required field 'model' is missing"),
    (CHAT, {"model": "gone", "messages": MESSAGES}, 404, 'model "gone" not found; served: fake'),
    (GENERATE, {"model": "gone"}, 404, 'model "gone" not found; served: fake'),
    (CHAT, talk(messages=[{"role": "user", "images": ["aGk="]}]), 400, "reads and writes text"),
    (GENERATE, write(images=["aGk="]), 400, "reads and writes text"),
    (GENERATE, write(suffix="b"), 400, "suffix needs a model whose vocabulary"),
    (GENERATE, write(template="{{ .Prompt }}"), 400, "templates are never taken"),
    (GENERATE, write(raw=True, top_logprobs=2), 400, "top_logprobs needs logprobs to be true"),
    (GENERATE, write(raw=True, system="b"), 400, "system belongs to a conversation"),
    (GENERATE, write(context=[10**9]), 400, "context holds ids from 1000000000"),
    (CHAT, talk(temperature=1), 400, "'temperature'; put it into options"),
    (CHAT, talk(options={"tempature": 1}), 400, "did you mean 'temperature'?"),
    (CHAT, talk(options={"mirostat": 2}), 400, "options.mirostat is not supp"),
    (CHAT, talk(options={"num_predict": -3}), 400, "options.num_predict must"),
    (CHAT, talk(options={"top_p": 2}), 400, "options.top_p must be"),
    (CHAT, talk(format="yaml"), 400, 'format must be "json" or a JSON schema'),
    (CHAT, talk(format={"type": 3}), 400, "format"),
    (CHAT, talk(think=True), 400, '"fake" does not support thinking; leave think out'),
    (CHAT, {"model": "fake", "messages": [], "keep_alive": 0}, 400, "keep_alive is 0, which unloads a model"),
    (
        CHAT,
        {
            "model": "fake",
            "messages": [
                *MESSAGES,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            ],
        },
        400,
        "only an assistant's message without tool calls can be continued",
    ),
    ("/api/embed", {"model": "fake", "prompt": "a"}, 400, "'prompt'; this route takes input"),
    ("/api/pull", {"model": "gone"}, 404, "this server fetches nothing for clients"),
    ("/api/show", {}, 400, "model is missing"),
    ("/api/create", {"model": "b", "from": "fake"}, 400, "/api/create is not supported"),
    ("/api/nothing", {}, 404, "there is no route POST /api/nothing"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED)
def test_a_refusal_is_a_text_with_the_reason(
    oracle: LLM, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer, _ = ask(oracle, path, body)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    assert message in answer.json()["error"]


def test_a_failure_in_a_stream_is_its_last_line(oracle: LLM) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), (GENERATE, {"prompt": "hi"})):
        client = saying(oracle, "hello there", EngineError("the device is lost"))
        *pieces, last = lines_of(ask(oracle, path, {"model": "fake", **body}, client)[0])
        assert pieces
        assert last == {"error": "the device is lost"}
        full = ask(oracle, path, {"model": "fake", **body}, saying(oracle, "", QueueFull.of(3, 3)))[0]
        assert (full.status_code, full.headers["retry-after"]) == (503, "1")
        assert full.json()["error"].startswith("3 sequences are waiting")


def chat_of(**fields: Any) -> ChatRequest:
    return ollama_to_chat(OllamaChat.model_validate({"model": "m", **fields}), "served")


def test_calls_and_results_find_each_other_without_ids() -> None:
    calls = [
        {"function": {"name": name, "arguments": {"city": city}}}
        for name, city in (("get_weather", "Rome"), ("get_time", "Oslo"))
    ]
    made = chat_of(
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
            {"role": "tool", "tool_name": "get_time", "content": "noon"},
            {"role": "tool", "content": "rain"},
        ],
        tools=[TOOL],
        format={"type": "object"},
        think="max",
    )
    _, called, first, second = made.messages
    assert called["reasoning_content"] == "Hm."
    ids = [call["id"] for call in called["tool_calls"]]
    assert len(set(ids)) == 2
    assert (first["tool_call_id"], first["name"]) == (ids[1], "get_time")
    assert second["tool_call_id"] == ids[0]
    assert made.tools == [TOOL]
    assert (made.model, made.reasoning_effort) == ("served", "xhigh")
    assert made.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "format", "schema": {"type": "object"}},
    }


def test_many_calls_find_their_results_in_linear_time() -> None:
    count = 10_000
    names = [f"tool_{i}" for i in range(count)]
    calls = [{"function": {"name": name, "arguments": {}}} for name in names]
    results = [{"role": "tool", "content": "1", "tool_name": name} for name in reversed(names)]
    started_at = time.process_time()  # in which a busy machine makes no difference
    made = chat_of(messages=[*MESSAGES, {"role": "assistant", "tool_calls": calls}, *results])
    assert time.process_time() - started_at < 5
    ids = [call["id"] for call in made.messages[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in made.messages[2:]] == ids[::-1]


def test_an_unknown_way_to_think_is_refused() -> None:
    with pytest.raises(RequestError, match="think must be one of true, false, low, medium, high, max"):
        chat_of(messages=MESSAGES, think="deeply")


def test_a_model_without_a_notation_for_calls_does_not_support_tools() -> None:
    body, encoder = OllamaChat(model="m", tools=[TOOL]), SimpleNamespace(dialect=None, think=None)
    with pytest.raises(RequestError, match='"m" does not support tools; leave tools out'):
        check_abilities(body, cast(PromptEncoder, encoder), has_tools=True)


def test_without_a_chat_template_a_prompt_is_continued_as_it_is(
    oracle: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptEncoder, "has_chat_template", False)
    made, client = ask(oracle, GENERATE, write(stream=False))
    assert made.json()["response"] == "hello there"
    assert "context" not in made.json()
    assert client.requests[0].prompt == tuple(oracle.encoder.encode("a"))
    refused, _ = ask(oracle, GENERATE, write(system="b"))
    assert refused.json()["error"].startswith("system belongs to a conversation, and this model has no chat")


@pytest.mark.parametrize(
    ("name", "listed"),
    [("a", "a:latest"), ("org/a", "org/a:latest"), ("a:8b", "a:8b"), ("h:1/a", "h:1/a:latest")],
)
def test_a_name_is_listed_with_a_tag(name: str, listed: str) -> None:
    assert tagged(name) == listed


def test_clients_find_the_server(oracle: LLM) -> None:
    site = Site(FakeClient(), encoder=oracle.encoder)
    for method, path in (("HEAD", "/"), ("GET", "/"), ("HEAD", "/api/tags"), ("HEAD", "/api/version")):
        assert site.request(method, path).status_code == 200
    version = site.request("GET", "/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # what VS Code asks for
    (model,) = site.request("GET", "/api/tags").json()["models"]
    assert model["name"] == model["model"] == "fake:latest"
    shown = site.request("POST", "/api/show", json={"name": model["name"], "verbose": True})
    assert shown.headers["x-infer-ignored"] == "verbose"
    info = shown.json()["model_info"]
    assert info[f"{info['general.architecture']}.context_length"] == oracle.encoder.context_len
    assert shown.json()["capabilities"][0] == "completion"


def test_without_the_page_the_root_answers_as_ollama_does(oracle: LLM) -> None:
    site = Site(FakeClient(), encoder=oracle.encoder, ui=False)
    assert site.request("HEAD", "/").status_code == 200
    assert site.request("GET", "/").text == "infer is running"
