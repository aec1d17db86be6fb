"""Bodies of `/v1/messages` and `/v1/responses` as the chat they stand for, and every field accounted for."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from infer.dialects.answer import read_choice, read_tools
from infer.errors import MalformedRequest, RequestError
from infer.server.protocol.messages_to_chat import CountTokensRequest, MessagesRequest, messages_to_chat
from infer.server.protocol.responses_to_chat import ResponsesRequest, responses_to_chat
from infer.server.protocol.schemas import ChatRequest, TunedBody
from infer.server.protocol.structured import read_structured

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
USER = {"role": "user", "content": "hi"}
TUNED: dict[str, Any] = {  # fields that a chat has under the same names
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "logit_bias": {"5": 1.0},
    "seed": 7,
    "min_tokens": 1,
    "stop": ["x"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "bad_words": ["x"],
    "allowed_token_ids": [1],
    "metrics": True,
    "include_metrics": True,
    "priority": 2,
    "cache_salt": "s",
    "timeout": 5.0,
    "num_speculative_tokens": 2,
    "chat_template_kwargs": {"a": 1},
}


def message(**fields: Any) -> ChatRequest:
    return messages_to_chat(MessagesRequest.model_validate({"max_tokens": 9, "messages": [USER], **fields}))


def response(**fields: Any) -> ChatRequest:
    return responses_to_chat(ResponsesRequest.model_validate({"input": "hi", **fields}))


def chat(**fields: Any) -> dict[str, Any]:
    return ChatRequest.model_validate(fields).model_dump(exclude_none=True)


def test_blocks_become_turns() -> None:
    made = message(
        system=[
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "Let me see.", "citations": None},
                    {"type": "tool_use", "id": "call_1", "name": "f", "input": {"city": "Köln"}},
                    {"type": "tool_use", "id": "call_2", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_1",
                        "content": [{"type": "text", "text": "rain"}],
                    },
                    {"type": "tool_result", "tool_use_id": "call_2", "content": "no city", "is_error": True},
                    {"type": "text", "text": "And now?"},
                ],
            },
            {"role": "user", "content": "Go on."},
        ],
    )
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"city": "Köln"}}},
        {"id": "call_2", "type": "function", "function": {"name": "f", "arguments": {}}},
    ]
    assert made.messages == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "Error: no city"},
        {"role": "user", "content": "And now?\nGo on."},
    ]


def test_items_become_turns() -> None:
    made = response(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Be kind."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "short"}],
                "content": [{"type": "reasoning_text", "text": "hm"}],
                "encrypted_content": None,
            },
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
                ],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "call_2", "name": "f", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
            {
                "type": "function_call_output",
                "call_id": "call_2",
                "output": [{"type": "input_text", "text": "sun"}],
            },
        ],
    )
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "call_2", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}},
    ]
    assert made.messages == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "sun"},
    ]


def test_the_fields_of_a_message() -> None:
    made = message(
        model="m",
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_sequences=["###"],
        stream=True,
        tools=[
            {"name": "f", "description": "d", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
        ],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        metadata={"user_id": "u"},
    )
    assert made.model_dump(exclude_none=True) == chat(
        model="m",
        messages=[USER],
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop=["###"],
        stream=True,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
    )


def test_the_fields_of_a_response() -> None:
    made = response(
        model="m",
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        stream=True,
        tools=[{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": None}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "out", "schema": SCHEMA, "strict": True}},
        metadata={"a": "b"},
        user="u",
        store=False,
        truncation="disabled",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        **TUNED,
    )
    assert made.model_dump(exclude_none=True) == chat(
        model="m",
        messages=[USER],
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        stream=True,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=False,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "out", "schema": SCHEMA, "strict": True},
        },
        logprobs=True,
        top_logprobs=2,
        **TUNED,
    )
    assert {*TUNED} == {*TunedBody.model_fields} - {"model", "stream", "temperature", "top_p"} | {
        "chat_template_kwargs"
    }


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_choices_of_tools(given: dict[str, Any], chosen: object) -> None:
    made = message(tools=[{"name": "f", "input_schema": SCHEMA}], tool_choice=given)
    assert made.tool_choice == chosen


def test_a_result_of_no_call_is_refused_where_it_stands() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_9", "content": "rain"}
    with pytest.raises(MalformedRequest, match="'toolu_9', which is not the id of a tool call") as caught:
        message(messages=[USER, {"role": "user", "content": [result]}])
    assert caught.value.param == "messages[1].content[0].tool_use_id"
    output = {"type": "function_call_output", "call_id": "fc_9", "output": "rain"}
    with pytest.raises(MalformedRequest, match="'fc_9', which is not the id of a tool call") as caught:
        response(input=[USER, output])
    assert caught.value.param == "input[1].call_id"


def test_thinking_and_output_config() -> None:
    made = message(thinking={"type": "enabled", "budget_tokens": 100}, output_config={"effort": "max"})
    assert (made.max_reasoning_tokens, made.reasoning_effort) == (100, "xhigh")
    assert message(thinking={"type": "disabled"}, output_config={"effort": "low"}).reasoning_effort == "none"
    assert message(thinking={"type": "adaptive"}).max_reasoning_tokens is None
    form = {"type": "json_schema", "schema": SCHEMA}
    wanted = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    assert message(output_config={"format": form}).response_format == wanted
    assert message(output_format=form).response_format == wanted
    assert response(reasoning={"effort": "low", "summary": "auto"}).reasoning_effort == "low"


def test_fields_without_effect_are_named() -> None:
    text = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "citations": None}
    body = CountTokensRequest.model_validate(
        {
            "messages": [{"role": "user", "content": [text, text]}],
            "system": [text],
            "metadata": {"user_id": "u"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "tools": [{"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"}}],
        }
    )
    messages_to_chat(body)
    assert body.ignored_fields == (
        "metadata",
        "context_management",
        "system.cache_control",
        "messages.cache_control",
        "tools.cache_control",
    )
    other = ResponsesRequest.model_validate(
        {
            "input": [{"role": "user", "content": "hi", "status": "completed"}],
            "service_tier": "auto",
            "reasoning": {"summary": "auto"},
            "include": ["reasoning.encrypted_content"],
        }
    )
    responses_to_chat(other)
    assert other.ignored_fields == ("service_tier", "input.status", "reasoning.summary", "include")


def test_tools_in_namespaces_become_functions_and_hosted_tools_are_left_out() -> None:
    def flat(name: str) -> dict[str, Any]:
        return {"type": "function", "name": name, "strict": False}

    inner = {"type": "namespace", "name": "inner", "tools": [flat("h"), {"type": "mcp"}]}
    tools = [
        flat("f"),
        {"type": "namespace", "name": "outer", "description": "d", "tools": [flat("g"), inner]},
        *({"type": kind} for kind in ("web_search", "web_search_preview_2025_03_11", "local_shell", "mcp")),
    ]
    fields = {"input": "hi", "client_metadata": {"a": "b"}, "tools": tools}
    for choice in ("auto", None, "none", {"type": "function", "name": "h"}):
        body = ResponsesRequest.model_validate({**fields, "tool_choice": choice})
        made = responses_to_chat(body)
        assert [tool["function"]["name"] for tool in made.tools or []] == ["f", "g", "h"]
        assert body._namespaces == {"g": "outer", "h": "inner"}
        assert body.ignored_fields == (
            "client_metadata",
            "tools.namespace.description",
            "tools.mcp",
            "tools.web_search",
            "tools.web_search_preview",
            "tools.local_shell",
        )
    assert not response(tools=[{"type": "web_search"}], tool_choice="auto").tools


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0]",
            "reads and writes text",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}],
                    }
                ]
            },
            "messages[0].content[0].content[0]",
            "'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "txt", "text": "a"}]}]},
            "messages[0].content[0]",
            "did you mean 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]},
            "messages[0].content[0].txt",
            "did you mean 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content[0].text",
            "valid string",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
                ]
            },
            "messages[0].content[0]",
            "allowed: text, tool_result",
        ),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]", "a valid object"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role", "user, assistant, system"),
        (
            {"messages": [{"role": "user", "content": "hi", "name": "Bob"}]},
            "messages[0].name",
            "allowed: role",
        ),
        *(
            (
                {"messages": [{**USER, "type": kind}]},
                "messages[0].type",
                "unknown field 'messages[0].type'; allowed: role, content",
            )
            for kind in ("message", None, "")
        ),
        (
            {"output_config": {"type": "x"}},
            "output_config.type",
            "unknown field 'output_config.type'; allowed: format, effort",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0]",
            "'web_search_20250305'",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "missing"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "is missing and the type is 'tool'"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "only 'enabled' has it: give it"),
        ({"thinking": {"type": "disabled", "budget_tokens": 0}}, "thinking.budget_tokens", "leave it out"),
        ({"tool_choice": {"type": "required"}}, "tool_choice", "allowed: auto, any"),
        ({"thread": {"type": "create"}}, "thread", "stores nothing"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers", "where the client runs"),
        ({"container": "c"}, "container", "runs no code"),
        ({"stop": ["a"]}, "stop", "takes stop_sequences"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "is empty; give a text"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        (
            {"output_config": {"format": {"type": "json_schema", "json_schema": {"schema": {}}}}},
            "output_config.format",
            'output_config.format has no schema; give {"type": "json_schema", "schema": {...}}',
        ),
    ],
)
def test_what_a_message_cannot_have(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        message(**fields)
    assert caught.value.param == param
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"tool_choice": {"type": "tool"}}, MalformedRequest),
        ({"tool_choice": {"type": "auto", "name": "f"}}, RequestError),
        ({"thinking": {"type": "enabled"}}, MalformedRequest),
        ({"thinking": {"type": "disabled", "budget_tokens": 0}}, RequestError),
    ],
)
def test_a_field_that_its_type_needs_is_malformed_only_where_it_is_missing(
    fields: dict[str, Any], kind: type[RequestError]
) -> None:
    with pytest.raises(RequestError) as caught:
        message(**fields)
    assert caught.type is kind


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"conversation": "conv_1"}, "conversation", "send previous_response_id"),
        ({"background": True}, "background", "on the connection"),
        ({"prompt": {"id": "p"}}, "prompt", "stores no prompts"),
        ({"truncation": "middle"}, "truncation", "must be 'auto' or 'disabled'"),
        ({"max_tokens": 9}, "max_tokens", "takes max_output_tokens"),
        ({"messages": []}, "messages", "takes input"),
        ({"include": ["message.output_text.logprob"]}, "include", "message.output_text.logprobs"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tools[0]",
            "where the client runs",
        ),
        ({"tools": [{"type": "web_serach"}]}, "tools[0]", "where the client runs"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0]", "where the client runs"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f"}]}]},
            "tools[0].tools[0]",
            "where the client runs",
        ),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "missing"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "where the client runs"),
        (
            {"tools": [{"type": "function", "name": "f", "paramaters": {}}]},
            "tools[0].paramaters",
            "did you mean",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools[0].function",
            "tools are flat here",
        ),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "where the client runs"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "stores no responses"),
        ({"input": [{"type": "computer_call_output", "call_id": "c"}]}, "input[0]", "allowed: message"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "reads and writes text",
        ),
        ({"input": [{"role": "tool", "content": "hi"}]}, "input[0].role", "allowed are user"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input[0].call_id",
            "missing",
        ),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        (
            {"text": {"format": {"type": "json_schema", "json_schema": {"schema": {}}}}},
            "text.format",
            'text.format has no schema; give {"type": "json_schema", "name": ..., "schema": {...}}',
        ),
    ],
)
def test_what_a_response_cannot_have(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        response(**fields)
    assert caught.value.param == param
    assert said in str(caught.value)


@pytest.mark.parametrize("content", [[], [{"type": "redacted_thinking", "data": "x"}]])
def test_an_answer_that_says_nothing_is_no_message(content: list[dict[str, str]]) -> None:
    assert message(messages=[{"role": "assistant", "content": content}]).messages == []


def test_a_block_of_the_wrong_type_is_malformed() -> None:
    with pytest.raises(MalformedRequest):
        message(messages=[{"role": "user", "content": [{"type": 7}]}])
    with pytest.raises(MalformedRequest):
        response(input=[{"type": None, "role": "user", "content": "hi"}])


VALUES: tuple[Any, ...] = (
    *(None, True, 5, 3.5, -1, 1e300, 2**70, "", "x", "auto", [], [5], ["x"], [None], [[]], {}, [{}]),
    *(
        {"type": 5},
        {"type": []},
        {"type": "text"},
        {"type": "function"},
        {"x": {"y": [1]}},
        [{"type": "text"}],
    ),
)
FULL_MESSAGE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"city": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "b"}],
                    "is_error": True,
                }
            ],
        },
    ],
    "tools": [{"type": "custom", "name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "stop_sequences": ["x"],
    "temperature": 1.0,
    "top_p": 0.5,
    "top_k": 4,
    "stream": False,
    "metadata": {"user_id": "u"},
    "mcp_servers": [],
    "speed": "standard",
}
FULL_RESPONSE: dict[str, Any] = {
    "model": "m",
    "instructions": "s",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "function_call",
            "call_id": "1",
            "name": "f",
            "arguments": "{}",
            "caller": {"type": "direct"},
        },
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ],
    "tools": [
        {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
        {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "g"}]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "function", "name": "f"},
    "parallel_tool_calls": True,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 9,
    "temperature": 1.0,
    "top_p": 0.5,
    "stream": False,
    "stream_options": {"include_obfuscation": False},
    "metadata": {"a": "b"},
    "user": "u",
    "store": False,
    "previous_response_id": "resp_1",
    "truncation": "auto",
    "top_logprobs": 2,
    **TUNED,
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to everything inside of a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


@pytest.mark.parametrize(
    ("body_type", "to_chat", "full"),
    [(MessagesRequest, messages_to_chat, FULL_MESSAGE), (ResponsesRequest, responses_to_chat, FULL_RESPONSE)],
)
def test_any_value_in_any_place_is_taken_or_refused(body_type: Any, to_chat: Any, full: Any) -> None:
    assert isinstance(to_chat(body_type.model_validate(full)), ChatRequest)
    kept = pickle.dumps(full)  # a third of the time of deepcopy
    for path in places(full):
        for value in VALUES:
            made = pickle.loads(kept)
            holder = made
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = value
            try:
                body = body_type.model_validate(made)
            except (ValidationError, RequestError):  # FastAPI's to answer
                continue
            try:
                made_chat = to_chat(body)
                read_structured(made_chat)
                read_choice(made_chat.tool_choice, read_tools(made_chat.tools))
            except RequestError as error:
                assert error.param, (path, value)
            except Exception as error:
                raise AssertionError(f"{path} = {value!r}: {error!r}") from error
