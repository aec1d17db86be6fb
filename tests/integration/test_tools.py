"""Tools and reasoning over HTTP, with clients' own libraries and engines that really run.

The models are tiny and their weights are random: a call is well-formed because nothing else can be written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.frontend.llm import LLM
from infer.sampling.params import SamplingParams
from infer.server.app import create_app
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.fetched import fetched_model
from tests.support.live_server import KNOBS, LiveServer, serve, serve_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Zürich"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}},
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
    },
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
ASK: Any = [{"role": "user", "content": "Weather?"}]
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
SIZES = Sizes(context_len=4096)
SERVER = ServerConfig(in_process=True, access_log=False, served_model_name="default")


def check(name: str, arguments: str) -> None:
    assert name in ("get_weather", "now")
    if name == "get_weather":
        jsonschema.validate(json.loads(arguments), SCHEMA)
    assert isinstance(json.loads(arguments), dict)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = tmp_path_factory.mktemp("tools") / "qwen3"
    make_checkpoint("qwen3", directory, sizes=SIZES)
    with serve_model(directory, max_n=4) as server:
        yield server


@pytest.fixture
def client(live: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.base_url, api_key="any", max_retries=0, timeout=60) as made:
        yield made


@pytest.mark.parametrize("seed", range(2))
def test_a_tool_is_called_and_its_result_is_taken_back(client: OpenAI, seed: int) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, tool_choice="required", seed=seed, max_tokens=300,
        parallel_tool_calls=False, extra_body=QUIET,
    )  # fmt: skip
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    check(call.function.name, call.function.arguments)
    history: Any = [*ASK, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    again = client.chat.completions.create(
        model="tiny", messages=history, tools=TOOLS, max_tokens=3, extra_body=QUIET
    )
    assert again.usage is not None and answer.usage is not None
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_named_tool_is_the_one_that_is_called(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, tool_choice=NAMED, n=3, max_tokens=300, extra_body=QUIET
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        (call,) = choice.message.tool_calls or []
        assert call.type == "function" and call.function.name == "get_weather"
        check(call.function.name, call.function.arguments)


def test_a_stream_of_a_call(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=ASK, tools=TOOLS, tool_choice=NAMED, max_tokens=300, seed=2, extra_body=QUIET
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or []
    check(call.function.name, call.function.arguments)


class Place(BaseModel):
    """Arguments of a tool, or the form of an answer."""

    city: Literal["Paris", "Oslo"]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the package's own warning about `parsed`
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_dumped", [False, True], ids=["as it is", "as all of its fields"])
@pytest.mark.parametrize("kind", ["text", "format", "tools"])
def test_a_message_that_the_package_parsed_can_be_sent_back(
    client: OpenAI, kind: str, is_dumped: bool, is_streamed: bool
) -> None:
    tools: Any = [openai.pydantic_function_tool(Place, name="visit")]
    options: Any = {"model": "tiny", "seed": 2, "extra_body": QUIET} | {
        "text": {"max_tokens": 300, "stop": ["e", "a", "o"]},
        "format": {"max_tokens": 300, "response_format": Place},
        "tools": {
            "max_tokens": 300,
            "tools": tools,
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    }[kind]
    if is_streamed:
        with client.chat.completions.stream(messages=ASK, **options) as stream:
            message: Any = stream.until_done().get_final_completion().choices[0].message
    else:
        message = client.chat.completions.parse(messages=ASK, **options).choices[0].message
    history: Any = [*ASK, message.model_dump() if is_dumped else message]
    if kind == "tools":
        (call,) = message.tool_calls
        assert isinstance(call.function.parsed_arguments, Place)
        history.append({"role": "tool", "tool_call_id": call.id, "content": "21"})
    assert isinstance(message.parsed, Place if kind == "format" else type(None))
    history.append({"role": "user", "content": "And now?"})
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=history, tools=tools, max_tokens=3, extra_body=QUIET | {"min_tokens": 3}
    )
    assert raw.headers.get("x-infer-ignored") == ("messages.parsed" if kind == "format" else None)
    assert raw.parse().choices[0].finish_reason == "length"


def test_a_call_waits_for_the_end_of_reasoning(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, tool_choice=NAMED, max_tokens=400, seed=1,
        extra_body={"max_reasoning_tokens": 7},
    )  # fmt: skip
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    check(call.function.name, call.function.arguments)
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 9, "the budget, a newline and the tag"


def test_a_thought_is_ended_when_its_tokens_are_spent(live: LiveServer) -> None:
    """Random weights never end a thought by themselves."""
    encoder = live.oracle.encoder
    end = encoder.tokenizer.token_id("</think>")
    assert end is not None
    for budget in (0, 1, 9):
        params = SamplingParams(max_tokens=40, seed=3, logit_bias={end: -100.0})
        ids, bound, form = encoder.open_chat("Hm?", params, max_reasoning_tokens=budget)
        if budget == 0:  # told not to think at all
            assert form is None
            continue
        assert bound is not None and bound.reasoning is not None
        assert form is not None and form.in_reasoning, "the thought is opened, so that it can be ended"
        (answer,) = live.oracle.generate([ids], bound)
        written = answer.outputs[0].token_ids
        assert written.index(end) == budget + len(bound.reasoning.forced) - 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "mistral"])
def test_every_family_writes_its_own_calls(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path / family, sizes=SIZES)
    with LLM(str(tmp_path / family), **KNOBS) as llm:
        params = SamplingParams(max_tokens=200, seed=4)
        for choice in ("required", "get_weather"):
            (answer,) = llm.chat("Weather?", params, tools=TOOLS, tool_choice=choice)
            output = answer.outputs[0]
            assert output.tool_calls and not output.text, llm.tokenizer.decode(output.token_ids)
            for call in output.tool_calls if output.finish_reason != "length" else output.tool_calls[:-1]:
                check(call.name, call.arguments)
            assert answer.to_dict()["outputs"][0]["tool_calls"][0]["name"] == output.tool_calls[0].name


def test_the_default_model_calls_a_tool() -> None:
    fetched_model()
    with serve(create_app(EngineConfig.from_knobs(num_threads=1, num_blocks=256), SERVER)) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120)
        asked: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
        wishes: Any = {"model": "default", "tools": TOOLS, "max_tokens": 80, "temperature": 0}
        answer = client.chat.completions.create(messages=asked, tool_choice=NAMED, **wishes)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments)["city"] == "Paris"
        chunks = list(
            client.chat.completions.create(messages=asked, tool_choice=NAMED, stream=True, **wishes)
        )
        deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
        streamed = "".join(each.function.arguments or "" for each in deltas if each.function)
        assert streamed == call.function.arguments
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees, sunny"}
        history: Any = [*asked, answer.choices[0].message, result]
        told = client.chat.completions.create(messages=history, tool_choice="none", **wishes)
        assert told.choices[0].message.content


def test_langchain_binds_tools(live: LiveServer) -> None:
    pytest.importorskip("langchain_openai")
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    chat = ChatOpenAI(
        base_url=live.base_url, api_key=SecretStr("any"), model="tiny", max_completion_tokens=300, seed=5,
        extra_body=QUIET,
    )  # fmt: skip
    bound = chat.bind_tools([add], tool_choice="add", strict=True)
    message = bound.invoke("1 + 2?")
    (call,) = message.tool_calls
    assert call["name"] == "add"
    assert set(call["args"]) == {"a", "b"}
    whole: Any = None
    for chunk in bound.stream("1 + 2?"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [each["name"] for each in whole.tool_calls] == ["add"]
