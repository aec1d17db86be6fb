"""The Responses API of the real openai package, and openai-agents, against a server on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.actor import Actor, read_encoder, reasoned, serve_actor

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
ASK: Any = {"model": "fake", "input": "How is Rome?"}


def play(prompt: str) -> str:
    """Look at the weather if there is a tool for it, then say what it was."""
    if "<tool_response>" in prompt:
        return reasoned(prompt, "So.", "It rains in Rome." if "rain" in prompt else "Nobody knows.")
    if "get_weather" in prompt:
        return reasoned(prompt, "A tool knows.", CALL)
    return reasoned(prompt, "Easy.", "Rome is old.")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Actor]]:
    encoder = read_encoder("qwen3", tmp_path_factory.mktemp("responses") / "qwen3")
    actor = Actor(encoder, play)
    with serve_actor(actor, encoder) as url:
        yield f"{url}/v1", actor


@pytest.fixture(scope="module")
def client(served: tuple[str, Actor]) -> Iterator[OpenAI]:
    with OpenAI(base_url=served[0], api_key="any", max_retries=0, timeout=30) as made:
        yield made


def test_a_response(client: OpenAI, served: tuple[str, Actor]) -> None:
    answer: Any = client.responses.create(**ASK, instructions="Be brief.", store=False, metadata={"a": "b"})
    reasoning, message = answer.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert (reasoning.content or [])[0].text == "Easy."
    assert answer.output_text == "Rome is old."
    assert (answer.status, answer.metadata) == ("completed", {"a": "b"})
    assert answer.usage is not None
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    assert "Be brief." in served[1].prompts[-1]
    cut: Any = client.responses.create(**ASK, max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_a_stream_is_the_response(client: OpenAI) -> None:
    whole = client.responses.create(**ASK)
    with client.responses.stream(**ASK) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text
    assert final.usage == whole.usage
    kinds = [event.type for event in client.responses.create(**ASK, stream=True)]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"


def test_a_function_call_round_trip(client: OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": "How is Rome?"}]
    with client.responses.stream(model="fake", input=history, tools=[TOOL]) as stream:
        first: Any = stream.until_done().get_final_response()
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
    history += [item.to_dict() for item in first.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    last = client.responses.create(model="fake", input=history, tools=[TOOL])
    assert last.output_text == "It rains in Rome."


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_body_of_codex_is_answered(client: OpenAI, is_streamed: bool) -> None:
    tools: Any = [
        {"type": "namespace", "name": "sky", "description": "The sky", "tools": [TOOL]},
        {"type": "web_search", "external_web_access": False},
    ]
    history: list[Any] = [
        {"type": "message", "id": "m1", "role": role, "content": [{"type": "input_text", "text": text}]}
        for role, text in (("developer", "Be brief."), ("user", "How is Rome?"))
    ]
    ask: Any = {
        "model": "fake",
        "instructions": "Help.",
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "extra_body": {"client_metadata": {"x-codex-installation-id": "1"}},
    }
    raw = client.responses.with_raw_response.create(**ask, input=history)
    ignored = raw.headers["x-infer-ignored"].split(", ")
    assert {"client_metadata", "tools.web_search", "tools.namespace.description"} <= {*ignored}
    output: Any = raw.parse().output
    if is_streamed:
        events: list[Any] = list(client.responses.create(**ask, input=history, stream=True))
        output = events[-1].response.output
    (call,) = [item for item in output if item.type == "function_call"]
    assert (call.name, call.namespace) == ("get_weather", "sky")
    history += [item.to_dict() for item in output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    assert client.responses.create(**ask, input=history).output_text == "It rains in Rome."


def test_errors_are_the_packages_own_classes(client: OpenAI) -> None:
    for options, kind, param in (
        ({"temperature": 500}, openai.BadRequestError, "temperature"),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id"),
        ({"max_output_tokens": -1}, openai.BadRequestError, "max_output_tokens"),
        ({"input": {"a": 1}}, openai.BadRequestError, "input"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            openai.BadRequestError,
            "tools[0]",
        ),
        ({"model": "other"}, openai.NotFoundError, "model"),
    ):
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                client.responses.create(**ASK | {"stream": stream} | options)
            assert caught.value.param == param
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def import_agents() -> Any:
    """The openai-agents package, if it fits."""
    agents: Any = pytest.importorskip("agents")
    try:
        agents.Usage()
    except ValueError as error:  # it makes records of the openai package, which asks for more fields by now
        pytest.skip(f"this openai-agents does not fit this openai: {error!s:.80}")
    agents.set_tracing_disabled(True)
    return agents


@pytest.mark.parametrize("api", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
@pytest.mark.parametrize("streamed", [False, True])
def test_agents_work_unmodified(served: tuple[str, Actor], api: str, streamed: bool) -> None:
    agents = import_agents()
    asked: list[str] = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "rain"

    async def go() -> Any:
        async with AsyncOpenAI(base_url=served[0], api_key="any", max_retries=0, timeout=30) as client:
            model = getattr(agents, api)(model="fake", openai_client=client)
            tools = [agents.function_tool(get_weather)]
            agent = agents.Agent(name="guide", instructions="Be brief.", model=model, tools=tools)
            if not streamed:
                return await agents.Runner.run(agent, "How is Rome?")
            running = agents.Runner.run_streamed(agent, "How is Rome?")
            async for _ in running.stream_events():
                pass
            return running

    result = asyncio.run(go())
    assert asked == ["Rome"]
    assert result.final_output == "It rains in Rome."
    assert "<tool_response>\nrain" in served[1].prompts[-1]
