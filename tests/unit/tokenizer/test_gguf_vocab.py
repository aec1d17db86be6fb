from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from infer.errors import CheckpointError
from infer.loader.formats.gguf_config import _eos_ids
from infer.tokenizer.gguf_metadata import tokenizer_metadata
from infer.tokenizer.gguf_vocab import _merges_from_scores
from infer.tokenizer.tokenizer import Tokenizer
from infer.tokenizer.vocabulary import SPLIT_RULES, Vocabulary, byte_level_core
from tests.unit.tokenizer.vocabularies import gpt2_metadata, gpt2_tokenizer, spm_metadata, spm_tokenizer

KEY = "tokenizer.ggml."


def cut(text: str, pre: str) -> list[str]:
    """Which stretches a rule keeps apart, seen through a vocabulary that merges every pair it may."""
    tokenizer = gpt2_tokenizer(pre=pre)
    split = tokenizer._core.pre_tokenizer
    assert split is not None
    return [text[start:stop] for _, (start, stop) in split.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", SPLIT_RULES)
def test_a_split_rule_is_written_by_a_name_that_is_read_as_the_same_rule(pre: str) -> None:
    """`llama-bpe` and `dbrx` have one pattern, but only the first takes words of the vocabulary whole."""
    rule = SPLIT_RULES[pre]
    core = byte_level_core({"a": 0, "b": 1, "ab": 2}, [("a", "b")], rule)
    named = SPLIT_RULES[tokenizer_metadata(Vocabulary(core=core), (), 3)[KEY + "pre"]]
    assert replace(named, adds_bos=False) == replace(rule, adds_bos=False)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 1984", " ", " WE", "'", "RE", "\n"]),
        ("smollm", ["It", "'s", " ", "1", "9", "8", "4", " ", " WE", "'", "RE", "\n"]),
        ("llama-bpe", ["It", "'s", " ", "198", "4", " ", " WE", "'RE", "\n"]),
        ("qwen2", ["It", "'s", " ", "1", "9", "8", "4", " ", " WE", "'RE", "\n"]),
        ("tekken", ["It", "'s", " ", "1", "9", "8", "4", " ", " WE", "'RE", "\n"]),
        ("gpt-4o", ["It's", " ", "198", "4", " ", " WE'RE", "\n"]),  # gpt-oss, Phi-4-mini
        ("dbrx", ["It", "'s", " ", "198", "4", " ", " WE", "'RE", "\n"]),  # Phi-4, OLMo 2
        ("glm4", ["It", "'s", " ", "198", "4", " ", " WE", "'RE", "\n"]),
        ("smaug-bpe", ["It", "'s", " ", "198", "4", " ", " WE", "'RE", "\n"]),  # SmolLM3
        ("refact", ["It", "'s", " ", "1", "9", "8", "4", " ", " WE", "'", "RE", "\n"]),  # Granite
        ("command-r", ["It", "'s", " ", "1", "9", "8", "4", " ", " WE", "'", "RE", "\n"]),  # Cohere 2
        ("qwen35", ["It", "'s", " ", "1", "9", "8", "4", " ", " WE", "'RE", "\n"]),
        ("exaone4", ["It", "'s", " 1984", " ", " WE", "'", "RE", "\n"]),
        ("deepseek-r1-qwen", ["It", "'s", " ", "1", "9", "8", "4", " ", " WE", "'RE", "\n"]),
        ("default", ["It", "'", "s", " ", "198", "4", " ", " WE", "'", "RE", "\n"]),
    ],
)
def test_each_family_cuts_in_its_own_way(pre: str, pieces: list[str]) -> None:
    assert cut("It's 1984  WE'RE\n", pre) == pieces


@pytest.mark.parametrize(("pre", "name"), [("qwen35", "Qwen3_5Tokenizer"), ("command-r", "CohereTokenizer")])
@given(text=st.text(st.sampled_from("a B1é़ेश9'sS-=\r\n\t €e\u0301"), max_size=20))
def test_a_rule_cuts_and_normalizes_as_the_class_of_the_reference(pre: str, name: str, text: str) -> None:
    tokens = {token: number for number, token in enumerate(["<UNK>", "<BOS_TOKEN>", "<PAD>"])}
    theirs = getattr(transformers, name)(vocab=tokens, merges=[])._tokenizer
    ours = gpt2_tokenizer(pre=pre)._core
    assert theirs.normalizer.normalize_str(text) == ours.normalizer.normalize_str(text)
    assert theirs.pre_tokenizer.pre_tokenize_str(text) == ours.pre_tokenizer.pre_tokenize_str(text)


def sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """The specification: merge the adjacent pair with the best score, the leftmost of equals, to the end."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[a + b], i)
            for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False))
            if a + b in scores
        ]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = ["".join(symbols[i : i + 2])]


@given(st.text("abcehintr ", min_size=1, max_size=30))
def test_scores_give_the_merges_sentencepiece_makes(text: str) -> None:
    metadata = spm_metadata()
    tokens, ranks = metadata[KEY + "tokens"], metadata[KEY + "scores"]
    scores = dict(zip(tokens[259:], ranks[259:], strict=True))
    tokenizer = spm_tokenizer()
    found = [tokens[i] for i in tokenizer.encode(text, add_special=False)]
    assert found == sentencepiece(text, scores)


def test_a_list_of_merges_takes_the_place_of_scores() -> None:
    metadata = spm_metadata(add_space_prefix=False)
    lists = (metadata[KEY + name] for name in ("tokens", "token_type", "scores"))
    merges = [" ".join(pair) for pair in _merges_from_scores(*lists)]
    listed = {key: value for key, value in metadata.items() if not key.endswith(("scores", "prefix"))}
    gemma4 = Tokenizer.from_gguf(listed | {KEY + "model": "gemma4", KEY + "merges": merges})
    by_scores = Tokenizer.from_gguf(metadata)
    for text in ("a  a", "the in the", "\n\nhe €"):
        assert gemma4.encode(text) == by_scores.encode(text)
        assert gemma4.decode(gemma4.encode(text, add_special=False)) == text


def test_runs_of_spaces_stored_as_spaces_are_marks() -> None:
    metadata = spm_metadata(add_space_prefix=False)
    tokens = [("  " if token == "▁▁" else token) for token in metadata[KEY + "tokens"]]
    written, as_spaces = (
        Tokenizer.from_gguf(metadata),
        Tokenizer.from_gguf(metadata | {KEY + "tokens": tokens}),
    )
    for text in ("a  a", "   ", "the  in"):
        assert as_spaces.encode(text) == written.encode(text)
        assert as_spaces.decode(as_spaces.encode(text)) == text


def test_user_defined_tokens_are_matched_whole_and_shown() -> None:
    tokenizer = gpt2_tokenizer(user_defined=["<tool_call>"])
    ids = tokenizer.encode("the<tool_call>")
    assert ids[-1] == tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == "the<tool_call>"


def test_ends_of_turns_end_an_answer() -> None:
    tokenizer = gpt2_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], eos_token_id=0)
    assert tokenizer.eos_ids == (0, 2)


def test_the_end_of_a_message_of_gpt_oss_is_not_the_end_of_its_answer() -> None:
    specials = ("<|return|>", "<|end|>", "<|call|>", "<|message|>")
    metadata = gpt2_metadata(specials, eos_token_id=0, eot_token_id=1)
    assert Tokenizer.from_gguf(metadata).eos_ids == (0, 1)
    metadata["general.architecture"] = "gpt-oss"
    assert Tokenizer.from_gguf(metadata).eos_ids == (0, 2)
    assert _eos_ids(metadata) == [0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "bert"}, "'gpt2'"),
        ({"model": None}, "'gpt2'"),
        ({"pre": "unheard-of"}, "smollm"),
        ({"tokens": None}, "missing"),
        ({"tokens": "abc"}, "not a list"),
        ({"tokens": []}, "empty"),
        ({"tokens": [1, 2]}, "entries for|str values"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "twice"),
        ({"token_type": [1]}, "entries for"),
        ({"merges": ["a"]}, "two tokens"),
        ({"merges": ["a b c"]}, "two tokens"),
        ({"merges": ["Ġ nowhere"]}, "do not fit"),
        ({"merges": None}, "missing"),
        ({"eos_token_id": 10**6}, "the vocabulary has"),
        ({"bos_token_id": -1}, "the vocabulary has"),
        ({"bos_token_id": "x"}, "the vocabulary has"),
        ({"bos_token_id": [1]}, "the vocabulary has"),
        ({"pre": ["smollm"]}, "smollm"),
    ],
)
def test_a_damaged_header_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.from_gguf(gpt2_metadata(**change))


def test_a_token_of_many_characters_is_refused_before_it_is_cut_everywhere() -> None:
    metadata = spm_metadata()
    metadata["tokenizer.ggml.tokens"][-1] = "▁" * 100_000
    with pytest.raises(CheckpointError, match="a token of 100000 characters, at most 1024"):
        Tokenizer.from_gguf(metadata)


def test_an_answer_of_phi_ends_with_its_turn() -> None:
    """Its files name <|endoftext|> alone; to gpt-oss the same token is the end of one of several messages."""
    metadata = gpt2_metadata(["<|endoftext|>", "<|user|>", "<|end|>"], eos_token_id=0)
    assert Tokenizer.from_gguf(metadata).eos_ids == (0, 2)
    assert Tokenizer.from_gguf(metadata | {"general.architecture": "gpt-oss"}).eos_ids == (0,)


def test_rules_that_add_no_bos_add_none() -> None:
    for pre, begins in (("llama-bpe", True), ("dbrx", False), ("smaug-bpe", False), ("gpt-4o", False)):
        tokenizer = gpt2_tokenizer(pre=pre, bos_token_id=0)
        assert (tokenizer.encode("the")[0] == 0) is begins, pre
