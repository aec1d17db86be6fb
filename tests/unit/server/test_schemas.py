"""Every field is honoured, neutral, ignored by name, or refused: nothing is dropped in silence."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from infer.errors import RequestError
from infer.server.protocol.schemas import (
    ABOUT_THE_CLIENT,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    SamplingBody,
    TokenizeRequest,
)

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def complete(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x"} | fields)


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2, 3], [[1], [2, 3]], "", []])
def test_a_prompt_is_text_or_ids_or_a_list_of_either(prompt: Any) -> None:
    assert complete(prompt=prompt).prompt == prompt


@pytest.mark.parametrize(
    "prompt", [1, True, {"a": 1}, [1, "a"], [[1], "a"], [1.5], [True], [[["a"]]], [None]]
)
def test_any_other_prompt_has_the_wrong_type(prompt: Any) -> None:
    with pytest.raises(ValidationError, match="must be a string"):
        complete(prompt=prompt)


@pytest.mark.parametrize("name", sorted(SamplingBody.model_fields))
def test_a_null_is_a_field_that_was_not_given(name: str) -> None:
    assert getattr(complete(**{name: None}), name) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 5.5),
        ("temperature", "hot"),
        ("echo", 1),
        ("stop", 7),
        ("logit_bias", [1]),
        ("stream_options", True),
    ],
)
def test_types_are_strict(name: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        complete(**{name: value})


def test_an_integer_is_a_number() -> None:
    assert complete(temperature=1).temperature == 1.0


def test_an_unknown_field_is_refused_with_the_closest_name() -> None:
    with pytest.raises(RequestError, match="unknown field 'max_token'; did you mean 'max_tokens'") as caught:
        complete(max_token=5)
    assert caught.value.param == "max_token"


@pytest.mark.parametrize(
    ("body", "field", "hint"),
    [
        (
            CompletionRequest,
            "messages",
            "; conversations go to /v1/chat/completions, this route takes prompt",
        ),
        (ChatRequest, "prompt", "; plain prompts go to /v1/completions, this route takes messages"),
        (ChatRequest, "input", "; this route takes messages"),
        (CompletionRequest, "input", "; this route takes prompt"),
        (EmbeddingRequest, "prompt", "; this route takes input"),
        (DetokenizeRequest, "prompt", "; this route takes tokens"),
        (TokenizeRequest, "content", "; this route takes prompt"),
    ],
)
def test_a_field_of_another_route_is_refused_with_where_it_belongs(body: Any, field: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        body.model_validate({field: "x"})
    assert str(caught.value) == f"unknown field {field!r}{hint}"


def test_an_unknown_field_inside_another_is_refused_too() -> None:
    with pytest.raises(RequestError, match="include_usage"):
        complete(stream_options={"include_usag": True})


@pytest.mark.parametrize("name", sorted(ABOUT_THE_CLIENT))
def test_fields_about_the_client_are_named_as_ignored(name: str) -> None:
    assert complete(**{name: "something"}).ignored_fields == (name,)
    assert complete().ignored_fields == ()


@pytest.mark.parametrize("body", [CompletionRequest, ChatRequest, EmbeddingRequest, TokenizeRequest])
def test_neutral_fields_pass_at_their_neutral_values_and_are_refused_at_others(body: Any) -> None:
    needed = {"prompt": "x"} if body is not ChatRequest else CHAT
    needed = {"input": "x"} if body is EmbeddingRequest else needed
    for name, neutral in body.neutral.items():
        for value in (None, *neutral.values):
            assert body.model_validate(needed | {name: value}).ignored_fields == ()
        with pytest.raises(RequestError, match=f"{name} is not supported") as caught:
            body.model_validate(needed | {name: {"some": "value"}})
        assert caught.value.param == name


def test_a_neutral_number_is_not_a_neutral_truth() -> None:
    assert complete(length_penalty=1) is not None
    with pytest.raises(RequestError):
        complete(length_penalty=True)


def test_no_field_is_in_two_groups() -> None:
    for body in (CompletionRequest, ChatRequest, EmbeddingRequest, TokenizeRequest):
        honoured, neutral = set(body.model_fields), set(body.neutral)
        assert not honoured & neutral
        assert not (honoured | neutral) & body.ignored


def say(body: Any = ChatRequest, **keys: Any) -> Any:
    return body.model_validate({"messages": [{"role": "assistant", "content": "hi"} | keys]})


@pytest.mark.parametrize("body", [ChatRequest, TokenizeRequest])
def test_an_unknown_key_of_a_message_is_refused_with_the_closest_name(body: Any) -> None:
    with pytest.raises(RequestError, match=r"'messages\[0\].tool_cals'; did you mean 'tool_calls'") as caught:
        say(body, tool_cals=[])
    assert caught.value.param == "messages[0].tool_cals"


@pytest.mark.parametrize("key", ["audio", "function_call"])
def test_a_key_of_a_message_that_no_model_here_can_be_shown_is_refused_unless_null(key: str) -> None:
    assert say(**{key: None}).ignored_fields == ()
    with pytest.raises(RequestError, match=rf"messages\[0\].{key} is not supported"):
        say(**{key: {"id": "1"}})


def test_keys_without_effect_are_named_once() -> None:
    assert say(refusal=None, annotations=[]).ignored_fields == ()
    message = {
        "role": "assistant",
        "content": "x",
        "thinking_blocks": ["hm"],
        "annotations": [{"type": "url_citation"}],
    }
    body = ChatRequest.model_validate({"messages": [message] * 2, "user": "me"})
    assert body.ignored_fields == ("user", "messages.thinking_blocks", "messages.annotations")


def test_an_answer_can_be_sent_back_as_openai_s_client_wrote_it_down() -> None:
    from openai.types.chat import ChatCompletionMessage

    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    answers = [
        ChatCompletionMessage.model_validate({"role": "assistant", "content": "hi"}),
        ChatCompletionMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [call]}),
        ChatCompletionMessage.model_validate(
            {"role": "assistant", "content": "hi", "refusal": None, "reasoning_content": "hm"}
        ),
    ]
    for answer in answers:
        body = ChatRequest.model_validate({"messages": [answer.model_dump()]})
        assert body.ignored_fields == ()


@pytest.mark.parametrize("key", ["parsed", "id", "timestamp", "created_at", "annotations", "refusal"])
def test_what_a_client_library_adds_to_a_message_is_ignored(key: str) -> None:
    assert say(**{key: None}).ignored_fields == ()
    assert say(**{key: "x"}).ignored_fields == (f"messages.{key}",)


def test_a_refusal_without_content_is_the_text_of_its_message() -> None:
    body = say(content=None, refusal="I would rather not.")
    assert body.messages[0]["content"] == "I would rather not."
    assert body.ignored_fields == ()
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert say(content=None, refusal=None, tool_calls=[call]).messages[0]["content"] is None
    assert say(content=None, refusal=7).messages[0]["content"] is None  # which the template refuses


def test_a_refusal_among_the_parts_of_an_answer_is_its_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    content = say(role="assistant", content=parts).messages[0]["content"]
    assert content == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for role, part in (("user", parts[1]), ("assistant", {"type": "refusal"})):
        assert say(role=role, content=[part]).messages[0]["content"] == [part]  # which the template refuses


def test_every_field_of_openai_s_client_is_known() -> None:
    """The names come from the package itself, so that a new one shows up here."""
    from openai.types import CompletionCreateParams, EmbeddingCreateParams
    from openai.types.chat import completion_create_params

    def names(params: Any) -> set[str]:
        union = getattr(params, "__args__", (params,))
        return {name for each in union for name in each.__annotations__}

    chat = names(completion_create_params.CompletionCreateParams) | set(
        completion_create_params.CompletionCreateParamsBase.__annotations__
    )
    for body, wanted in (
        (ChatRequest, chat),
        (CompletionRequest, names(CompletionCreateParams)),
        (EmbeddingRequest, names(EmbeddingCreateParams)),
    ):
        known = {*body.model_fields, *body.neutral, *body.ignored}
        assert wanted - known == set()
