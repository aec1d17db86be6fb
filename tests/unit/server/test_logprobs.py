"""Logprobs in OpenAI's two shapes: exact floats, JSON numbers only, offsets that point into the text."""

from __future__ import annotations

import math
import random

import pytest

from infer.frontend.llm import LLM
from infer.sampling.params import RowLogprobs
from infer.server.protocol.logprobs import LOWEST, CompletionLogprobs, chat_logprobs, join
from infer.tokenizer.detokenizer import Detokenizer
from infer.tokenizer.tokenizer import Tokenizer


def test_minus_infinity_becomes_a_number(oracle: LLM) -> None:
    row = RowLogprobs(300, -math.inf, 9, ((301, -0.5), (302, -math.inf)))
    lists = CompletionLogprobs(oracle.tokenizer).take([300], [row])
    assert lists["token_logprobs"] == [LOWEST]
    assert sorted(lists["top_logprobs"][0].values()) == [LOWEST, LOWEST, -0.5]
    entry = chat_logprobs(oracle.tokenizer, [row])["content"][0]
    assert [entry["logprob"], entry["top_logprobs"][1]["logprob"]] == [LOWEST, LOWEST]


def test_the_chosen_token_is_among_the_alternatives(oracle: LLM) -> None:
    row = RowLogprobs(300, -3.25, 3, ((301, -0.5), (302, -1.0)))
    top = CompletionLogprobs(oracle.tokenizer).take([300], [row])["top_logprobs"][0]
    assert list(top.values()) == [-0.5, -1.0, -3.25]
    assert list(top) == [oracle.tokenizer.token_text(i) for i in (301, 302, 300)]


def test_tokens_that_are_no_text_are_named_by_their_bytes(oracle: LLM) -> None:
    first, second, whole = byte_ids(oracle.tokenizer, b"\xe2\x82a")
    row = RowLogprobs(second, -2.0, 2, ((first, -1.0), (whole, -3.0)))
    lists = CompletionLogprobs(oracle.tokenizer).take([second], [row])
    assert lists["top_logprobs"] == [{r"bytes:\xe2": -1.0, "a": -3.0, r"bytes:\x82": -2.0}]
    assert lists["tokens"] == [r"bytes:\x82"] and lists["token_logprobs"] == [-2.0]


def test_of_two_tokens_with_the_same_bytes_the_likelier_counts(oracle: LLM) -> None:
    """Whether the token is the likeliest follows from the largest value."""
    beyond = oracle.tokenizer.vocab_size  # spelled alike: with no text
    row = RowLogprobs(beyond + 1, -2.0, 2, ((beyond, -1.0),))
    lists = CompletionLogprobs(oracle.tokenizer).take([beyond + 1], [row])
    assert lists["top_logprobs"] == [{"": -1.0}] and lists["token_logprobs"] == [-2.0]


def test_offsets_follow_characters_that_are_made_of_several_tokens(oracle: LLM) -> None:
    ids = oracle.tokenizer.encode("a€b", add_special=False)
    assert len(ids) == 5, "the euro sign must be three tokens for this test"
    lists = CompletionLogprobs(oracle.tokenizer).take(ids, [None] * 5)
    assert lists["text_offset"] == [0, 1, 1, 1, 2]


def test_taking_pieces_is_taking_the_whole(oracle: LLM) -> None:
    ids = oracle.tokenizer.encode("the river is wide", add_special=False)
    rows = [RowLogprobs(i, -1.5, 1, ((i, -1.5),)) for i in ids]
    whole = CompletionLogprobs(oracle.tokenizer).take(ids, rows)
    pieces = CompletionLogprobs(oracle.tokenizer)
    joined = pieces.take(ids[:2], rows[:2])
    assert join(joined, pieces.take(ids[2:], rows[2:])) == whole


def test_a_row_the_tokenizer_does_not_know_has_no_text(oracle: LLM) -> None:
    beyond = oracle.tokenizer.vocab_size + 3
    row = RowLogprobs(300, -1.0, 2, ((beyond, -0.5),))
    assert chat_logprobs(oracle.tokenizer, [row])["content"][0]["top_logprobs"][0]["bytes"] == []
    assert "" in CompletionLogprobs(oracle.tokenizer).take([300], [row])["top_logprobs"][0]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [of_byte[bytes([byte])] for byte in data]


@pytest.mark.parametrize(
    ("data", "offsets"),
    [
        (b"\xe2a", [0, 1]),  # shows as U+FFFD, then the letter
        (b"\xe2\x82a", [0, 0, 1]),
        (b"\xff\xffa", [0, 1, 2]),
        (b"a\xe2\xe2\x82\xac.", [0, 1, 2, 2, 2, 3]),
        (b"\xef\xbf\xbda", [0, 0, 0, 1]),  # U+FFFD itself
        (b"\xf0\x9f\x98\x80\x80", [0, 0, 0, 0, 1]),
    ],
)
def test_offsets_stand_after_bytes_that_are_no_character(
    oracle: LLM, data: bytes, offsets: list[int]
) -> None:
    ids = byte_ids(oracle.tokenizer, data)
    assert CompletionLogprobs(oracle.tokenizer).take(ids, [None] * len(ids))["text_offset"] == offsets


def test_every_whole_token_is_found_at_its_offset_in_the_text(oracle: LLM) -> None:
    """Whatever the tokens: where one is text by itself, it stands at its offset."""
    tokenizer, rng = oracle.tokenizer, random.Random(0)
    whole = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    whole = [i for i in whole if "\ufffd" not in tokenizer.token_text(i) and tokenizer.token_bytes(i)]
    halves = byte_ids(tokenizer, b"\xe2\x82\xac\xff\xf0\x9f")
    for _ in range(100):
        prompt = rng.choices([*whole, *halves], k=3)
        ids = [rng.choice(halves if rng.random() < 0.6 else whole) for _ in range(20)]
        detokenizer = Detokenizer(tokenizer, prompt_ids=prompt)
        text = "".join(detokenizer.push((i,)) for i in ids) + detokenizer.finish()
        lists = CompletionLogprobs(tokenizer, prompt_ids=prompt).take(ids, [None] * len(ids))
        for token_id, offset in zip(ids, lists["text_offset"], strict=True):
            if token_id in whole:
                assert text.startswith(tokenizer.token_text(token_id), offset), (prompt, ids)
