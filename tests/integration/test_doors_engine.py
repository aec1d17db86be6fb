"""Agents' APIs around a real engine: tools that must be called and answers that follow a schema.

The model is tiny and its weights are random: it calls a tool because it cannot say anything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from scripts.make_checkpoint import make_checkpoint
from tests.support.live_server import LiveServer, serve_model


class City(BaseModel):
    """An answer that ends soon, whatever a model says."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Rome", "Paris"]
    is_old: bool


SCHEMA: Any = City.model_json_schema()
ASK: Any = {
    "model": "tiny",
    "max_tokens": 150,
    "messages": [{"role": "user", "content": "hi"}],
    "thinking": {"type": "disabled"},
}
RESPOND: Any = {"model": "tiny", "input": "hi", "max_output_tokens": 150, "reasoning": {"effort": "none"}}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = tmp_path_factory.mktemp("tiny-qwen3")
    make_checkpoint("qwen3", directory, max_position_embeddings=2048)  # tools take a long prompt
    with serve_model(directory) as server:
        yield server


@pytest.fixture(scope="module")
def claude(live: LiveServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=live.url, api_key="any", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def gpt(live: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.base_url, api_key="any", max_retries=0, timeout=60) as made:
        yield made


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "visit"}])
def test_a_message_that_must_call_a_tool(claude: Anthropic, choice: dict[str, str]) -> None:
    tools: Any = [{"name": "visit", "description": "Go there", "input_schema": SCHEMA, "strict": True}]
    options: Any = {"tools": tools, "tool_choice": choice | {"disable_parallel_tool_use": True}}
    whole: Any = claude.messages.create(**ASK, **options)
    with claude.messages.stream(**ASK, **options) as stream:
        streamed: Any = stream.get_final_message()
    for answer in (whole, streamed):
        (use,) = answer.content
        assert (use.type, use.name, answer.stop_reason) == ("tool_use", "visit", "tool_use")
        City.model_validate(use.input)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "visit"}])
def test_a_response_that_must_call_a_function(gpt: OpenAI, choice: Any) -> None:
    tools: Any = [{"type": "function", "name": "visit", "parameters": SCHEMA, "strict": True}]
    options: Any = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    whole: Any = gpt.responses.create(**RESPOND, **options)
    with gpt.responses.stream(**RESPOND, **options) as stream:
        streamed: Any = stream.get_final_response()
    for answer in (whole, streamed):
        (call,) = answer.output
        assert (call.type, call.name, answer.status) == ("function_call", "visit", "completed")
        City.model_validate(json.loads(call.arguments))


def test_only_allowed_functions_are_called(gpt: OpenAI) -> None:
    flat: Any = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("stay", "visit", "go")]
    for name in ("stay", "visit", "go"):
        named = [{"type": "function", "name": name}]
        choice: Any = {"type": "allowed_tools", "mode": "required", "tools": named}
        options: Any = {"tools": flat, "parallel_tool_calls": False}
        made: Any = gpt.responses.create(**RESPOND, **options, tool_choice=choice, extra_body={"seed": 1})
        assert [call.name for call in made.output] == [name]
        assert made.tool_choice.mode == "required"
        chat: Any = gpt.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=150,
            reasoning_effort="none",
            tools=[{"type": "function", "function": {"name": t["name"], "parameters": SCHEMA}} for t in flat],
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": name}}],
                },
            },
            parallel_tool_calls=False,
        )
        assert [call.function.name for call in chat.choices[0].message.tool_calls] == [name]
    for tools, said in (
        ([], "1 to 128"),
        ([{"type": "function", "name": "other"}], "the tools are: stay"),
        ([{"type": "web_search"}], "must look like"),
    ):
        choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
        with pytest.raises(openai.BadRequestError, match=said) as caught:
            gpt.responses.create(**RESPOND, tools=flat, tool_choice=choice)
        assert (caught.value.param or "").startswith("tool_choice.tools")


def test_logprobs_and_sampling_fields_are_those_of_a_chat(gpt: OpenAI) -> None:
    extra = {"seed": 7, "top_k": 20, "ignore_eos": True, "repetition_penalty": 1.1}
    options: Any = {"temperature": 1.0, "top_logprobs": 2, "extra_body": extra}
    ask: Any = RESPOND | options | {"max_output_tokens": 12}
    chat: Any = gpt.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=12,
        reasoning_effort="none",
        logprobs=True,
        **options,
    )
    rows = {each.logprob: each.model_dump() for each in chat.choices[0].logprobs.content}
    whole: Any = gpt.responses.create(**ask)
    text = whole.output[-1].content[0]
    assert text.text == chat.choices[0].message.content
    assert text.logprobs
    assert all(each.to_dict() == rows[each.logprob] for each in text.logprobs)
    events: list[Any] = list(gpt.responses.create(**ask, stream=True))
    assert events[-1].response.output[-1].content[0].logprobs == text.logprobs


def test_answers_of_a_class(claude: Anthropic, gpt: OpenAI) -> None:
    assert isinstance(claude.messages.parse(**ASK, output_format=City).parsed_output, City)
    assert isinstance(gpt.responses.parse(**RESPOND, text_format=City).output_parsed, City)
    with gpt.responses.stream(**RESPOND, text_format=City) as stream:
        assert isinstance(stream.get_final_response().output_parsed, City)


def test_a_schema_that_cannot_be_used_is_blamed_by_its_own_name(claude: Anthropic, gpt: OpenAI) -> None:
    wrong = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    config: Any = {"format": {"type": "json_schema", "schema": wrong}}
    with pytest.raises(anthropic.BadRequestError, match=r"not"):
        claude.messages.create(**ASK, output_config=config)
    form: Any = {"format": {"type": "json_schema", "name": "out", "schema": wrong}}
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(**RESPOND, text=form)
    assert caught.value.param is not None
    assert caught.value.param.startswith("text.format")
