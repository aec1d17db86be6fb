"""Fields of other servers: vLLM's, SGLang's and Hugging Face's names for what this one does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infer.client.client import InProcessClient
from infer.frontend.llm import LLM
from tests.support.fake_client import FakeClient
from tests.support.wire import Wire, invalid, make_state, read_frames

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TALK = [{"role": "user", "content": "Where is the river?"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "The river", "max_tokens": 3},
    CHAT: {"messages": TALK, "max_tokens": 3},
}
BOTH = pytest.mark.parametrize("path", list(BODIES))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
def fake() -> FakeClient:
    return FakeClient()


@pytest.fixture
def wire(oracle: LLM, fake: FakeClient) -> Wire:
    return Wire(make_state(oracle.encoder, fake))


# -- constraints -------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"regex": "a+"}, "regex", "regex"),
        ({"ebnf": 'root ::= "a"'}, "grammar", "ebnf"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", "json_schema"),
        ({"json_schema": SCHEMA}, "json_schema", "json_schema"),
        (
            {"response_format": {"type": "json_object", "value": SCHEMA}},
            "json_schema",
            "response_format.value",
        ),
    ],
)
def test_a_constraint_has_the_names_of_other_servers(
    wire: Wire, fake: FakeClient, path: str, fields: dict[str, Any], kind: str, param: str
) -> None:
    wire.ok(path, BODIES[path] | fields)
    structured = fake.requests[0].params.structured
    assert structured is not None
    assert (structured.kind, structured.param) == (kind, param)


@BOTH
def test_the_same_grammar_under_two_names_is_one(wire: Wire, fake: FakeClient, path: str) -> None:
    grammar = 'start: "a" | "b"'
    both = {"structured_outputs": {"grammar": grammar}, "guided_grammar": grammar}
    wire.ok(path, BODIES[path] | both)
    structured = fake.requests[0].params.structured
    assert structured is not None and structured.text == grammar
    other = both | {"guided_grammar": 'start: "c"'}
    assert "give one of them" in wire.refused(path, BODIES[path] | other, invalid(path))["message"]


# -- what is shown -----------------------------------------------------------------------------------


@BOTH
def test_token_ids_are_shown_on_request(wire: Wire, fake: FakeClient, path: str) -> None:
    body = BODIES[path] | {"return_token_ids": True}
    whole = wire.ok(path, body)
    choice = whole["choices"][0]
    assert choice["token_ids"] == [65, 66, 67]
    place = whole if path == CHAT else choice
    prompt = list(fake.requests[0].prompt)
    assert place["prompt_token_ids"] == prompt
    chunks = read_frames(wire.post(path, body | {"stream": True}))
    frames = [chunk["choices"][0] for chunk in chunks]
    assert [token_id for frame in frames for token_id in frame["token_ids"]] == [65, 66, 67]
    places = chunks if path == CHAT else frames
    assert [place["prompt_token_ids"] for place in places if "prompt_token_ids" in place] == [prompt]
    assert "token_ids" not in wire.ok(path, BODIES[path])["choices"][0]


@BOTH
def test_the_logprobs_of_a_prompt_come_in_vllms_form(oracle: LLM, client: InProcessClient, path: str) -> None:
    wire = Wire(make_state(oracle.encoder, client))
    answer = wire.ok(path, BODIES[path] | {"prompt_logprobs": 2, "return_token_ids": True})
    place = answer if path == CHAT else answer["choices"][0]
    first, *rows = place["prompt_logprobs"]
    assert first is None
    assert len(rows) == len(place["prompt_token_ids"]) - 1
    for token_id, row in zip(place["prompt_token_ids"][1:], rows, strict=True):
        own = row[str(token_id)]
        assert set(own) == {"logprob", "rank", "decoded_token"}
        assert len(row) in (2, 3)
        ranked = sorted(row.values(), key=lambda entry: entry["rank"])
        assert [entry["logprob"] for entry in ranked] == sorted((e["logprob"] for e in ranked), reverse=True)


@BOTH
def test_the_logprobs_of_a_prompt_do_not_stream(wire: Wire, path: str) -> None:
    body = BODIES[path] | {"prompt_logprobs": 2, "stream": True}
    assert wire.refused(path, body, invalid(path))["param"] == "prompt_logprobs"


# -- what may be written -----------------------------------------------------------------------------


@BOTH
def test_bans_reach_the_engine_as_ids(wire: Wire, fake: FakeClient, oracle: LLM, path: str) -> None:
    fields = {"bad_words": ["river", "the"], "allowed_token_ids": [5, 6], "include_stop_str_in_output": True}
    wire.ok(path, BODIES[path] | fields)
    params = fake.requests[0].params
    assert params.allowed_token_ids == (5, 6)
    assert params.include_stop_str_in_output
    words = ("river", " river", "the", " the")
    expected = {tuple(oracle.tokenizer.encode(word, add_special=False)) for word in words}
    assert set(params.banned_ids) == expected


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": [""]},
        {"bad_words": ["x"] * 1000},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": []},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
    ],
)
def test_bans_that_cannot_be_are_refused(wire: Wire, path: str, fields: dict[str, Any]) -> None:
    assert wire.refused(path, BODIES[path] | fields, invalid(path))["param"].startswith(next(iter(fields)))


# -- prompts -----------------------------------------------------------------------------------------


@BOTH
def test_a_prompt_is_cut_to_its_last_tokens_on_request(
    wire: Wire, fake: FakeClient, oracle: LLM, path: str
) -> None:
    long = (
        {"prompt": "river " * 2000}
        if path == COMPLETIONS
        else {"messages": [TALK[0] | {"content": "river " * 2000}]}
    )
    body = BODIES[path] | long
    wire.ok(path, body | {"truncate_prompt_tokens": 7})
    wire.ok(path, body | {"truncate_prompt_tokens": -1})
    seven, most = (request.prompt for request in fake.requests)
    assert len(seven) == 7
    assert len(most) == oracle.encoder.context_len - 3
    begin = tuple(oracle.tokenizer.begin([]))
    assert begin and seven[: len(begin)] == most[: len(begin)] == begin
    assert most[-6:] == seven[-6:]
    assert wire.refused(path, body | {"truncate_prompt_tokens": 0}, invalid(path))["param"] == (
        "truncate_prompt_tokens"
    )


def test_an_echo_of_a_prompt_that_was_cut_is_what_is_left(wire: Wire, fake: FakeClient, oracle: LLM) -> None:
    body = {"prompt": "the river is long", "max_tokens": 1, "echo": True, "truncate_prompt_tokens": 3}
    text = wire.ok(COMPLETIONS, body)["choices"][0]["text"]
    assert "the river is long" not in text
    assert text.strip().startswith(oracle.tokenizer.decode(fake.requests[0].prompt).strip()[:2])


def test_an_embedding_is_cut_as_well(wire: Wire, fake: FakeClient, oracle: LLM) -> None:
    text = "a clock and " + "river " * 2000 + "a bridge"
    wire.ok("/v1/embeddings", {"input": text, "truncate_prompt_tokens": 5})
    wire.ok("/v1/embeddings", {"input": text, "truncate_prompt_tokens": 5, "truncation_side": "right"})
    last, first = (request.prompt for request in fake.requests)
    ids = oracle.tokenizer.encode(text)
    assert list(first) == ids[:5]
    assert list(last) == ids[:1] + ids[-4:]


@pytest.mark.parametrize("name", ["opening", "add_generation_prompt", "tools", "messages", "self"])
def test_no_keyword_of_ours_is_set_through_the_template(wire: Wire, name: str) -> None:
    error = wire.refused(CHAT, {"messages": TALK, "chat_template_kwargs": {name: False}}, 400)
    assert name in error["message"]


def test_a_conversation_may_end_without_the_head_of_an_answer(wire: Wire, oracle: LLM) -> None:
    def text(**fields: Any) -> str:
        ids = wire.ok("/tokenize", {"messages": TALK} | fields)["tokens"]
        return oracle.tokenizer.decode(ids, skip_special=False)

    whole, bare = text(), text(add_generation_prompt=False)
    assert whole.startswith(bare) and len(whole) > len(bare)


def test_what_contradicts_itself_about_the_last_message_is_refused(wire: Wire) -> None:
    body = {"messages": TALK, "continue_final_message": True}
    assert "only an assistant's message" in wire.refused(CHAT, body, 400)["message"]
    said = {"messages": [*TALK, {"role": "assistant", "content": "It"}], "continue_final_message": True}
    error = wire.refused(CHAT, said | {"add_generation_prompt": True}, 400)
    assert error["param"] == "continue_final_message"


def test_a_suffix_needs_marks_in_the_vocabulary(wire: Wire) -> None:
    error = wire.refused(COMPLETIONS, {"prompt": "a", "suffix": "b"}, 422)
    assert (error["param"], "fill in the middle" in error["message"]) == ("suffix", True)
    assert wire.ok(COMPLETIONS, {"prompt": "a", "suffix": ""})["choices"]


@pytest.mark.parametrize(
    "fields", [{"echo": True}, {"truncate_prompt_tokens": 3}, {"add_special_tokens": False}, {"prompt": [1]}]
)
def test_a_suffix_is_refused_with_what_it_would_ignore(wire: Wire, fields: dict[str, Any]) -> None:
    error = wire.refused(COMPLETIONS, {"prompt": "a", "suffix": "b"} | fields, 422)
    assert error["message"].startswith("suffix goes with")
