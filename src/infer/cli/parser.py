"""The parser of `infer` and of each of its subcommands: argparse, with errors that help.

    infer serve: error: unknown option --max-batchsize; did you mean --max-batch-size?
    infer serve: error: --port must be a whole number, for example 8000, got 'x'
    infer: error: unknown command 'serv'; did you mean serve?

What other programs call a command is known as well: `infer run` means `generate`.

argparse leaves what a subcommand does not know to the parser above it, which can neither name the
subcommand nor compare with its options. Here each parser complains for itself.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from infer.errors import nearest

ELSEWHERE = {
    "run": "generate",
    "complete": "generate",
    "pull": "fetch",
    "download": "fetch",
    "start": "serve",
    "benchmark": "bench",
    "version": "--version",
}
MODELS_HINT = (
    "'infer fetch MODEL' gets a model and prints where it lies; a server lists its own at /v1/models"
)

KINDS = {int: "a whole number", float: "a number"}  # those of readers.py have such words as their name
REWORDED = (
    (
        re.compile(r"argument ([^\s/]+)\S*: expected (?:one|at least one) argument"),
        r"\1 needs a value behind it",
    ),
    (re.compile(r"argument ([^\s/]+)\S*: ignored explicit argument (.*)"), r"\1 takes no value, got \2"),
)
EXAMPLES = {"X": "0.5", "ID=BIAS": "42=-100"}  # by metavar, where the help of a flag names no default


class Parser(argparse.ArgumentParser):
    """A parser whose subcommands are called `prog NAME`, and that suggests what was meant."""

    def add_subparsers(self, **options: Any) -> argparse._SubParsersAction[Any]:
        """Make room for subcommands; argparse would put our whole usage line before their names."""
        return super().add_subparsers(**{"prog": self.prog, **options})

    def parse_known_args(  # type: ignore[override]  # the overloads of the base differ in the namespace alone
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse, and refuse here what is not known; the list returned is always empty."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._complaint(unknown))
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not among the choices; argparse calls the commands of a parser such, too."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            known = {name: name for name in action.choices}
            here = {*action.choices, *self._option_string_actions}
            known |= {name: ours for name, ours in ELSEWHERE.items() if ours in here}
            match = nearest(value, known)
            hint = f"did you mean {known[match]}?" if match else f"'{self.prog} --help' lists the commands"
            if value in ("list", "ls", "models") and "fetch" in here:
                hint = MODELS_HINT
            self.error(f"unknown command {value!r}; {hint}")
        if action.choices is not None and value not in action.choices:
            self.error(f"{_name(action)} must be one of {', '.join(map(str, action.choices))}, got {value!r}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Read a value; one that cannot be read is refused with what is allowed and an example."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if isinstance(error.__context__, ValueError):
                reader: Any = action.type
                kind = KINDS.get(reader) or reader.__name__
                example = _example(action)
                self.error(f"{_name(action)} must be {kind}, for example {example}, got {arg_string!r}")
            raise

    def error(self, message: str) -> NoReturn:
        """Leave with a message; where it is argparse's own, in our words."""
        for theirs, ours in REWORDED:
            message = theirs.sub(ours, message)
        super().error(message)

    def _complaint(self, unknown: Sequence[str]) -> str:
        options = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
        if not options:
            return f"unexpected argument {unknown[0]!r}; {self._surplus_hint()}"
        known = {name.lstrip("-"): name for name in self._option_string_actions}  # dashes make no two alike
        match = nearest(options[0].lstrip("-"), known)
        hint = f"did you mean {known[match]}?" if match else f"'{self.prog} --help' lists the options"
        return f"unknown option {options[0]}; {hint}"

    def _surplus_hint(self) -> str:
        """What somebody may have meant who wrote one word too many."""
        if any(action.metavar == "PROMPT" for action in self._get_positional_actions()):
            return "quote a text that holds spaces"
        if "--model" in self._option_string_actions:
            return "name a model with --model"
        return f"'{self.prog} --help' shows what it takes"


def _name(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else str(action.metavar)


def _example(action: argparse.Action) -> str:
    """A value that the flag takes: its default, if its help names one."""
    default = re.search(r"\(default: (?:[^)]* )?(-?\d[\d.,e-]*)\)", action.help or "")
    return default[1] if default else EXAMPLES.get(str(action.metavar), "16")
