"""`/v1/completions` answers what the offline `LLM` answers, in every shape clients read."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from infer.config.settings import EngineConfig, SchedulerConfig
from infer.frontend.llm import LLM
from infer.sampling.params import SamplingParams
from tests.support.thinned import thinned
from tests.support.wire import Wire, read_events

PATH = "/v1/completions"
PROMPTS = ["the engine", "Once there was", "The river is behind", "count: 1, 2,"]


def random_body(rng: random.Random) -> tuple[dict[str, Any], list[Any], SamplingParams]:
    """A body, its prompts, and the same wishes offline."""
    wishes: dict[str, Any] = {
        "max_tokens": rng.randint(1, 12),
        "seed": rng.randrange(1000),
        "temperature": rng.choice([0, 0.7, 1.5]),
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        wishes["n"] = rng.randint(1, 3)
    if rng.random() < 0.3:
        wishes["stop"] = rng.sample(["e", " t", "the", "\n", "a", "�"], 2)
    if rng.random() < 0.3:
        wishes |= {"top_k": rng.randint(1, 40), "top_p": 0.9, "repetition_penalty": 1.2}
    if rng.random() < 0.3:
        wishes["min_tokens"] = rng.randint(0, wishes["max_tokens"])
    if rng.random() < 0.3:
        wishes["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.2:
        wishes["logit_bias"] = {rng.randrange(300, 500): 5.0}
    prompts: list[Any] = rng.sample(PROMPTS, rng.randint(1, 3))
    if rng.random() < 0.3:
        prompts = [[rng.randrange(5, 500) for _ in range(rng.randint(1, 9))] for _ in prompts]
    body = wishes | {"prompt": prompts[0] if len(prompts) == 1 else prompts}
    if "logit_bias" in wishes:
        body["logit_bias"] = {str(key): value for key, value in wishes["logit_bias"].items()}
    return body, prompts, SamplingParams(**wishes)


def assemble(frames: list[Any]) -> dict[int, dict[str, Any]]:
    """What a client puts together from a stream, choice by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for frame in frames:
        assert frame["object"] == "text_completion"
        for choice in frame["choices"]:
            held = choices.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert held["finish_reason"] is None, "nothing comes after the end of a choice"
            held["text"] += choice["text"]
            held["finish_reason"] = choice["finish_reason"]
            held["stop_reason"] = choice.get("stop_reason")
            if choice["logprobs"] is not None:
                before = held["logprobs"] or {name: [] for name in choice["logprobs"]}
                held["logprobs"] = {name: before[name] + choice["logprobs"][name] for name in before}
    return choices


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Equal but for the rounding of logprobs: a prompt found in the cache is computed in another batch."""
    left, right = one.pop("logprobs"), other.pop("logprobs")
    assert one == other
    assert (left is None) == (right is None)
    for name in left or ():
        if name in ("token_logprobs", "top_logprobs"):
            assert_close(left[name], right[name])
        else:
            assert left[name] == right[name]


def assert_close(one: list[Any], other: list[Any]) -> None:
    for left, right in zip(one, other, strict=True):
        assert left == (None if right is None else pytest.approx(right, abs=1e-4))


@pytest.mark.parametrize("seed", thinned(range(60), keep=5))
def test_stream_and_whole_and_offline_agree(wire: Wire, oracle: LLM, seed: int) -> None:
    body, prompts, params = random_body(random.Random(seed))
    whole = wire.ok(PATH, body)
    frames = wire.frames(PATH, body | {"stream": True, "stream_options": {"include_usage": True}})
    events = read_events(wire.post(PATH + "/stream", body))
    offline = [output for answer in oracle.generate(prompts, params) for output in answer.outputs]

    assert [choice["index"] for choice in whole["choices"]] == list(range(len(offline)))
    assert [choice["text"] for choice in whole["choices"]] == [output.text for output in offline]
    assert [c["finish_reason"] for c in whole["choices"]] == [output.finish_reason for output in offline]
    assert [c["stop_reason"] for c in whole["choices"]] == [output.stop_reason for output in offline]

    streamed = assemble(frames[:-1])
    for choice in whole["choices"]:
        assert_same(streamed[choice.pop("index")], choice)
    num_tokens = sum(len(output.token_ids) for output in offline)
    assert len(frames) - 1 == num_tokens, "one token is one chunk"
    assert frames[-1]["choices"] == []
    assert frames[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == num_tokens
    assert len({(frame["id"], frame["created"], frame["model"]) for frame in frames}) == 1

    assert [name for name, _ in events] == ["token"] * num_tokens + ["done"]
    for index, output in enumerate(offline):
        mine = [event for name, event in events if name == "token" and event["index"] == index]
        assert [event["id"] for event in mine] == output.token_ids
        assert "".join(event["text"] for event in mine) == output.text
        assert events[-1][1]["choices"][index]["finish_reason"] == output.finish_reason
    assert events[-1][1]["usage"]["completion_tokens"] == num_tokens


def test_choices_are_numbered_prompt_by_prompt(wire: Wire, oracle: LLM) -> None:
    body = {"prompt": PROMPTS[:2], "n": 2, "seed": 5, "max_tokens": 4}
    answers = oracle.generate(PROMPTS[:2], SamplingParams(n=2, seed=5, max_tokens=4))
    texts = [choice["text"] for choice in wire.ok(PATH, body)["choices"]]
    assert texts == [output.text for answer in answers for output in answer.outputs]


def test_best_of_and_beams_return_the_likeliest(wire: Wire, oracle: LLM) -> None:
    best: dict[str, Any] = {"best_of": 3, "n": 2, "seed": 1, "max_tokens": 5}
    beams: dict[str, Any] = {"use_beam_search": True, "n": 3, "max_tokens": 5}
    for wishes, params in (
        (best, SamplingParams(**best)),
        (beams, SamplingParams(temperature=0, **beams)),
    ):
        wanted = [output.text for output in oracle.generate(PROMPTS[0], params)[0].outputs]
        got = wire.ok(PATH, {"prompt": PROMPTS[0]} | wishes)
        assert [choice["text"] for choice in got["choices"]] == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front(wire: Wire, stream: bool) -> None:
    for prompt, shown in (("the engine", "the engine"), ([0, 300, 301], None)):
        plain = wire.ok(PATH, {"prompt": prompt, "max_tokens": 4, "temperature": 0})["choices"][0]["text"]
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "echo": True, "stream": stream}
        if stream:
            text = assemble(wire.frames(PATH, body))[0]["text"]
        else:
            text = wire.ok(PATH, body)["choices"][0]["text"]
        shown = shown or wire.ok("/detokenize", {"tokens": [300, 301]})["prompt"]
        assert text == shown + plain


@pytest.mark.parametrize("logprobs", [None, 0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_but_the_prompt_can_be_asked_for(wire: Wire, stream: bool, logprobs: int | None) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "stream": stream, "logprobs": logprobs}
    if stream:
        frames = wire.frames(PATH, body | {"stream_options": {"include_usage": True}})
        choice, usage = assemble(frames[:-1])[0], frames[-1]["usage"]
    else:
        answer = wire.ok(PATH, body)
        choice, usage = answer["choices"][0], answer["usage"]
    assert choice["finish_reason"] == "length"
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)
    assert choice["text"] == wire.ok("/detokenize", {"tokens": [5, 6, 7]})["prompt"]
    if logprobs is not None:
        assert len(choice["logprobs"]["tokens"]) == 3
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert None not in choice["logprobs"]["token_logprobs"][1:]


def test_an_evaluation_program_reads_loglikelihoods(wire: Wire, oracle: LLM) -> None:
    """What lm-evaluation-harness does with `local-completions`, against logprobs computed offline."""
    rng = random.Random(0)
    contexts = [[rng.randrange(5, 500) for _ in range(rng.randint(1, 8))] for _ in range(6)]
    greedy = [
        oracle.generate(c, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0] for c in contexts
    ]
    pairs = [(c, answer.token_ids) for c, answer in zip(contexts[:3], greedy[:3], strict=True)]
    pairs += [(c, [rng.randrange(5, 500) for _ in range(3)]) for c in contexts[3:]]
    body = {
        "model": "tiny",
        "prompt": [context + list(continuation) for context, continuation in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    choices = sorted(wire.ok(PATH, body)["choices"], key=lambda choice: choice["index"])
    found = set()
    for (context, continuation), choice in zip(pairs, choices, strict=True):
        logprobs = choice["logprobs"]
        own = logprobs["token_logprobs"][len(context) : -1]
        tops = logprobs["top_logprobs"][len(context) : -1]
        is_greedy = all(token == max(top.values()) for token, top in zip(own, tops, strict=True))
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        rows = oracle.generate([*context, *continuation], params)[0].prompt_logprobs
        assert rows is not None
        wanted = [row.logprob for row in rows[len(context) :] if row is not None]
        assert own == pytest.approx(wanted, abs=1e-5)
        found.add(is_greedy)
        assert is_greedy == all(row is not None and row.rank == 1 for row in rows[len(context) :])
        assert len(logprobs["tokens"]) == len(context) + len(continuation) + 1
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
    assert found == {True, False}, "both kinds were in the batch"


def test_offsets_point_into_the_text(wire: Wire) -> None:
    body = {"prompt": "the river", "max_tokens": 12, "logprobs": 0, "echo": True, "temperature": 0}
    choice = wire.ok(PATH, body)["choices"][0]
    for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"].startswith(token, offset)


def test_usage_counts_what_the_prefix_cache_saved(wire: Wire) -> None:
    body = {"prompt": [100 + i for i in range(20)], "max_tokens": 1}
    assert wire.ok(PATH, body)["usage"]["prompt_tokens_details"]["cached_tokens"] in (0, 19)
    usage = wire.ok(PATH, body)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 19
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (20, 1, 21)
    salted = wire.ok(PATH, body | {"cache_salt": "somebody else"})["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_named_events_carry_the_logprob_even_without_alternatives(wire: Wire) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "logprobs": 0, "ignore_eos": True}
    events = read_events(wire.post(PATH + "/stream", body))
    assert [name for name, _ in events] == ["token", "token", "done"]
    assert all(event["logprob"] <= 0 for _, event in events[:2])


def test_fields_without_effect_are_named_in_a_header(wire: Wire) -> None:
    body = {"prompt": "x", "user": "me", "store": True, "max_tokens": 1}
    for stream in (False, True):
        response = wire.post(PATH, body | {"stream": stream})
        assert response.headers["x-infer-ignored"] == "user, store"
    assert "x-infer-ignored" not in wire.post(PATH, {"prompt": "x", "max_tokens": 1}).headers


def test_a_priority_that_no_policy_reads_is_named_in_a_header(wire: Wire) -> None:
    body = {"prompt": "x", "max_tokens": 1, "priority": -1}
    assert wire.post(PATH, body).headers["x-infer-ignored"] == "priority"
    assert "x-infer-ignored" not in wire.post(PATH, body | {"priority": 0}).headers, "the default"
    (model,) = wire.state.models.values()
    model.config = EngineConfig(scheduler=SchedulerConfig(scheduler_policy="priority"))
    assert "x-infer-ignored" not in wire.post(PATH, body).headers


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (["a", "word " * 20_000, "b"], "prompt 1 has "),  # seen by the tokenizer
        ([[5], [5], [5] * 5_000], "prompt 2 has 5000 tokens"),  # seen by the engine
        ([[5], [10**6]], "prompt 1 holds ids from 1000000 to 1000000"),
        (["word " * 20_000], "prompt has "),
        ([[10**6]], "prompt holds ids"),
    ],
)
def test_a_prompt_of_a_list_is_named_by_its_place(wire: Wire, prompts: Any, words: str) -> None:
    code = None if "holds" in words else "context_length_exceeded"
    error = wire.refused(PATH, {"prompt": prompts, "max_tokens": 1}, 422, code)
    assert error["message"].startswith(words) and error["param"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0, which needs"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens must be an"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"logprobs": 50}, "logprobs", "logprobs must be an integer in [0, 20], got 50"),
        (
            {"stream": True, "stream_options": {"include_usgae": True}},
            "stream_options.include_usgae",
            "unknown field 'stream_options.include_usgae'; did you mean 'include_usage'?",
        ),
    ],
)
def test_an_error_names_the_field_that_was_sent(
    wire: Wire, fields: dict[str, Any], param: str, words: str
) -> None:
    error = wire.refused(PATH, {"prompt": "x"} | fields, 422)
    assert error["param"] == param and error["message"].startswith(words)


def test_the_event_route_refuses_what_it_cannot_show(wire: Wire) -> None:
    assert wire.refused(PATH + "/stream", {"prompt": "x", "stream": False}, 422)["param"] == "stream"
    assert wire.refused(PATH + "/stream", {"prompt": "x", "echo": True}, 422)["param"] == "echo"
    assert wire.refused(PATH + "/stream", {"prompt": "x", "best_of": 2}, 422)["param"] == "best_of"


def test_usage_is_in_every_chunk_where_that_was_asked(wire: Wire) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    frames = wire.frames(
        PATH, {"prompt": "x", "max_tokens": 4, "ignore_eos": True, "stream": True, "stream_options": options}
    )
    assert [frame["usage"]["completion_tokens"] for frame in frames] == [1, 2, 3, 4, 4]
    scored = {"prompt": "x", "max_tokens": 0, "echo": True, "stream": True, "stream_options": options}
    assert {frame["usage"]["completion_tokens"] for frame in wire.frames(PATH, scored)} == {0}


def test_answers_are_json_of_the_right_shape(wire: Wire) -> None:
    from openai.types import Completion

    answer = wire.ok(PATH, {"prompt": "x", "logprobs": 1, "max_tokens": 3})
    assert Completion.model_validate(answer, strict=True).usage is not None
    json.dumps(answer, allow_nan=False)


def test_named_events_hold_usage_once_whether_it_was_asked_for_or_not(wire: Wire) -> None:
    body = {"prompt": "the engine", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    path = f"{PATH}/stream"
    plain = read_events(wire.post(path, body))
    asked = read_events(wire.post(path, body | {"stream_options": {"include_usage": True}}))
    assert plain[-1][1]["usage"] == asked[-1][1]["usage"]
    assert [name for name, _ in asked] == ["token", "token", "done"]
    refused = wire.refused(path, body | {"stream_options": {"continuous_usage_stats": True}}, 422)
    assert refused["param"] == "stream_options.continuous_usage_stats"


def test_the_newer_name_of_max_tokens_counts_too(wire: Wire) -> None:
    body = {"prompt": "the engine", "temperature": 0, "ignore_eos": True}
    answer = wire.ok(PATH, body | {"max_completion_tokens": 3})
    assert answer["usage"]["completion_tokens"] == 3
    scored = wire.ok(PATH, body | {"max_completion_tokens": 0, "echo": True})
    assert scored["choices"][0]["text"] == "the engine" and scored["usage"]["completion_tokens"] == 0
