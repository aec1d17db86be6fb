"""Every exercise takes a right solution, and says what is wrong with other files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from infer.cli.main import build_parser
from infer.cli.main import main as infer
from infer.learn.lessons import LESSONS, check_file, find_lesson, main, module_of
from tests.unit.learn.solutions import RIGHT, WRONG

ROOT = Path(__file__).parents[3]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("lesson", LESSONS)
def test_right_solution_passes(lesson: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(lesson, write(tmp_path, RIGHT[lesson]))
    assert (code, capsys.readouterr().out) == (0, "right\n")


@pytest.mark.parametrize("lesson", LESSONS)
def test_wrong_solution_is_told_what_is_wrong(
    lesson: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after, said = WRONG[lesson]
    assert before in RIGHT[lesson]
    code = main(lesson, write(tmp_path, RIGHT[lesson].replace(before, after)))
    assert code == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("lesson", LESSONS)
def test_starter_is_python_and_says_what_is_missing(
    lesson: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(lesson, write(tmp_path, module_of(lesson).STARTER)) == 1
    out = capsys.readouterr().out
    assert "NotImplementedError" in out
    assert "of mine.py, while" in out, "the line of the file is named"


@pytest.mark.parametrize("lesson", LESSONS)
def test_lesson_has_a_page_that_names_its_exercise(lesson: str) -> None:
    number = LESSONS.index(lesson) + 1
    page = (ROOT / "docs/learn" / f"{number:02}-{lesson.replace('_', '-')}.md").read_text("utf-8")
    assert f"infer learn check {number} " in page
    assert module_of(lesson).TITLE in page.splitlines()[0]


def test_syntax_error_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("one_token", write(tmp_path, "def generate(:\n    pass\n")) == 1
    assert "line 1 of mine.py is not Python" in capsys.readouterr().out


def test_missing_name_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("chunks", write(tmp_path, "x = 1\n")) == 1
    assert "mine.py defines no chunks" in capsys.readouterr().out


def test_endless_loop_is_ended(tmp_path: Path) -> None:
    verdict = check_file("batching", write(tmp_path, "while True: pass\n"), seconds=2)
    assert not verdict.is_right
    assert "an endless loop" in verdict.message


def test_file_may_have_the_name_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("token.py", "random.py", "numpy.py"):
        path = Path(name)
        path.write_text(RIGHT["batching"], encoding="utf-8")
        verdict = check_file("batching", path)
        assert verdict.is_right, verdict.message
        path.unlink()


def test_file_that_ends_the_process_is_not_right(tmp_path: Path) -> None:
    for text in ("import os; os._exit(0)\n", "import sys; sys.exit(0)\n"):
        assert not check_file("batching", write(tmp_path, text)).is_right


def test_command_starts_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chunks.py"
    assert infer(["learn", "start", "6", str(path)]) == 0
    assert path.read_text("utf-8") == module_of("chunks").STARTER
    assert infer(["learn", "start", "6", str(path)]) == 2, "a file is never overwritten"
    assert infer(["learn", "check", "6", str(path)]) == 1
    assert "lesson 6 is not right yet: NotImplementedError" in capsys.readouterr().out
    path.write_text(RIGHT["chunks"], encoding="utf-8")
    assert infer(["learn", "check", "chunks", str(path)]) == 0
    assert "lesson 6 is right" in capsys.readouterr().out


def test_list_has_all_lessons(capsys: pytest.CaptureFixture[str]) -> None:
    assert infer(["learn"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [str(number) for number in range(1, 13)]


def test_an_installed_package_says_where_the_pages_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.cli.learn.ROOT", tmp_path)  # where a wheel is installed there is no docs/
    assert infer(["learn"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "  1  One token at a time" and "docs" not in said.out
    assert "a page for each lesson is in the repository, in docs/learn" in said.err


def test_unknown_lesson_and_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert infer(["learn", "check", "13", "x.py"]) == 2
    assert infer(["learn", "check", "1", str(tmp_path / "none.py")]) == 2
    assert infer(["learn", "check", "1"]) == 2
    err = capsys.readouterr().err
    assert "there is no lesson '13'" in err and "there is no file" in err and "say which lesson" in err
    assert find_lesson("kv-cache") == "kv_cache"


@pytest.mark.parametrize("action", ["start", "check"])
def test_the_file_of_a_lesson_must_end_in_py(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.txt"
    if action == "check":
        file.write_text("def generate(): ...\n")
    assert infer(["learn", action, "1", str(file)]) == 2
    assert f"the name of your Python file must end in .py, got {file}" in capsys.readouterr().err
    assert file.exists() is (action == "check")


PAGES = sorted((ROOT / "docs/learn").glob("*.md"))
ROW = re.compile(r"^\w+ +\d+ +[\d.]+ .*$", re.MULTILINE)  # one policy and cache size of a simulation


def commands(page: Path) -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_are_known_to_the_command_line(page: Path) -> None:
    for program, *words in commands(page):
        assert program == "infer"
        build_parser(words[:1]).parse_args(words)  # leaves with an error where a flag is not known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_simulations_of_a_page_print_what_it_shows(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulations = [words for _, *words in commands(page) if words[0] == "simulate"]
    assert all(infer(words) == 0 for words in simulations)
    printed = [row.split() for row in ROW.findall(capsys.readouterr().out)]
    shown = re.findall(r"^```text\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for row in [line.split() for block in shown for line in block.splitlines()]:
        assert any(each[: len(row)] == row for each in printed), row
