"""`infer learn`: the lessons of docs/learn, a file to begin with, and a check of the learner's file."""

from __future__ import annotations

import argparse
from pathlib import Path

from infer.cli import flags
from infer.cli.answer import notice, write_out
from infer.errors import ConfigError

HELP = "learn how an engine works: twelve lessons with exercises"
DESCRIPTION = (
    "Twelve lessons build an engine, one idea each. In the exercise of a lesson you write one\n"
    "part of it in a Python file; the check runs that file, in the real engine where it can, and reports\n"
    "the first mistake. The file runs with your rights: check only files that you trust."
)
USAGE = "[start | check] [LESSON FILE]"
EXAMPLES = """\
examples:
  infer learn                       the lessons
  infer learn start 7 policy.py     a file to begin with
  infer learn check 7 policy.py
"""
ROOT = Path(__file__).parents[3]  # the repository, if the package runs from one
PAGES = "docs/learn"
FLAGS: flags.Rows = {
    "lesson [LESSON]": (str, "number or name of a lesson"),
    "file [FILE]": (Path, "your Python file"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    what = ("start", "check")
    parser.add_argument("what", nargs="?", metavar="ACTION", choices=what, help="write a file, or check it")
    flags.add_rows(parser, FLAGS)
    flags.add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    """List the lessons, write a file to begin with, or check one."""
    from infer.learn.lessons import LESSONS, check_file, find_lesson, module_of

    if args.what is None:
        has_pages = (ROOT / PAGES).is_dir()
        for number, name in enumerate(LESSONS, 1):
            page = f"{PAGES}/{number:02}-{name.replace('_', '-')}.md" if has_pages else ""
            write_out(f"{number:>3}  {module_of(name).TITLE:<22} {page}".rstrip() + "\n")
        if not has_pages:
            notice(f"a page for each lesson is in the repository, in {PAGES}; an installed package has none")
        notice("'infer learn start 1 FILE' writes a file to begin with")
        return 0
    if args.lesson is None or args.file is None:
        raise ConfigError(f"say which lesson and which file: infer learn {args.what} 1 my_file.py")
    if args.file.suffix != ".py" and not args.file.is_dir():
        raise ConfigError(f"the name of your Python file must end in .py, got {args.file}")
    lesson = find_lesson(args.lesson)
    number = LESSONS.index(lesson) + 1
    if args.what == "start":
        _start(args.file, module_of(lesson).STARTER)
        notice(f"{args.file} is written; when your part is done, check it:")
        notice(f"infer learn check {number} {args.file}")  # a line that can be copied
        return 0
    verdict = check_file(lesson, args.file)
    if verdict.is_right:
        following = f"; next: infer learn start {number + 1} FILE" if number < len(LESSONS) else ""
        write_out(f"lesson {number} is right{following}\n")
        return 0
    write_out(f"lesson {number} is not right yet: {verdict.message}\n")
    return 1


def _start(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there already; name another file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
