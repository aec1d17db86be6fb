"""`infer step` on a tiny model: printed without a terminal, browsed with keys in one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from infer.cli.main import main
from infer.cli.stepping import HELP, LeaveSteps, StepScreen
from infer.tools.step_frames import Frame
from scripts.make_checkpoint import make_checkpoint
from tests.unit.cli.terminal import Terminal, infer_command

Infer = Callable[..., Any]
FLAGS = ["--raw", "--dtype", "float32", "--max-tokens", "4", "--seed", "5", "--num-blocks", "40"]
FLAGS += ["--ignore-eos", "--log-level", "error"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-qwen3"
    make_checkpoint("qwen3", folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(list(words))
    return code, capsys.readouterr().out


def steps_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^step (\d+): ", text, re.MULTILINE)]


def test_without_a_terminal_all_steps_are_printed_and_then_the_answers(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, "step", "the river", "the sea", "--model", str(model), *FLAGS)
    assert code == 0
    assert steps_in(text) == [1, 2, 3, 4]
    assert text.count("\nsampled\n") == 4 and "A   length" in text and "B   length" in text
    _, plain = run(capsys, "generate", "the river", "--model", str(model), *FLAGS)
    assert f"\n[the river]\n{plain.rstrip(chr(10))}\n" in text


def test_watch_goes_by_itself_and_n_forks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("the river", "-n", "2", "--watch", "0", "--top", "2", "--model", str(model), *FLAGS)
    code, text = run(capsys, "step", *words)
    assert code == 0 and "forks into 2" in text
    assert text.count("[the river]") == 2
    first = text[text.index("      model") :].splitlines()[1:]
    shown = [line for line in first[: next(i for i, s in enumerate(first) if "id " in s)] if "%" in line]
    assert 2 <= len(shown) <= 3


def test_generate_steps_through_its_prompts_and_a_record_of_it_too(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = str(tmp_path / "run.jsonl")
    words = ("the river", "--record", record, "--model", str(model), *FLAGS)
    code, text = run(capsys, "generate", "--step", *words)
    assert code == 0 and steps_in(text) == [1, 2, 3, 4]
    code, again = run(capsys, "replay", record, "--step", "--model", str(model))
    assert code == 0 and again.endswith("4 steps, 4 tokens, identical\n")

    def without_times(frames: str) -> str:
        return re.sub(r", [\d.]+ ms$", "", frames, flags=re.MULTILINE)

    frames = without_times(text)[: without_times(text).index("\n[the river]")]
    assert without_times(again).startswith(frames.rstrip("\n"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step", "hi", "--url", "http://127.0.0.1:1"], "--url leaves the engine to a server"),
        (["step", "hi", "--use-overlap"], "steps are watched one at a time, so they cannot overlap"),
        (["step", "hi", "--raw", "--system", "x"], "--system needs the chat template that --raw turns off"),
        (["generate", "hi", "--step", "--json"], "--step shows the steps of an engine here"),
        (["replay", "RECORD", "--watch"], "--watch shows step after step; give it with --step"),
        (["replay", "RECORD", "--step", "--orders"], "--orders runs without a scheduler"),
    ],
)
def test_what_cannot_be_stepped_through_is_refused(infer: Infer, words: Sequence[str], message: str) -> None:
    outcome = infer(*words)
    assert outcome.code == 2
    assert outcome.err.startswith(f"infer: error: {message}")


def test_keys_move_between_the_steps_of_a_run(model: Path) -> None:
    words = infer_command("step", "the river", "--model", str(model), *FLAGS)
    with Terminal(words, env={"HF_HUB_OFFLINE": "1"}, columns=100, timeout_s=180.0) as terminal:
        terminal.wait_for("[step 1 of 1]")
        terminal.type(" ")
        terminal.wait_for("[step 2 of 2]")
        terminal.type("b")
        assert "step 1: " in terminal.wait_for("[step 1 of 2]")
        terminal.type("\r")
        terminal.wait_for("[step 2 of 2]")
        terminal.type("?")
        assert "show the step before" in terminal.wait_for("[step 2 of 2]")
        terminal.type("n4\r")
        assert "step 3: " not in terminal.wait_for("[step 4 of 4, the last one]")
        terminal.type("n1\r")
        assert "step 1: " in terminal.wait_for("[step 1 of 4, the last one]")
        terminal.type("n9\r")
        terminal.wait_for("n needs the number of an existing step")
        terminal.type("n4\r")
        terminal.wait_for("[step 4 of 4, the last one]")
        terminal.type(" ")
        terminal.wait_for("[the river]")
        assert terminal.end() == 0
        assert terminal.is_as_before


def test_a_frame_taller_than_the_terminal_is_shown_page_by_page(model: Path) -> None:
    words = infer_command("step", "the river", "--top", "20", "--model", str(model), *FLAGS)
    with Terminal(words, env={"HF_HUB_OFFLINE": "1"}, columns=200, timeout_s=180.0) as terminal:
        first = terminal.wait_for("(d down, u up)")
        assert "step 1: " in first and "blocks" not in first and "lines 1 to 21 of " in first
        terminal.type("d")
        second = terminal.wait_for("(d down, u up)")
        assert "step 1: " not in second and "lines 22 to " in second
        terminal.type("u")
        assert "step 1: " in terminal.wait_for("lines 1 to 21 of ")
        terminal.type("q")  # leaves at once: no further step is computed
        assert terminal.end() == 0
        assert "[step 2" not in terminal.text and "[the river]" not in terminal.text
        assert terminal.is_as_before


def test_a_line_wider_than_the_terminal_goes_on_in_the_next(model: Path) -> None:
    words = infer_command("step", "the river", "--model", str(model), *FLAGS)
    with Terminal(words, env={"HF_HUB_OFFLINE": "1"}, columns=70, timeout_s=180.0) as terminal:
        terminal.wait_for("step 1: ")
        frame = terminal.wait_for("[step 1 of 1]")
        assert max(map(len, frame.splitlines())) < 70
        assert ".: free" in frame.replace("\n", "")  # the end of the longest line
        terminal.type("q")
        assert terminal.end() == 0


def test_help_names_every_key() -> None:
    assert all(
        re.search(rf"^{key}", HELP, re.MULTILINE) for key in ("space", "b ", "n 12", "d, u", "q", r"\?")
    )


def test_a_screen_that_is_no_terminal_waits_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    screen = StepScreen()
    with screen.keys():
        screen.show(Frame(1, "one\n"))
        screen.show(Frame(2, "two\n"), is_last=True)
        screen.end()
        assert not screen.is_left
        raise LeaveSteps
    assert screen.is_left
    assert capsys.readouterr().out == "one\n\ntwo\n"
