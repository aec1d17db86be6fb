from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from infer.errors import CheckpointError
from infer.tokenizer.special_text import SpecialText

WORDS = ["<s>", "<start>", "<stop>", "</s>", "<|im_end|>", "<|im_", "[INST]", "a.c", "<s><s>", "s><", "|"]


def longest_leftmost(text: str) -> list[tuple[int, int]]:
    """The specification: at each place the longest word that fits, then go on behind it."""
    spans, at = [], 0
    while at < len(text):
        fitting = [word for word in WORDS if text.startswith(word, at)]
        if fitting:
            spans.append((at, at + len(max(fitting, key=len))))
        at = spans[-1][1] if fitting else at + 1
    return spans


@given(
    st.lists(st.sampled_from([*WORDS, "<", "s", ">", "|", "im_end", "abc", " ", "\n"]), max_size=20).map(
        "".join
    )
)
def test_finds_the_leftmost_and_there_the_longest(text: str) -> None:
    special = SpecialText([AddedToken(word, special=True) for word in WORDS])
    assert [(found.start, found.stop) for found in special.find(text)] == longest_leftmost(text)


@given(st.lists(st.sampled_from([*WORDS, "<", "s>", "im_end|>"]), max_size=12).map("".join))
def test_a_guarded_text_holds_no_special_text(text: str) -> None:
    special = SpecialText([AddedToken(word, special=True) for word in WORDS])
    guarded = special.guard(text, "\ufdd2")
    assert not list(special.find(guarded, "\ufdd2"))
    assert guarded.replace("\ufdd2", "") == text


def test_white_space_belongs_to_a_token_that_asks_for_it() -> None:
    special = SpecialText([AddedToken("<m>", lstrip=True, rstrip=True), AddedToken("<n>")])
    assert [found[:2] for found in special.find("a \n<m>  b <n> c")] == [(1, 8), (10, 13)]


def test_a_long_chain_of_special_tokens_is_refused_before_it_fills_the_memory() -> None:
    tokens = [AddedToken("<" + "x" * length) for length in range(2000)]  # 2 MB, and a copy for every link
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="begin with one another"):
            SpecialText(tokens)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def test_deep_branches_that_are_no_tokens_are_refused_as_well() -> None:
    words = ["x" * depth + "y" for depth in range(1, 1000)]
    with pytest.raises(CheckpointError, match="begin with one another"):
        SpecialText([AddedToken(word) for word in words])


def test_a_short_chain_is_found_by_its_longest_link() -> None:
    special = SpecialText([AddedToken("<" + "x" * length) for length in range(20)])
    assert [found[:2] for found in special.find("a<xx<xxx b")] == [(1, 4), (4, 8)]


def test_a_vocabulary_without_special_tokens_finds_nothing() -> None:
    assert not list(SpecialText([]).find("<s>"))
    assert SpecialText([]).guard("<s>", "x") == "<s>"


def test_hostile_text_takes_linear_time() -> None:
    """A thousand tokens that begin alike, and a text that is all beginnings."""
    special = SpecialText([AddedToken(f"<SPECIAL_{i}>") for i in range(1000)])
    text = "<SPECIAL_" * 100_000
    started = time.perf_counter()
    assert not list(special.find(text))
    assert time.perf_counter() - started < 5  # trying each token at each place takes minutes
