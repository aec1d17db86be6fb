"""`infer generate --json-schema | --regex | --choice | --grammar`: one constraint, here or for a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.cli.remote import to_fields
from infer.constraints.description import Structured
from infer.server.protocol.schemas import CompletionRequest
from infer.server.protocol.structured import read_structured
from tests.unit.cli.test_remote import ONE_MODEL, PIECE, server

Infer = Callable[..., Any]
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}'
GRAMMAR = 'start: "a" | "b"\n'


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "schema.json").write_text(SCHEMA, encoding="utf-8")
    (tmp_path / "grammar.lark").write_text(GRAMMAR, encoding="utf-8")
    (tmp_path / "latin.json").write_bytes(b'{"title": "\xfc"}')
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--json-schema", SCHEMA], Structured(kind="json_schema", text=SCHEMA, param="--json-schema")),
        (
            ["--json-schema", "schema.json"],
            Structured(kind="json_schema", text=SCHEMA, param="--json-schema"),
        ),
        (["--regex", "[0-9]+"], Structured(kind="regex", text="[0-9]+", param="--regex")),
        (["--choice", "yes", "--choice", "no"], Structured.choice(["yes", "no"], param="--choice")),
        (["--grammar", "grammar.lark"], Structured(kind="grammar", text=GRAMMAR, param="--grammar")),
        ([], None),
    ],
)
def test_a_flag_is_a_constraint_on_every_prompt(
    infer: Infer,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    wanted: Structured | None,
) -> None:
    monkeypatch.chdir(files)
    (files / "prompts.txt").write_text("one\ntwo\n")
    outcome = infer("generate", "--prompts-file", "prompts.txt", *arguments)
    assert outcome.code == 0
    assert [params.structured for params in outcome.llm.params] == [wanted, wanted]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json-schema", "missing.json"], "cannot read --json-schema missing.json: No such file"),
        (["--json-schema", "latin.json"], "--json-schema latin.json is not UTF-8"),
        (["--json-schema", '{"type": '], "--json-schema: this is not JSON: "),
        (["--json-schema", '{"not": {}}'], "--json-schema: the keyword 'not' of the schema at #/not"),
        (["--regex", "(?=a)"], "--regex: the pattern uses look-around"),
        (["--choice", ""], "not empty"),
        (["--grammar", "."], "cannot read --grammar"),
        (["--choice", "a", "--regex", "b"], "not allowed with argument --choice"),
    ],
)
def test_what_is_no_constraint_is_refused_before_a_model_is_loaded(
    infer: Infer, files: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(files)
    outcome = infer("generate", "why?", *arguments)
    assert outcome.code != 0
    assert words in outcome.err
    assert outcome.llm.params == []


def test_a_server_is_asked_for_it(infer: Infer) -> None:
    bodies: list[dict[str, Any]] = []
    with server(ONE_MODEL, PIECE % b'"stop"', bodies=bodies) as url:
        assert infer("generate", "--url", url, "--json-schema", SCHEMA, "hello").out == "hi\n"
        assert infer("generate", "--url", url, "--choice", "hi", "hello").out == "hi\n"
    described = {"name": "answer", "schema": json.loads(SCHEMA), "strict": True}
    assert bodies[0]["response_format"] == {"type": "json_schema", "json_schema": described}
    assert bodies[1]["structured_outputs"] == {"choice": ["hi"]}


@pytest.mark.parametrize(
    "structured",
    [
        Structured.json_schema({"type": "string"}),
        Structured.json_object(),
        Structured.regex("a+"),
        Structured.choice(["a", "b"]),
        Structured.grammar(GRAMMAR),
    ],
)
def test_this_server_reads_back_what_was_meant(structured: Structured) -> None:
    body = CompletionRequest.model_validate({"prompt": "a", **to_fields(structured)})
    read = read_structured(body)
    assert read is not None
    assert (read.kind, read.text) == (structured.kind, structured.text)


def test_a_cut_answer_is_said_to_be_incomplete(infer: Infer, tmp_path: Path) -> None:
    cut = infer("generate", "--json-schema", SCHEMA, "--max-tokens", "2", "hello")
    assert (cut.code, cut.out) == (0, "HE\n")
    assert cut.err == "[cut: the answer is incomplete; --max-tokens or the context allows no more]\n"
    assert infer("generate", "--json-schema", SCHEMA, "hello").err == ""
    assert infer("generate", "--max-tokens", "2", "hello").err == "", "text may end anywhere"
    (tmp_path / "prompts").write_text("hi\nhello\n")
    many = infer("generate", "--regex", "a", "--max-tokens", "2", "--prompts-file", str(tmp_path / "prompts"))
    assert "[line 2: cut: the answer is incomplete" in many.err
    assert "line 1" not in many.err
