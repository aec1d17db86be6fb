from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.errors import RequestError
from infer.tokenizer.detokenizer import Detokenizer
from infer.tokenizer.tokenizer import Tokenizer
from tests.unit.tokenizer.vocabularies import gpt2_tokenizer, spm_tokenizer

TOKENIZERS = {
    "byte-level": gpt2_tokenizer(user_defined=["<tool>", "éé"]),
    "sentencepiece": spm_tokenizer(),
    "sentencepiece without a space in front": spm_tokenizer(add_space_prefix=False),
}
TEXTS = [
    "the inner",
    " the",
    "  a",
    "한글 가나다",
    "👩‍👩‍👧 🇩🇪",
    "日本語",
    "naïve\n\n",
    "½€",
    "ab",
    "abc",
    "\x00",
    "</s>",
    "éé<tool>",
]


def cut_at_the_first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The specification: the earliest beginning wins, and there the longest."""
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


def stream(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    return [*pieces, detokenizer.finish()]


@st.composite
def id_lists(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Random ids, mixed with the ids of real text: both broken and whole characters."""
    random_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6)
    text_ids = st.sampled_from(TEXTS).map(lambda text: tokenizer.encode(text, add_special=False))
    byte_ids = st.binary(max_size=5).map(lambda data: [tokenizer.encode("\x00")[-1] + byte for byte in data])
    parts = (
        st.one_of(random_ids, text_ids, byte_ids) if not tokenizer.bos_id else st.one_of(random_ids, text_ids)
    )
    return [i for part in draw(st.lists(parts, max_size=6)) for i in part if i < tokenizer.vocab_size]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_a_stream_is_the_whole_text_up_to_the_first_stop_string(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(id_lists(tokenizer))
    whole = tokenizer.decode(ids)
    spans = st.tuples(st.integers(0, len(whole)), st.integers(1, 5)).map(lambda s: whole[s[0] : s[0] + s[1]])
    stops = data.draw(st.lists(st.one_of(spans, st.text("ab \ufffd", max_size=4)), max_size=3))
    stops = [stop for stop in stops if stop]
    detokenizer = Detokenizer(tokenizer, stop=stops)

    shown = stream(detokenizer, ids, data.draw(st.lists(st.integers(0, 50), max_size=8)))

    assert ("".join(shown), detokenizer.stopped) == cut_at_the_first_stop(whole, stops)
    if detokenizer.stopped is not None:
        assert detokenizer.push(ids) == ""


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_nothing_is_held_back_longer_than_needed(name: str, data: st.DataObject) -> None:
    """After each push, what is shown is all the text that no later token can change."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(id_lists(tokenizer))
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for end in range(1, len(ids) + 1):
        shown += detokenizer.push(ids[end - 1 : end])
        so_far = tokenizer.decode(ids[:end])
        assert so_far.startswith(shown)
        held = so_far[len(shown) :]  # at most one unfinished character, or the bytes of a broken one
        assert len(held) <= 1 or (len(held) <= 3 and set(held) == {"\ufffd"})
        assert shown == so_far or so_far.endswith("\ufffd")


def test_an_emoji_appears_whole() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("🙂!")
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([i]) for i in ids]
    assert [piece for piece in pieces if piece] == ["🙂", "!"]


def test_text_that_may_become_a_stop_string_waits() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = Detokenizer(tokenizer, stop=["END"])
    assert detokenizer.push(tokenizer.encode("one E")) == "one "
    assert detokenizer.push(tokenizer.encode("N")) == ""
    assert detokenizer.push(tokenizer.encode("x")) == "ENx"
    assert detokenizer.push(tokenizer.encode(" EEND and more")) == " E"
    assert detokenizer.stopped == "END"
    assert detokenizer.push(tokenizer.encode("never shown")) == ""
    assert detokenizer.finish() == ""


def test_an_earlier_stop_string_that_is_still_open_wins_if_it_completes() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    for ending, expected in (("d", ("", "abcd")), ("x", ("a", "bc"))):
        detokenizer = Detokenizer(tokenizer, stop=["bc", "abcd"])
        shown = detokenizer.push(tokenizer.encode("abc"))
        assert detokenizer.stopped is None
        shown += detokenizer.push(tokenizer.encode(ending)) + detokenizer.finish()
        assert [shown, detokenizer.stopped] == list(expected)


def test_a_continuation_keeps_its_first_space() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    prompt, output = tokenizer.encode("in"), tokenizer.encode("the", add_special=False)
    assert Detokenizer(tokenizer).push(output) == "the"
    assert Detokenizer(tokenizer, prompt_ids=prompt).push(output) == " the"
    assert Detokenizer(tokenizer, prompt_ids=[1]).push(output) == "the"  # BOS alone is an empty text
    assert tokenizer.decode(prompt + output) == "in the"


def test_a_character_that_the_prompt_began_is_finished() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("€")
    assert Detokenizer(tokenizer, prompt_ids=ids[:1]).push(ids[1:]) == "€"
    padding = tokenizer.vocab_size  # of a model with more rows than tokens: it has no text
    assert Detokenizer(tokenizer, prompt_ids=[*ids[:1], padding]).push(ids[1:]) == "€"


def test_an_id_the_tokenizer_does_not_have_adds_no_text() -> None:
    """Models are padded to round sizes: Qwen's has rows that no token belongs to."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("hello")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([*ids, tokenizer.vocab_size, tokenizer.vocab_size + 7]) == "hello"


def test_a_long_stop_string_costs_no_more_per_token() -> None:
    """Work is counted, not timed: each character moves a tracker forward once, and back at most as often."""
    tokenizer = TOKENIZERS["byte-level"]
    stop = "a" * 5000 + "b"
    detokenizer = Detokenizer(tokenizer, stop=[stop])
    token = tokenizer.encode("a")
    shown = "".join(detokenizer.push(token) for _ in range(20_000)) + detokenizer.finish()
    assert shown == "a" * 20_000


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="non-empty"):
        Detokenizer(TOKENIZERS["byte-level"], stop=[""])
