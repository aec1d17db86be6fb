from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer import __version__
from infer.__main__ import main as open_door
from infer.cli import fetch
from infer.cli.interrupts import importing
from infer.log import progress, setup_logging
from tests.support.server_process import is_alive, wait_until
from tests.unit.cli.fake_llm import FakeLLM

Infer = Callable[..., Any]


def test_version_and_help_leave_with_success(infer: Infer) -> None:
    assert infer("--version").out == f"infer {__version__}\n"
    outcome = infer("--help")
    assert outcome.code == 0
    assert "generate" in outcome.out
    assert "chat" in outcome.out


@pytest.mark.parametrize("command", [[], ["serve"], ["bench", "serve"]])
def test_help_is_a_command_too(infer: Infer, command: list[str]) -> None:
    outcome = infer("help", *command)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == infer(*command, "--help").out


def test_no_command_shows_the_help_on_standard_error(infer: Infer) -> None:
    outcome = infer()
    assert (outcome.code, outcome.out) == (2, "")
    assert "hold a conversation in the terminal" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["serve", "--port", "x"],
            "infer serve: error: --port must be a whole number, for example 8000, got 'x'",
        ),
        (["bench", "serve"], "infer: error: which server? give --url http://host:port, or --host and --port"),
        (["bench", "trace"], "infer bench trace: error: the following arguments are required: --url"),
        *(
            (
                [*words, "--nonsense", "x"],
                f"infer {' '.join(words)}: error: unknown option --nonsense; "
                f"'infer {' '.join(words)} --help' lists the options",
            )
            for words in (["quantize"], ["replay"], ["bench", "serve"], ["bench", "compare"])
        ),
        (
            ["bench", "trace", "--prompt-len=8"],
            "infer bench trace: error: the following arguments are required: --url",
        ),
        (["serv"], "infer: error: unknown command 'serv'; did you mean serve?"),
        (["pull"], "infer: error: unknown command 'pull'; did you mean fetch?"),
        (["benchmark"], "infer: error: unknown command 'benchmark'; did you mean bench?"),
        (["version"], "infer: error: unknown command 'version'; did you mean --version?"),
        (["help", "serv"], "infer: error: unknown command 'serv'; did you mean serve?"),
        (["ls"], "infer: error: unknown command 'ls'; did you mean list?"),
        (["models"], "infer: error: unknown command 'models'; did you mean list?"),
        (
            ["bench", "pull"],
            "infer bench: error: unknown command 'pull'; 'infer bench --help' lists the commands",
        ),
        (["bench", "off"], "infer bench: error: unknown command 'off'; did you mean offline?"),
        (["xyzzy"], "infer: error: unknown command 'xyzzy'; 'infer --help' lists the commands"),
        (["--verison"], "infer: error: unknown option --verison; did you mean --version?"),
        (
            ["serve", "--max-batchsize=8"],
            "infer serve: error: unknown option --max-batchsize; did you mean --max-batch-size?",
        ),
        (
            ["bench", "compare", "a", "b", "--nois", "1"],
            "infer bench compare: error: unknown option --nois; did you mean --noise?",
        ),
        (
            ["generate", "hi", "--xyzzy"],
            "infer generate: error: unknown option --xyzzy; 'infer generate --help' lists the options",
        ),
        (
            ["generate", "two", "words"],
            "infer generate: error: unexpected argument 'words'; quote a text that holds spaces",
        ),
        (["chat", "a", "b"], "infer chat: error: unexpected argument 'b'; name a model with --model"),
        (
            ["chat", "a", "--model", "b"],
            "infer: error: two models are named, 'a' and --model 'b'; give one of them",
        ),
        (["serve", "a", "b"], "infer serve: error: unexpected argument 'b'; name a model with --model"),
        (
            ["doctor", "who"],
            "infer doctor: error: unexpected argument 'who'; 'infer doctor --help' shows what it takes",
        ),
    ],
)
def test_a_wrong_argument_is_blamed_on_its_command_and_the_option_meant_is_named(
    infer: Infer, arguments: list[str], message: str
) -> None:
    outcome = infer(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines()[-1] == message


@pytest.mark.parametrize("command", [(), ("serve",), ("bench",), ("bench", "compare")])
def test_every_usage_line_begins_with_the_command_as_it_is_typed(
    infer: Infer, command: tuple[str, ...]
) -> None:
    usage = infer(*command, "--help").out.splitlines()[0]
    assert usage.startswith(" ".join(["usage: infer", *command]) + " ")
    assert usage.count("infer") == 1


def test_an_error_is_one_line_and_its_traceback_waits_for_debug(infer: Infer) -> None:
    assert "Traceback" not in infer("generate", "").err
    outcome = infer("generate", "", "--debug")
    assert outcome.code == 2
    assert "Traceback" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("infer: error: the prompt is empty")


def test_an_interrupt_is_exit_code_130(infer: Infer) -> None:
    llm = FakeLLM()

    def interrupt(index: int) -> None:
        raise KeyboardInterrupt

    llm.before_token = interrupt
    outcome = infer("generate", "hi", llm=llm)
    assert (outcome.code, outcome.err) == (130, "")


def test_a_bug_is_not_dressed_up_as_a_users_mistake(infer: Infer) -> None:
    llm = FakeLLM()

    def break_down(index: int) -> None:
        raise ZeroDivisionError

    llm.before_token = break_down
    with pytest.raises(ZeroDivisionError):
        infer("generate", "hi", llm=llm)


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """`infer ... | head -1`, with a reader that closes the pipe before anything is written."""
    script = (
        "import sys, time\n"
        "from infer.cli import fetch, main\n"
        "from infer.cli.answer import write_out\n"
        "fetch.run = lambda args: [write_out('text' * 1000) for _ in range(1000)] and 0\n"
        "sys.exit(main.main(['fetch']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_streams_that_were_closed_by_who_started_us_are_no_error() -> None:
    """`infer ... <&- >&- 2>&-`: Python then has None in the place of each."""
    script = (
        "import sys\n"
        "from infer.cli import fetch, main\n"
        "from infer.cli.answer import notice, write_out\n"
        "fetch.run = lambda args: len(sys.stdin.read()) or write_out('text') or notice('text') or 0\n"
        "sys.exit(main.main(['fetch']))"
    )
    closing = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", script]
    assert subprocess.run(closing, timeout=120).returncode == 0


def test_a_letter_the_terminal_cannot_show_does_not_end_the_program(
    infer: Infer, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    outcome = infer("generate", "ü!")
    assert outcome.code == 0
    assert raw.getvalue() == b"?!\n"


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_piped_bytes_that_are_not_utf8_are_called_that(infer: Infer, command: str) -> None:
    outcome = infer(command, stdin="grüß\n".encode("latin-1"))
    assert outcome.code != 0
    assert "standard input is not UTF-8" in outcome.err


def test_coloured_help_still_gives_names_and_examples(infer: Infer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14 colours the help that a terminal shows."""
    plain = ArgumentParser.format_help
    monkeypatch.setattr(
        ArgumentParser, "format_help", lambda self: re.sub(r"(--[\w-]+)", "\x1b[1;36m\\1\x1b[0m", plain(self))
    )
    assert "did you mean --max-batch-size?" in infer("serve", "--max-batchsize", "3").err
    assert "for example 8000" in infer("serve", "--port", "x").err


def test_fetch_prints_where_the_model_lies(infer: Infer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    outcome = infer("fetch", str(tmp_path))
    assert (outcome.code, outcome.out) == (0, f"{tmp_path}\n")


def test_fetch_of_a_path_that_is_not_there_is_a_clear_error(infer: Infer, tmp_path: Path) -> None:
    outcome = infer("fetch", str(tmp_path / "absent"))
    assert outcome.code == 2
    assert outcome.err.startswith("infer: error: ")
    assert fetch.__doc__


def test_log_lines_go_to_standard_error_from_the_asked_level_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("info")
    logging.getLogger("infer.part").info("heard")
    logging.getLogger("infer.part").debug("not heard")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("INFO infer.part: heard\n")


def test_a_bar_is_not_drawn_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("loading", 3) as advance:
        advance(3)
    assert capsys.readouterr().err == ""


def test_a_bar_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("loading", 3, counts_bytes=True) as advance:
        advance(3)
    assert "loading" in terminal.getvalue()


@pytest.mark.parametrize("total", [9e8, None])
def test_a_bar_fits_the_terminal_and_has_no_question_mark(
    monkeypatch: pytest.MonkeyPatch, total: float | None
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    with progress("loading a-model, rounding weights to int4" * 2, total, counts_bytes=True) as advance:
        advance(1e8)
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()))
    drawn = [line for line in lines if "loading" in line]
    assert drawn and all(len(line) <= 80 and "?" not in line for line in lines)


IMPATIENT = """
import os, signal, sys

class CtrlC:  # pressed while a module of the command line is looked for
    def find_spec(self, name, path=None, target=None):
        if name == "{pressed_at}":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:  # as the import system may do it
                raise TypeError("expected a message argument") from None

signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent process may ignore it
sys.meta_path.insert(0, CtrlC())
{door}
"""


@pytest.mark.parametrize(
    "door",
    [
        "from infer.__main__ import main; sys.exit(main())",
        "import runpy; runpy.run_module('infer', run_name='__main__')",
        "import runpy; runpy.run_module('infer.server', run_name='__main__')",
    ],
)
def test_ctrl_c_while_importing_ends_quietly(door: str) -> None:
    command = [sys.executable, "-c", IMPATIENT.format(pressed_at="infer.cli.flags", door=door)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "hi"],
        ["chat"],
        ["plan"],
        ["doctor"],
        ["replay", "a-record"],
        ["bench", "offline", "--tiny"],
    ],
)
def test_ctrl_c_while_torch_is_imported_ends_quietly(arguments: list[str]) -> None:
    """It takes seconds, and what Ctrl-C raises in it is lost or comes out as an ImportError."""
    door = f"from infer.__main__ import main; sys.exit(main({arguments}))"
    command = [sys.executable, "-c", IMPATIENT.format(pressed_at="torch", door=door)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


NOTING = """
from infer.client import spawn
start = spawn.spawn
def note(module):
    process = start(module)
    print(process.pid, flush=True)
    return process
spawn.spawn = note
from infer.__main__ import main
sys.exit(main(["serve"]))
"""


def test_ctrl_c_while_a_server_is_imported_ends_its_engine_process_too() -> None:
    """It was started ahead, and nothing is cleaned up: it ends because its standard input does."""
    command = [sys.executable, "-c", IMPATIENT.format(pressed_at="fastapi", door=NOTING)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "")
    wait_until(lambda: not is_alive(int(done.stdout)))


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_ctrl_c_is_given_back_also_by_an_import_that_fails(handler: signal.Handlers) -> None:
    previous = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(ImportError), importing():
            assert (signal.getsignal(signal.SIGINT) is handler) == (handler is signal.SIG_IGN)
            raise ImportError
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("handler", ["default_int_handler", "SIG_IGN"])
def test_ctrl_c_means_afterwards_what_it_meant_before(handler: str) -> None:
    code = (
        "import signal\nfrom infer.__main__ import main\n"
        f"signal.signal(signal.SIGINT, signal.{handler})\n"
        "try: main(['--version'])\nexcept SystemExit: pass\n"
        f"assert signal.getsignal(signal.SIGINT) is signal.{handler}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_that_is_not_pythons_business_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        signal, "getsignal", lambda number: None
    )  # set by an embedding program, not from Python
    with pytest.raises(SystemExit, match="0"):
        open_door(["--version"])


def test_nothing_is_imported_before_ctrl_c_is_looked_after() -> None:
    """Python's own start is not looked after; without `site` it has imported little."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(fetch.__file__).parents[2])!r}); import os\n"
        "before = set(sys.modules)\nimport infer.__main__\nprint(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert done.stdout == "['__future__', 'infer', 'infer.__main__']\n", done.stderr


def test_the_installed_command_enters_by_the_door_that_can_be_interrupted() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"infer": "infer.__main__:main"}
