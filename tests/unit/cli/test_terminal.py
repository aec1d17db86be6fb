"""A conversation at a real terminal: keys go in, a screen comes out, and the modes are put back."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import stat
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from infer.cli.prompt import MAX_KEPT, HistoryFile
from infer.cli.terminal import WordWrap, char_width, is_terminal
from tests.unit.cli.terminal import Terminal

ROOT = Path(__file__).parents[3]
CHAT = """
import os, sys, time
from infer.cli import asking
from infer.cli.main import main
from tests.unit.cli.fake_llm import FakeLLM
llm = FakeLLM()
llm.before_token = lambda index: time.sleep(float(os.environ["SECONDS_PER_LETTER"]))
asking.open_llm = lambda args, observer=None: llm
sys.exit(main(sys.argv[1:]))
"""
Open = Callable[..., Terminal]


@pytest.fixture
def chat(tmp_path: Path) -> Open:
    """Open a terminal with a conversation in it; the model repeats a message in capitals."""

    def open_chat(*flags: str, seconds: float = 0.0, columns: int = 80, command: str = "chat") -> Terminal:
        terminal = open_terminal(tmp_path, command, *flags, columns=columns, SECONDS_PER_LETTER=str(seconds))
        terminal.wait_prompt()
        return terminal

    return open_chat


def open_terminal(folder: Path, *words: str, columns: int = 80, **env: str) -> Terminal:
    """A terminal in which a command of `infer` runs, with the model of `chat`."""
    settings = {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "XDG_CACHE_HOME": str(folder), "SECONDS_PER_LETTER": "0"
    }  # fmt: skip
    return Terminal([sys.executable, "-c", CHAT, *words], env=settings | env, columns=columns)


def messages(terminal: Terminal, folder: Path) -> list[str]:
    """The texts of the conversation so far."""
    terminal.ask(f"/save {folder}/talk.json")
    return [message["content"] for message in json.loads((folder / "talk.json").read_text())]


def test_a_pasted_text_of_several_lines_is_one_message(chat: Open, tmp_path: Path) -> None:
    with chat() as terminal:
        terminal.paste("one\r\ntwo\nthree")
        assert "ONE\nTWO\nTHREE" in terminal.ask("")
        assert messages(terminal, tmp_path) == ["one\ntwo\nthree", "ONE\nTWO\nTHREE"]


def test_three_quotes_hold_a_message_together(chat: Open, tmp_path: Path) -> None:
    with chat() as terminal:
        terminal.ask('"""one')
        terminal.ask("/two")
        assert "ONE\n/TWO\nTHREE" in terminal.ask('three"""')
        terminal.ask('"""/four"""')
        assert messages(terminal, tmp_path)[::2] == ["one\n/two\nthree", "/four"]


def test_alt_enter_begins_a_line(chat: Open) -> None:
    with chat() as terminal:
        terminal.type("one\x1b\rtwo")
        assert "ONE\nTWO" in terminal.ask("")


def test_typed_messages_are_kept_for_the_next_conversation(chat: Open, tmp_path: Path) -> None:
    file = tmp_path / "infer" / "chat-history.jsonl"
    file.parent.mkdir()
    file.write_text('"from before"\nnot ours\n')
    file.chmod(0o644)
    with chat() as terminal:
        terminal.ask("hello")
        terminal.paste("two\nlines")
        terminal.ask("")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [json.loads(line) for line in file.read_text().splitlines() if line.startswith('"')] == [
        "from before",
        "hello",
        "two\nlines",
    ]
    with chat() as terminal:
        assert "HELLO" in terminal.ask("\x1b[A\x1b[A\x1b[A")  # a line up in the text, too
    with chat("--no-history") as terminal:
        terminal.ask("secret")
    assert "secret" not in file.read_text()


def test_tab_completes_a_command_and_its_argument(chat: Open) -> None:
    with chat() as terminal:
        terminal.type("/sys\t")
        assert "[system message set]" in terminal.ask("be kind")
        terminal.type("/set temp\t")
        assert "[temperature is 0.5]" in terminal.ask("0.5")


def test_keys_during_an_answer_are_kept_and_not_echoed_into_it(chat: Open) -> None:
    with chat(seconds=0.03) as terminal:
        terminal.type("a rather long question\r")
        terminal.wait_for("A RATHER")
        assert not terminal.echoes
        terminal.type("typed ahead")
        assert terminal.wait_prompt() == " LONG QUESTION\n"
        assert "TYPED AHEAD" in terminal.ask("")


def test_ctrl_c_stops_an_answer_and_clears_a_line_and_twice_it_leaves(chat: Open) -> None:
    with chat(seconds=0.1) as terminal:
        terminal.type("a rather long question\r")
        terminal.wait_for("A RATHER")
        terminal.type("\x03")
        assert "[stopped]" in terminal.wait_prompt()
        terminal.type("\x03")
        assert "[press Ctrl-C again, or Ctrl-D, to leave]" in terminal.wait_prompt()
        terminal.type("half a line\x03")  # clears the line, and does not leave
        assert "leaves]" not in terminal.wait_prompt()
        assert "HELLO\n" in terminal.ask("hello")
        terminal.type("\x03")
        terminal.wait_prompt()
        terminal.type("\x03")
        assert terminal.end() == 0
        assert terminal.is_as_before


def test_ctrl_d_leaves_a_terminal_as_it_was(chat: Open) -> None:
    with chat() as terminal:
        terminal.type("\x04")
        assert terminal.end() == 0
        assert terminal.is_as_before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminal_is_as_before_when_the_conversation_is_killed(chat: Open, number: int) -> None:
    with chat(seconds=0.03) as terminal:  # at the prompt
        assert not terminal.is_as_before
        terminal.process.send_signal(number)
        assert terminal.end() == -number
        assert terminal.is_as_before
        assert terminal.written.rindex("\x1b[?2004l") > terminal.written.rindex("\x1b[?2004h")
    with chat(seconds=0.03) as terminal:  # in an answer
        terminal.type("a rather long question\r")
        terminal.wait_for("A RATHER")
        assert not terminal.is_as_before
        terminal.process.send_signal(number)
        assert terminal.end() == -number
        assert terminal.is_as_before


def test_a_terminal_is_as_before_when_the_engine_fails_in_an_answer(chat: Open) -> None:
    with chat() as terminal:
        assert "infer: error: the step failed" in terminal.ask("broken")
        terminal.type("\x04")
        assert terminal.end() == 0 and terminal.is_as_before


def test_retry_set_and_clear_at_a_terminal(chat: Open, tmp_path: Path) -> None:
    with chat() as terminal:
        terminal.ask("hello")
        assert "[max_tokens is 3]" in terminal.ask("/set max_tokens 3")
        assert "HEL\n[cut after 3 tokens" in terminal.ask("/retry")
        assert messages(terminal, tmp_path) == ["hello", "HEL"]
        assert "did you mean 'temperature'?" in terminal.ask("/set tempratur 1")
        terminal.ask("/clear")
        assert messages(terminal, tmp_path) == []


def test_an_answer_breaks_between_words_at_the_width_of_the_terminal(chat: Open) -> None:
    with chat(columns=24) as terminal:
        answer = terminal.ask("the quick brown fox jumps over the lazy dog")
        assert "THE QUICK BROWN FOX\nJUMPS OVER THE LAZY DOG\n" in answer


def test_notices_break_between_words_and_keep_their_columns(chat: Open) -> None:
    with chat(columns=60) as terminal:
        for command in ("/help", "/set"):
            lines = terminal.ask(command).splitlines()
            assert max(map(len, lines)) <= 60
        begun = next(place for place, line in enumerate(lines) if line.startswith("  ignore_eos "))
        assert lines[begun + 1].strip() == "model's"
        assert lines[begun + 1].index("model's") == lines[begun].index("go on past")


def test_a_dumb_terminal_gets_no_control_sequences(tmp_path: Path) -> None:
    with open_terminal(tmp_path, "chat", TERM="dumb") as terminal:
        terminal.wait_for("> ")
        terminal.type("hello\r")
        terminal.wait_for("HELLO\n> ")
        terminal.type("/exit\r")
        assert terminal.end() == 0
        assert "\x1b" not in terminal.written


def test_a_row_of_a_table_goes_on_in_its_last_column() -> None:
    rows = "name  size  said of it in many words\n  - advice in many words\ninfer serve --flag value"
    program = f"from infer.cli.answer import write_rows; write_rows({rows!r})"
    with Terminal(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(ROOT / "src")}, columns=22
    ) as terminal:
        assert terminal.end() == 0
        assert terminal.text == (
            "name  size  said of it\n            in many\n            words\n"
            "  - advice in many\n  words\n"
            "infer serve --flag value\n"  # a command stays whole
        )


def test_an_explanation_breaks_between_words_and_cannot_move_the_cursor() -> None:
    told = b"queue  25 s   69%  ####\n\nIt waited 23 s in the queue\x1b[2J.\n"
    program = (
        "import io, sys; from infer.cli import explain; from infer.cli.main import main\n"
        f"explain.open_url = lambda *args, **options: io.BytesIO({told!r})\n"
        "sys.exit(main(['explain', 'req-1']))"
    )
    with Terminal(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(ROOT / "src")}, columns=24
    ) as terminal:
        assert terminal.end() == 0
        assert terminal.written == (
            "queue  25 s   69%  ####\r\n\r\nIt waited 23 s in the\r\nqueue\\x1b[2J.\r\n"
        )


def test_run_with_a_prompt_answers_and_leaves(tmp_path: Path) -> None:
    with open_terminal(tmp_path, "run", "x", "--seed", "1", "hello") as terminal:
        assert terminal.end() == 0
        assert terminal.text == "HELLO\n"
        assert terminal.is_as_before


def test_help_fits_the_terminal(tmp_path: Path) -> None:
    with open_terminal(tmp_path, "explain", "--help", columns=50) as terminal:
        assert terminal.end() == 0
        help_text, _, examples = terminal.text.partition("examples:\n")
        assert max(map(len, help_text.splitlines())) <= 50
        assert "became of its prompt, and what would" in " ".join(help_text.split())
        assert (
            "  infer explain req-7f21 --url http://gpu-box:8000 --api-key KEY\n" in examples
        )  # can be copied


# -- its parts -----------------------------------------------------------------------------------------------


@pytest.fixture
def narrow() -> Iterator[TextIO]:
    """A terminal of 10 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 10, 0, 0))
    with open(slave, "w", encoding="utf-8") as stream:
        yield stream
    os.close(master)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three", "one two\nthree"),
        ("1234567890 x", "1234567890\nx"),
        ("a  b", "a  b"),
        ("    code\n    more code", "    code\n    more\ncode"),
        ("a word123456789012 b", "a\nword123456789012 b"),
        ("end \n\nnext", "end \n\nnext"),
        ("日本語日本語 abc", "日本語日本\n語 abc"),
        ("cafe\u0301 cafe\u0301", "cafe\u0301 cafe\u0301"),
        ("a\x1b[2Jb\x9b", "a\\x1b[2Jb\\x9b"),
        ("a\rb", "a\\rb"),
    ],
)
def test_lines_break_between_words_however_the_text_comes(narrow: TextIO, text: str, shown: str) -> None:
    for size in (1, 3, 100):
        wrap = WordWrap(narrow)
        pieces = [wrap.feed(text[place : place + size]) for place in range(0, len(text), size)]
        assert "".join(pieces) + wrap.end() == shown


def test_a_word_is_shown_when_it_is_complete(narrow: TextIO) -> None:
    wrap = WordWrap(narrow)
    assert [wrap.feed(piece) for piece in ("he", "llo", " ", "you")] == ["", "", "hello", ""]
    assert (wrap.end(), wrap.end()) == (" you", "")


def test_text_for_a_file_is_left_alone(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        wrap = WordWrap(file)
        assert not is_terminal(file)
        assert wrap.feed("word \x1b\r" * 100) == "word \x1b\r" * 100
        assert wrap.end() == ""


def test_widths_of_characters() -> None:
    assert [char_width(char) for char in "aé日🙂\u0301\u200d"] == [1, 1, 2, 2, 0, 0]


def test_an_old_history_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "infer" / "chat-history.jsonl"
    path.parent.mkdir()
    path.write_text("".join(f'"{number}"\n' for number in range(2 * MAX_KEPT + 5)))
    file = HistoryFile.open()
    assert file is not None
    assert len(path.read_text().splitlines()) == MAX_KEPT
    file.add("new")
    file.add("long" * 5000)
    assert file.read()[-2:] == [str(2 * MAX_KEPT + 4), "new"]


def test_a_history_that_cannot_be_kept_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "infer").write_text("a file in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert HistoryFile.open() is None
    assert "[no history of messages is kept: " in capsys.readouterr().err
