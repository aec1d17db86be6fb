"""Harmony (gpt-oss) from end to end: prompts, channels on every API, stop strings, constraints."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from infer.constraints.description import Structured
from infer.dialects.answer import find_format, read_tools
from infer.dialects.table import BY_NAME, HARMONY_MARKERS, THINKS, find_dialect, find_think
from infer.errors import TemplateError
from infer.finish_reason import FinishReason
from infer.frontend.llm import LLM
from infer.frontend.outputs import OutputBuilder
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request, StepOutput
from infer.tokenizer.chat_template import ChatTemplate, find_template
from infer.tokenizer.tokenizer import Tokenizer
from tests.support.wire import ScriptedClient, Wire, make_state, read_events
from tests.unit.tokenizer.vocabularies import gpt2_metadata, id_of

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name"},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "days": {"type": ["integer", "null"]},
                "spots": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
                },
            },
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALLED = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "They ask for Paris.",
    "tool_calls": [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        },
        {"id": "2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ],
}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi<|end|>"},
    {"role": "assistant", "content": "Hello", "reasoning_content": "A greeting."},
    {"role": "user", "content": "Weather?"},
    CALLED,
    {"role": "tool", "tool_call_id": "2", "content": "noon"},
    {"role": "tool", "tool_call_id": "1", "content": "21"},
]
# as OpenAI's own renderer (openai-harmony) writes it
PROMPT = """<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2025-06-28

Reasoning: high

# Valid channels: analysis, commentary, final. Channel must be included for every message.
Calls to these tools must go to the commentary channel: 'functions'.<|end|><|start|>developer<|message|># Instructions

Be kind.

# Tools

## functions

namespace functions {

// Weather in a city
type get_weather = (_: {
// Its name
city: string,
unit?: "C" | "F", // default: C
days?: number | null,
spots?: {
    x: number,
    }[],
}) => any;

type now = () => any;

} // namespace functions<|end|><|start|>user<|message|>Hi<|end|><|end|>\
<|start|>assistant<|channel|>final<|message|>Hello<|end|><|start|>user<|message|>Weather?<|end|>\
<|start|>assistant<|channel|>analysis<|message|>They ask for Paris.<|end|>\
<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>\
<|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city": "Paris"}<|call|>\
<|start|>assistant to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}<|call|>\
<|start|>functions.now to=assistant<|channel|>commentary<|message|>noon<|end|>\
<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>21<|end|><|start|>assistant"""  # noqa: E501

THOUGHT = "<|channel|>analysis<|message|>Hm, final STOP?<|end|><|start|>assistant"
ANSWER = THOUGHT + "<|channel|>final<|message|>It is noon.<|return|>"
CALL = (
    THOUGHT
    + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    + "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
)


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return Tokenizer.from_gguf(gpt2_metadata(("<|endoftext|>", *HARMONY_MARKERS)))


def test_a_conversation_is_written_as_openai_writes_it(vocabulary: Tokenizer) -> None:
    template = find_template("gpt_oss", vocabulary)
    options: dict[str, Any] = {"reasoning_effort": "high", "date_string": "2025-06-28"}
    ids = template.encode_chat(HISTORY, tools=[TOOL, NOW], **options)
    assert vocabulary.decode(ids, skip_special=False) == PROMPT
    assert ids.count(id_of(vocabulary, "<|end|>")) == PROMPT.count("<|end|>") - 1, "a user's marker is text"
    ended = [*HISTORY, {"role": "assistant", "content": "21 °C"}, {"role": "user", "content": "Thanks"}]
    assert "They ask" not in template.render(ended), "reasoning is dropped once there is an answer"
    with pytest.raises(TemplateError, match="low, medium or high"):
        template.render(HISTORY, reasoning_effort="much")
    assert find_dialect("auto", template, vocabulary) is BY_NAME["harmony"]
    assert find_think("auto", template, vocabulary) is THINKS["harmony"]


def test_the_published_template_gets_reasoning_in_its_own_words(vocabulary: Tokenizer) -> None:
    source = "{% for message in messages %}{{ message.thinking }}|{{ message.content }};{% endfor %}"
    template = ChatTemplate(source, vocabulary, name="shipped")
    assert template.render([CALLED, HISTORY[2]]) == "They ask for Paris.\n\nI look.|;A greeting.|Hello;"


class Harmony:
    """A server whose model writes one text."""

    def __init__(self, oracle: LLM, text: str, reason: str = "stop") -> None:
        encoder = copy.copy(oracle.encoder)
        encoder.context_len = encoder.model_len = 4096
        encoder.dialect, encoder.think = BY_NAME["harmony"], THINKS["harmony"]
        ids = encoder.tokenizer.encode(text, add_special=False)

        async def write(request: Request) -> AsyncGenerator[StepOutput, None]:
            for i, token_id in enumerate(ids):
                last = FinishReason(reason) if i == len(ids) - 1 else None
                yield StepOutput(request.request_id, 0, (token_id,), finish_reason=last)

        self.wire = Wire(make_state(encoder, ScriptedClient(write)))

    def message(self, **fields: Any) -> dict[str, Any]:
        """The chat message, which is the same in a stream."""
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        choice = self.wire.ok("/v1/chat/completions", body)["choices"][0]
        joined: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
        for frame in self.wire.frames("/v1/chat/completions", body | {"stream": True}):
            for delta in (each["delta"] for each in frame["choices"]):
                joined["content"] += delta.get("content") or ""
                joined["reasoning"] += delta.get("reasoning") or ""
                joined["calls"] += [c["function"]["name"] for c in delta.get("tool_calls", ()) if "id" in c]
        message: dict[str, Any] = choice["message"]
        calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
        assert joined == {
            "content": message["content"] or "",
            "reasoning": message.get("reasoning") or "",
            "calls": calls,
        }
        return message | {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}


def test_channels_are_fields_of_a_chat(oracle: LLM) -> None:
    message = Harmony(oracle, ANSWER).message()
    assert (message["content"], message["reasoning_content"]) == ("It is noon.", "Hm, final STOP?")
    assert message["finish_reason"] == "stop"
    message = Harmony(oracle, CALL).message(tools=[NOW])
    assert (message["content"], message["reasoning"]) == ("I look.", "Hm, final STOP?")
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert message["finish_reason"] == "tool_calls"
    cut = Harmony(oracle, THOUGHT + "<|channel|>fi", reason="length").message(tools=[NOW])
    assert (cut["content"], cut["finish_reason"]) == (None, "length")


def test_stop_strings_are_not_looked_for_in_analysis_or_headers(oracle: LLM) -> None:
    for stop in ("STOP", "final", "assistant", "<|message|>"):
        message = Harmony(oracle, ANSWER).message(stop=[stop])
        assert (message["content"], message["stop_reason"]) == ("It is noon.", None), stop
    message = Harmony(oracle, ANSWER).message(stop=["noon"])
    assert (message["content"], message["stop_reason"]) == ("It is ", "noon")
    assert message["reasoning"] == "Hm, final STOP?"


def test_channels_are_items_of_a_response_and_blocks_of_a_message(oracle: LLM) -> None:
    tool = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
    site = Harmony(oracle, CALL).wire
    body: dict[str, Any] = {"input": "hi", "tools": [tool]}
    items = site.ok("/v1/responses", body)["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert items[0]["content"][0]["text"] == "Hm, final STOP?"
    assert items[1]["content"][0]["text"] == "I look."
    streamed = read_events(site.post("/v1/responses", body | {"stream": True}))
    done = streamed[-1][1]["response"]["output"]
    assert [without_ids(item) for item in done] == [without_ids(item) for item in items]
    body = {
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "now", "input_schema": {"type": "object"}}],
    }
    blocks = site.ok("/v1/messages", body)["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"], blocks[2]["name"]) == (
        "Hm, final STOP?",
        "I look.",
        "now",
    )
    assert HARMONY_MARKERS[0] not in site.post("/v1/messages", body | {"stream": True}).text


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def test_markers_that_are_special_tokens_reach_the_parser(vocabulary: Tokenizer) -> None:
    request = Request(request_id="r", prompt=(0,), params=SamplingParams())
    for tools in ((), read_tools([NOW])):
        form = find_format(
            vocabulary, [], dialect=BY_NAME["harmony"], think=THINKS["harmony"], tools=tools, choice="auto"
        )
        assert form is not None and not form.is_forced
        builder = OutputBuilder(request, vocabulary, None, is_chat=True, form=form)
        ids = vocabulary.encode(CALL, parse_special=True, add_special=False)
        builder.take(StepOutput("r", 0, tuple(ids), finish_reason=FinishReason.STOP))
        output = builder.build()
        assert output.reasoning == "Hm, final STOP?"
        assert output.text == "I look." if tools else "I look.\n\n{}", "without tools nothing is a call"
        assert [call.name for call in output.tool_calls] == (["now"] if tools else [])


def test_an_answer_that_is_continued_has_no_header(vocabulary: Tokenizer) -> None:
    form = find_format(vocabulary, [], dialect=BY_NAME["harmony"], think=THINKS["harmony"], is_continued=True)
    request = Request(request_id="r", prompt=(0,), params=SamplingParams())
    builder = OutputBuilder(request, vocabulary, None, is_chat=True, form=form)
    ids = vocabulary.encode("final words<|return|>", parse_special=True, add_special=False)
    builder.take(StepOutput("r", 0, tuple(ids), finish_reason=FinishReason.STOP))
    assert builder.build().text == "final words"


def test_a_constraint_waits_for_the_final_channel(vocabulary: Tokenizer) -> None:
    prompt = vocabulary.encode("<|start|>assistant", parse_special=True, add_special=False)
    form = find_format(vocabulary, prompt, dialect=BY_NAME["harmony"], think=THINKS["harmony"])
    assert form is not None
    params = SamplingParams(structured=Structured.json_schema({"type": "integer"}))
    bound = form.bind(params, vocabulary)
    assert bound.reasoning is not None and bound.structured is params.structured
    assert vocabulary.decode(bound.reasoning.later, skip_special=False) == THINKS["harmony"].next
    ids, opened = form.opened(vocabulary)
    assert vocabulary.decode(ids, skip_special=False) == "<|channel|>analysis<|message|>"
    assert opened.in_reasoning
    assert form.bind(SamplingParams(), vocabulary, 5).reasoning.later == ()  # type: ignore[union-attr]
