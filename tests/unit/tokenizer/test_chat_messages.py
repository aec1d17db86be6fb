from __future__ import annotations

from typing import Any

import pytest

from infer.errors import MalformedRequest, RequestError, TemplateError
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


def calling(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": function}]}


@pytest.mark.parametrize(
    ("message", "kind", "says"),
    [
        ({"role": "robot", "content": "x"}, TemplateError, "allowed are system, developer, user, assistant"),
        ({"role": 5, "content": "x"}, MalformedRequest, "messages[0].role is 5, allowed are system"),
        ({"content": "x"}, MalformedRequest, "'messages[0].role' is missing"),
        ({"role": "user"}, MalformedRequest, "'messages[0].content' is missing"),
        ({"role": "user", "content": 7}, MalformedRequest, "got 7"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            TemplateError,
            "type 'image_url'",
        ),
        ({"role": "user", "content": [{"type": 5}]}, MalformedRequest, "has type 5"),
        ({"role": "user", "content": ["x"]}, MalformedRequest, "must be an object"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, TemplateError, "only assistant messages may"),
        ({"role": "assistant", "tool_calls": "f"}, MalformedRequest, "must be a list"),
        (calling(), MalformedRequest, "'messages[0].tool_calls[0].function.name' is missing"),
        (calling(name="f", arguments="{"), TemplateError, "not valid JSON"),
        (calling(name="f", arguments="[1]"), MalformedRequest, "must be a JSON object"),
        (calling(name="f", arguments="[" * 99999), TemplateError, "not valid JSON"),
        ({"role": "user", "content": "x", "name": 3}, MalformedRequest, "name must be text"),
        ("hello", MalformedRequest, "must be an object"),
    ],
)
def test_what_no_model_can_read_is_refused(message: Any, kind: type[RequestError], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        clean_messages([message])
    assert caught.type is kind
    assert says in str(caught.value)


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, None])
def test_a_conversation_is_a_list_with_something_in_it(messages: Any) -> None:
    with pytest.raises(TemplateError):
        clean_messages(messages)


@pytest.mark.parametrize(
    ("tools", "kind", "says"),
    [
        ("f", TemplateError, "tools must be a list, got a string"),
        ({"function": {}}, TemplateError, "tools must be a list, got an object"),
        ([{}], MalformedRequest, "the required field 'tools[0].function' is missing"),
        (["f"], MalformedRequest, "tools[0] must be an object, got a string"),
        ([{"function": {}}], MalformedRequest, "the required field 'tools[0].function.name' is missing"),
        ([{"function": {"name": 1}}], MalformedRequest, "tools[0].function.name must be text, got 1"),
    ],
)
def test_tools_have_names(tools: Any, kind: type[RequestError], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        clean_tools(tools)
    assert (caught.type, str(caught.value)) == (kind, says)


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
