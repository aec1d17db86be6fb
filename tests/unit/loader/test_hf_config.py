"""The JSON files beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infer.errors import CheckpointError
from infer.loader.formats.hf_config import (
    GenerationDefaults,
    merge_eos_ids,
    read_generation_defaults,
    read_hf_config,
    read_json,
)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000, b"9" * 5000])
def test_a_config_must_be_a_json_object(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config.json (is not valid JSON|must hold a JSON object)"):
        read_hf_config(tmp_path)


def test_a_config_of_any_size_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"x": "y" * 100}))
    with pytest.raises(CheckpointError, match="larger than the 50 bytes"):
        read_json(tmp_path / "x.json", 50)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*config.json: No such file"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, GenerationDefaults()),
        ({"eos_token_id": 7}, GenerationDefaults(eos_ids=(7,))),
        ({"eos_token_id": [7, 9]}, GenerationDefaults(eos_ids=(7, 9))),
        ({"eos_token_id": None, "temperature": 0.5}, GenerationDefaults()),
        ({"do_sample": False, "temperature": 0.5}, GenerationDefaults()),
        (
            {"do_sample": True, "temperature": 0.5, "top_p": None, "max_length": 9},
            GenerationDefaults(sampling={"temperature": 0.5}),
        ),
    ],
)
def test_generation_defaults_are_what_the_authors_sample_with(
    tmp_path: Path, raw: dict[str, Any], expected: GenerationDefaults
) -> None:
    assert read_generation_defaults(tmp_path) == GenerationDefaults()
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    assert read_generation_defaults(tmp_path) == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"eos_token_id": "2"}',
        '{"eos_token_id": [1, true]}',
        '{"eos_token_id": -1}',
        '{"do_sample": true, "temperature": NaN}',
        '{"do_sample": true, "top_p": "0.9"}',
        '{"do_sample": true, "top_k": 1' + 400 * "0" + "}",
    ],
)
def test_generation_defaults_that_make_no_sense_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config.json must be"):
        read_generation_defaults(tmp_path)


def test_all_ends_count_once_and_only_if_they_are_tokens() -> None:
    assert merge_eos_ids((3, 1), (1, 9, 50), vocab_size=10) == (3, 1, 9)
