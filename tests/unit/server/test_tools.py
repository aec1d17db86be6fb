"""Tools and reasoning on `/v1/chat/completions`: what an engine writes becomes OpenAI's fields and deltas."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from infer.dialects.answer import read_tools
from infer.dialects.table import BY_NAME, THINK
from infer.errors import RequestError
from infer.finish_reason import FinishReason
from infer.frontend.llm import LLM
from infer.scheduling.request import Request, StepOutput
from tests.support.wire import ScriptedClient, Wire, make_state

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "…",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
BODY = {"messages": MESSAGES, "tools": [WEATHER, NOW]}
NESTED = (
    'tools[0] must look like {"type": "function", "function": {"name": ...}}; '
    "name, description and parameters belong inside of function, as in chat completions"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TWO = f'I look.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


class Talk:
    """A server whose model writes the given texts, one for each choice, in Hermes' notation."""

    def __init__(self, oracle: LLM, *texts: str, thinks: bool = False, reason: str = "stop") -> None:
        encoder = copy.copy(oracle.encoder)
        encoder.dialect, encoder.think = BY_NAME["hermes"], THINK if thinks else None
        self.ids = [encoder.tokenizer.encode(text, add_special=False) for text in texts]
        self._reason = reason
        self.engine = ScriptedClient(self._write)
        self.wire = Wire(make_state(encoder, self.engine))

    async def _write(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        for index, ids in enumerate(self.ids):
            for i, token_id in enumerate(ids):
                reason = FinishReason(self._reason) if i == len(ids) - 1 else None
                yield StepOutput(request.request_id, index, (token_id,), finish_reason=reason)

    def choice(self, **fields: Any) -> dict[str, Any]:
        answer = self.wire.ok(PATH, BODY | fields)
        ChatCompletion.model_validate(answer)
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def frames(self, **fields: Any) -> list[dict[str, Any]]:
        frames = self.wire.frames(PATH, BODY | {"stream": True} | fields)
        for frame in frames:
            ChatCompletionChunk.model_validate(frame)
        return frames


def joined(frames: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that a client puts together from deltas."""
    message: dict[str, Any] = {
        "content": None,
        "reasoning_content": None,
        "reasoning": None,
        "tool_calls": [],
    }
    reason = None
    for choice in (c for frame in frames for c in frame["choices"] if c["index"] == index):
        assert reason is None, "nothing follows the finish reason"
        reason = choice["finish_reason"]
        for key in ("content", "reasoning_content", "reasoning"):
            if choice["delta"].get(key) is not None:
                message[key] = (message[key] or "") + choice["delta"][key]
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                assert call["function"]["arguments"] == ""
                message["tool_calls"].append({k: v for k, v in copy.deepcopy(call).items() if k != "index"})
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message | {"finish_reason": reason}


def test_a_call_is_a_call(oracle: LLM) -> None:
    talk = Talk(oracle, CALL)
    choice = talk.choice()
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Zürich"}'}
    assert call["type"] == "function"
    assert call["id"].startswith("call_")


def test_deltas_are_those_of_openai(oracle: LLM) -> None:
    frames = Talk(oracle, CALL).frames(stream_options={"include_usage": True})
    deltas = [frame["choices"][0]["delta"] for frame in frames if frame["choices"]]
    assert deltas[0] == {"role": "assistant", "content": None}
    (start,) = deltas[1]["tool_calls"]
    assert start.pop("id").startswith("call_")
    assert start == {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    assert all(list(delta) == ["tool_calls"] for delta in deltas[1:-1])
    assert deltas[-1] == {}
    assert frames[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert frames[-1]["usage"]["completion_tokens"] > 0
    pieces = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas[2:-1]]
    assert len(pieces) > 2, "arguments come as they are written"
    assert "".join(pieces) == '{"city": "Zürich"}'


@pytest.mark.parametrize(
    "text", [CALL, TWO, "No call.\n", f"{CALL}\nDone.", "<tool_call>oops", "a < b <tool"]
)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_streams_say_what_the_whole_says(oracle: LLM, text: str, reason: str) -> None:
    talk = Talk(oracle, text, reason=reason)
    choice = talk.choice()
    whole = choice["message"]
    streamed = joined(talk.frames())
    without_ids = [
        [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls", ())]
        for message in (whole, streamed)
    ]
    assert without_ids[0] == without_ids[1]
    assert streamed["content"] == whole["content"]
    assert streamed["finish_reason"] == choice["finish_reason"]
    assert choice["finish_reason"] == ("tool_calls" if without_ids[0] and reason == "stop" else reason)


def test_each_choice_has_its_own_calls(oracle: LLM) -> None:
    talk = Talk(oracle, CALL, "No.", TWO)
    whole = talk.wire.ok(PATH, BODY | {"n": 3})["choices"]
    assert [choice["finish_reason"] for choice in whole] == ["tool_calls", "stop", "tool_calls"]
    frames = talk.frames(n=3)
    for choice in whole:
        streamed = joined(frames, choice["index"])
        assert len(streamed["tool_calls"]) == len(choice["message"].get("tool_calls", ()))
        assert streamed["content"] == choice["message"]["content"]


def test_one_call_at_a_time_ends_the_answer(oracle: LLM) -> None:
    talk = Talk(oracle, TWO)
    choice = talk.choice(parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert talk.engine.aborted, "the engine need not write what is not read"
    assert len(joined(talk.frames(parallel_tool_calls=False))["tool_calls"]) == 1


def test_a_named_tool_stops(oracle: LLM) -> None:
    talk = Talk(oracle, CALL)
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert talk.choice(tool_choice=named)["finish_reason"] == "stop"
    assert talk.choice(tool_choice="required")["finish_reason"] == "tool_calls"
    one, any_of_them = (request.params.structured for request in talk.engine.requests)
    assert one is not None and any_of_them is not None
    assert "now" not in one.text and '\\"now\\"' in any_of_them.text


def test_without_tools_a_call_is_text(oracle: LLM) -> None:
    talk = Talk(oracle, CALL)
    assert talk.choice(tool_choice="none")["message"]["content"] == CALL
    assert talk.choice(tools=None)["message"]["content"] == CALL
    assert [request.params.structured for request in talk.engine.requests] == [None, None]
    assert len({request.prompt for request in talk.engine.requests}) == 1, "tools are not shown"


def test_strict_tools_are_enforced_where_a_call_begins(oracle: LLM) -> None:
    talk = Talk(oracle, CALL)
    strict = copy.deepcopy(WEATHER) | {"function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
    talk.choice(tools=[strict])
    talk.choice()
    first, second = (request.params.structured for request in talk.engine.requests)
    assert first is not None and first.triggers == ("<tool_call>",)
    assert second is None


def test_a_logprob_of_every_token_arrives(oracle: LLM) -> None:
    from infer.sampling.params import RowLogprobs

    talk = Talk(oracle, f"So.{CALL}")
    (ids,) = talk.ids

    async def write(request: Request) -> AsyncGenerator[StepOutput, None]:
        for i, token_id in enumerate(ids):
            row = RowLogprobs(token_id, -0.5, 1, ())
            reason = FinishReason.STOP if i == len(ids) - 1 else None
            yield StepOutput(request.request_id, 0, (token_id,), logprobs=(row,), finish_reason=reason)

    talk.engine._script = write
    whole = talk.choice(logprobs=True)["logprobs"]["content"]
    frames = talk.frames(logprobs=True)
    streamed = [
        entry
        for frame in frames
        for choice in frame["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in whole]
    assert len(whole) == len(ids)


# -- reasoning ----------------------------------------------------------------------------------------


def test_reasoning_has_both_names(oracle: LLM) -> None:
    talk = Talk(oracle, "<think>\nHm, 2.\n</think>\n\nTwo.", thinks=True)
    message = talk.choice(tools=None)["message"]
    assert message["content"] == "Two."
    assert message["reasoning"] == message["reasoning_content"] == "Hm, 2."
    streamed = joined(talk.frames(tools=None))
    assert streamed["reasoning"] == streamed["reasoning_content"] == "Hm, 2."
    assert streamed["content"] == "Two."


def test_reasoning_can_be_left_out(oracle: LLM) -> None:
    talk = Talk(oracle, "<think>Hm</think>Two.", thinks=True)
    assert set(talk.choice(include_reasoning=False)["message"]) == {"role", "content", "refusal"}
    streamed = joined(talk.frames(include_reasoning=False))
    assert (streamed["reasoning"], streamed["content"]) == (None, "Two.")


def test_a_stop_string_is_not_looked_for_in_reasoning(oracle: LLM) -> None:
    talk = Talk(oracle, "<think>Hm, two.</think>One, two, three.", thinks=True)
    for found in (talk.choice(stop=["two"])["message"], joined(talk.frames(stop=["two"]))):
        assert (found["reasoning"], found["content"]) == ("Hm, two.", "One, ")


def test_tokens_of_reasoning_are_counted(oracle: LLM) -> None:
    talk = Talk(oracle, "<think>Hm</think>Two.", "<think>", thinks=True, reason="length")
    usage = talk.wire.ok(PATH, BODY | {"n": 2})["usage"]
    last = talk.frames(n=2, stream_options={"include_usage": True})[-1]["usage"]
    spent = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < spent < usage["completion_tokens"]
    assert usage == last
    plain = Talk(oracle, "Two.")
    assert "completion_tokens_details" not in plain.wire.ok(PATH, BODY)["usage"]


def test_a_thought_that_is_cut_off_is_all_reasoning(oracle: LLM) -> None:
    choice = Talk(oracle, "<think>Hm, and", thinks=True, reason="length").choice()
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"] == "Hm, and"
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("field", [{"reasoning_effort": "low"}, {"max_reasoning_tokens": 5}])
def test_a_model_that_does_not_reason_keeps_every_limit_on_it(oracle: LLM, field: dict[str, Any]) -> None:
    response = Talk(oracle, "x").wire.post(PATH, BODY | field)
    assert response.status_code == 200, response.text
    assert response.headers["x-infer-ignored"] == next(iter(field))
    Talk(oracle, "x").choice(reasoning_effort="none")


# -- what is refused -----------------------------------------------------------------------------------


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f"} | fields}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": function(name="a b")}, "tools[0].function.name"),
        ({"tools": function(name="x" * 65)}, "tools[0].function.name"),
        ({"tools": function(name="ü")}, "tools[0].function.name"),
        ({"tools": function(name="auto")}, "tools[0].function.name"),
        ({"tools": function(name="required")}, "tools[0].function.name"),
        ({"tools": function(name="none")}, "tools[0].function.name"),
        ({"tools": function(parameters={"type": "string"})}, "tools[0].function.parameters"),
        ({"tools": function(returns={})}, "tools[0].function.returns"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": function() * 2}, "tools"),
        ({"tools": [function(name=f"f{i}")[0] for i in range(129)]}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.allowed_tools.mode"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"functions": []}, "functions"),
        ({"function_call": "none"}, "function_call"),
        ({"function_call": "auto"}, "function_call"),
        ({"reasoning_effort": "max"}, "reasoning_effort"),
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens"),
    ],
)
def test_what_cannot_be_understood_is_refused_by_name(
    oracle: LLM, fields: dict[str, Any], param: str
) -> None:
    error = Talk(oracle, "x", thinks=True).wire.refused(PATH, BODY | fields, 400)
    assert error["param"] == param, error


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"parameters": []}, "parameters"),
        ({"parameters": {"properties": 5}}, "parameters.properties"),
        ({"parameters": {"properties": {"a": 1}}}, "parameters.properties"),
        ({"parameters": {"required": 5}}, "parameters.required"),
        ({"parameters": {"type": "object", "required": "a"}}, "parameters.required"),
        ({"parameters": {"required": [1]}}, "parameters.required"),
        ({"strict": "yes"}, "strict"),
        ({"description": 5}, "description"),
        ({"name": 5}, "name"),
    ],
)
def test_a_wrong_json_type_in_a_tool_is_400(oracle: LLM, wrong: dict[str, Any], name: str) -> None:
    error = Talk(oracle, "x").wire.refused(PATH, BODY | {"tools": function(**wrong)}, 400)
    assert error["param"] == f"tools[0].function.{name}"


@pytest.mark.parametrize(
    ("choice", "param", "said"),
    [
        ({"type": 5}, "tool_choice", "5 is not supported; tool_choice must be 'auto'"),
        ({"type": None}, "tool_choice", "tool_choice must be 'auto'"),
        ({"type": "function"}, "tool_choice.function", "field 'tool_choice.function' is missing"),
        ({"type": "function", "function": 5}, "tool_choice.function", "must be an object, got a number"),
        ({"type": "function", "function": {}}, "tool_choice.function.name", "name' is missing"),
        ({"type": "function", "function": {"name": 5}}, "tool_choice.function.name", "must be text, got 5"),
        ({"type": "function", "name": 5}, "tool_choice.name", "tool_choice.name must be text, got 5"),
    ],
)
def test_a_tool_choice_of_the_wrong_form_is_400(oracle: LLM, choice: Any, param: str, said: str) -> None:
    error = Talk(oracle, "x").wire.refused(PATH, BODY | {"tool_choice": choice}, 400)
    assert error["param"] == param
    assert said in error["message"]


def test_a_model_whose_notation_is_not_known_takes_no_tools(oracle: LLM) -> None:
    talk = Talk(oracle, "x")
    talk.wire.state.models["tiny"].encoder.dialect = None
    error = talk.wire.refused(PATH, BODY, 400)
    assert "--tool-call-parser" in error["message"]


def test_json_of_a_history_is_shown_again(oracle: LLM) -> None:
    talk = Talk(oracle, CALL)
    message = talk.choice()["message"]
    result = {
        "role": "tool",
        "tool_call_id": message["tool_calls"][0]["id"],
        "content": [{"type": "text", "text": "21 °C"}],
    }
    talk.choice(messages=[*MESSAGES, message, result])
    shown = oracle.tokenizer.decode(talk.engine.requests[-1].prompt)
    assert json.dumps({"city": "Zürich"}, ensure_ascii=False) in shown
    assert "21 °C" in shown


def test_a_result_of_no_call_is_400_and_names_the_id(oracle: LLM) -> None:
    talk = Talk(oracle, CALL)
    message = talk.choice()["message"]
    result = {"role": "tool", "tool_call_id": "call_of_no_one", "content": "21"}
    for history in ([message, result], [result], [result, message]):
        error = talk.wire.refused(PATH, BODY | {"messages": [*MESSAGES, *history]}, 400)
        assert "'call_of_no_one', which is not the id of a tool call before it" in error["message"]
        assert error["param"] == f"messages[{len(MESSAGES) + history.index(result)}].tool_call_id"
    bare = {
        "role": "assistant",
        "tool_calls": [{key: message["tool_calls"][0][key] for key in ("type", "function")}],
    }
    for history in ([bare, result], [message, {"role": "tool", "content": "21"}]):  # it may be that call's
        talk.choice(messages=[*MESSAGES, *history])


def test_the_end_of_a_history_can_be_counted(oracle: LLM) -> None:
    """An agent that cuts its history asks how long the rest is, also where that begins with a result."""
    talk = Talk(oracle, CALL)
    result = {"role": "tool", "tool_call_id": "call_cut_off", "content": "21"}
    counted = talk.wire.ok("/tokenize", {"messages": [result, *MESSAGES]})
    assert counted["count"] > talk.wire.ok("/tokenize", {"messages": MESSAGES})["count"]


def test_a_call_that_is_cut_does_not_look_complete(oracle: LLM) -> None:
    """A stop string inside the arguments ends the answer: there is no call to make."""
    talk = Talk(oracle, CALL)
    for choice, reason in (("auto", "stop"), ("required", "stop")):
        whole = talk.choice(stop=["rich"], tool_choice=choice)
        assert (whole["finish_reason"], whole["stop_reason"]) == (reason, "rich")
        assert joined(talk.frames(stop=["rich"], tool_choice=choice))["finish_reason"] == reason
    assert talk.choice(stop=["</tool_call>"])["finish_reason"] == "tool_calls", "it is cut behind the call"
    text = CALL.partition("rich")[0]
    assert Talk(oracle, text, reason="length").choice()["finish_reason"] == "length"


@pytest.mark.parametrize(("choice", "said"), [("required", ""), ("auto", "Ok. ")])
def test_the_markup_of_a_cut_call_is_no_content(oracle: LLM, choice: str, said: str) -> None:
    """Neither of the first call nor of one behind others, whether a limit or a stop string cuts it."""
    text = said + CALL.partition("get_w")[0]
    wanted = said.strip() or None
    talk = Talk(oracle, text, reason="length")
    whole = talk.choice(tool_choice=choice)
    assert (whole["message"]["content"], whole["finish_reason"]) == (wanted, "length")
    assert "tool_calls" not in whole["message"]
    assert joined(talk.frames(tool_choice=choice))["content"] == wanted
    stopped = Talk(oracle, said + CALL).choice(tool_choice=choice, stop=["get_w"])
    assert (stopped["message"]["content"], stopped["finish_reason"]) == (wanted, "stop")
    later = Talk(oracle, f"{said}{CALL}\n{CALL.partition('get_w')[0]}", reason="length")
    message = later.choice(tool_choice=choice)["message"]
    assert (message["content"], len(message["tool_calls"])) == (wanted, 1)


@pytest.mark.parametrize(
    ("tool", "status", "param", "said"),
    [
        (
            NOW | {"strict": True},
            400,
            "tools[0].strict",
            "unknown field 'tools[0].strict'; it belongs inside of function",
        ),
        (
            NOW | {"returns": {}},
            400,
            "tools[0].returns",
            "unknown field 'tools[0].returns'; allowed: type, function",
        ),
        ({"type": "function", "name": "now"}, 400, "tools[0]", NESTED),
        ({"name": "now", "input_schema": {}}, 400, "tools[0]", NESTED),
    ],
)
def test_no_field_of_a_tool_is_passed_over(
    oracle: LLM, tool: dict[str, Any], status: int, param: str, said: str
) -> None:
    error = Talk(oracle, "x").wire.refused(PATH, BODY | {"tools": [tool]}, status)
    assert (error["param"], error["message"]) == (param, said)


def test_a_field_of_a_tool_may_be_no_text_in_python() -> None:
    with pytest.raises(RequestError) as caught:
        read_tools([{"type": "function", "function": {"name": "f", 3: 1}}])
    assert caught.value.param == "tools[0].function.3"
    allowed = "name, description, parameters, strict"
    assert str(caught.value) == f"unknown field 'tools[0].function.3'; allowed: {allowed}"


def test_a_format_beside_forced_calls_is_named_as_without_effect(oracle: LLM) -> None:
    talk = Talk(oracle, CALL)
    for field in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}}):
        answer = talk.wire.post(PATH, BODY | field | {"tool_choice": "required"})
        assert answer.headers["x-infer-ignored"] == next(iter(field))
    auto = talk.wire.post(PATH, BODY | {"response_format": {"type": "json_object"}})
    assert "x-infer-ignored" not in auto.headers, "it has its effect"
