from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.cli.main import main
from infer.engine.engine import Engine
from scripts.make_checkpoint import make_checkpoint

Infer = Callable[..., Any]
FLAGS = ["--raw", "--dtype", "float32", "--max-tokens", "12", "--seed", "5", "--num-blocks", "40"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-qwen3"
    make_checkpoint("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def record(model: Path) -> Path:
    path = model.parent / "run.jsonl"
    assert main(["generate", "the river", "--model", str(model), "--record", str(path), *FLAGS]) == 0
    return path


def test_a_recorded_answer_is_replayed_identically(infer: Infer, model: Path, record: Path) -> None:
    lines = [json.loads(line) for line in record.read_text("utf-8").splitlines()]
    num_steps = sum(line["kind"] == "step" for line in lines)
    num_tokens = sum(len(ids) for line in lines if line["kind"] == "step" for ids in line["ids"])
    outcome = infer("replay", str(record), "--model", str(model))
    assert (outcome.code, outcome.out) == (0, f"{num_steps} steps, {num_tokens} tokens, identical\n")


def test_runs_that_differ_are_exit_code_1(infer: Infer, model: Path, record: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in record.read_text("utf-8").splitlines()]
    third = [line for line in lines if line["kind"] == "step"][2]
    third["ids"][0][0] ^= 1
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = infer("replay", str(changed), "--model", str(model))
    assert outcome.code == 1
    assert outcome.out.startswith("the runs differ at step 3: sampled ids, number 0: in the record [")
    assert outcome.out.endswith("identical up to there: 2 steps\n")
    outcome = infer("replay", str(changed), "--model", str(model), "--no-check")
    assert outcome.code == 0
    assert outcome.out.endswith("not compared\n")


@pytest.mark.parametrize("num_lost", [1, 5])
def test_a_record_that_lost_its_end_is_identical_so_far(
    infer: Infer, model: Path, record: Path, tmp_path: Path, num_lost: int
) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(record.read_text("utf-8").splitlines(keepends=True)[:-num_lost]))
    outcome = infer("replay", str(cut), "--model", str(model))
    assert outcome.code == 0
    first, second = outcome.out.splitlines()
    assert first.endswith("tokens, identical")
    assert second.startswith("the record has no end: requests are unfinished")


def test_until_prints_the_state_after_that_step(infer: Infer, model: Path, record: Path) -> None:
    outcome = infer("replay", str(record), "--model", str(model), "--until", "4")
    assert outcome.code == 0
    first, second, third, last = outcome.out.splitlines()
    assert first == "4 steps, 4 tokens, identical"
    assert second == "after step 4: 1 running, 0 waiting"
    assert "output 4, computed" in third
    assert last.startswith("cache: num_blocks 40, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.jsonl"], "cannot read absent.jsonl: No such file"),
        (["RECORD", "--until", "0"], "--until must be a step, 1 or more, got 0"),
        (["RECORD", "--until", "999"], "--until is 999, but the record ends with step"),
    ],
)
def test_an_impossible_replay_is_refused_in_one_line(
    infer: Infer, record: Path, arguments: list[str], message: str
) -> None:
    outcome = infer("replay", *[str(record) if word == "RECORD" else word for word in arguments])
    assert outcome.code == 2
    assert outcome.err.startswith(f"infer: error: {message}")
    assert outcome.err.count("\n") == 1


def test_a_record_that_is_there_is_replaced_only_when_told_to(infer: Infer, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("precious\n")
    outcome = infer("generate", "hi", "--record", str(path))
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        f"infer: error: {path} is there already; record to another name, or replace it with --overwrite\n"
    )
    assert outcome.llm.params == [] and path.read_text() == "precious\n"
    assert infer("generate", "hi", "--record", str(path), "--overwrite").code == 0
    (tmp_path / "empty").touch()  # as mktemp makes them
    assert infer("generate", "hi", "--record", str(tmp_path / "empty")).code == 0


def test_a_record_is_not_written_into_a_pipe(infer: Infer, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # so that to open it would not wait
    outcome = infer("generate", "hi", "--record", str(tmp_path / "pipe"))
    os.close(reader)
    assert outcome.code == 2
    assert "it is not a plain file" in outcome.err


def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    infer: Infer, tmp_path: Path
) -> None:
    outcome = infer("generate", "hi", "--record", str(tmp_path / "absent" / "r.jsonl"))
    assert outcome.code == 2
    assert "cannot record to" in outcome.err
    assert outcome.llm.params == []


@pytest.mark.parametrize(("flags", "verdict"), [((), "identical so far"), (("--no-check",), "not compared")])
def test_ctrl_c_says_how_far_a_replay_came(
    infer: Infer,
    model: Path,
    record: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    verdict: str,
) -> None:
    step, num_steps = Engine.step, 0

    def press_after_three(engine: Engine) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", press_after_three)
    outcome = infer("replay", str(record), "--model", str(model), *flags)
    assert (outcome.code, outcome.out) == (130, "")
    assert re.search(rf"^interrupted after [1-3] of 12 steps, {verdict}$", outcome.err, re.MULTILINE)


def test_ctrl_c_while_the_model_of_a_replay_is_loaded_says_so(
    infer: Infer, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("infer.tools.replay.replay_model", press)
    outcome = infer("replay", str(record))
    assert outcome.err == "interrupted while the model was loaded; nothing was replayed\n"


@pytest.mark.parametrize("words", [["--speculative-method", "ngram"], ["--speculative-method", "suffix"]])
def test_drafts_from_texts_are_replayed_identically(
    infer: Infer, model: Path, tmp_path: Path, words: list[str]
) -> None:
    path = tmp_path / "run.jsonl"
    prompt = "the river the river the river the river the"
    assert main(["generate", prompt, "--model", str(model), "--record", str(path), *DRAFTED, *words]) == 0
    assert has_windows(path)
    outcome = infer("replay", str(path), "--model", str(model))
    assert outcome.code == 0, outcome.out
    assert outcome.out.endswith("tokens, identical\n")


def test_a_draft_model_is_replayed_if_it_is_named(infer: Infer, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    words = ["--model", str(model), "--draft-model", str(model), "--record", str(path)]
    assert main(["generate", "the river", *words, *DRAFTED]) == 0
    assert has_windows(path)
    assert str(model) not in path.read_text("utf-8"), "a record names no place of this machine"
    where = ("replay", str(path), "--model", str(model))
    missing = infer(*where)
    assert missing.code == 2
    assert "made with the draft model tiny-qwen3; give it with --draft-model" in missing.err
    outcome = infer(*where, "--draft-model", str(model))
    assert outcome.code == 0, outcome.out
    assert outcome.out.endswith("tokens, identical\n")
    make_checkpoint("llama", tmp_path / "other")
    other = infer(*where, "--draft-model", str(tmp_path / "other"))
    assert other.code == 2
    assert "give the recorded model with --draft-model" in other.err


@pytest.mark.parametrize("method", ["auto", "draft_model"])
def test_a_record_with_a_draft_model_that_was_turned_off_needs_none(
    infer: Infer, model: Path, tmp_path: Path, method: str
) -> None:
    path = tmp_path / "run.jsonl"
    words = ["--model", str(model), "--draft-model", str(model), "--speculative-method", method]
    words += ["--no-speculative-decoding", "--record", str(path), *DRAFTED]
    assert main(["generate", "the river", *words]) == 0
    assert not has_windows(path)
    outcome = infer("replay", str(path), "--model", str(model))
    assert outcome.code == 0, outcome.err
    assert outcome.out.endswith("tokens, identical\n")


def test_a_draft_model_of_a_record_without_one_is_refused(infer: Infer, model: Path, record: Path) -> None:
    outcome = infer("replay", str(record), "--model", str(model), "--draft-model", str(model))
    assert outcome.code == 2
    assert "made without a draft model; leave --draft-model out" in outcome.err


DRAFTED = [*FLAGS, "--max-tokens", "40", "--temperature", "0", "--no-adaptive-speculation", "--ignore-eos"]


def has_windows(path: Path) -> bool:
    """Whether a step after the prompt computed several tokens of the sequence."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    steps = [line for line in lines if line["kind"] == "step"][1:]
    return any(stop - start > 1 for line in steps for _, start, stop, _ in line["chunks"])
