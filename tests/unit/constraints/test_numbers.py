"""Numbers of JSON end, whatever a model would like to write, and the schema allows every output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from infer import LLM, SamplingParams
from infer.constraints.description import Structured
from scripts.make_checkpoint import make_checkpoint

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory: Path = tmp_path_factory.mktemp("numbers") / "llama"
    make_checkpoint("llama", directory)
    return LLM(str(directory), dtype="float32", num_threads=1, num_blocks=128, block_size=4)


def digits_first(llm: LLM, extra: str = "") -> dict[int, float]:
    """A bias by which a model writes digits for as long as it may."""
    tokenizer = llm.tokenizer
    ids = [each for each in range(tokenizer.vocab_size) if tokenizer.token_bytes(each)[:1] in b"0123456789"]
    return dict.fromkeys(ids, 100.0) | {tokenizer.encode(char, add_special=False)[-1]: 60.0 for char in extra}


def write(llm: LLM, schema: Any, extra: str = "", **fields: Any) -> str:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=160,
        logit_bias=digits_first(llm, extra),
        structured=Structured.json_schema(schema),
        **fields,
    )
    (answer,) = llm.generate(["x"], params)
    assert answer.finish_reason == "stop", answer.text
    jsonschema.validate(json.loads(answer.text), schema)
    return answer.text


def one(kind: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"a": kind},
        "required": ["a"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_number_without_bounds_ends(llm: LLM, kind: str) -> None:
    for schema in (
        one({"type": kind}),
        one({"type": [kind, "null"]}),
        {"type": "array", "items": {"type": kind}, "minItems": 3, "maxItems": 3},
    ):
        text = write(llm, schema)
        runs = re.findall(r"\d+", text)
        assert runs and max(map(len, runs)) == 16, text


def test_points_and_exponents_end_too(llm: LLM) -> None:
    text = write(llm, one({"type": "number"}), ".e")
    assert sum(map(str.isdigit, text)) <= 18, text


def test_texts_and_bounds_of_the_schema_are_kept(llm: LLM) -> None:
    long = {"type": "string", "minLength": 30, "maxLength": 40}
    assert len(json.loads(write(llm, one(long)))["a"]) == 40
    pattern = {"type": "string", "pattern": "^[0-9]{20}$"}
    assert len(json.loads(write(llm, one(pattern)))["a"]) == 20
    assert json.loads(write(llm, one({"type": "string", "format": "uuid"})))["a"].count("-") == 4
    hexadecimal = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
    assert re.fullmatch("[0-9]{32}", json.loads(write(llm, one(hexadecimal)))["a"])
    long_value = {"enum": [1234567890123456, 12345678901234568]}
    assert json.loads(write(llm, one(long_value)))["a"] == 12345678901234568
    quoted = {"type": "string", "pattern": '^"[0-9]{20}$'}
    assert len(json.loads(write(llm, one(quoted)))["a"]) == 21
    large = {"type": "integer", "minimum": 2**53 - 9, "maximum": 2**53 - 1}
    assert json.loads(write(llm, one(large)))["a"] >= 2**53 - 9


def test_any_json_object_ends_its_numbers(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=60,
        logit_bias=digits_first(llm, ":"),
        structured=Structured.json_object(),
    )
    (answer,) = llm.generate(["x"], params)
    assert not re.search(r"[:,\[]\s*\d{17}", answer.text), answer.text


def test_a_regular_expression_and_a_choice_have_as_many_digits_as_they_say(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=60,
        logit_bias=digits_first(llm),
        structured=Structured.regex("[0-9]{30}|[a-z]+"),
    )
    (answer,) = llm.generate(["x"], params)
    assert re.fullmatch("[0-9]{30}", answer.text)
