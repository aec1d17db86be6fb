"""From ids to answers: pieces that join to the whole, stop strings anywhere, the best of several."""

from __future__ import annotations

import random
from typing import Any

import pytest

from infer.dialects.events import TextDelta
from infer.errors import RequestError
from infer.frontend.outputs import OutputBuilder, RequestOutput, check_streams
from infer.sampling.params import RowLogprobs, SamplingParams
from infer.scheduling.request import Request, StepOutput
from infer.tokenizer.tokenizer import Tokenizer
from tests.unit.tokenizer.vocabularies import gpt2_metadata, spm_metadata

BYTES = Tokenizer.from_gguf(gpt2_metadata())
PIECES = Tokenizer.from_gguf(spm_metadata())
both_vocabularies = pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "sentencepiece"])


def make_builder(tokenizer: Tokenizer = BYTES, **params: Any) -> OutputBuilder:
    request = Request(request_id="r", prompt=tuple(tokenizer.encode("in")), params=SamplingParams(**params))
    return OutputBuilder(request, tokenizer, "in")


def step_output(*ids: int, index: int = 0, **fields: Any) -> StepOutput:
    return StepOutput(request_id="r", index=index, token_ids=ids, **fields)


def feed(
    builder: OutputBuilder, ids: list[int], reason: str = "length", index: int = 0
) -> tuple[list[TextDelta], bool]:
    """Give a line its ids one by one, the last with a finish reason, until the builder has seen enough."""
    deltas = []
    for place, token_id in enumerate(ids):
        is_last = place == len(ids) - 1
        output = step_output(token_id, index=index, finish_reason=reason if is_last else None)
        delta, can_stop = builder.take(output)
        if delta is not None:
            deltas.append(delta)
        if can_stop:
            return deltas, True
    return deltas, False


def random_ids(tokenizer: Tokenizer, seed: int, count: int = 30) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(tokenizer.vocab_size) for _ in range(count)]


@both_vocabularies
@pytest.mark.parametrize("seed", range(20))
def test_the_pieces_joined_are_the_whole_answer(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    stop = tuple(rng.choice(["e", "he", " a", "\n\n", "zz"]) for _ in range(rng.randrange(3)))
    builder = make_builder(tokenizer, stop=stop, min_tokens=rng.choice((0, 0, 3, 10)))
    deltas, _ = feed(builder, random_ids(tokenizer, seed))
    (output,) = builder.build().outputs
    assert "".join(delta.text for delta in deltas) == output.text
    assert [token for delta in deltas for token in delta.token_ids] == output.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [output.finish_reason]
    assert deltas[-1].stop_reason == output.stop_reason
    assert builder.is_finished


@both_vocabularies
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5, 17, 30])
def test_a_stop_string_that_never_comes_changes_nothing(tokenizer: Tokenizer, min_tokens: int) -> None:
    for seed in range(30):
        ids = random_ids(tokenizer, seed)
        ids[min_tokens // 2 :: 5] = [sorted(tokenizer.special_ids)[-1]] * len(ids[min_tokens // 2 :: 5])
        plain, watched = make_builder(tokenizer), make_builder(tokenizer, stop="q~q~q", min_tokens=min_tokens)
        for builder in (plain, watched):
            feed(builder, ids)
        assert watched.build().text == plain.build().text


def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    builder = make_builder(stop="END")
    ids = [*BYTES.encode("a"), *BYTES.encode("E"), *BYTES.encode("N"), *BYTES.encode("D"), *BYTES.encode("x")]
    deltas, can_stop = feed(builder, ids)
    assert [delta.text for delta in deltas] == ["a", "", "", ""]
    assert can_stop
    (output,) = builder.build().outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "END")
    assert output.token_ids == ids[:-1], "the token that completed it counts, nothing after it"


def test_what_looked_like_a_stop_string_is_shown_when_it_is_none() -> None:
    builder = make_builder(stop="END")
    ids = [BYTES.encode(char)[0] for char in "ENx"]
    assert [delta.text for delta in feed(builder, ids)[0]] == ["", "", "ENx"]


def test_half_a_stop_string_at_the_end_belongs_to_the_text() -> None:
    builder = make_builder(stop="END")
    deltas, _ = feed(builder, [BYTES.encode(char)[0] for char in "aEN"])
    assert (deltas[-1].text, deltas[-1].finish_reason) == ("EN", "length")


def test_the_longest_of_two_stop_strings_is_settled_at_the_end() -> None:
    """After "bc" an "abcd" could not follow any more, but a longer one could: only the end decides."""
    builder = make_builder(stop=("bc", "bcd"))
    deltas, _ = feed(builder, [BYTES.encode(char)[0] for char in "abc"])
    assert "".join(delta.text for delta in deltas) == "a"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "bc")


def test_stop_strings_count_only_after_min_tokens() -> None:
    ids = [BYTES.encode(char)[0] for char in "xaxax"]
    wanted = {0: "x", 1: "x", 2: "xax", 3: "xax", 4: "xaxax"}
    for min_tokens, text in wanted.items():
        builder = make_builder(stop="a", min_tokens=min_tokens)
        feed(builder, ids)
        assert builder.build().text == text, min_tokens


def test_the_engine_is_told_once_that_it_can_stop() -> None:
    builder = make_builder(stop="a", n=2)
    a, x = (BYTES.encode(char)[0] for char in "ax")
    assert builder.take(step_output(a))[1]
    assert not builder.is_finished, "the other line goes on"
    assert builder.take(step_output(x)) == (None, False), "whatever comes late is not shown"
    assert builder.take(step_output(a, index=1, finish_reason="length"))[1] is False, "it has stopped itself"
    assert builder.is_finished


def test_several_tokens_at_once_are_cut_at_the_stop() -> None:
    ids = [BYTES.encode(char)[0] for char in "xyaz"]
    rows = tuple(RowLogprobs(token_id, -1.0, 1, ()) for token_id in ids)
    builder = make_builder(stop="a", logprobs=0)
    delta, can_stop = builder.take(step_output(*ids, logprobs=rows, cumulative_logprob=-4.0))
    assert delta is not None
    assert can_stop
    assert (delta.text, delta.token_ids, delta.logprobs) == ("xy", tuple(ids[:3]), rows[:3])
    assert builder.build().outputs[0].cumulative_logprob == -3.0


def test_best_of_ranks_by_mean_logprob_per_token() -> None:
    builder = make_builder(n=2, best_of=4)
    totals = {0: (-8.0, 4), 1: (-1.0, 1), 2: (-2.0, 4), 3: (-9.0, 3)}  # means -2, -1, -0.5, -3
    letters = [BYTES.encode(char)[0] for char in "abcd"]
    for index, (total, length) in totals.items():
        builder.take(
            step_output(
                *[letters[index]] * length, index=index, finish_reason="length", cumulative_logprob=total
            )
        )
    answer = builder.build()
    assert [output.text for output in answer.outputs] == ["cccc", "b"]
    assert [output.index for output in answer.outputs] == [0, 1]
    assert [output.cumulative_logprob for output in answer.outputs] == [-2.0, -1.0]
    with pytest.raises(RequestError, match="best_of and beam search .* cannot stream; do without") as caught:
        check_streams(builder.request.params, "do without")
    assert caught.value.param == "best_of"


def test_best_of_counts_only_the_tokens_before_a_stop_string() -> None:
    builder = make_builder(best_of=2, stop="a")
    for index, text in enumerate(("xyaz", "xxxy")):
        ids = [BYTES.encode(char)[0] for char in text]
        rows = tuple(RowLogprobs(token_id, -1.0 - index / 4, 1, ()) for token_id in ids)
        builder.take(step_output(*ids, index=index, logprobs=rows, cumulative_logprob=-4.0))
    (output,) = builder.build().outputs
    assert (output.text, output.cumulative_logprob, output.logprobs) == ("xy", -3.0, None)


def test_beams_come_ranked_and_stay_so() -> None:
    builder = make_builder(n=2, best_of=4, use_beam_search=True, temperature=0.0)
    letters = [BYTES.encode(char)[0] for char in "ab"]
    for index in (0, 1):
        fields = {"finish_reason": "length", "cumulative_logprob": -5.0 + index}
        builder.take(step_output(letters[index], index=index, **fields))
    assert [output.text for output in builder.build().outputs] == ["a", "b"]
    assert builder.is_finished


def test_logprobs_are_there_for_those_who_asked() -> None:
    row = RowLogprobs(5, -0.5, 1, ((5, -0.5),))
    cases: list[tuple[dict[str, Any], Any, Any]] = [({"logprobs": 1}, [row], -0.5), ({}, None, None)]
    for params, logprobs, total in cases:
        builder = make_builder(**params)
        builder.take(
            step_output(
                5,
                finish_reason="stop",
                logprobs=(row,) if params else (),
                cumulative_logprob=-0.5,
                prompt_logprobs=(None, row),
            )
        )
        (output,) = builder.build().outputs
        assert (output.logprobs, output.cumulative_logprob) == (logprobs, total)
        assert builder.build().prompt_logprobs == [None, row]


def test_a_failed_sequence_says_why() -> None:
    builder = make_builder()
    delta, _ = builder.take(step_output(finish_reason="error", error="MemoryError in step 3"))
    assert delta is not None
    assert (delta.finish_reason, delta.error) == ("error", "MemoryError in step 3")
    assert builder.is_finished


def test_the_answer_as_plain_data() -> None:
    builder = make_builder()
    a = BYTES.encode("a")[0]
    builder.take(step_output(a, finish_reason="length", num_cached=1))
    answer = builder.build()
    assert isinstance(answer, RequestOutput)
    assert (answer.text, answer.token_ids, answer.prompt, answer.num_cached_tokens) == ("a", [a], "in", 1)
    data = answer.to_dict()
    assert data["outputs"][0]["text"] == "a"
    assert data["prompt_token_ids"] == BYTES.encode("in")
