from __future__ import annotations

from typing import Any

import pytest

from infer.errors import RequestError, TemplateError
from infer.tokenizer import chat_template
from infer.tokenizer.chat_template import clean_messages, clean_tools, map_strings


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert clean_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "ab"}]


def test_arguments_become_an_object() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    (message,) = clean_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


def test_developer_is_system_and_unread_keys_are_dropped() -> None:
    message = {"role": "developer", "content": "x", "refusal": None, "annotations": [1]}
    assert clean_messages([message]) == [{"role": "system", "content": "x"}]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "robot", "content": "x"}, "allowed are system, user, assistant, tool"),
        ({"content": "x"}, "'messages\\[0\\].role' is missing"),
        ({"role": "user"}, "content' is missing"),
        ({"role": "user", "content": 7}, "got 7"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "type 'image_url'"),
        ({"role": "user", "content": ["x"]}, "must be an object"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "only assistant messages may"),
        ({"role": "assistant", "tool_calls": "f"}, "must be a list"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "function.name' is missing"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "not valid JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 99999}}]},
            "JSON",
        ),
        ({"role": "user", "content": "x", "name": 3}, "name must be text"),
        ("hello", "must be an object"),
    ],
)
def test_what_no_model_can_read_is_refused(message: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        clean_messages([message])


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, None])
def test_a_conversation_is_a_list_with_something_in_it(messages: Any) -> None:
    with pytest.raises(TemplateError):
        clean_messages(messages)


@pytest.mark.parametrize("tools", ["f", [{}], ["f"], [{"function": {"name": 1}}], {"function": {}}])
def test_tools_have_names(tools: Any) -> None:
    with pytest.raises(RequestError):
        clean_tools(tools)


def test_no_tools_is_none() -> None:
    assert clean_tools(None) is None
    assert clean_tools([]) is None


def test_sizes_are_bounded() -> None:
    with pytest.raises(TemplateError, match="at most"):
        clean_messages([{"role": "user", "content": ""}] * (chat_template.MAX_MESSAGES + 1))
    with pytest.raises(TemplateError, match="at most"):
        clean_tools([{"function": {"name": "f"}}] * (chat_template.MAX_TOOLS + 1))
    deep: Any = "x"
    for _ in range(chat_template.MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(TemplateError, match="levels deep"):
        map_strings(deep, str)


def test_every_string_is_visited_keys_included() -> None:
    assert map_strings({"a": ["b", {"c": ("d", 1, None, True)}]}, str.upper) == {
        "A": ["B", {"C": ["D", 1, None, True]}]
    }
