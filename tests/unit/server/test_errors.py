"""Failures in OpenAI's form: the right status, the field to blame, and nothing of this machine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from infer.config.server import ServerConfig
from infer.errors import (
    ConfigError,
    ContextOverflow,
    EngineError,
    EngineStopped,
    MalformedRequest,
    QueueFull,
    RequestError,
    RequestTimeout,
    TemplateError,
    UnknownModel,
)
from infer.frontend.llm import LLM
from infer.scheduling.request import Request, StepOutput
from infer.server.app import build_app
from infer.server.protocol.errors import (
    MAX_MESSAGE_LEN,
    REFUSALS,
    RETRY_LATER_S,
    RETRY_SOON_S,
    ROUTES,
    scrub,
    to_api_error,
)
from infer.server.protocol.schemas import ChatRequest, EmbeddingRequest
from infer.server.state import ServerState
from tests.support.wire import ScriptedClient, Wire, invalid, make_state

JSON = {"content-type": "application/json"}
MESSAGES = {"messages": [{"role": "user", "content": "x"}]}
PATHS = ["/v1/completions", "/v1/completions/stream", "/v1/chat/completions", "/v1/embeddings", "/tokenize"]


def failing(oracle: LLM, error: Exception) -> Wire:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        raise error
        yield

    return Wire(make_state(oracle.encoder, ScriptedClient(script)))


@pytest.mark.parametrize(
    ("error", "specified", "elsewhere"),
    [
        (MalformedRequest("x"), 400, 400),
        (RequestError("x"), 422, 400),
        (ContextOverflow(9, 9, 10), 422, 400),
        (TemplateError("x"), 422, 400),
        (UnknownModel("x"), 422, 404),
        (QueueFull("x"), 503, 503),
        (EngineStopped("x"), 503, 503),
        (RequestTimeout("x"), 504, 504),
        (EngineError("x"), 500, 500),
        (ConfigError("the secret is /etc/passwd"), 500, 500),
        (KeyError("a bug"), 500, 500),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_error_has_its_status_also_before_a_stream(
    oracle: LLM, error: Exception, specified: int, elsewhere: int, path: str, stream: bool
) -> None:
    wire = failing(oracle, error)
    code = "model_not_found" if isinstance(error, UnknownModel) else None
    code = "context_length_exceeded" if isinstance(error, ContextOverflow) else code
    status = specified if path == "/v1/completions" else elsewhere
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/responses": {"input": "x"},
    }
    refused = wire.refused(path, bodies[path] | {"stream": stream}, status, code)
    if status == 500 and not isinstance(error, EngineError):
        assert refused["message"] == "the server failed to answer this request; its log says why"
    elif str(error) != "x":
        assert refused["message"] == str(error)


@pytest.mark.parametrize(
    ("error", "seconds"), [(QueueFull("full"), RETRY_SOON_S), (EngineStopped("it restarts"), RETRY_LATER_S)]
)
def test_who_may_try_again_is_told_when(oracle: LLM, error: Exception, seconds: int) -> None:
    response = failing(oracle, error).post("/v1/completions", {"prompt": "x"})
    assert int(response.headers["retry-after"]) == seconds
    assert ("x-infer-refused" in response.headers) is isinstance(error, QueueFull), "was nothing begun?"
    assert RETRY_SOON_S < RETRY_LATER_S


def test_who_ran_out_of_time_is_told_not_to_try_the_same_again(oracle: LLM) -> None:
    response = failing(oracle, RequestTimeout("late")).post("/v1/completions", {"prompt": "x"})
    assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[]",
        b'"text"',
        b"{}",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda content: content[:40].decode("latin-1"),
)
def test_a_malformed_body_is_a_400(wire: Wire, path: str, content: bytes) -> None:
    response = wire.request("POST", path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_of_another_type_is_refused(wire: Wire) -> None:
    """A web page may send text/plain anywhere without asking; JSON it may not."""
    page = {"origin": "https://page.example", "content-type": "application/x-www-form-urlencoded"}
    for headers in ({"content-type": "text/plain"}, page):
        response = wire.request("POST", "/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert response.status_code == 400
        assert "send it as application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({}, "prompt", 400),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens", 400),
        ({"prompt": "x", "max_tokens": 10**25}, "max_tokens", 422),
        ({"prompt": "x", "stop_token_ids": [1, 2**70]}, "stop_token_ids[1]", 422),
        ({"prompt": "x", "logit_bias": {"5": "a"}}, "logit_bias.5", 400),
        ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias.5", 422),
        ({"prompt": [2**70]}, "prompt", 422),
        ({"prompt": [[1.5]]}, "prompt", 400),
        ({"prompt": "x", "stop": [1]}, "stop", 400),
        ({"prompt": "x", "stop_token_ids": [1, "a"]}, "stop_token_ids[1]", 400),
        ({"prompt": "x", "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", 400),
        ({"prompt": "x", "temperature": 200}, "temperature", 422),
        ({"prompt": "x", "timeout": 0}, "timeout", 422),
        ({"prompt": "x", "model": "m" * 300}, "model", 422),
        ({"prompt": "x", "nn": 2}, "nn", 422),
        ({"prompt": "x", "suffix": "y"}, "suffix", 422),
        ({"prompt": [9999]}, "prompt", 422),
        ({"prompt": [-1]}, "prompt", 422),
    ],
)
def test_the_field_to_blame_is_named(wire: Wire, body: dict[str, Any], param: str, status: int) -> None:
    assert wire.refused("/v1/completions", body, status)["param"] == param


@pytest.mark.parametrize("ids", [[2**70], [[2**70]], [[5], [6, 2**70]]])
def test_an_id_beyond_64_bits_is_out_of_range_in_any_list(wire: Wire, ids: list[Any]) -> None:
    for path, name in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        error = wire.refused(path, {name: ids}, invalid(path))
        assert error["param"] == name
        assert "1180591620717411303424" in error["message"]


def test_lists_in_lists_are_refused_at_any_depth(wire: Wire) -> None:
    body = b'{"prompt": ' + b"[" * 249 + b"]" * 249 + b"}"  # as deep as a body may be
    response = wire.request("POST", "/v1/completions", content=body, headers=JSON)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"seed": 2**70}, "seed must be an integer in [-2^63 + 1, 2^63 - 1], got 1180591620717411303424"),
        ({"seed": 1.5}, "seed: input should be a valid integer, got 1.5"),
        ({"n": 2**70}, "n must be an integer in [1, 4], got 1180591620717411303424"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5 must be a number in [-100, 100], got 101"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias.5 must be a number in [-100, 100], got 100.5"),
        ({"temperature": 200}, "temperature must be a number in [0, 100], got 200"),
    ],
)
def test_a_number_out_of_range_hears_of_the_range(wire: Wire, fields: dict[str, Any], said: str) -> None:
    status = 400 if "valid" in said else 422
    assert wire.refused("/v1/completions", {"prompt": "x"} | fields, status)["message"] == said


@pytest.mark.parametrize(
    ("path", "body", "missing"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("/v1/chat/completions", MESSAGES | {"response_format": {}}, "response_format.type"),
        ("/v1/chat/completions", MESSAGES | {"tool_choice": {}}, "tool_choice.type"),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text"),
        ("/tokenize", MESSAGES | {"tools": [{"function": {}}]}, "tools[0].function.name"),
    ],
)  # fmt: skip
def test_a_missing_field_of_any_object_is_400(wire: Wire, path: str, body: Any, missing: str) -> None:
    error = wire.refused(path, body, 400)
    assert (error["message"], error["param"]) == (f"the required field {missing!r} is missing", missing)


@pytest.mark.parametrize(
    ("path", "body", "allowed"),
    [
        ("/detokenize", {"tokens": [1]}, "model, tokens"),
        ("/v1/embeddings", {"input": "x"}, ", ".join(EmbeddingRequest.model_fields)),
        ("/v1/chat/completions", MESSAGES, ", ".join(ChatRequest.model_fields)),
    ],
)
def test_every_route_lists_the_fields_it_takes(wire: Wire, path: str, body: Any, allowed: str) -> None:
    error = wire.refused(path, body | {"zzzz": 1}, invalid(path))
    assert error["message"] == f"unknown field 'zzzz'; allowed: {allowed}"


@pytest.mark.parametrize(
    ("body", "param", "advice"),
    [
        ({"prompt": "x" * 600, "max_tokens": 200}, "prompt", "shorten the prompt to at most 255 tokens"),
        ({"prompt": "x", "max_tokens": 2000}, "max_tokens", "shorten the prompt or set max_tokens <= 25"),
    ],
)
def test_what_does_not_fit_has_the_code_and_the_words_that_clients_look_for(
    wire: Wire, body: dict[str, Any], param: str, advice: str
) -> None:
    refused = wire.refused("/v1/completions", body, 422, "context_length_exceeded")
    assert refused["param"] == param
    assert f"this model's maximum context length is 256 tokens; {advice}" in refused["message"]
    assert "max_seq_len" not in refused["message"]  # nothing that a client could change


@pytest.mark.parametrize(
    ("body", "status", "shown"),
    [
        ({"prompt": "x", "max_tokens": "5"}, 400, "'5'"),
        ({"prompt": "x", "stop_token_ids": [1, "a"]}, 400, "'a'"),
        ({"prompt": "x", "stream_options": {"include_usage": "yes"}}, 400, "'yes'"),
        ({"prompt": "x", "timeout": -1}, 422, "-1"),
        ({"prompt": 5}, 400, "5"),
        ({"prompt": "x", "skip_special_tokens": False}, 422, "false"),
        ({"prompt": "x", "max_tokens": True}, 400, "true"),
        ({"prompt": [{"name": "f"}, None]}, 400, '[{"name": "f"}, null]'),
    ],
)
def test_the_value_that_was_given_is_shown(wire: Wire, body: dict[str, Any], status: int, shown: str) -> None:
    response = wire.request("POST", "/v1/completions", content=json.dumps(body).encode(), headers=JSON)
    assert response.status_code == status
    assert response.json()["error"]["message"].endswith(f", got {shown}")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "model": "m" * 10**6},
        {"prompt": [[1.5] * 10**5]},
        {"prompt": {str(i): [i] * 100 for i in range(1000)}},
        {"prompt": "x", "prompt_embeds": "long " * 10**5},
    ],
)
def test_a_value_is_shown_in_part_if_it_is_long(wire: Wire, body: dict[str, Any]) -> None:
    status = 400 if len(body) == 1 else 422
    message = wire.refused("/v1/completions", body, status)["message"]
    shown = message.partition(", got ")[2]
    assert "..." in shown and 3 < len(shown) <= 60


def test_only_the_value_to_blame_is_shown(wire: Wire) -> None:
    for body in ({"temperature": 1, "seed": 77}, {"prompt": "private", "max_tokens": "x"}):
        message = wire.refused("/v1/completions", body, 400)["message"]
        assert "77" not in message and "private" not in message


@pytest.mark.parametrize("path", PATHS)
def test_a_missing_body_is_not_a_missing_field(wire: Wire, path: str) -> None:
    response = wire.request("POST", path, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("the body is empty or null; send a JSON object")


@pytest.mark.parametrize(
    ("content", "headers", "message"),
    [
        (b"prompt=hi", JSON, "the body is not valid JSON: unexpected character"),
        (b'{"prompt": "a",\n}', JSON, "trailing comma is not allowed (character 15)"),
        (b"null", JSON, "the body is empty or null; send a JSON object"),
        (b"[1]", JSON, "the body must be a JSON object, such as {...}, got a list"),
        (b'"hi"', JSON, "the body must be a JSON object, such as {...}, got a string"),
        (b"1.5", JSON, "the body must be a JSON object, such as {...}, got a number"),
        (b"true", JSON, "the body must be a JSON object, such as {...}, got true or false"),
        ('{"prompt": "ä"}'.encode("latin-1"), JSON, "the body is not UTF-8 text, as JSON must be"),
        ('{"prompt": "a"}'.encode("utf-16"), JSON, "the body is not UTF-8 text, as JSON must be"),
        (
            b'{"prompt": "a"}',
            {"content-type": "text/plain"},
            "the body came as content-type text/plain; "
            "send it as application/json (curl -H 'content-type: application/json')",
        ),
        (
            b'{"prompt": "a"}',
            {"origin": "https://page.example"},  # a page of a browser can leave the type out
            "the body came without a content-type; send it as application/json",
        ),
    ],
)
def test_each_fault_of_a_whole_body_is_told_by_its_own_words(
    wire: Wire, content: bytes, headers: dict[str, str], message: str
) -> None:
    response = wire.request("POST", "/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


DEEP = (  # bodies with a place for a value
    ("/v1/completions", '{"prompt": "a", "logit_bias": %s}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a", "parsed": %s}]}'),
    (
        "/v1/chat/completions",
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", '
        '"tool_calls": [{"id": %s, "function": {"name": "f", "arguments": "{}"}}]}]}',
    ),
    ("/v1/responses", '{"input": [{"id": %s}]}'),
    ("/v1/responses", '{"input": "a", "stream": true, "text": {"format": {"type": "text", "x": %s}}}'),
    ("/v1/messages", '{"max_tokens": 2, "messages": [{"role": "user", "content": "a"}], "metadata": %s}'),
)


@pytest.mark.parametrize(("path", "body"), DEEP)
@pytest.mark.parametrize("depth", [260, 990, 2000, 100_000])
def test_a_body_that_is_nested_too_deeply_is_refused(wire: Wire, path: str, body: str, depth: int) -> None:
    content = body % ("[" * depth + "]" * depth)
    answer = wire.request("POST", path, content=content, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert "more than 250 objects and lists inside each other" in answer.text


@pytest.mark.parametrize(("path", "body"), DEEP)
def test_a_body_that_is_nested_as_deeply_as_allowed_is_an_answer_or_an_error(
    wire: Wire, path: str, body: str
) -> None:
    before = body.partition("%s")[0]
    depth = 250 - sum((char in "[{") - (char in "]}") for char in before)
    for levels in (depth, depth + 1):
        content = body % ("[" * levels + "]" * levels)
        answer = wire.request("POST", path, content=content, headers=JSON)
        assert answer.status_code < 500 and "InternalServerError" not in answer.text, answer.text
        assert ("inside each other" in answer.text) == (levels > depth)


def test_brackets_in_a_text_are_not_levels(wire: Wire) -> None:
    assert wire.ok("/tokenize", {"prompt": "[{" * 300})["count"] > 0


def test_a_body_without_a_type_of_its_own_is_json_unless_a_page_sent_it(wire: Wire) -> None:
    content = b'{"messages": [{"role": "user", "content": "hi"}]}'  # LiteLLM sends so to /api/chat
    for path in ("/v1/chat/completions", "/v1/messages/count_tokens"):
        assert wire.request("POST", path, content=content).status_code == 200
        curl = {"content-type": "application/x-www-form-urlencoded"}  # what `curl -d` says by itself
        assert wire.request("POST", path, content=content, headers=curl).status_code == 200
        page = {"origin": "https://page.example"}
        assert wire.request("POST", path, content=content, headers=page).status_code == 400


def test_messages_of_the_wrong_type_are_malformed(wire: Wire) -> None:
    for messages in ("hi", {"role": "user"}, ["hi"], None):
        assert wire.refused("/v1/chat/completions", {"messages": messages}, 400)["param"] is not None


def test_an_unknown_route_and_method_answer_in_the_same_form(wire: Wire) -> None:
    missing = wire.post("/v1/nothing", {})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, 404)
    wrong = wire.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, 405)
    assert wrong.json()["error"]["message"] == "/v1/completions does not take GET; it takes POST"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "; did you mean '/v1/chat/completions'?"),  # a base URL without /v1
        ("/v1/v1/chat/completions", "; did you mean '/v1/chat/completions'?"),
        ("/v1/embedding", "; did you mean '/v1/embeddings'?"),
        ("/v1/complete", "; did you mean '/v1/messages'?"),
        ("/v1/v1/responses", "; did you mean '/v1/responses'?"),
        ("/v1/v1/messages", "; did you mean '/v1/messages'?"),  # Anthropic's client adds the /v1 itself
        ("/v1/completions/", "; did you mean '/v1/completions'?"),  # and not a longer route
        ("/v1/audio/speech", "; GET /openapi.json lists the routes"),
    ],
)
def test_a_route_that_is_nearly_right_is_told_the_right_one(wire: Wire, path: str, meant: str) -> None:
    assert wire.post(path, {}).json()["error"]["message"] == f"there is no route POST {path}{meant}"


def test_the_list_of_routes_is_where_a_hint_says(wire: Wire) -> None:
    assert "/v1/chat/completions" in wire.get("/openapi.json").json()["paths"]


def test_messages_hold_no_addresses_and_no_paths() -> None:
    said = scrub("<Thing object at 0x7f3a2b1c4d5e> in /home/someone/models/x.py of org/model at 3/4")
    assert said == "<Thing object at [address]> in [path] of org/model at 3/4"
    assert len(scrub("x" * 5000)) == MAX_MESSAGE_LEN
    for path in ("/etc/security/passwd", "/secret", "'/secret'", "/v1/completions/secret"):
        for error in (EngineError(f"cannot read {path}"), TemplateError(f"cannot read {path}: no")):
            said = to_api_error(error).message
            assert "[path]" in said and "passwd" not in said and "secret" not in said


def test_hints_and_the_client_s_own_words_stay_as_they_are() -> None:
    hint = "this model has no chat template; use /v1/completions, or see /v1/models."
    words = "model '/models/mine' is not served here; served: /models/yours"
    closing = "the template knows no tag </think>"
    for error in (RequestError(hint), EngineError(hint), UnknownModel(words), TemplateError(closing)):
        assert to_api_error(error).message == str(error)


def test_every_route_a_hint_may_name_exists() -> None:
    paths = build_app(ServerState(config=ServerConfig())).openapi()["paths"]
    assert set(paths) >= ROUTES
    assert {path for path in paths if "{" not in path} <= ROUTES


def test_the_documentation_has_the_table_of_statuses() -> None:
    text = Path("docs/features/openai-api.md").read_text()
    rows = [line.rstrip(" |").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    told = {(row[-1].strip("`"), row[-3], row[-2]) for row in rows if len(row) == 4}
    for refusal in REFUSALS:
        if refusal.code is not None:
            assert (refusal.code, str(refusal.specified), str(refusal.elsewhere)) in told
