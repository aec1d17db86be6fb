"""The bytes that grammars see are those that the text side writes, for every id of a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from infer.constraints.compiler import Compiler
from infer.constraints.description import Structured
from infer.constraints.token_bytes import TokenBytes, tokenizer_json
from infer.errors import CheckpointError, RequestError
from infer.tokenizer.directory_vocab import read_directory_vocabulary
from infer.tokenizer.gguf_vocab import read_gguf_vocabulary
from infer.tokenizer.tokenizer import Tokenizer
from tests.unit.tokenizer.vocabularies import gpt2_metadata, spm_metadata


def bytes_of(metadata: Mapping[str, Any], **options: Any) -> tuple[TokenBytes, Tokenizer]:
    tokenizer = Tokenizer.from_gguf(metadata)
    given: dict[str, Any] = {"vocab_size": tokenizer.vocab_size + 3, "eos_ids": tokenizer.eos_ids} | options
    return TokenBytes(lambda: tokenizer_json(Path(), metadata), **given), tokenizer


@pytest.mark.parametrize(
    "metadata", [gpt2_metadata(), gpt2_metadata(user_defined=("<tool>",)), spm_metadata()]
)
def test_every_id_has_the_bytes_that_the_text_side_writes(metadata: Mapping[str, Any]) -> None:
    made, tokenizer = bytes_of(metadata)
    library = made.tokenizer()
    assert library.vocab_size == tokenizer.vocab_size + 3
    wrong = {
        token_id: (library.decode_bytes([token_id]), tokenizer.token_bytes(token_id))
        for token_id in range(tokenizer.vocab_size)
        if library.decode_bytes([token_id]) != tokenizer.token_bytes(token_id)
        and tokenizer.token_bytes(token_id) != b"\xff"  # which is in no text, and marks specials there
    }
    assert not wrong


@pytest.mark.parametrize("metadata", [gpt2_metadata(), spm_metadata()])
def test_a_grammar_accepts_what_the_text_side_encodes(metadata: Mapping[str, Any]) -> None:
    made, tokenizer = bytes_of(metadata)
    text = '{"the": "in a 한 ü", "b": [1, 2]}'
    matcher = Compiler(made).compile(Structured.json_object()).lexer.matcher()
    ids = tokenizer.encode("x" + text, add_special=False)
    start = next(n for n in range(1, len(ids)) if tokenizer.decode(ids[n:]).strip() == text)
    assert matcher.try_consume_tokens(ids[start:]) == len(ids) - start
    assert matcher.is_accepting()


def test_a_model_without_a_tokenizer_says_so() -> None:
    made = TokenBytes(None, vocab_size=10)
    made.start()
    with pytest.raises(RequestError, match="has no tokenizer") as caught:
        Compiler(made).compile(Structured.json_object(param="response_format"))
    assert caught.value.param == "response_format"


def test_a_tokenizer_that_cannot_be_read_fails_the_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    def read() -> str:
        raise CheckpointError("tokenizer.json is damaged")

    made = TokenBytes(read, vocab_size=10, eos_ids=(1,))
    made.prepare()
    for _ in range(2):
        with pytest.raises(RequestError, match="cannot be used for constraints: tokenizer.json is damaged"):
            made.tokenizer()
    assert "no constraints" in caplog.text


def test_a_model_without_an_end_of_text_cannot_be_constrained() -> None:
    made, _ = bytes_of(gpt2_metadata(), eos_ids=())
    with pytest.raises(RequestError, match="no end-of-text token"):
        made.tokenizer()


def test_it_is_built_once_and_beside_other_work() -> None:
    calls = []
    metadata = gpt2_metadata()

    def read() -> str:
        calls.append(1)
        return tokenizer_json(Path(), metadata)

    made = TokenBytes(read, vocab_size=300, eos_ids=(2,))
    made.start()
    assert made.tokenizer() is made.tokenizer()
    assert calls == [1]


def test_a_tokenizer_json_that_needs_no_change_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    read_gguf_vocabulary(gpt2_metadata()).core.save(str(file))
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert tokenizer_json(tmp_path, None) == tokenizer_json(file, None) == file.read_text()
    read = read_directory_vocabulary(tmp_path).core.to_str()
    assert json.loads(read) == json.loads(file.read_text())


@pytest.mark.parametrize(
    ("in_file", "in_config"),
    [
        ({}, {"eos_token": "in"}),
        (
            {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}},
            {},
        ),
    ],
    ids=["a special token is not marked", "it cuts texts"],
)
def test_a_tokenizer_json_that_needs_a_change_gets_it(
    tmp_path: Path, in_file: dict[str, Any], in_config: dict[str, Any]
) -> None:
    file = tmp_path / "tokenizer.json"
    read_gguf_vocabulary(gpt2_metadata()).core.save(str(file))
    file.write_text(json.dumps(json.loads(file.read_text()) | in_file))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(in_config))
    changed = json.loads(tokenizer_json(tmp_path, None))
    assert changed["truncation"] is None
    marked = {token["content"] for token in changed["added_tokens"] if token["special"]}
    assert marked >= set(in_config.values())
