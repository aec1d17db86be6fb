from __future__ import annotations

import builtins
import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from infer.cli import flags
from infer.cli.chat_commands import complete
from infer.cli.conversation import ChatSession
from infer.cli.terminal import WordWrap
from infer.errors import DeviceLost, EngineError, EngineStopped, ModelSourceError
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
    assert outcome.err.count("press Ctrl-C again, or Ctrl-D, to leave") == 2


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


def test_three_quotes_hold_lines_of_a_pipe_together(infer: Infer) -> None:
    outcome = infer("chat", stdin='"""\none\n/two\n"""\nthree\n')
    assert [chat[-1]["content"] for chat in outcome.llm.chats] == ["one\n/two", "three"]
    outcome = infer("chat", stdin='"""one\ntwo\n')
    assert outcome.code == 2 and 'opened with """ and not closed' in outcome.err


def test_a_model_is_named_by_position_or_by_flag(infer: Infer) -> None:
    assert infer("chat", "a/model", stdin="").llm.knobs["model"] == "a/model"
    assert infer("chat", "a/model", "--model", "a/model", stdin="").llm.knobs["model"] == "a/model"
    assert infer("run", "a/model", "--seed", "1", "hi").llm.knobs["model"] == "a/model"


def test_run_answers_a_prompt_or_a_pipe_once(infer: Infer) -> None:
    outcome = infer("run", "a/model", "two\nlines", "--system", "s")
    assert (outcome.code, outcome.out) == (0, "TWO\nLINES\n")
    assert outcome.llm.chats == [[{"role": "system", "content": "s"}, user("two\nlines")]]
    assert infer("run", "a/model", stdin="one\ntwo\n").llm.chats == [[user("one\ntwo")]]
    for words, piped in (((), " \n"), (("",), ""), ((" ",), "\n")):
        assert "no prompt: write one after the model" in infer("run", "a/model", *words, stdin=piped).err
    assert infer("run", "a/model", "forbidden").code == 1
    assert infer("run", stdin="hi\nho\n", is_typed=True).llm.chats[-1] == [
        user("hi"), assistant("HI"), user("ho"),
    ]  # fmt: skip


def test_retry_answers_the_last_message_again(infer: Infer) -> None:
    outcome = infer("chat", stdin="/retry\none\n/retry\ntwo\n")
    assert outcome.out == "ONE\nONE\nTWO\n"
    assert outcome.llm.chats[-1] == [user("one"), assistant("ONE"), user("two")]
    assert len({params.seed for params in outcome.llm.params}) == 3
    assert "[nothing to answer again" in outcome.err and "temperature is 0" not in outcome.err
    assert (
        "/set temperature 0.7 draws another" in infer("chat", "--temperature", "0", stdin="a\n/retry\n").err
    )


def test_a_retry_leaves_a_file_that_was_read_for_the_next_message(infer: Infer, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    outcome = infer("chat", stdin=f"one\n/read {tmp_path}/letter.txt\n/retry\ntwo\n")
    assert outcome.out == "ONE\nONE\nTWO\n\nDEAR\n"


@pytest.mark.parametrize("line", ["/retry but shorter", "/exit now", "/tools x"])
def test_text_after_a_command_that_takes_none_is_refused(infer: Infer, line: str) -> None:
    outcome = infer("chat", stdin=f"one\n{line}\ntwo\n")
    assert outcome.out == "ONE\nTWO\n"
    name = line.partition(" ")[0]
    assert f'[{name} takes nothing after it; a text in """ is a message]' in outcome.err


def test_a_retry_that_fails_keeps_the_first_answer(infer: Infer) -> None:
    llm = FakeLLM()

    def fail(index: int) -> None:
        if llm.num_opened == 2:
            raise EngineError("the step failed")

    llm.before_token = fail
    outcome = infer("chat", stdin="one\n/retry\ntwo\n", is_typed=True, llm=llm)
    assert "infer: error: the step failed" in outcome.err
    assert llm.chats[-1] == [user("one"), assistant("ONE"), user("two")]


def test_set_changes_the_parameters_of_the_next_answers(infer: Infer) -> None:
    settings = (
        "temperature 0.25",
        "max-tokens none",
        "stop 'END NOW' HALT",
        "ignore_eos on",
        "logit_bias 5=-1",
        "num_speculative_tokens 0",
    )
    lines = "".join(f"/set {setting}\n" for setting in settings)
    outcome = infer("chat", "--seed", "7", stdin=f"{lines}one\n/set stop default\n/set seed 9\ntwo\n")
    first, second = outcome.llm.params
    assert (first.temperature, first.max_tokens, first.stop, first.ignore_eos) == (
        0.25,
        None,
        ("END NOW", "HALT"),
        True,
    )
    assert (first.seed, first.logit_bias, first.num_speculative_tokens) == (7, {5: -1.0}, 0)
    assert (second.stop, second.seed, second.temperature) == ((), 9, 0.25)
    assert "[temperature is 0.25]\n[max_tokens is none]\n[stop is 'END NOW' HALT]\n" in outcome.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set tempratur 1", "no setting 'tempratur'; did you mean 'temperature'?"),
        ("/set xyzzy 1", "no setting 'xyzzy'; /set lists them"),
        ("/set temperature hot", "[not set: temperature must be a number, or 'default', got 'hot']"),
        ("/set temperature -1", "[not set: temperature must be"),
        ("/set ignore_eos maybe", "[not set: ignore_eos must be on or off, or 'default', got 'maybe']"),
        ("/set top_k", "  top_k                      0  "),
        ("/set num_speculative_tokens 99", "[not set: num_speculative_tokens must be"),
        ("/set", "  temperature                0.7 "),
    ],
)
def test_set_explains_itself(infer: Infer, line: str, said: str) -> None:
    outcome = infer("chat", stdin=f"{line}\nhi\n")
    assert said in outcome.err
    assert outcome.llm.params[0].temperature == 0.7


def test_a_drawn_seed_stays_when_a_setting_changes(infer: Infer) -> None:
    first, second = infer("chat", stdin="hi\n/reset\n/set top_k 5\nhi\n").llm.params
    assert second.seed == flags.nth_draw(first, 1).seed


def test_read_puts_a_file_behind_the_next_message(infer: Infer, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear\nall\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    refused = f"/read\n/read {tmp_path}/no\n/read {tmp_path}/bytes\n/read /dev/zero\n"
    lines = f"/read {tmp_path}/letter.txt\nsum up:\nthanks\n{refused}"
    outcome = infer("chat", stdin=lines)
    assert [chat[-1]["content"] for chat in outcome.llm.chats] == ["sum up:\n\ndear\nall", "thanks"]
    for said in (
        "[9 characters of ",
        "/read needs a file name",
        "cannot read ",
        "is not UTF-8",
        "or a device",
    ):
        assert said in outcome.err


def test_load_goes_on_with_a_saved_conversation(infer: Infer, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    infer("chat", "--system", "s", stdin=f"one\n/save {file}\n")
    outcome = infer("chat", stdin=f"zero\n/load {file}\ntwo\n")
    assert outcome.llm.chats[-1] == [
        {"role": "system", "content": "s"}, user("one"), assistant("ONE"), user("two"),
    ]  # fmt: skip
    assert f"[3 messages read from {file}]" in outcome.err


def test_load_takes_a_conversation_that_was_saved_before_its_first_message(
    infer: Infer, tmp_path: Path
) -> None:
    outcome = infer("chat", stdin=f"/save {tmp_path}/x\none\n/load {tmp_path}/x\ntwo\n")
    assert outcome.llm.chats[-1] == [user("two")]


@pytest.mark.parametrize(
    "text", ["plain", "{}", '""', "[1]", '[{"role": "boss", "content": "x"}]', '[{"role": "user"}]']
)
def test_load_refuses_what_is_no_conversation(infer: Infer, tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    outcome = infer("chat", stdin=f"one\n/load {tmp_path}/x\ntwo\n")
    assert "is not a conversation that /save wrote; /read takes any text" in outcome.err
    assert len(outcome.llm.chats[-1]) == 3


def test_model_goes_on_with_another_model(
    infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    lines = f"one\n/model {tmp_path}/absent\n/model {tmp_path}\ntwo\n/model\n"
    outcome = infer("chat", "--model", "old", "--revision", "r", stdin=lines)
    assert "there is no such file or directory" in outcome.err
    assert outcome.llm.is_closed, "the old one, before the new one was loaded"
    assert outcome.llm.knobs == {"model": str(tmp_path)}
    assert outcome.llm.chats[-1] == [user("one"), assistant("ONE"), user("two")]
    assert "[fake, context of 1000 tokens]" in outcome.err and "  fake; others: " in outcome.err


def test_what_the_search_for_a_model_says_has_its_own_line(
    infer: Infer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(name: str) -> None:
        print(f"asking the hub for {name}", file=sys.stderr)
        raise ModelSourceError("the hub knows no such model")

    monkeypatch.setattr("infer.cli.chat_commands.check_model", check)
    monkeypatch.setattr("infer.cli.terminal.is_terminal", lambda stream: stream is sys.stderr)
    monkeypatch.setattr("infer.cli.answer.WordWrap", lambda stream, **_: WordWrap(io.StringIO()))
    err = infer("chat", stdin="/model nope/nope\n").err
    assert "asking the hub for nope/nope\ninfer: error: the hub knows no such model\n" in err
    assert "\rasking" not in err and "looking for" not in err


def test_tab_offers_commands_settings_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").write_text("")
    (tmp_path / ".hidden").write_text("")
    monkeypatch.chdir(tmp_path)

    def offered(text: str) -> list[str]:
        return list(complete(cast("ChatSession", None), text))

    assert offered("/s") == ["/set ", "/system ", "/save "]
    assert offered("/cl") == ["/clear"]
    assert offered("/set top") == ["top_p ", "top_k "]
    assert offered("/load f") == ["file.txt", "folder/"]
    assert offered(f"/save {tmp_path}/.h") == [f"{tmp_path}/.hidden"]
    assert offered("/load no/such/") == offered("hello") == offered("/retry x") == offered("/xyzzy y") == []
