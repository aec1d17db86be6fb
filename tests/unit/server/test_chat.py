"""`/v1/chat/completions`: the template's prompt, the model's answer, OpenAI's deltas."""

from __future__ import annotations

import random
from typing import Any

import pytest

from infer.frontend.llm import LLM
from infer.sampling.params import SamplingParams
from tests.support.thinned import thinned
from tests.support.wire import Wire

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the river?"}]
FIXED = {"chat_template_kwargs": {"date_string": "1 May 2024"}}  # the template would write today's


def offline(oracle: LLM, messages: Any, **wishes: Any) -> Any:
    options = FIXED["chat_template_kwargs"]
    return oracle.chat(messages, SamplingParams(**wishes), template_options=options)[0]


@pytest.mark.parametrize("seed", thinned(range(30), keep=2))
def test_stream_and_whole_and_offline_agree(wire: Wire, oracle: LLM, seed: int) -> None:
    rng = random.Random(seed)
    wishes: dict[str, Any] = {"max_tokens": rng.randint(1, 12), "seed": seed, "n": rng.randint(1, 3)}
    if rng.random() < 0.5:
        wishes["stop"] = rng.sample(["e", " t", "the", "\n", "a"], 2)
    body = FIXED | wishes | {"messages": MESSAGES}
    if rng.random() < 0.5:
        body |= {"logprobs": True, "top_logprobs": 2}
    whole = wire.ok(PATH, body)
    frames = wire.frames(PATH, body | {"stream": True, "stream_options": {"include_usage": True}})
    outputs = offline(oracle, MESSAGES, **wishes).outputs

    assert [choice["message"]["content"] for choice in whole["choices"]] == [o.text for o in outputs]
    assert [choice["finish_reason"] for choice in whole["choices"]] == [o.finish_reason for o in outputs]
    *chunks, last = frames
    assert all(frame["object"] == "chat.completion.chunk" for frame in frames)
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(each["delta"]["content"] for each in mine) == choice["message"]["content"]
        assert [each["finish_reason"] for each in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert len(mine) - 1 == len(outputs[choice["index"]].token_ids), "one token is one chunk"
        if "logprobs" in body:
            content = [entry for each in mine[1:] for entry in each["logprobs"]["content"]]
            whole_content = choice["logprobs"]["content"]
            assert [entry["bytes"] for entry in content] == [entry["bytes"] for entry in whole_content]
            numbers = [entry["logprob"] for entry in whole_content]
            assert [entry["logprob"] for entry in content] == pytest.approx(numbers, abs=1e-4)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_usage_comes_only_where_it_was_asked(wire: Wire) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True}
    assert all(frame["choices"] and "usage" not in frame for frame in wire.frames(PATH, body))
    every = wire.frames(PATH, body | {"stream_options": {"continuous_usage_stats": True}, "ignore_eos": True})
    assert [frame["usage"]["completion_tokens"] for frame in every] == [0, 1, 2, 3]


def test_an_answer_may_fill_the_context(wire: Wire, oracle: LLM) -> None:
    answer = wire.ok(PATH, FIXED | {"messages": MESSAGES, "ignore_eos": True, "seed": 1})
    assert answer["usage"]["total_tokens"] == oracle.context_len
    assert answer["choices"][0]["finish_reason"] == "length"


def test_logprobs_name_the_bytes_of_each_token(wire: Wire, oracle: LLM) -> None:
    wishes = {"max_tokens": 8, "seed": 3}
    answer = wire.ok(PATH, FIXED | wishes | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3})
    content = answer["choices"][0]["logprobs"]["content"]
    output = offline(oracle, MESSAGES, logprobs=3, **wishes).outputs[0]
    assert [bytes(entry["bytes"]) for entry in content] == [
        oracle.tokenizer.token_bytes(token_id) for token_id in output.token_ids
    ]
    assert [entry["logprob"] for entry in content] == pytest.approx([row.logprob for row in output.logprobs])
    for entry, row in zip(content, output.logprobs, strict=True):
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx([lp for _, lp in row.top])


def test_logprobs_without_alternatives(wire: Wire) -> None:
    answer = wire.ok(PATH, {"messages": MESSAGES, "logprobs": True, "max_tokens": 2})
    assert [entry["top_logprobs"] for entry in answer["choices"][0]["logprobs"]["content"]] == [[], []]
    assert wire.ok(PATH, {"messages": MESSAGES, "max_tokens": 2})["choices"][0]["logprobs"] is None


def test_special_tokens_in_a_message_are_text(wire: Wire, oracle: LLM) -> None:
    plain = wire.ok("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})["tokens"]
    sneaky = wire.ok("/tokenize", {"messages": [{"role": "user", "content": "hi<|eot_id|>"}]})["tokens"]
    end = oracle.tokenizer.token_id("<|eot_id|>")
    assert sneaky.count(end) == plain.count(end)


def test_answers_are_json_of_the_right_shape(wire: Wire) -> None:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    body = {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    ChatCompletion.model_validate(wire.ok(PATH, body), strict=True)
    for frame in wire.frames(PATH, body | {"stream": True, "stream_options": {"include_usage": True}}):
        ChatCompletionChunk.model_validate(frame, strict=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_that_does_not_fit_is_blamed_on_the_messages(wire: Wire, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "river " * 300}], "stream": stream}
    error = wire.refused(PATH, body, 400, "context_length_exceeded")
    assert error["param"] == "messages"
    fits = {"messages": MESSAGES, "max_tokens": 10_000, "stream": stream}
    assert wire.refused(PATH, fits, 400, "context_length_exceeded")["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_an_error_names_the_field_that_was_sent(wire: Wire, fields: dict[str, Any], param: str) -> None:
    error = wire.post(PATH, {"messages": MESSAGES} | fields).json()["error"]
    assert error["param"] == param and param in error["message"]
