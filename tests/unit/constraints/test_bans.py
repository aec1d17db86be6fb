"""Banned ids against a brute force over the output, in masks of their own and beside a grammar's."""

from __future__ import annotations

import random

import numpy as np
import pytest

from infer import LLM, SamplingParams
from infer.constraints.bans import Bans
from infer.constraints.description import Structured
from infer.constraints.guide import Guide
from infer.errors import RequestError
from scripts.make_checkpoint import make_checkpoint

VOCAB_SIZE = 70


def allowed_by(output: list[int], allowed: list[int], words: list[tuple[int, ...]]) -> set[int]:
    """The ids after which the output ends with no banned word, by trying each."""
    ids = allowed or range(VOCAB_SIZE)
    return {each for each in ids if not any(tuple([*output, each][-len(word) :]) == word for word in words)}


@pytest.mark.parametrize("seed", range(40))
def test_a_mask_allows_what_completes_no_banned_word(seed: int) -> None:
    rng = random.Random(seed)
    ids = rng.sample(range(VOCAB_SIZE), 6)  # few, so that words are met
    words = [tuple(rng.choices(ids, k=rng.randint(1, 4))) for _ in range(rng.randint(0, 6))]
    allowed = rng.sample(range(VOCAB_SIZE), 20) if rng.random() < 0.5 or not words else []
    guide = Guide(None, None, Bans(allowed, words))
    output: list[int] = []
    for _ in range(60):
        assert guide.has_mask
        mask_W = np.zeros((VOCAB_SIZE + 31) // 32, dtype=np.int32)
        guide.fill(mask_W)
        bits = {each for each in range(VOCAB_SIZE) if mask_W[each // 32] >> each % 32 & 1}
        assert bits == allowed_by(output, allowed, words)
        output.append(rng.choice(ids))
        guide.consume(output[-1:])


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = tmp_path_factory.mktemp("bans") / "llama"
    make_checkpoint("llama", directory)
    return LLM(str(directory), dtype="float32", num_threads=1, num_blocks=64, block_size=4)


def test_a_banned_word_never_appears_and_the_next_likeliest_comes(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    (free,) = llm.generate([[5, 6, 7]], greedy)
    pair = tuple(free.token_ids[3:5])
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, banned_ids=(pair,))
    (limited,) = llm.generate([[5, 6, 7]], params)
    ids = limited.token_ids
    assert pair not in set[tuple[int, ...]](zip(ids, ids[1:], strict=False))
    cut = next(i for i in range(24) if tuple(free.token_ids[i : i + 2]) == pair) + 1
    assert ids[:cut] == free.token_ids[:cut] and ids[cut] != free.token_ids[cut]


def test_a_bad_word_is_banned_by_its_text(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=200, ignore_eos=True)
    (free,) = llm.generate(["the river"], params)
    word = next(part for part in free.text.split() if part.isascii() and len(part) > 1)
    (limited,) = llm.generate(
        ["the river"],
        SamplingParams(temperature=1.0, seed=3, max_tokens=200, ignore_eos=True, bad_words=(word,)),
    )
    spellings = [tuple(llm.tokenizer.encode(text, add_special=False)) for text in (word, f" {word}")]
    for ids in spellings:
        windows = zip(*(limited.token_ids[i:] for i in range(len(ids))), strict=False)
        assert ids not in set(windows)


def test_only_allowed_ids_appear(llm: LLM) -> None:
    allowed = (17, 18, 19, 40)
    (answer,) = llm.generate(
        ["x"], SamplingParams(temperature=1.0, seed=1, max_tokens=50, allowed_token_ids=allowed)
    )
    assert set(answer.token_ids) <= set(allowed)
    assert len(answer.token_ids) == 50


def test_allowed_ids_narrow_a_grammar(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, structured=Structured.regex("[ab]{8}"))
    (free,) = llm.generate(["x"], params)
    other = "b" if free.text[0] == "a" else "a"
    banned = tuple(llm.tokenizer.encode(free.text[0], add_special=False))
    (limited,) = llm.generate(
        ["x"],
        SamplingParams(
            temperature=0.0, max_tokens=8, structured=Structured.regex("[ab]{8}"), banned_ids=(banned[-1:],)
        ),
    )
    assert limited.token_ids[0] != free.token_ids[0] or other in limited.text


def test_ids_outside_of_the_vocabulary_and_beams_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="allowed_token_ids holds token id 99999"):
        llm.generate(["x"], SamplingParams(allowed_token_ids=(99999,)))
    with pytest.raises(RequestError, match="banned_ids holds token id 99999"):
        llm.generate(["x"], SamplingParams(banned_ids=((99999,),)))
    with pytest.raises(RequestError, match="beam search"):
        SamplingParams(use_beam_search=True, temperature=0.0, n=2, bad_words=("x",))


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_stop_string_is_shown_on_request(llm: LLM, is_shown: bool) -> None:
    (free,) = llm.generate(["the river"], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    stop = free.text[10:13]
    params = SamplingParams(
        temperature=0.0, max_tokens=40, ignore_eos=True, stop=(stop,), include_stop_str_in_output=is_shown
    )
    (answer,) = llm.generate(["the river"], params)
    end = free.text.index(stop) + (len(stop) if is_shown else 0)
    assert answer.text == free.text[:end]
    assert answer.outputs[0].stop_reason == stop
    pieces = list(llm.stream("the river", params))
    assert "".join(piece.text for piece in pieces) == answer.text


def test_a_ban_holds_where_a_grammar_has_one_way_on(llm: LLM) -> None:
    """What both leave is nothing: the request's own mistake, told as such."""
    first = llm.tokenizer.encode("a", add_special=False)[-1:]
    for fields in ({"allowed_token_ids": (5,)}, {"banned_ids": (tuple(first),)}):
        params = SamplingParams(
            structured=Structured.choice(["abc", "axz"]), temperature=0.0, max_tokens=8, **fields
        )
        try:
            (answer,) = llm.generate(["x"], params)
        except RequestError as error:
            assert "leave no token" in str(error)
        else:
            assert answer.token_ids[0] not in first and answer.text in ("abc", "axz")


def test_a_window_of_drafts_is_banned_at_every_position() -> None:
    guide = Guide(None, None, Bans((), [(3,), (1, 2)]))
    masks = np.zeros((4, 3), dtype=np.int32)
    assert guide.fill_window([1, 1, 5], masks) == 3
    allowed = [{each for each in range(8) if mask[0] >> each & 1} for mask in masks]
    assert [3 in each for each in allowed] == [False] * 4
    assert [2 in each for each in allowed] == [True, False, False, True]
