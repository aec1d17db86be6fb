"""The parser of `infer` and of each of its subcommands: argparse, with errors that help.

    infer serve: error: unknown option --max-batchsize; did you mean --max-batch-size?
    infer serve: error: --port must be a whole number, for example 8000, got 'x'
    infer: error: unknown command 'serv'; did you mean serve?

The names of commands in other programs are known as well: for `infer pull` the message suggests `fetch`.

argparse reports a mistake through `error`, and a subcommand leaves unknown options to the parser above it.
Here each parser refuses them itself, and `error` rewords argparse's messages; the names that a message
suggests, and the example of a value, are read from the help text. Only public methods are overridden.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TextIO, cast

from infer.cli.readers import KINDS
from infer.cli.terminal import columns_of
from infer.config.settings import knob_table
from infer.errors import nearest

MOVED_BENCHES = ("matrix", "backends", "attention", "memory", "startup", "policies")
ELSEWHERE = {
    "complete": "generate", "pull": "fetch", "download": "fetch", "ls": "list", "models": "list",
    "remove": "rm", "delete": "rm", "start": "serve", "benchmark": "bench", "version": "--version",
}  # fmt: skip

# values by metavar, where the help of a flag names no default
EXAMPLES = {"X": "0.5", "ID=BIAS": "42=-100", "GB/S": "450", "US": "6"}


HELP_COLUMNS = 100  # width of help texts in pipes, files and wide terminals
COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # what argparse of Python 3.14 writes to terminals


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A formatter for help of a fixed width, or of the width of a narrower terminal."""

    def __init__(self, prog: str, *, columns: int = HELP_COLUMNS) -> None:
        super().__init__(prog, max_help_position=28, width=min(columns, HELP_COLUMNS))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Return a description or examples; if a line is too long, paragraphs are broken anew.

        Indented lines stay whole: they are commands to copy.
        """
        if max(map(len, text.splitlines()), default=0) <= width:
            return super()._fill_text(text, width, indent)
        joined = re.sub(r"^(\S.*)\n(?=\S)", r"\1 ", text, flags=re.MULTILINE)
        lines = (line if line.startswith(" ") else _fold(line, width) for line in joined.splitlines())
        return "\n".join(lines) + "\n"

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Return the lines of a help text; names of flags and files stay whole."""
        return _fold(" ".join(text.split()), width).split("\n")


def _fold(line: str, width: int) -> str:
    return textwrap.fill(line, width, break_on_hyphens=False, break_long_words=False)


class Parser(argparse.ArgumentParser):
    """A parser whose subcommands are called `prog NAME`, and that suggests the intended word."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, "allow_abbrev": False, **options})
        self._given: Sequence[str] = ()

    def add_subparsers(self, **options: Any) -> argparse._SubParsersAction[Any]:
        """Add subcommands; argparse would put the whole usage line before their names."""
        return super().add_subparsers(**{"prog": self.prog, **options})

    def parse_known_args(  # type: ignore[override]  # the overloads of the base differ in the namespace alone
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse, and refuse unknown options here; the list returned is always empty."""
        self._given = list(args or ())
        parsed, unknown = super().parse_known_args(args, namespace)
        if len(unknown) == 1 and not unknown[0].startswith("-") and getattr(parsed, "prompt", "") is None:
            parsed.prompt = unknown.pop()  # run MODEL --flag PROMPT: argparse expects them side by side
        if unknown:
            self.error(self._complaint(unknown))
        return parsed, unknown

    def print_help(self, file: Any = None) -> None:
        """Print the help; the lines fit the terminal that shows them."""
        stream = cast("TextIO", sys.stdout if file is None else file)
        if (columns := columns_of(stream)) is not None:
            self.formatter_class = partial(HelpFormatter, columns=max(columns - 2, 1))
        super().print_help(file)

    def error(self, message: str) -> NoReturn:
        """Exit with a message; messages of argparse are reworded."""
        for theirs, reworded in self._rewordings().items():
            if match := re.fullmatch(theirs, message, re.DOTALL):
                super().error(reworded(match))
        super().error(message)

    def _rewordings(self) -> dict[str, Callable[[re.Match[str]], str]]:
        """Return each message of argparse as a pattern, with the function that rewords it."""
        return {
            r"argument ([^\s/:]+)\S*: expected (?:one|at least one) argument": (
                lambda match: f"{match[1]} needs a value after it; '{self.prog} --help' says which"
            ),
            r"argument ([^\s/:]+)\S*: ignored explicit argument (.*)": (
                lambda match: f"{match[1]} takes no value, got {match[2]}"
            ),
            r"argument ([^\s/:]+)\S*: invalid (.*?) value: (.*)": self._wrong_value,
            r"(the following arguments are required: .*)": self._missing,
            r"ambiguous option: (\S+) could match .*": lambda match: self._complaint([match[1]]),
            r"argument (\S+?)(?:/\S+)?: invalid choice: (.*) \(choose from (.*)\)": self._wrong_choice,
        }

    def _missing(self, match: re.Match[str]) -> str:
        """Report an unknown option before a missing argument, which may have been taken as its value."""
        names = {
            word.partition("=")[0]: word for word in self._given if word.startswith("--") and word != "--"
        }
        unknown = [word for name, word in names.items() if name not in self._option_string_actions]
        return self._complaint(unknown) if unknown else match[1]

    def _wrong_value(self, match: re.Match[str]) -> str:
        name, kind, value = match.groups()
        return f"{name} must be {KINDS.get(kind, kind)}, for example {self._example(name)}, got {value}"

    def _wrong_choice(self, match: re.Match[str]) -> str:
        name, value, choices = match[1], match[2], match[3].replace("'", "").split(", ")
        if name != "COMMAND":
            return f"{name} must be one of {', '.join(choices)}, got {value}"
        given = value.strip("'\"")
        here = {*choices, *self._options()}
        known = {each: each for each in choices} | {n: ours for n, ours in ELSEWHERE.items() if ours in here}
        if self.prog.endswith(" bench") and given in MOVED_BENCHES:
            return f"{given} is a command of 'python -m benchmarks.bench', in a checkout of the source"
        found = nearest(given, known)
        hint = f"did you mean {known[found]}?" if found else f"'{self.prog} --help' lists the commands"
        return f"unknown command {given!r}; {hint}"

    def _complaint(self, unknown: Sequence[str]) -> str:
        options = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
        if not options:
            return f"unexpected argument {unknown[0]!r}; {self._surplus_hint()}"
        known = {name.lstrip("-"): name for name in self._options()}  # no two names differ in dashes only
        match = nearest(options[0].lstrip("-"), known)
        hint = f"did you mean {known[match]}?" if match else f"'{self.prog} --help' lists the options"
        of_server = knob_table(with_server=True).keys() - knob_table().keys()
        if options[0].lstrip("-").replace("-", "_") in of_server:
            hint = "it is a knob of the server: infer serve"
        if options[0] in ("-n", "--n"):
            hint = "it is for 'infer generate'"
        return f"unknown option {options[0]}; {hint}"

    def _surplus_hint(self) -> str:
        """Return a hint at what the user may have meant by a surplus argument."""
        if re.search(r"^  PROMPT\b", self._help(), re.MULTILINE):
            return "quote a text that holds spaces"
        if "--model" in self._options():
            return "name a model with --model"
        return f"'{self.prog} --help' shows what it takes"

    def _example(self, option: str) -> str:
        """Return a value that the option takes: its default, if its help names one."""
        pattern = rf"^  {re.escape(option)} (\S+)(.*?)(?=^  \S|\n\n|\Z)"
        part = re.search(pattern, self._help(), re.DOTALL | re.MULTILINE)
        if part is None:
            return "16"
        default = re.search(r"\(default:\s(?:[^)]*\s)?(-?\d[\d.,e-]*)\)", part[2])
        return default[1] if default else EXAMPLES.get(part[1], "16")

    def _options(self) -> list[str]:
        """Return every option that the help text shows."""
        return re.findall(r"(?<![\w-])--?[a-z][\w-]*", self._help())

    def _help(self) -> str:
        """Return the help text without colours; a name that a line ends in is whole."""
        return re.sub(r"-\n\s+", "-", COLOUR.sub("", self.format_help()))
