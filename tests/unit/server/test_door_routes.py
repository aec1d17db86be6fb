"""`/v1/messages` and `/v1/responses` through the whole application: answers, streams, limits and errors."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import re
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from anthropic.types import Message
from anthropic.types.shared import ErrorResponse
from openai.types.responses import Response

from infer.errors import EngineError, QueueFull
from infer.finish_reason import FinishReason
from infer.frontend.llm import LLM
from infer.scheduling.request import Request, StepOutput
from tests.support.app import Site
from tests.support.fake_client import FakeClient
from tests.support.wire import ScriptedClient, outputs_of, read_events

MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
HELLO: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
ASK: dict[str, Any] = {"max_output_tokens": 5, "input": "hi"}


def site(oracle: LLM, client: Any = None, **knobs: Any) -> Site:
    encoder = copy.copy(oracle.encoder)
    encoder.context_len = encoder.model_len = 4096  # tools and rules fit
    return Site(client or FakeClient(), encoder=encoder, **knobs)


def saying(oracle: LLM, text: str, finish_reason: str = "stop") -> ScriptedClient:
    ids = oracle.tokenizer.encode(text, add_special=False)

    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        for output in outputs_of(request, ids, finish_reason):
            yield output

    return ScriptedClient(script)


def failing(error: Exception, after: int = 0) -> ScriptedClient:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        for output in outputs_of(request, [70] * after, None):
            yield output
        raise error

    return ScriptedClient(script)


def refused(answer: httpx.Response, status: int, kind: str) -> str:
    """The message of an error in Anthropic's form."""
    assert answer.status_code == status, answer.text
    error = ErrorResponse.model_validate(answer.json(), strict=True)
    assert error.error.type == kind
    assert error.request_id == answer.headers["request-id"] == answer.headers["x-request-id"]
    return error.error.message


def test_a_message_is_the_chat_it_stands_for(oracle: LLM) -> None:
    place = site(oracle, saying(oracle, "The river is here."))
    chat = place.request("POST", "/v1/chat/completions", json=HELLO)
    answer = place.request("POST", MESSAGES, json=HELLO)
    assert answer.status_code == 200, answer.text
    made = Message.model_validate(answer.json(), strict=True)
    assert [block.to_dict() for block in made.content] == [
        {"type": "text", "text": chat.json()["choices"][0]["message"]["content"]}
    ]
    assert (made.stop_reason, made.stop_sequence) == ("end_turn", None)
    assert made.id.startswith("msg_")
    assert made.model == "fake"
    usage = chat.json()["usage"]
    assert made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0) == usage["prompt_tokens"]
    assert made.usage.output_tokens == usage["completion_tokens"]
    counted = place.request("POST", COUNT, json={"messages": HELLO["messages"]})
    assert counted.json() == {"input_tokens": usage["prompt_tokens"]}


def test_the_end_of_a_history_can_be_counted_and_not_answered(oracle: LLM) -> None:
    place = site(oracle)
    block = {"type": "tool_result", "tool_use_id": "toolu_cut", "content": "rain"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    said = {"role": "assistant", "content": [call]}
    for history in ([{"role": "user", "content": [block]}, *HELLO["messages"]], [*HELLO["messages"], said]):
        counted = place.request("POST", COUNT, json={"messages": history})
        assert counted.status_code == 200, counted.text
        shorter = place.request("POST", COUNT, json={"messages": HELLO["messages"]})
        assert counted.json()["input_tokens"] > shorter.json()["input_tokens"]
        assert place.request("POST", MESSAGES, json=HELLO | {"messages": history}).status_code == 400


def test_an_answer_may_continue_a_text_of_the_assistant(oracle: LLM) -> None:
    client = saying(oracle, " blue.")
    place = site(oracle, client)
    said = {"role": "assistant", "content": "The sky is"}
    body = HELLO | {"messages": [*HELLO["messages"], said]}
    answer = place.request("POST", MESSAGES, json=body).json()
    assert answer["content"][0]["text"] == " blue."
    prompt = oracle.tokenizer.decode(client.requests[0].prompt, skip_special=False)
    assert prompt.endswith("The sky is")
    counted = place.request("POST", COUNT, json={"messages": body["messages"]}).json()
    assert counted["input_tokens"] == len(client.requests[0].prompt)
    chat = HELLO | {"messages": body["messages"], "continue_final_message": True}
    place.request("POST", "/v1/chat/completions", json=chat | {"add_generation_prompt": False})
    assert client.requests[1].prompt == client.requests[0].prompt


def test_a_response_is_the_chat_it_stands_for(oracle: LLM) -> None:
    place = site(oracle, saying(oracle, "The river is here."))
    chat = place.request("POST", "/v1/chat/completions", json=HELLO).json()
    body = {**ASK, "metadata": {"a": "b"}, "user": "u", "instructions": None, "temperature": 0.5}
    answer = place.request("POST", RESPONSES, json=body)
    assert answer.status_code == 200, answer.text
    made = Response.model_validate(answer.json(), strict=True)
    assert made.output_text == chat["choices"][0]["message"]["content"]
    assert (made.status, made.error, made.incomplete_details) == ("completed", None, None)
    assert (made.metadata, made.user, made.temperature) == ({"a": "b"}, "u", 0.5)
    assert answer.json()["store"] is True
    assert made.usage is not None
    assert made.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert made.usage.output_tokens == chat["usage"]["completion_tokens"]


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_fails_is_not_stored(oracle: LLM, stream: bool, after: int) -> None:
    place = site(oracle, failing(EngineError("it broke"), after))
    place.request("POST", RESPONSES, json=ASK | {"stream": stream})
    assert len(place.state.responses) == 0  # type: ignore[arg-type]


def test_what_is_asked_about_a_stored_response_is_checked(oracle: LLM) -> None:
    place = site(oracle, saying(oracle, "The river is here."))
    made = place.request("POST", RESPONSES, json=ASK).json()
    path = f"{RESPONSES}/{made['id']}"
    assert place.request("GET", path).json() == made
    for query, param in (
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?limit=x", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_1", "after"),
        ("?stream=true", "stream"),
    ):
        answer = place.request("GET", path + query)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
    answer = place.request("PUT", path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, DELETE")
    place.state.config = dataclasses.replace(place.state.config, max_body_size="100B")
    reference = {"type": "item_reference", "id": made["output"][0]["id"]}
    answer = place.request("POST", RESPONSES, json={"input": [reference]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0]")
    assert "refer to fewer items" in answer.json()["error"]["message"]
    answer = place.request("POST", RESPONSES, json={"input": "a" * 100, "previous_response_id": made["id"]})
    assert answer.status_code == 400
    assert "at most 100B are allowed" in answer.json()["error"]["message"]


def test_a_long_conversation_is_rendered_a_few_times(oracle: LLM) -> None:
    place = site(oracle, saying(oracle, "The river is here."))
    encoder: Any = place.state.models["fake"].encoder
    lengths: list[int] = []

    def encode_chat(messages: Any, **options: Any) -> Any:
        lengths.append(len(messages))
        return type(encoder).encode_chat(encoder, messages, **options)

    encoder.encode_chat = encode_chat
    turns = [{"role": role, "content": "word " * 5} for _ in range(1000) for role in ("user", "assistant")]
    body = {"input": [*turns, {"role": "user", "content": "So?"}], "truncation": "auto"}
    answer = place.request("POST", RESPONSES, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["truncation"] == "auto"
    assert lengths[0] == 2001
    assert len(lengths) <= 1 + 10  # as often as 1000 can be halved
    lengths.clear()
    place.request("POST", RESPONSES, json=body | {"input": turns[:4]})
    assert lengths == [4]


def test_fields_that_a_message_does_not_have_are_ignored_when_it_is_shortened(oracle: LLM) -> None:
    place = site(oracle, saying(oracle, "The river is here."))
    place.state.models["fake"].encoder.context_len = 100
    result: dict[str, Any] = {"call_id": [], "output": 1}  # of another kind of item
    turns = [{"role": role, "content": "word " * 20} | result for role in ("user", "assistant")] * 5
    body = ASK | {"input": [*turns, {"role": "user", "content": "So?"}], "truncation": "auto"}
    answer = place.request("POST", RESPONSES, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_streams_add_up_to_whole_answers(oracle: LLM, finish_reason: str) -> None:
    place = site(oracle, saying(oracle, "The river is here.", finish_reason))
    whole = place.request("POST", MESSAGES, json=HELLO).json()
    events = read_events(place.request("POST", MESSAGES, json=HELLO | {"stream": True}))
    texts = [data["delta"]["text"] for name, data in events if name == "content_block_delta"]
    assert "".join(texts) == whole["content"][0]["text"]
    (ending,) = [data for name, data in events if name == "message_delta"]
    assert ending["delta"]["stop_reason"] == whole["stop_reason"]
    assert ending["usage"] == whole["usage"]

    response = place.request("POST", RESPONSES, json=ASK).json()
    name, last = read_events(place.request("POST", RESPONSES, json=ASK | {"stream": True}))[-1]
    assert name == ("response.completed" if finish_reason == "stop" else "response.incomplete")
    assert last["response"]["output"][0]["content"] == response["output"][0]["content"]
    assert last["response"]["usage"] == response["usage"]


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = '{"name": "f", "parameters": {"city": "Rome"}}'


def test_a_tool_call_is_a_block(oracle: LLM) -> None:
    place = site(oracle, saying(oracle, CALL))
    body = HELLO | {"tools": [{"name": "f", "input_schema": SCHEMA}]}
    answer = place.request("POST", MESSAGES, json=body).json()
    (block,) = Message.model_validate(answer, strict=True).content
    assert block.type == "tool_use"
    assert (block.name, block.input) == ("f", {"city": "Rome"})
    assert answer["stop_reason"] == "tool_use"

    events = read_events(place.request("POST", MESSAGES, json=body | {"stream": True}))
    (start,) = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert (start["type"], start["name"], start["input"]) == ("tool_use", "f", {})
    pieces = [data["delta"]["partial_json"] for name, data in events if name == "content_block_delta"]
    assert json.loads("".join(pieces)) == {"city": "Rome"}
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("text", "finish_reason", "expected"),
    [(CALL, "stop", "stop_sequence"), (CALL[:-5], "length", "max_tokens")],
)
def test_a_call_that_is_cut_is_no_block(oracle: LLM, text: str, finish_reason: str, expected: str) -> None:
    """No arguments are made up for it, and the reason is what cut it."""
    place = site(oracle, saying(oracle, text, finish_reason))
    body = HELLO | {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}
    body |= {"stop_sequences": ["ome"]} if expected == "stop_sequence" else {}
    answer = place.request("POST", MESSAGES, json=body).json()
    assert answer["content"] == [{"type": "text", "text": ""}]
    assert answer["stop_reason"] == expected
    events = read_events(place.request("POST", MESSAGES, json=body | {"stream": True}))
    assert events[-2][1]["delta"]["stop_reason"] == expected


def test_line_ends_in_arguments_are_kept(oracle: LLM) -> None:
    place = site(oracle, saying(oracle, CALL.replace("Rome", "Ro\nme")))
    body = HELLO | {"tools": [{"name": "f", "input_schema": SCHEMA}]}
    (block,) = place.request("POST", MESSAGES, json=body).json()["content"]
    assert block["input"] == {"city": "Ro\nme"}


def test_a_tool_call_is_an_item(oracle: LLM) -> None:
    place = site(oracle, saying(oracle, CALL))
    body = ASK | {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}
    answer = place.request("POST", RESPONSES, json=body).json()
    (item,) = Response.model_validate(answer, strict=True).output
    assert item.type == "function_call"
    assert (item.name, json.loads(item.arguments)) == ("f", {"city": "Rome"})
    assert item.call_id.startswith("call_")

    events = read_events(place.request("POST", RESPONSES, json=body | {"stream": True}))
    kind = "response.function_call_arguments"
    pieces = [data["delta"] for name, data in events if name == f"{kind}.delta"]
    (done,) = [data["arguments"] for name, data in events if name == f"{kind}.done"]
    assert json.loads("".join(pieces)) == json.loads(done) == {"city": "Rome"}


def test_text_on_both_sides_of_a_call_stays_there(oracle: LLM) -> None:
    place = site(oracle, saying(oracle, f"one <|python_tag|>{CALL} two"))
    body = HELLO | {"tools": [{"name": "f", "input_schema": SCHEMA}]}
    whole = place.request("POST", MESSAGES, json=body).json()["content"]
    events = read_events(place.request("POST", MESSAGES, json=body | {"stream": True}))
    streamed = [data["content_block"] for name, data in events if name == "content_block_start"]
    for name, data in events:
        if name == "content_block_delta" and "text" in data["delta"]:
            streamed[data["index"]]["text"] += data["delta"]["text"]
    assert [block["type"] for block in whole] == [block["type"] for block in streamed]
    assert [block.get("text") for block in whole] == [block.get("text") for block in streamed]
    assert [block.get("text") for block in whole] == ["one", None, "  two"]

    body = ASK | {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}
    response = place.request("POST", RESPONSES, json=body).json()
    _, last = read_events(place.request("POST", RESPONSES, json=body | {"stream": True}))[-1]
    for made in (response, last["response"]):
        texts = [item["content"][0]["text"] if "content" in item else None for item in made["output"]]
        assert texts == ["one", None, "  two"]


def test_a_stop_sequence_is_named(oracle: LLM) -> None:
    place = site(oracle, saying(oracle, "one two three"))
    body = HELLO | {"stop_sequences": [" two"]}
    answer = place.request("POST", MESSAGES, json=body).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " two")
    assert answer["content"][0]["text"] == "one"


def test_an_answer_that_says_nothing_has_an_empty_text(oracle: LLM) -> None:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        yield StepOutput(request.request_id, 0, (), finish_reason=FinishReason.STOP)

    place = site(oracle, ScriptedClient(script))
    for stream in (False, True):
        message = place.request("POST", MESSAGES, json=HELLO | {"stream": stream})
        response = place.request("POST", RESPONSES, json=ASK | {"stream": stream})
        if not stream:
            assert message.json()["content"] == [{"type": "text", "text": ""}]
            assert Response.model_validate(response.json(), strict=True).output_text == ""
        else:
            assert "content_block_start" in [name for name, _ in read_events(message)]
            assert read_events(response)[-1][1]["response"]["output"][0]["content"][0]["text"] == ""


def test_more_tokens_than_fit_fill_the_context(oracle: LLM) -> None:
    """Agents ask for more than small models have; a prompt that does not fit is refused all the same."""
    client = saying(oracle, "The river", "length")
    place = site(oracle, client)
    answer = place.request("POST", MESSAGES, json=HELLO | {"max_tokens": 100_000})
    assert answer.json()["stop_reason"] == "model_context_window_exceeded"
    assert client.requests[-1].params.max_tokens is None
    place.request("POST", MESSAGES, json=HELLO)
    assert client.requests[-1].params.max_tokens == 5
    long = {"max_tokens": 5, "messages": [{"role": "user", "content": "river " * 50_000}]}
    said = refused(place.request("POST", MESSAGES, json=long), 400, "invalid_request_error")
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 4096 maximum; shorten the messages", said)
    endless = {"messages": [{"role": "user", "content": "river " * 500_000}]}  # not even counted
    assert refused(place.request("POST", COUNT, json=endless), 400, "invalid_request_error").startswith(
        "prompt is too long: "
    )
    error = place.request("POST", RESPONSES, json={"input": "river " * 50_000}).json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


def test_what_coding_agents_send_is_taken(oracle: LLM) -> None:
    """Marks for caches, edits of the context, notes of the system between turns, far too many tokens."""
    mark = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "call_1", "name": "f", "input": {"city": "Rome"}, **mark}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "rain", "is_error": False}
    body = {
        "max_tokens": 32_000,
        "stream": True,
        "system": [{"type": "text", "text": "You write programs.", **mark}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", **mark}]},
            {"role": "assistant", "content": [{"type": "text", "text": "One moment."}, call]},
            {"role": "user", "content": [result]},
            {"role": "system", "content": "5000 tokens left"},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "defer_loading": True}],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "u"},
    }
    answer = site(oracle, saying(oracle, "Done.")).request("POST", f"{MESSAGES}?beta=true", json=body)
    assert answer.status_code == 200, answer.text
    assert read_events(answer)[-1][0] == "message_stop"
    ignored = (
        "context_management, metadata, system.cache_control, messages.cache_control, tools.defer_loading"
    )
    assert answer.headers["x-infer-ignored"] == ignored


def test_ignored_fields_are_named_in_a_header(oracle: LLM) -> None:
    body = HELLO | {"metadata": {"user_id": "u"}}
    for stream in (False, True):
        answer = site(oracle).request("POST", MESSAGES, json=body | {"stream": stream})
        assert answer.headers["x-infer-ignored"] == "metadata"


@pytest.mark.parametrize(
    ("body", "status", "kind", "said"),
    [
        ({"messages": HELLO["messages"]}, 400, "invalid_request_error", "'max_tokens' is missing"),
        (HELLO | {"temprature": 1}, 400, "invalid_request_error", "did you mean 'temperature'?"),
        (HELLO | {"temperature": -1}, 400, "invalid_request_error", "temperature"),
        (HELLO | {"top_p": "1"}, 400, "invalid_request_error", "top_p"),
        (HELLO | {"model": "other"}, 404, "not_found_error", "'other' is not served"),
        (HELLO | {"messages": []}, 400, "invalid_request_error", "messages"),
        ([], 400, "invalid_request_error", "must be a JSON object"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_the_form_of_anthropic(
    oracle: LLM, body: Any, status: int, kind: str, said: str, stream: bool
) -> None:
    if isinstance(body, dict):
        body = body | {"stream": stream}
    assert said in refused(site(oracle).request("POST", MESSAGES, json=body), status, kind)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (RESPONSES, {"input": 3}, "input", "input should be a valid string or a valid list, got 3"),
        (RESPONSES, {"input": "x", "text": 1}, "text", "input should be a valid object, got 1"),
        (RESPONSES, {"input": "x", "reasoning": []}, "reasoning", "input should be a valid object, got []"),
        (RESPONSES, {"input": [-1]}, "input[0]", "input should be a valid object, got -1"),
        (RESPONSES, {"input": [{}, 4, 5]}, "input[1]", "input should be a valid object, got 4"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": 3}]},
            "input[0].content",
            "input should be a valid string or a valid list, got 3",
        ),
        (
            "/v1/chat/completions",
            {"messages": [], "tool_choice": 3},
            "tool_choice",
            "input should be a valid string or a valid object, got 3",
        ),
    ],
)
def test_every_form_that_a_value_may_have_is_said(
    oracle: LLM, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    answer = site(oracle).request("POST", path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["param"], error["message"]) == (param, f"{param}: {message}")


def test_every_layer_refuses_in_the_form_of_anthropic(oracle: LLM) -> None:
    closed = site(oracle, api_key=("secret",), max_body_size="1KiB")
    refused(closed.request("POST", MESSAGES, json=HELLO), 401, "authentication_error")
    refused(closed.request("POST", COUNT, json=HELLO), 401, "authentication_error")
    wrong = {"x-api-key": "other"}
    refused(closed.request("POST", MESSAGES, json=HELLO, headers=wrong), 401, "authentication_error")
    key = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
    assert closed.request("POST", MESSAGES, json=HELLO, headers=key).status_code == 200
    assert closed.request("POST", RESPONSES, json=ASK, headers=key).status_code == 200
    bearer = {"authorization": "Bearer secret"}
    assert closed.request("POST", MESSAGES, json=HELLO, headers=bearer).status_code == 200
    assert closed.request("GET", "/v1/models", headers=wrong).json()["error"]["type"] == "AuthenticationError"
    large = HELLO | {"system": "x" * 2000}
    answer = closed.request("POST", MESSAGES, json=large, headers=key)
    assert answer.json()["error"]["type"] == "request_too_large"
    assert answer.status_code == 413

    open_one = site(oracle)
    refused(open_one.request("GET", MESSAGES), 405, "invalid_request_error")
    refused(open_one.request("GET", f"{MESSAGES}/batches"), 404, "not_found_error")
    open_one.state.board.is_draining = True
    busy = open_one.request("POST", MESSAGES, json=HELLO)
    refused(busy, 503, "overloaded_error")
    assert busy.headers["retry-after"]


def test_a_full_queue_is_an_overload(oracle: LLM) -> None:
    place = site(oracle, failing(QueueFull("8 requests are waiting")))
    answer = place.request("POST", MESSAGES, json=HELLO)
    assert "waiting" in refused(answer, 503, "overloaded_error")
    assert answer.headers["retry-after"] == "1"
    assert place.request("POST", RESPONSES, json=ASK).json()["error"]["type"] == "ServiceUnavailableError"


def test_a_thread_is_refused_in_the_words_that_make_a_tool_runner_go_on(oracle: LLM) -> None:
    answer = site(oracle).request("POST", MESSAGES, json=HELLO | {"thread": {"type": "create"}})
    refused(answer, 400, "invalid_request_error")
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_a_failure_in_a_stream_is_its_last_event(oracle: LLM) -> None:
    place = site(oracle, failing(EngineError("the engine fell over"), after=3))
    name, data = read_events(place.request("POST", MESSAGES, json=HELLO | {"stream": True}))[-1]
    assert name == "error"
    assert ErrorResponse.model_validate(data, strict=True).error.type == "api_error"
    *_, (failed, response), (kind, _) = read_events(
        place.request("POST", RESPONSES, json=ASK | {"stream": True})
    )
    assert (failed, kind) == ("response.failed", "error")
    assert response["response"]["status"] == "failed"


@pytest.mark.parametrize(("path", "body"), [(MESSAGES, HELLO), (RESPONSES, ASK)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(oracle: LLM, path: str, body: Any, stream: bool) -> None:
    client = FakeClient(delay_s=0.01)
    app = site(oracle, client).app

    async def go() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://site") as http:
            many = {"max_output_tokens": 200} if path == RESPONSES else {"max_tokens": 200}
            asking = asyncio.create_task(http.post(path, json=body | many | {"stream": stream}))
            while not client.num_open:
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            while client.num_open:
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(go(), 10))


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}}
    return value


@pytest.mark.parametrize("depth", [20, 100, 250])
def test_deep_bodies_are_refused(oracle: LLM, depth: int) -> None:
    """What a body may hold in its depths is neither rendered nor sent back: never a 5xx."""
    place, deep = site(oracle), nested(depth)
    use = {"type": "tool_use", "id": "c", "name": "f", "input": deep}
    tool = {"name": "f", "input_schema": deep}
    function = {"type": "function", "name": "f", "parameters": deep}
    message = {"role": "assistant", "content": [use]}
    flat = {"type": "function", "name": "f"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [flat]}
    schema = {"type": "json_schema", "name": "s", "schema": deep}
    for path, body in (
        (MESSAGES, HELLO | {"messages": [*HELLO["messages"], message, *HELLO["messages"]]}),
        (MESSAGES, HELLO | {"tools": [tool]}),
        (MESSAGES, HELLO | {"tools": [tool], "tool_choice": {"type": "none"}}),
        (MESSAGES, HELLO | {"system": [deep]}),
        (MESSAGES, HELLO | {"output_config": {"format": {"type": "json_schema", "schema": deep}}}),
        (RESPONSES, ASK | {"tools": [function]}),
        (RESPONSES, ASK | {"tools": [function], "tool_choice": "none"}),
        (RESPONSES, ASK | {"tool_choice": deep}),
        (RESPONSES, ASK | {"text": {"format": schema}}),
        (RESPONSES, ASK | {"input": [deep]}),
        (RESPONSES, ASK | {"input": [{"role": "user", "content": "hi", "id": deep}]}),
        (RESPONSES, ASK | {"input": [{"role": "user", "content": "hi", "zzz": deep}]}),
        (RESPONSES, ASK | {"tools": [flat], "tool_choice": {"type": "function", "name": "f", "zzz": deep}}),
        (RESPONSES, ASK | {"tools": [flat], "tool_choice": allowed | {"zzz": deep}}),
    ):
        for stream in (False, True):
            answer = place.request("POST", path, json=body | {"stream": stream})
            assert answer.status_code in (200, 400, 422), (path, body.keys(), answer.text)
            assert b"event: error" not in answer.content, (path, body.keys())


def test_routes_are_counted_and_logged_like_all(oracle: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="infer")
    place = site(oracle)
    answer = place.request("POST", MESSAGES, json=HELLO, headers={"x-infer-trace": "1"})
    assert "from_engine" in answer.headers["server-timing"]
    place.request("POST", MESSAGES, json=HELLO | {"model": "other"})
    lines = [record.getMessage() for record in caplog.records if "path=" in record.getMessage()]
    assert 'path="/v1/messages" status=200' in lines[0]
    assert "output_tokens=5" in lines[0]
    assert "status=404" in lines[1]
    assert "code=model_not_found" in lines[1]


@pytest.mark.parametrize("stream", [False, True])
def test_limits_on_reasoning_are_kept_by_a_model_that_does_not_reason(oracle: LLM, stream: bool) -> None:
    """Agents send them to any model."""
    assert oracle.encoder.think is None
    place = site(oracle, saying(oracle, "Done."))
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}}
    answer = place.request("POST", MESSAGES, json=HELLO | thinking | {"stream": stream})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-infer-ignored"] == "output_config.effort, thinking.budget_tokens"
    count = place.request("POST", COUNT, json={"messages": HELLO["messages"]} | thinking)
    assert count.status_code == 200
    answer = place.request("POST", RESPONSES, json=ASK | {"reasoning": {"effort": "high"}, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-infer-ignored"] == "reasoning.effort"
    none = place.request("POST", RESPONSES, json=ASK | {"reasoning": {"effort": "none"}, "stream": stream})
    assert "x-infer-ignored" not in none.headers, "it has its effect"


def test_wrong_limits_on_reasoning_are_refused_all_the_same(oracle: LLM) -> None:
    place = site(oracle)
    wrong = place.request("POST", RESPONSES, json=ASK | {"reasoning": {"effort": "banana"}})
    assert wrong.json()["error"]["param"] == "reasoning.effort"
    thinking = {"thinking": {"type": "enabled", "budget_tokens": -1}}
    assert "thinking.budget_tokens" in refused(
        place.request("POST", MESSAGES, json=HELLO | thinking), 400, "invalid_request_error"
    )
