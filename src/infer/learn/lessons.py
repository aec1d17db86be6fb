"""The lessons in order, and the check of one file in a separate process.

A student's file may loop forever, use up all memory, or exit the process. So `check_file` starts this module
as a program and reads how it ended:

    infer learn check ──► python -m infer.learn.lessons 4 blocks.py ──► "right", or the fault
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

from infer.errors import ConfigError, nearest
from infer.learn.student import Student

LESSONS: Final = (
    "one_token", "kv_cache", "batching", "paging", "prefixes", "chunks", "scheduling", "sampling",
    "quantization", "speculation", "constraints", "parallelism",
)  # fmt: skip
CHECK_SECONDS: Final = 60
RIGHT: Final = "right\n"  # last line of a check that found nothing


class CheckResult(NamedTuple):
    """The result of a check."""

    is_right: bool
    message: str  # the fault, if there is one


def find_lesson(text: str) -> str:
    """Return the name of a lesson, given its number or name."""
    name = text.replace("-", "_")
    if text.isdigit() and 1 <= int(text) <= len(LESSONS):
        return LESSONS[int(text) - 1]
    if name in LESSONS:
        return name
    like = nearest(name, LESSONS)
    meant = f"; did you mean {like}?" if like else f": {', '.join(LESSONS)}"
    raise ConfigError(f"there is no lesson {text!r}; they are numbered 1 to {len(LESSONS)}{meant}")


def module_of(lesson: str) -> Any:
    """Return the module of a lesson: TITLE, STARTER and `check`."""
    return importlib.import_module(f"infer.learn.{lesson}")


def check_file(lesson: str, path: Path, *, seconds: float = CHECK_SECONDS) -> CheckResult:
    """Check a file in a new process."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; name a Python file in it")
    if not path.is_file():
        raise ConfigError(
            f"there is no file {path}; 'infer learn start {LESSONS.index(lesson) + 1} {path}' writes one to "
            "begin with"
        )
    # -P and our own path: a file called token.py must not take the place of Python's module
    command = [sys.executable, "-P", "-m", "infer.learn.lessons", lesson, str(path)]
    own_path = {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=os.environ | own_path,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CheckResult(False, f"it did not end within {seconds:g} s: is there an endless loop?")
    if done.returncode == 0:
        is_whole = done.stdout.endswith(RIGHT)
        return CheckResult(is_whole, "" if is_whole else "it ended the process before the check was complete")
    if done.returncode == 1 and done.stdout:
        return CheckResult(False, done.stdout.strip())
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return CheckResult(False, f"the process was ended by {name}: memory may have run out")
    last = (done.stderr.strip().splitlines() or ["there is no output"])[-1]
    return CheckResult(False, f"the process ended with code {done.returncode}: {last}")


def main(lesson: str, path: Path) -> int:
    """Check a file in this process; prints the fault."""
    student = Student(path)
    try:
        student.load()
        module_of(lesson).check(student)
    except (Exception, SystemExit) as error:
        print(student.spell(error))
        return 1
    print(RIGHT, end="")
    return 0


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # the engine would log the same faults
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
