from __future__ import annotations

import builtins
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infer.errors import DeviceLost, EngineError, EngineStopped
from tests.unit.cli.ctrl_c import press_ctrl_c
from tests.unit.cli.fake_llm import FakeLLM

Infer = Callable[..., Any]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_each_line_of_a_pipe_is_a_message_and_the_model_sees_all_before_it(infer: Infer) -> None:
    outcome = infer("chat", stdin="one\n\ntwo\n")
    assert (outcome.code, outcome.out, outcome.err) == (0, "ONE\nTWO\n", "")
    assert outcome.llm.chats == [[user("one")], [user("one"), assistant("ONE"), user("two")]]


def test_reset_forgets_the_turns_and_keeps_the_system_message(infer: Infer) -> None:
    outcome = infer("chat", "--system", "be kind", stdin="one\n/reset\ntwo\n")
    assert outcome.llm.chats[-1] == [{"role": "system", "content": "be kind"}, user("two")]
    assert infer("chat", stdin="one\n/clear\ntwo\n").llm.chats[-1] == [user("two")]


def test_system_replaces_the_system_message_and_removes_it(infer: Infer) -> None:
    outcome = infer("chat", stdin="/system  be brief\none\n/system\ntwo\n")
    assert outcome.llm.chats[0][0] == {"role": "system", "content": "be brief"}
    assert outcome.llm.chats[1][0] == user("one")


def test_the_same_question_is_drawn_anew_at_each_turn(infer: Infer) -> None:
    seeds = [params.seed for params in infer("chat", stdin="hi\n/reset\nhi\n/reset\nhi\n").llm.params]
    assert len(set(seeds)) == 3


def test_with_a_seed_a_conversation_can_be_held_again_and_its_turns_still_differ(infer: Infer) -> None:
    def seeds(seed: str) -> list[int | None]:
        return [params.seed for params in infer("chat", "--seed", seed, stdin="hi\n/reset\nhi\n").llm.params]

    assert seeds("7") == seeds("7")
    assert seeds("7")[0] == 7
    assert len({*seeds("7"), *seeds("8")}) == 4


def test_a_message_without_an_answer_leaves_its_seed_to_the_next(infer: Infer) -> None:
    """So that what was said decides the answers, and not what was refused in between."""
    answered = infer("chat", "--seed", "7", stdin="one\ntwo\n", is_typed=True).llm.params
    refused = infer("chat", "--seed", "7", stdin="one\nforbidden\ntwo\n", is_typed=True).llm.params
    assert [params.seed for params in refused] == [params.seed for params in answered]


@pytest.mark.parametrize("command", ["/exit", "/quit", "/bye"])
def test_exit_leaves_before_the_next_line(infer: Infer, command: str) -> None:
    outcome = infer("chat", stdin=f"{command}\none\n")
    assert (outcome.code, outcome.out, outcome.llm.chats) == (0, "", [])


def test_save_writes_the_conversation(infer: Infer, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    outcome = infer("chat", "--system", "s", stdin=f"grüß\n/save {file}\n")
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert saved == [{"role": "system", "content": "s"}, user("grüß"), assistant("GRÜSS")]
    assert f"3 messages written to {file}" in outcome.err


def test_a_conversation_that_cannot_be_saved_goes_on(infer: Infer, tmp_path: Path) -> None:
    outcome = infer("chat", stdin=f"/save {tmp_path}/no/file\n/save\none\n")
    assert "cannot write" in outcome.err
    assert "/save needs a file name" in outcome.err
    assert outcome.out == "ONE\n"


def test_help_lists_every_command_and_a_misspelt_one_is_guessed(infer: Infer) -> None:
    outcome = infer("chat", stdin="/help\n/rest\n/xyzzy\n")
    assert all(command in outcome.err for command in ("/help", "/reset", "/system", "/save", "/exit"))
    assert "no command '/rest'; did you mean '/reset'?\n" in outcome.err
    assert "no command '/xyzzy'; /help lists them\n" in outcome.err


def test_the_oldest_turns_are_dropped_with_a_notice_when_the_context_is_full(infer: Infer) -> None:
    outcome = infer(
        "chat", "--max-tokens", "10", "--system", "s", stdin="first\nsecond\nthird\n", context_len=75
    )
    assert outcome.out == "FIRST\nSECOND\nTHIRD\n"
    assert outcome.llm.chats[-1] == [
        {"role": "system", "content": "s"},
        user("second"),
        assistant("SECOND"),
        user("third"),
    ]
    assert outcome.err == (
        "[the context of 75 tokens is full: forgot your oldest message and its answer: 'first']\n"
    )


def test_a_message_too_long_for_the_context_is_refused_and_the_talk_goes_on(infer: Infer) -> None:
    outcome = infer("chat", "--max-tokens", "10", stdin="x" * 50 + "\nhi\n", context_len=40)
    assert outcome.code == 1
    assert outcome.out == "HI\n"
    assert outcome.err == (
        "infer: error: prompt has 56 tokens, but this model's maximum context length is 40 tokens; "
        "shorten the prompt to at most 39 tokens\n"
    )
    assert outcome.llm.chats[-1] == [user("hi")]


def test_a_message_the_template_refuses_is_taken_back(infer: Infer) -> None:
    outcome = infer("chat", stdin="forbidden\nhi\n")
    assert outcome.llm.chats == [[user("hi")]]
    assert "infer: error: the template refuses this message" in outcome.err
    assert (outcome.code, outcome.out) == (1, "HI\n"), "a script can see that a line has no answer"
    assert infer("chat", stdin="forbidden\nhi\n", is_typed=True).code == 0


def test_a_cut_answer_is_said_to_be_cut(infer: Infer) -> None:
    outcome = infer("chat", "--max-tokens", "2", stdin="hello\n")
    assert outcome.out == "HE\n"
    assert "[cut after 2 tokens; --max-tokens allows more]" in outcome.err


def test_an_answer_cut_by_the_context_says_so(infer: Infer) -> None:
    outcome = infer("chat", "--max-tokens", "none", stdin="hello\n", context_len=14)
    assert outcome.out == "HEL\n"
    assert "[cut after 3 tokens; the context is full, /reset empties it]" in outcome.err


def test_ctrl_c_stops_the_answer_and_not_the_program(infer: Infer) -> None:
    llm = FakeLLM()

    def press(index: int) -> None:
        if index == 2 and len(llm.chats) == 1:
            press_ctrl_c()

    llm.before_token = press
    handler = signal.getsignal(signal.SIGINT)
    outcome = infer("chat", stdin="hello\nbye\n", llm=llm)
    assert outcome.code == 0
    assert outcome.out == "HEL\nBYE\n"
    assert "[stopped]" in outcome.err
    assert llm.num_closed == 2
    assert llm.chats[-1] == [user("hello"), assistant("HEL"), user("bye")]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_leaves_even_a_model_that_is_stuck(infer: Infer) -> None:
    llm = FakeLLM()

    def press_twice(index: int) -> None:
        press_ctrl_c()
        press_ctrl_c()

    llm.before_token = press_twice
    assert infer("chat", stdin="hello\n", llm=llm).code == 130


def typing(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Make input() return these lines, or raise them, and then the end of the file."""
    script: Iterator[str | type[BaseException]] = iter(lines)

    def fake_input(prompt: str) -> str:
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", fake_input)


def test_at_the_prompt_ctrl_d_leaves(infer: Infer, monkeypatch: pytest.MonkeyPatch) -> None:
    typing(monkeypatch, "one")
    outcome = infer("chat", is_typed=True)
    assert (outcome.code, outcome.out) == (0, "ONE\n")
    assert outcome.err.startswith("fake, context of 1000 tokens; /help lists the commands")


def test_at_the_prompt_only_two_ctrl_c_in_a_row_leave(infer: Infer, monkeypatch: pytest.MonkeyPatch) -> None:
    typing(monkeypatch, KeyboardInterrupt, "one", KeyboardInterrupt, KeyboardInterrupt, "two")
    outcome = infer("chat", is_typed=True)
    assert (outcome.code, outcome.out) == (0, "ONE\n")
    assert outcome.err.count("Ctrl-C again, or Ctrl-D, leaves") == 2


def test_a_model_that_came_without_a_template_chats_with_a_warning(infer: Infer) -> None:
    outcome = infer("chat", stdin="hi\nho\n", ships_chat_template=False)
    assert (outcome.code, outcome.out) == (0, "HI\nHO\n")
    assert outcome.err == "infer: warning: fake came without a chat template\n"
    assert infer("chat", stdin="hi\n").err == ""


def test_a_model_without_a_template_cannot_chat(infer: Infer) -> None:
    outcome = infer("chat", stdin="hi\n", has_chat_template=False)
    assert outcome.code == 2
    assert "fake has no chat template" in outcome.err


def test_an_answer_that_fails_ends_its_line_and_not_a_typed_conversation(
    infer: Infer,
) -> None:
    outcome = infer("chat", stdin="broken\nhi\n", is_typed=True)
    assert outcome.code == 0
    assert outcome.out.replace("> ", "") == "B\nHI\n"
    assert "infer: error: the step failed\n" in outcome.err
    assert [message["content"] for message in outcome.llm.chats[-1]] == ["hi"], "it was taken back"


def test_an_answer_that_fails_ends_a_script(infer: Infer) -> None:
    outcome = infer("chat", stdin="broken\nhi\n")
    assert (outcome.code, outcome.out) == (2, "B\n")
    assert outcome.err == "infer: error: the step failed\n"


@pytest.mark.parametrize("error", [DeviceLost("gone"), EngineStopped("dead")])
def test_without_an_engine_there_is_nothing_to_go_on_with(infer: Infer, error: EngineError) -> None:
    llm = FakeLLM()

    def fail(index: int) -> None:
        raise error

    llm.before_token = fail
    assert infer("chat", stdin="one\ntwo\n", is_typed=True, llm=llm).code == 2
    assert llm.num_opened == 1


def test_the_form_of_the_answers_can_be_given(infer: Infer) -> None:
    outcome = infer("chat", "--json-schema", '{"type": "object"}', stdin="hi\nho\n")
    kinds = [params.structured.kind for params in outcome.llm.params]
    assert kinds == ["json_schema", "json_schema"]
