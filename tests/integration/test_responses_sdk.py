"""The Responses API of the real openai package, and openai-agents, against a server on loopback."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
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
    if "forever" in prompt:
        return reasoned(prompt, "Long.", "On and on. " * 2000)
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
        ({"top_logprobs": 500}, openai.BadRequestError, "top_logprobs"),
        ({"extra_body": {"min_p": 5}}, openai.BadRequestError, "min_p"),
        ({"extra_body": {"timeout": 0}}, openai.BadRequestError, "timeout"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, openai.NotFoundError, "input[0]"),
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


@pytest.mark.parametrize("is_streamed", [False, True])
def test_three_turns_that_are_continued_are_the_conversation_sent_whole(
    client: OpenAI, served: tuple[str, Actor], is_streamed: bool
) -> None:
    history: list[Any] = []
    previous: Any = None
    for i, (asked, rules) in enumerate(
        (("How is Rome?", "Be brief."), ("Really?", None), ("So?", "Be kind."))
    ):
        options: Any = {"model": "fake", "instructions": rules, "tools": [TOOL] if i == 1 else []}
        given: Any = asked if i != 2 else [{"role": "user", "content": asked}]
        more: Any = {"input": given, "previous_response_id": previous and previous.id}
        if is_streamed:
            with client.responses.stream(**options, **more) as stream:
                answer: Any = stream.get_final_response()
        else:
            answer = client.responses.create(**options, **more)
        continued = served[1].prompts[-1]
        history.append({"role": "user", "content": asked})
        client.responses.create(**options, input=history, store=False)
        assert served[1].prompts[-1] == continued
        assert answer.store is not False
        assert answer.previous_response_id == (previous and previous.id)
        history += [item.to_dict() for item in answer.output]
        if i == 1:
            (call,) = [item for item in answer.output if item.type == "function_call"]
            result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            history.append(result)
            answer = client.responses.create(
                model="fake", input=[result], previous_response_id=answer.id, tools=[TOOL]
            )
            assert answer.output_text == "It rains in Rome."
            history += [item.to_dict() for item in answer.output]
        kept: Any = client.responses.retrieve(answer.id)
        assert kept.output_text == answer.output_text
        assert [item.id for item in kept.output] == [item.id for item in answer.output]
        previous = answer
    items = list(client.responses.input_items.list(previous.id, order="asc", limit=2))
    assert [item.type for item in items] == [item.get("type", "message") for item in history][:-2]
    assert items[0].id.startswith("item_")
    backwards = client.responses.input_items.list(previous.id)
    assert [item.id for item in backwards.data] == [item.id for item in items][::-1]


def test_a_response_is_deleted_and_one_that_continues_it_is_not(client: OpenAI) -> None:
    first = client.responses.create(**ASK)
    second = client.responses.create(model="fake", input="And?", previous_response_id=first.id)
    client.responses.delete(first.id)
    for use in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            use(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASK, previous_response_id=first.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    assert client.responses.create(**ASK, previous_response_id=second.id).status == "completed"
    unkept = client.responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    cut = client.responses.create(**ASK, max_output_tokens=3)
    assert client.responses.retrieve(cut.id).status == "incomplete"


def test_a_reference_stands_for_an_item(client: OpenAI, served: tuple[str, Actor]) -> None:
    first: Any = client.responses.create(**ASK)
    question: Any = {"role": "user", "content": "How is Rome?"}
    for references in (
        [{"type": "item_reference", "id": item.id} for item in first.output],
        [{"id": item.id} for item in first.output],
        [item.to_dict() for item in first.output],
    ):
        given: Any = [question, *references, {"role": "user", "content": "And?"}]
        client.responses.create(model="fake", input=given)
    assert len(set(served[1].prompts[-3:])) == 1


def test_a_stream_whose_reader_leaves_is_not_stored(client: OpenAI) -> None:
    with client.responses.create(model="fake", input="Go on forever.", stream=True) as stream:
        begun: Any = next(iter(stream))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.response.id)


def test_another_key_finds_nothing(tmp_path: Path) -> None:
    encoder = read_encoder("qwen3", tmp_path / "qwen3")
    with serve_actor(Actor(encoder, play), encoder, api_key=("a", "b")) as url:
        mine, other = (OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in "ab")
        made: Any = mine.responses.create(**ASK)
        for use in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                use(made.id)
        with pytest.raises(openai.BadRequestError):
            other.responses.create(**ASK, previous_response_id=made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model="fake", input=[{"type": "item_reference", "id": made.output[0].id}])
        assert mine.responses.retrieve(made.id).id == made.id


def test_a_server_that_stores_nothing_says_so(tmp_path: Path) -> None:
    encoder = read_encoder("qwen3", tmp_path / "qwen3")
    with serve_actor(Actor(encoder, play), encoder, response_store=0) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        raw = client.responses.with_raw_response.create(**ASK, store=True)
        assert raw.headers["x-infer-ignored"] == "store"
        made: Any = raw.parse()
        assert made.store is False
        assert "x-infer-ignored" not in client.responses.with_raw_response.create(**ASK).headers
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="stores none"):
            client.responses.create(**ASK, previous_response_id=made.id)


def test_logprobs_are_those_of_the_text(client: OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    for options, num_top in (
        ({"include": include}, 0),
        ({"include": include, "top_logprobs": 2}, 2),
        ({"top_logprobs": 3}, 3),
    ):
        whole: Any = client.responses.create(**ASK, **options)
        text = whole.output[-1].content[0]
        assert "".join(each.token for each in text.logprobs).strip() == text.text == "Rome is old."
        assert all(bytes(each.bytes).decode() == each.token for each in text.logprobs)
        assert {len(each.top_logprobs) for each in text.logprobs} == {num_top}
        assert {each.logprob for each in text.logprobs} == {-0.5}
        events: list[Any] = list(client.responses.create(**ASK, **options, stream=True))
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert all("".join(each.token for each in event.logprobs).endswith(event.delta) for event in deltas)
        tokens = [each.token for each in text.logprobs]
        assert [each.token for event in deltas for each in event.logprobs] == tokens
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        assert [each.token for each in done.logprobs] == tokens
        assert events[-1].response.output[-1].content[0].logprobs == text.logprobs
    plain: Any = client.responses.create(**ASK)
    assert plain.output[-1].content[0].logprobs == []


def test_input_tokens_are_those_of_the_prompt(client: OpenAI) -> None:
    options: Any = {"model": "fake", "instructions": "Be brief.", "tools": [TOOL], "input": "How is Rome?"}
    made = client.responses.create(**options)
    counted = client.responses.input_tokens.count(**options)
    assert counted.object == "response.input_tokens"
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens
    more = client.responses.input_tokens.count(model="fake", input="And?", previous_response_id=made.id)
    assert more.input_tokens > 0
    output: Any = {"type": "function_call_output", "call_id": "c9", "output": "rain"}
    assert client.responses.input_tokens.count(model="fake", input=[output]).input_tokens > 0


def test_a_conversation_that_is_too_long_loses_its_oldest_items(
    client: OpenAI, served: tuple[str, Actor]
) -> None:
    num_turns = 100
    history: list[Any] = [{"role": "developer", "content": "Rule one."}]
    for i in range(num_turns):
        history += [
            {"role": "user", "content": f"Question {i}? " + "word " * 60},
            {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{i}", "output": f"Result {i}."},
            {"role": "assistant", "content": f"Answer {i}."},
        ]
    history.append({"role": "user", "content": "The end?"})
    options: Any = {"model": "fake", "instructions": "Be brief.", "max_output_tokens": 50}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**options, input=history)
    assert caught.value.code == "context_length_exceeded"
    made: Any = client.responses.create(**options, input=history, truncation="auto")
    assert made.truncation == "auto"
    prompt = served[1].prompts[-1]
    assert all(kept in prompt for kept in ("Be brief.", "Rule one.", "Answer 99.", "The end?"))
    numbers = {
        what: {int(each) for each in re.findall(rf"{what} (\d+)", prompt)}
        for what in ("Question", "Result", "Answer")
    }
    first = min(numbers["Question"])
    assert numbers["Question"] == numbers["Result"] == numbers["Answer"] == {*range(first, num_turns)}
    assert 0 < first < num_turns - 1
    per_turn = made.usage.input_tokens / (num_turns - first)
    assert 8192 - per_turn * 1.5 < made.usage.input_tokens + 50 <= 8192
    more: Any = client.responses.create(
        **options, input="And?", previous_response_id=made.id, truncation="auto"
    )
    assert more.status in ("completed", "incomplete")
    assert "And?" in served[1].prompts[-1]
    huge: Any = [{"role": "user", "content": "word " * 20_000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**options, input=[*history, *huge], truncation="auto")
    assert caught.value.code == "context_length_exceeded"


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
