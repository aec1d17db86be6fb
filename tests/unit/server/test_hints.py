"""Fields that change nothing: they are taken, and the answer's header names them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from infer.frontend.llm import LLM
from infer.server.protocol import body as bodies
from tests.support.app import Site
from tests.support.fake_client import FakeClient

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
TALK = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TALK, "max_tokens": 2},
    MESSAGES: {"messages": TALK, "max_tokens": 2},
    RESPONSES: {"input": "x", "max_output_tokens": 2},
    EMBEDDINGS: {"input": "x"},
    "/tokenize": {"prompt": "x"},
}


@pytest.fixture
def site(oracle: LLM) -> Site:
    return Site(FakeClient(), encoder=oracle.encoder)


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
        (MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        (MESSAGES, {"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
        (CHAT, {"cache_control": {"type": "ephemeral"}}, "cache_control"),
        (CHAT, {"messages": [{**TALK[0], "cache_control": {"type": "ephemeral"}}]}, "messages.cache_control"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
            "messages.content.cache_control",
        ),
        (MESSAGES, {"cache_control": {"type": "ephemeral"}}, "cache_control"),
        (CHAT, {"service_tier": "auto", "store": True}, "service_tier, store"),
        (MESSAGES, {"service_tier": "auto"}, "service_tier"),
        (RESPONSES, {"service_tier": "auto"}, "service_tier"),
    ],
)
def test_a_hint_is_ignored_and_named(site: Site, path: str, fields: dict[str, Any], ignored: str) -> None:
    response = site.request("POST", path, json=BODIES[path] | fields)
    assert response.status_code == 200, response.text
    assert response.headers["x-infer-ignored"] == ignored


def test_more_dimensions_than_the_models_own_are_refused(site: Site) -> None:
    error = site.request("POST", EMBEDDINGS, json={"input": "x", "dimensions": 7})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "dimensions")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", MESSAGES])
def test_a_float_that_is_whole_is_an_integer(oracle: LLM, path: str) -> None:
    client = FakeClient()
    body = {"messages": TALK} if path != "/v1/completions" else {"prompt": "x"}
    answer = Site(client, encoder=oracle.encoder).request("POST", path, json=body | {"max_tokens": 4.0})
    assert answer.status_code == 200, answer.text
    assert client.requests[0].params.max_tokens == 4
    assert isinstance(client.requests[0].params.max_tokens, int)
    error = Site(client, encoder=oracle.encoder).request("POST", path, json=body | {"max_tokens": 4.5})
    assert error.status_code == 400


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_minus_one_token_is_no_limit_on_a_chat(oracle: LLM, name: str) -> None:
    client = FakeClient()
    place = Site(client, encoder=oracle.encoder)
    assert place.request("POST", CHAT, json={"messages": TALK, name: -1}).status_code == 200
    assert client.requests[0].params.max_tokens is None
    assert place.request("POST", CHAT, json={"messages": TALK, name: -2}).status_code == 400
    assert place.request("POST", "/v1/completions", json={"prompt": "x", name: -1}).status_code == 422


# -- unknown fields ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_that_resembles_nothing_is_ignored_and_named(site: Site, path: str) -> None:
    response = site.request("POST", path, json=BODIES[path] | {"x_vendor_thing": 1})
    assert response.status_code == 200, response.text
    assert response.headers["x-infer-ignored"] == "x_vendor_thing"


def test_a_stream_names_it_too(site: Site) -> None:
    response = site.request("POST", CHAT, json=BODIES[CHAT] | {"x_vendor_thing": 1, "stream": True})
    assert response.headers["x-infer-ignored"] == "x_vendor_thing"


@pytest.mark.parametrize(
    ("path", "fields", "meant"),
    [
        (CHAT, {"temprature": 1}, "temperature"),
        (MESSAGES, {"stop_sequence": ["x"]}, "stop_sequences"),
        (RESPONSES, {"max_output_token": 3}, "max_output_tokens"),
        (EMBEDDINGS, {"encoding_formats": "float"}, "encoding_format"),
    ],
)
def test_a_slip_of_a_known_field_is_refused(
    site: Site, path: str, fields: dict[str, Any], meant: str
) -> None:
    response = site.request("POST", path, json=BODIES[path] | fields)
    assert response.status_code == 400
    assert f"did you mean '{meant}'?" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/completions/stream"])
def test_the_specified_routes_refuse_every_unknown_field(site: Site, path: str) -> None:
    response = site.request("POST", path, json={"prompt": "x", "x_vendor_thing": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (422, "x_vendor_thing")


@pytest.mark.parametrize("path", BODIES)
def test_a_strict_server_refuses_every_unknown_field(oracle: LLM, path: str) -> None:
    site = Site(FakeClient(), encoder=oracle.encoder, unknown_fields="refuse")
    response = site.request("POST", path, json=BODIES[path] | {"x_vendor_thing": 1})
    assert response.status_code == 400
    assert "x_vendor_thing" in response.json()["error"]["message"]


def test_unknown_fields_inside_are_named_by_their_place(site: Site) -> None:
    tool = {"type": "function", "function": {"name": "f", "x_cost": 3}, "x_owner": "me"}
    message = TALK[0] | {"x_mood": "good"}
    response = site.request(
        "POST", CHAT, json={"messages": [message], "tools": [tool], "tool_choice": "none"}
    )
    assert response.status_code == 200, response.text
    assert response.headers["x-infer-ignored"] == "messages.x_mood, tools.x_owner, tools.function.x_cost"
    block = {"type": "text", "text": "x", "x_mood": "good"}
    response = site.request(
        "POST", MESSAGES, json={"messages": [{"role": "user", "content": [block]}], "max_tokens": 2}
    )
    assert response.headers["x-infer-ignored"] == "messages.content.x_mood"


def test_a_hostile_name_reaches_neither_headers_nor_log_as_it_is(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    names = {f"zz{i}\r\nset-cookie: a=b, \x00\x1b[31m ümläut {'y' * 300}": 1 for i in range(20)}
    response = site.request("POST", CHAT, json=BODIES[CHAT] | names)
    assert response.status_code == 200, response.text
    assert "set-cookie" not in response.headers
    header = response.headers["x-infer-ignored"]
    assert header.isascii() and header.isprintable()
    assert len(header.split(", ")) == bodies.MAX_UNKNOWN
    assert len(header) < 2000
    assert "cookie" not in caplog.text and "field=..." in caplog.text
    assert "\x1b" not in caplog.text and "\r" not in caplog.text


def test_a_body_of_unknown_fields_is_refused_at_once(site: Site) -> None:
    """To compare each with all known names takes milliseconds, and the event loop waits."""
    body = BODIES[CHAT] | {f"qqqq{i}": 1 for i in range(3000)}
    began = time.process_time()
    response = site.request("POST", CHAT, json=body)
    assert response.status_code == 400 and "unknown field" in response.json()["error"]["message"]
    assert time.process_time() - began < 2


@pytest.mark.parametrize("name", ["sk-proj-AbCdEf0123", "4111-1111", "Patient John Doe"])
def test_the_log_does_not_name_what_may_be_data(
    site: Site, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    assert site.request("POST", CHAT, json=BODIES[CHAT] | {name: 1}).status_code == 200
    assert name.split("-")[0] not in caplog.text and "Doe" not in caplog.text


def test_the_log_names_an_unknown_field_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        site.request("POST", CHAT, json=BODIES[CHAT] | {"x_only_once": 1})
    told = [record for record in caplog.records if "x_only_once" in record.getMessage()]
    assert len(told) == 1
