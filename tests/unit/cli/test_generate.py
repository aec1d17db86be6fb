from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infer.cli import asking
from infer.cli.answer import ShownAnswer, show_answer
from infer.cli.generate import AskedPrompt, Prompt, to_json
from infer.dialects.events import TextDelta
from infer.errors import DeviceLost
from infer.finish_reason import FinishReason
from infer.sampling.params import SamplingParams
from tests.unit.cli.fake_llm import FakeLLM

Infer = Callable[..., Any]


def test_the_answer_and_nothing_else_is_on_standard_output(infer: Infer) -> None:
    outcome = infer("generate", "why?", "--stats")
    assert (outcome.code, outcome.out) == (0, "WHY?\n")
    assert "tokens/s" in outcome.err


def test_a_model_with_a_template_gets_the_prompt_as_a_message(infer: Infer) -> None:
    outcome = infer("generate", "why?", "--system", "be brief", "--no-thinking")
    assert outcome.llm.chats == [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    ]
    assert outcome.llm.options == [{"enable_thinking": False}]


@pytest.mark.parametrize(
    ("arguments", "fake"),
    [(["--raw"], {}), ([], {"has_chat_template": False}), ([], {"ships_chat_template": False})],
)
def test_raw_text_and_base_models_bypass_the_template(
    infer: Infer, arguments: list[str], fake: dict[str, bool]
) -> None:
    outcome = infer("generate", "once", *arguments, **fake)
    assert outcome.out == "ONCE\n"
    assert outcome.llm.chats == []


@pytest.mark.parametrize("arguments", [["-"], []])
def test_a_prompt_is_read_from_standard_input(infer: Infer, arguments: list[str]) -> None:
    outcome = infer("generate", *arguments, "--raw", stdin="two\nlines\n")
    assert outcome.out == "TWO\nLINES\n"


def test_each_line_of_a_prompts_file_is_answered_in_order(infer: Infer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  \nzwei ü\n", encoding="utf-8")
    outcome = infer("generate", "--prompts-file", str(file))
    assert outcome.out == "ONE\nZWEI Ü\n"
    assert outcome.err == "[1/2] one\n[2/2] zwei ü\n"


def test_all_prompts_of_a_file_are_in_the_engine_before_the_first_is_answered(
    infer: Infer, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\nthree\n")
    llm = FakeLLM()
    opened: list[int] = []
    llm.before_token = lambda index: opened.append(llm.num_opened)
    assert infer("generate", "--prompts-file", str(file), llm=llm).out == "ONE\nTWO\nTHREE\n"
    assert opened[0] == 3


@pytest.mark.parametrize("max_open", [1, 2])
def test_a_full_queue_holds_prompts_back_until_there_is_room(
    infer: Infer, tmp_path: Path, max_open: int
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a\nb\nc\nd\n")
    outcome = infer("generate", "--prompts-file", str(file), max_open=max_open)
    assert (outcome.code, outcome.out) == (0, "A\nB\nC\nD\n")
    none_fits = infer("generate", "--prompts-file", str(file), max_open=0)
    assert (none_fits.code, none_fits.err) == (2, "infer: error: the queue is full\n")


def test_a_prompt_that_fails_is_reported_by_its_line_and_the_others_are_answered(
    infer: Infer, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n" + "x" * 80 + "\nforbidden\nbroken\nlast\n")
    outcome = infer("generate", "--prompts-file", str(file), "--max-tokens", "9", context_len=60)
    assert outcome.code == 1
    assert outcome.out == "ONE\nB\nLAST\n"
    errors = [line for line in outcome.err.splitlines() if not line.startswith("[")]
    assert errors == [
        "infer: error: line 3: prompt has 86 tokens, but this model's maximum context length is 60 tokens; "
        "shorten the prompt to at most 59 tokens",
        "infer: error: line 4: the template refuses this message",
        "infer: error: line 5: the step failed",
        "infer: error: 3 of 5 prompts have no answer; the lines above say why",
    ]
    outcome = infer("generate", "--prompts-file", str(file), "--json", "--max-tokens", "9", context_len=60)
    found = [json.loads(line) for line in outcome.out.splitlines()]
    assert [answer["prompt"][:9] for answer in found] == ["one", "x" * 9, "forbidden", "broken", "last"]
    assert [answer.get("text") for answer in found] == ["ONE", None, None, None, "LAST"]
    assert found[2] == {"prompt": "forbidden", "line": 4, "error": "the template refuses this message"}


def test_an_engine_that_is_gone_is_reported_once(infer: Infer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n")
    llm = FakeLLM()

    def lose(index: int) -> None:
        raise DeviceLost("the device failed in step 3")

    llm.before_token = lose
    outcome = infer("generate", "--prompts-file", str(file), "--json", llm=llm)
    assert (outcome.code, outcome.err) == (2, "infer: error: the device failed in step 3\n")


def test_a_byte_order_mark_is_not_part_of_a_prompt(infer: Infer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a\nb\n", encoding="utf-8-sig")
    assert infer("generate", "--prompts-file", str(file)).out == "A\nB\n"
    assert infer("generate", stdin=file.read_bytes()).llm.chats == [[{"role": "user", "content": "a\nb"}]]
    assert infer("chat", stdin=file.read_bytes()).out == "A\nB\n"


def test_a_line_ends_where_an_editor_ends_it(infer: Infer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("a\u2028b\x0cc\r\nd".encode())
    assert infer("generate", "--prompts-file", str(file)).out == "A\u2028B\x0cC\nD\n"


def test_the_stats_of_many_prompts_end_with_all_of_them(infer: Infer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\nthree\n")
    lines = infer("generate", "--prompts-file", str(file), "--stats").err.splitlines()
    assert lines[-1].startswith("2 answers, 8 tokens in ")
    assert len([line for line in lines if line.startswith("load ")]) == 2


def interrupted_at(letter: int) -> FakeLLM:
    llm = FakeLLM()

    def press_ctrl_c(index: int) -> None:
        if index == letter:
            raise KeyboardInterrupt

    llm.before_token = press_ctrl_c
    return llm


def test_an_interrupted_answer_has_stats_too(infer: Infer) -> None:
    outcome = infer("generate", "hello", "--stats", llm=interrupted_at(3))
    assert (outcome.code, outcome.out) == (130, "HEL\n")
    (line,) = outcome.err.splitlines()
    assert line.startswith("load ") and "3 tokens in" in line and line.endswith("finish: stopped")


def test_an_interrupted_file_of_prompts_is_counted_as_far_as_it_came(infer: Infer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\nthree\nlast\n")
    outcome = infer("generate", "--prompts-file", str(file), "--stats", llm=interrupted_at(4))
    assert (outcome.code, outcome.out) == (130, "ONE\nTHRE\n")
    assert outcome.err.splitlines()[-1].startswith("1 of 3 answers, 7 tokens in ")


def test_an_interrupt_while_the_model_is_loaded_says_how_long_that_took(infer: Infer) -> None:
    class SlowLLM(FakeLLM):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "knobs" and hasattr(self, "knobs"):
                raise KeyboardInterrupt  # as loading it does, which is what sets the knobs
            super().__setattr__(name, value)

    outcome = infer("generate", "hello", "--stats", llm=SlowLLM())
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err.startswith("interrupted while loading, after ")


def test_json_is_one_object_per_prompt(infer: Infer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo", encoding="utf-8")
    outcome = infer("generate", "--prompts-file", str(file), "--json", "--max-tokens", "2", "--raw")
    first, second = map(json.loads, outcome.out.splitlines())
    assert first["prompt"] == "one"
    assert first["text"] == "ON"
    assert first["token_ids"] == [ord("O"), ord("N")]
    assert (first["finish_reason"], first["stop_reason"]) == ("length", None)
    assert first["seed"] == outcome.llm.params[0].seed
    assert first["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert set(first["timings"]) == {"load_s", "first_token_s", "total_s", "tokens_per_s"}
    assert second["prompt"] == "two"
    assert outcome.err == ""


@pytest.mark.parametrize("given", [(), ("--seed", "7")])
def test_each_line_of_a_file_is_drawn_with_the_seed_its_row_shows(
    infer: Infer, tmp_path: Path, given: tuple[str, ...]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("same\nsame\n\nsame\n")
    outcome = infer("generate", "--prompts-file", str(file), "--json", *given)
    rows = [json.loads(line) for line in outcome.out.splitlines()]
    assert len({row["seed"] for row in rows}) == 3
    assert [row["seed"] for row in rows] == [params.seed for params in outcome.llm.params]
    for row, params in zip(rows, outcome.llm.params, strict=True):
        assert infer("generate", "same", "--seed", str(row["seed"])).llm.params == [params]


def test_the_seed_of_a_line_depends_on_no_other_line(infer: Infer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"

    def seed_of_third(text: str) -> object:
        file.write_text(text)
        outcome = infer("generate", "--prompts-file", str(file), "--json", "--seed", "7")
        return next(row["seed"] for row in map(json.loads, outcome.out.splitlines()) if row["prompt"] == "c")

    assert seed_of_third("a\nb\nc\n") == seed_of_third("x\n\nc\nd\n")


def test_json_names_the_stop_string_that_ended_the_text() -> None:
    deltas = [
        TextDelta(text="a", token_ids=(1,)),
        TextDelta(text="", token_ids=(2,), finish_reason=FinishReason.STOP, stop_reason="END"),
    ]
    answer = show_answer(iter(deltas), None)
    stream: Any = SimpleNamespace(num_prompt_tokens=1)
    data = to_json(AskedPrompt(Prompt("?"), SamplingParams(), stream), answer, load_s=0.0)
    assert (data["finish_reason"], data["stop_reason"]) == ("stop", "END")


def test_knobs_reach_the_model(infer: Infer) -> None:
    outcome = infer("generate", "hi", "--model", "dir", "--max-model-len", "64")
    assert outcome.llm.knobs == {"model": "dir", "max_seq_len": 64}


def test_a_short_context_lowers_the_default_of_max_tokens(infer: Infer) -> None:
    outcome = infer("generate", "hi", context_len=40)
    assert outcome.code == 0
    assert outcome.llm.params[0].max_tokens == 20


def test_a_prompt_that_does_not_fit_is_an_error_that_says_so(infer: Infer) -> None:
    outcome = infer("generate", "hello", "--max-tokens", "90", "--raw", context_len=91)
    assert outcome.code == 2
    assert outcome.err.startswith("infer: error: prompt has 5 tokens and max_tokens is 90")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--raw", "--system", "x"], "--system needs the chat template that --raw turns off"),
        ([""], "the prompt is empty"),
        (["hi", "--prompts-file", "f"], "give a PROMPT or --prompts-file, not both"),
        (["--prompts-file", "absent.txt"], "cannot read --prompts-file absent.txt: No such file"),
    ],
)
def test_an_impossible_request_is_refused_in_one_line(
    infer: Infer, arguments: list[str], message: str
) -> None:
    outcome = infer("generate", *arguments)
    assert outcome.code == 2
    assert outcome.err.startswith(f"infer: error: {message}")
    assert outcome.err.count("\n") == 1


def test_a_system_message_needs_a_template(infer: Infer) -> None:
    outcome = infer("generate", "hi", "--system", "x", has_chat_template=False)
    assert outcome.code == 2
    assert "--system needs a chat template, and fake came without one" in outcome.err


def test_one_line_of_the_log_says_that_a_base_model_continues_the_text(infer: Infer, tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_text("a\nb\n")
    flags = ("generate", "--prompts-file", str(tmp_path / "two.txt"), "--log-level", "info")
    said = "no chat template, so prompts are continued as plain text model=fake"
    assert infer(*flags, ships_chat_template=False).err.count(said) == 1
    assert said not in infer(*flags).err
    assert said not in infer(*flags, "--raw", ships_chat_template=False).err


def test_a_terminal_without_a_prompt_is_told_how_to_give_one(infer: Infer) -> None:
    outcome = infer("generate", is_typed=True)
    assert outcome.code == 2
    assert "no prompt: write one after 'infer generate'" in outcome.err


def test_an_empty_prompts_file_is_refused(infer: Infer, tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.write_text("\n \n")
    assert "holds no prompt; write one per line" in infer("generate", "--prompts-file", str(file)).err
    file.write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in infer("generate", "--prompts-file", str(file)).err


def test_the_speed_does_not_count_the_first_token() -> None:
    answer = ShownAnswer(
        text="abc", token_ids=(1, 2, 3), finish_reason="stop", first_token_s=2.0, total_s=2.5
    )
    assert answer.tokens_per_s == 4.0
    alone = ShownAnswer(text="a", token_ids=(1,), finish_reason="stop", first_token_s=2.0, total_s=2.0)
    assert alone.tokens_per_s == 0.0


def test_several_answers_are_drawn_each_with_a_seed_of_its_own(infer: Any, tmp_path: Path) -> None:
    outcome = infer("generate", "-n", "3", "--seed", "7", "hi")
    assert (outcome.code, outcome.out) == (0, "HI\nHI\nHI\n")
    seeds = [params.seed for params in outcome.llm.params]
    assert seeds[0] == 7 and len(set(seeds)) == 3
    assert "temperature is 0" not in outcome.err
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\n")
    params = infer("generate", "--n", "2", "--prompts-file", str(prompts)).llm.params
    assert len({each.seed for each in params}) == 4


def test_equal_answers_of_a_greedy_model_are_explained(infer: Any) -> None:
    outcome = infer("generate", "-n", "3", "--temperature", "0", "hi")
    said = "[temperature is 0, so all 3 answers are the same; --temperature 0.7 draws others]\n"
    assert outcome.err.startswith(said)
    assert "are the same" not in infer("generate", "--temperature", "0", "hi").err


@pytest.mark.parametrize(
    ("piped", "prompt"), [("a letter\n", "Summarise:\n\na letter"), ("", "Summarise:"), (" \n", "Summarise:")]
)
def test_what_is_piped_in_follows_the_prompt(
    infer: Any, monkeypatch: pytest.MonkeyPatch, piped: str, prompt: str
) -> None:
    reader, writer = os.pipe()
    os.write(writer, piped.encode())
    os.close(writer)
    with open(reader, encoding="utf-8") as stdin:
        monkeypatch.setattr(asking, "read_piped", stdin.read)
        monkeypatch.setattr(asking, "_is_piped", lambda: True)
        outcome = infer("generate", "Summarise:")
    assert outcome.llm.chats == [[{"role": "user", "content": prompt}]]


def is_piped(stdin: int) -> bool:
    code = "from infer.cli import asking; raise SystemExit(int(asking._is_piped()))"
    return bool(subprocess.run([sys.executable, "-c", code], stdin=stdin).returncode)


def test_only_a_pipe_or_a_file_is_joined_to_a_prompt(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()
    (tmp_path / "file").write_text("text")
    with open(tmp_path / "file") as file, open(os.devnull) as nothing, ours, theirs:
        assert is_piped(reader) and is_piped(file.fileno())
        assert not is_piped(nothing.fileno()) and not is_piped(theirs.fileno())
    os.close(reader)
    os.close(writer)


def test_a_silent_pipe_is_waited_for_with_a_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(asking, "SILENCE_S", 0.05)

    def end_it(said: str) -> None:
        assert "waiting for the end of standard input" in said
        os.close(writer)

    monkeypatch.setattr(asking, "notice", end_it)
    with open(reader, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert asking.read_piped() == ""
