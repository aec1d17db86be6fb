"""The real anthropic package against a server on loopback: messages, streams, tools, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool

from tests.support.actor import Actor, read_encoder, reasoned, serve_actor

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASK: Any = {"model": "fake", "max_tokens": 200, "messages": [{"role": "user", "content": "How is Rome?"}]}


def play(prompt: str) -> str:
    """Look at the weather if there is a tool for it, then say what it was."""
    if "<tool_response>" in prompt:
        return reasoned(prompt, "So.", "It rains in Rome." if "rain" in prompt else "Nobody knows.")
    if "get_weather" in prompt:
        return reasoned(prompt, "A tool knows.", f"Let me look.\n{CALL}")
    return reasoned(prompt, "Easy.", "Rome is old ### and large.")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Actor]]:
    encoder = read_encoder("qwen3", tmp_path_factory.mktemp("anthropic") / "qwen3")
    actor = Actor(encoder, play)
    with serve_actor(actor, encoder, api_key=("secret",)) as url:
        yield url, actor


@pytest.fixture(scope="module")
def client(served: tuple[str, Actor]) -> Iterator[Anthropic]:
    with Anthropic(base_url=served[0], api_key="secret", max_retries=0, timeout=30) as made:
        yield made


def test_a_message(client: Anthropic) -> None:
    answer: Any = client.messages.create(**ASK, system="Be brief.", stop_sequences=["###"])
    thinking, text = answer.content
    assert (thinking.type, text.type) == ("thinking", "text")
    assert (thinking.thinking, text.text.rstrip()) == ("Easy.", "Rome is old")
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "###")
    assert answer.usage.output_tokens_details is not None
    assert 0 < answer.usage.output_tokens_details.thinking_tokens < answer.usage.output_tokens
    assert answer._request_id is not None
    assert client.messages.create(**ASK | {"max_tokens": 2}).stop_reason == "max_tokens"


def test_a_stream_is_the_message(client: Anthropic) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Rome is old ### and large."
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)


def test_a_tool_round_trip(client: Anthropic) -> None:
    messages = list(ASK["messages"])
    with client.messages.stream(**ASK, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        answer: Any = stream.get_final_message()
    assert answer.stop_reason == "tool_use"
    thinking, text, use = answer.content
    assert (thinking.type, text.type, use.type) == ("thinking", "text", "tool_use")
    assert (use.name, use.input) == ("get_weather", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(**ASK | {"messages": messages}, tools=[TOOL])
    assert last.content[-1].to_dict()["text"] == "It rains in Rome."
    assert last.stop_reason == "end_turn"


def test_async_and_sync_agree(served: tuple[str, Actor], client: Anthropic) -> None:
    async def go() -> list[Any]:
        made = AsyncAnthropic(base_url=served[0], api_key="secret", max_retries=0)
        async with made, made.messages.stream(**ASK, tools=[TOOL]) as stream:
            final = await stream.get_final_message()
        return [block.to_dict() for block in final.content]

    whole = [block.to_dict() for block in client.messages.create(**ASK, tools=[TOOL]).content]
    assert [block | {"id": 0} for block in asyncio.run(go())] == [block | {"id": 0} for block in whole]


def test_tokens_are_counted_as_the_prompt_is_rendered(client: Anthropic) -> None:
    fields = {name: ASK[name] for name in ("model", "messages")}
    usage = client.messages.create(**ASK).usage
    counted = client.messages.count_tokens(**fields).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert client.messages.count_tokens(**fields, tools=[TOOL]).input_tokens > counted
    without: Any = {"type": "none"}
    assert client.messages.count_tokens(**fields, tools=[TOOL], tool_choice=without).input_tokens == counted


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"extra_body": {"temperature": 500}}, anthropic.BadRequestError),
        ({"extra_body": {"max_tokns": 1}}, anthropic.BadRequestError),
        ({"model": "other"}, anthropic.NotFoundError),
        ({"max_tokens": -1}, anthropic.BadRequestError),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError),
        ({"extra_headers": {"authorization": "Bearer wrong"}}, anthropic.AuthenticationError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_packages_own_classes(
    client: Anthropic, options: dict[str, Any], kind: type[anthropic.APIStatusError], stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        client.messages.create(**ASK | {"stream": stream} | options)
    assert caught.value.api_message
    assert caught.value.request_id
    assert caught.value.type in ("invalid_request_error", "not_found_error", "authentication_error")


def test_the_header_of_older_clients_is_a_key(served: tuple[str, Actor]) -> None:
    """Packages before 2.0, and most other clients of this API, send x-api-key."""
    headers: Any = {"x-api-key": "secret", "authorization": anthropic.omit}
    with Anthropic(base_url=served[0], api_key=None, auth_token=None, default_headers=headers) as made:
        assert made.messages.count_tokens(model="fake", messages=ASK["messages"]).input_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_works_unmodified(client: Anthropic, served: tuple[str, Actor], stream: bool) -> None:
    """It asks for a thread first, is told that there is none, and sends whole conversations from then on."""
    asked: list[str] = []

    @beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        asked.append(city)
        return "rain"

    runner: Any = client.beta.messages.tool_runner(**ASK, tools=[get_weather], stream=stream)
    if stream:
        for message_stream in runner:
            last = message_stream.get_final_message()
    else:
        last = runner.until_done()
    assert asked == ["Rome"]
    assert last.content[-1].text == "It rains in Rome."
    assert "<tool_response>\nrain" in served[1].prompts[-1]


def test_a_tool_that_fails_is_told_to_the_model(client: Anthropic, served: tuple[str, Actor]) -> None:
    use = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "no network", "is_error": True}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    client.messages.create(**ASK | {"messages": messages}, tools=[TOOL])
    assert "Error: no network" in served[1].prompts[-1]
    assert json.dumps({"city": "Rome"}) in served[1].prompts[-1]


def test_models_have_the_fields_of_this_api(client: Anthropic) -> None:
    (listed,) = client.models.list()
    assert listed == client.models.retrieve("fake")
    assert (listed.type, listed.id, listed.display_name) == ("model", "fake", "fake")
    assert listed.created_at.timestamp() == 1_700_000_000
