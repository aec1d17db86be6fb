"""A student's file: load it, get its definitions, and explain its faults in words."""

from __future__ import annotations

import contextlib
import io
import traceback
from pathlib import Path
from typing import Any

from infer.config.own_code import load_file
from infer.errors import InferError


class Wrong(Exception):
    """A fault in a student's file, with a message that says what to change."""


class Student:
    """The definitions in a student's file. `doing` describes the current step of a check."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.doing = "reading the file"
        self._module: Any = None

    def load(self) -> None:
        """Run the file; its output is not shown."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._module = load_file(self.path)

    def get(self, name: str) -> Any:
        """Return a function or class that the file defines."""
        found = getattr(self._module, name, None)
        if found is None:
            raise Wrong(
                f"{self.path.name} defines no {name}; the file to begin with shows what it looks like"
            )
        if not callable(found):
            raise Wrong(f"{name} in {self.path.name} is {found!r}; it must be a function or a class")
        return found

    def spec(self, name: str) -> str:
        """Return the name of a definition in the file, as a knob accepts it (config/own_code.py)."""
        self.get(name)
        return f"{self.path.resolve()}:{name}"

    def spell(self, error: BaseException) -> str:
        """Describe an error, with the line of the file that it came from."""
        if isinstance(error, Wrong):
            return str(error)
        while isinstance(error, InferError) and error.__cause__ is not None:
            error = error.__cause__  # the engine wraps exceptions of the student's code
        if isinstance(error, SyntaxError):
            return f"line {error.lineno} of {self.path.name} is not Python: {error.msg}"
        said = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        name = str(self.path.resolve())
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name
        ]
        where = (
            f"line {lines[-1]} of {self.path.name}" if lines else "the engine, with what your code returned"
        )
        return f"{said}\n  in {where}, while {self.doing}"


def expect(is_right: bool, message: str) -> None:
    """Raise `Wrong` unless `is_right`."""
    if not is_right:
        raise Wrong(message)


def expect_int(value: object, what: str) -> int:
    """Return a whole number that a student's code returned."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise Wrong(f"{what} must be a whole number, got {value!r}")
    return int(value.__index__())


def expect_ints(values: object, what: str) -> list[int]:
    """Return a list of whole numbers that a student's code returned."""
    try:
        found = list(values)  # type: ignore[call-overload]  # any other type is an error
    except TypeError:
        raise Wrong(f"{what} must be a list of whole numbers, got {values!r}") from None
    return [expect_int(value, f"number {place} of {what}") for place, value in enumerate(found)]
