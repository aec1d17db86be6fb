"""Of what a client has sent, the log has names and nothing else."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from infer.errors import RequestError
from infer.server.middleware.redaction import redacted_reason
from infer.server.protocol.errors import ROUTES, ApiError, to_api_error
from infer.server.protocol.schemas import ChatRequest, CompletionRequest
from infer.tokenizer.chat_template import clean_messages
from tests.support.app import Site

CARD = "4111-1111-1111-1111"
SENTENCE = "\u8bf7\u544a\u8bc9\u6211\u600e\u6837\u6cbb\u7597\u6291\u90c1\u75c7"  # Chinese has no spaces

SECRETS = [
    SENTENCE,
    "tell me about it",
    "bob@example.com",
    "sk-live-abc",
    "SK_live_abc",
    "team/sk-abc",
    "xoxb-12-ab",
    "glpat-abc",
    "eyJhbGciOi.J9.x",
    "0123456789abcdefABCD",
    "a" * 65,
    CARD,
    CARD.replace("-", "."),
    "4111[1111][1111]1111",
    "1-1-1-1-1-1-",
    "123-45-6789",
    "user:word",
    "\u0661\u0662\u0663",  # digits, of another alphabet
]
NAMES = [
    "temperature",
    "messages[0].tool_calls[12].function.arguments",
    "spaces_between_special_tokens",
    "gpt-4o-2024-08-06",
    "meta-llama/Meta-Llama-3.1-405B-Instruct",
    "task-sk",
    "/v1/chat/completions",
]


def spell(message: str, param: str | None = None) -> str:
    return redacted_reason(ApiError(status=422, message=message, param=param))


def spell_messages(*messages: Any) -> str:
    with pytest.raises(RequestError) as refused:
        clean_messages(messages)
    return redacted_reason(to_api_error(refused.value))


def logged(caplog: pytest.LogCaptureFixture, **request: Any) -> str:
    """What the log says about a request that is refused."""
    with caplog.at_level(logging.INFO, logger="infer.server.middleware.access_log"):
        response = Site().request("POST", "/v1/completions", **request)
    assert response.status_code in (400, 415, 422)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "infer.server.middleware.access_log"]
    return line


@pytest.mark.parametrize("name", NAMES)
def test_names_are_kept(name: str) -> None:
    assert (
        spell(f"model {name!r} is not here", name) == f' param="{name}" error="model \'{name}\' is not here"'
    )


@pytest.mark.parametrize(
    "name", [*sorted(ROUTES), *ChatRequest.model_fields, *CompletionRequest.model_fields]
)
def test_what_we_call_things_is_a_name(name: str) -> None:
    assert f"'{name}' is missing" in spell(f"the required field {name!r} is missing")


@pytest.mark.parametrize("secret", SECRETS)
def test_what_is_no_name_is_cut(secret: str) -> None:
    assert spell(f"model {secret!r} is not here", secret) == ' error="model \'..."'


@pytest.mark.parametrize("secret", SECRETS)
def test_what_is_no_name_is_cut_where_nothing_quotes_it(secret: str) -> None:
    """A part of a body is named by its keys, and these are the client's."""
    assert spell(f"logit_bias.{secret}: must be a number", f"logit_bias.{secret}") == (
        ' error="...: must be a number"'
    )


def test_no_long_number_is_kept_anywhere() -> None:
    assert spell(f"prompt holds token id {10**15}, but ids are 0 to 151935") == (
        ' error="prompt holds token id ..., but ids are 0 to 151935"'
    )


@pytest.mark.parametrize("role", [SENTENCE, "bob", {"card": CARD}, ["bob"], int(CARD.replace("-", "")), 1.5])
def test_nothing_of_a_role_is_logged(role: object) -> None:
    assert spell_messages({"role": role, "content": "x"}) == (
        ' param="messages[0].role" error="messages[0].role is ..."'
    )


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("image_url", "'image_url'; this model reads text only: "),
        (None, "null; this model reads text only: "),
        (SENTENCE, "'..."),
        (CARD, "'..."),
        ({"bob": 1}, "..."),
        (["bob"], "..."),
        (4111, "..."),
    ],
)
def test_of_the_type_of_a_part_only_a_name_is_logged(kind: object, shown: str) -> None:
    said = spell_messages({"role": "user", "content": [{"type": kind}]})
    assert said.startswith(f' param="messages[0].content[0]" error="messages[0].content[0] has type {shown}')
    assert said.endswith('..."') or isinstance(kind, str | None)
    assert not any(secret in said for secret in (SENTENCE, "bob", "4111"))


def test_the_keys_of_an_object_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    line = logged(caplog, json={"prompt": "a", "logit_bias": {SENTENCE: "x"}})
    assert 'error="...: ' in line and SENTENCE not in line


@pytest.mark.parametrize("header", ["content-type", "content-encoding"])
def test_how_a_body_was_sent_is_not_logged(header: str, caplog: pytest.LogCaptureFixture) -> None:
    line = logged(caplog, content=b"{}", headers={header: "my secret"})
    assert f'{header} ..."' in line and "my secret" not in line
