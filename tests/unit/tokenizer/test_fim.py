"""A text with a gap, as the vocabularies of code models mark it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from infer.tokenizer.fim import SPELLINGS, find_gap_marks
from infer.tokenizer.tokenizer import Tokenizer


def vocabulary(directory: Path, special: list[str]) -> Tokenizer:
    """A vocabulary of bytes with these special tokens."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=special, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    library.train_from_iterator(["x"], trainer)
    library.save(str(directory / "tokenizer.json"))
    return Tokenizer.from_directory(directory)


@pytest.mark.parametrize("spellings", SPELLINGS, ids=lambda each: each[0])
def test_marks_are_found_by_their_spelling(tmp_path: Path, spellings: Any) -> None:
    tokenizer = vocabulary(tmp_path, [each for each in spellings if each is not None])
    marks = find_gap_marks(tokenizer)
    assert marks is not None
    text = tokenizer.decode(marks.join(tokenizer.encode("a b"), tokenizer.encode("c d")), skip_special=False)
    prefix, suffix, middle = spellings
    expected = f"{suffix}c d{prefix}a b" if middle is None else f"{prefix}a b{suffix}c d{middle}"
    assert text == expected


def test_a_vocabulary_without_marks_has_none(tmp_path: Path) -> None:
    assert find_gap_marks(vocabulary(tmp_path, ["<|endoftext|>", "<fim_prefix>"])) is None
