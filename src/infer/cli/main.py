"""The command `infer`: find the subcommand, run it, turn its end into an exit code.

    0     done
    1     `infer replay`: the runs differ; `infer serve`: every engine is down for good;
          `infer bench`: a figure got worse, or requests failed; `infer generate --prompts-file`:
          some prompts have no answer; `infer batch`: some lines have an error;
          `infer learn check`: something is wrong with the file
    2     the user asked for something impossible: one line on standard error says what to do
    130   interrupted with Ctrl-C
    141   the reader of the output has gone (`infer generate ... | head -1`); no message

Each subcommand is a module: its help text (HELP, DESCRIPTION, USAGE, EXAMPLES), its flags (the table FLAGS,
or `add_flags` if a table is not enough) and `run`. None of them imports torch before it loads a model, so
`--help` and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from infer import __version__
from infer.cli import flags
from infer.cli.interrupts import importing
from infer.cli.parser import Parser
from infer.client.imports import keep_bytecode
from infer.client.process_limits import check_limits, spell_shortage
from infer.config.knobs import spell_as_given
from infer.errors import InferError
from infer.log import setup_logging

EPILOG = """\
'infer COMMAND --help' shows all options of a command. Without --model, the default model
SmolLM2-135M-Instruct is used; it is downloaded once.
"""


COMMANDS = (
    "serve", "generate", "chat", "run", "fetch", "list", "rm", "quantize", "plan", "doctor", "simulate",
    "replay", "step", "batch", "bench", "explain", "learn",
)  # fmt: skip
LIGHT = {"doctor", "explain", "fetch", "learn", "simulate"}  # commands that load no model


def build_parser(commands: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser with these subcommands; scripts/docs.py prints its help into the docs."""
    parser = Parser(
        prog="infer",
        description="Run large language models on this machine.",
        usage="infer COMMAND [options]",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--version", action="version", version=f"infer {__version__}", help="print the version and leave"
    )
    parser.set_defaults(run=None)
    parsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    with importing():
        modules = [importlib.import_module(f"infer.cli.{command}") for command in commands]
    for name, module in zip(commands, modules, strict=True):
        usage = f"infer {name} {module.USAGE}"
        about = {"help": module.HELP, "description": module.DESCRIPTION, "epilog": module.EXAMPLES}
        command = parsers.add_parser(name, usage=usage, **about)
        command.set_defaults(run=module.run)
        if hasattr(module, "add_flags"):
            module.add_flags(command)
        else:
            flags.add_rows(command, module.FLAGS)
            flags.add_common_flags(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `infer` with these arguments (default: the process's own) and return its exit code."""
    _replace_closed_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        if "--debug" in words or (shortage := spell_shortage(error)) is None:
            raise
        print(f"infer: error: {shortage}", file=sys.stderr)
        return 2


def _run(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    is_named = words[:1] and words[0] in COMMANDS  # the other commands need not be imported
    parser = build_parser(words[:1] if is_named else COMMANDS)
    args = parser.parse_args(words)
    if args.run is None:
        parser.print_help(sys.stderr)
        return 2
    setup_logging(args.log_level)
    keep_bytecode()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not encode every character
    if isinstance(sys.stdin, io.TextIOWrapper):
        is_utf8 = sys.stdin.encoding.lower() == "utf-8" and not sys.stdin.isatty()
        # without a byte order mark, and strict: Python may let invalid bytes through, as lone surrogates
        sys.stdin.reconfigure(encoding="utf-8-sig" if is_utf8 else None, errors="strict")
    try:
        if words[0] not in LIGHT:
            check_limits()
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except InferError as error:
        if args.debug:
            traceback.print_exc()
        print(f"infer: error: {spell_as_given(str(error), flags.flags_as_given(args))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if args.debug:
            traceback.print_exc()
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            raise
        _silence_stdout()
        print(f"infer: error: cannot write the answer: {error.strerror}", file=sys.stderr)
        return 2


def _replace_closed_streams() -> None:
    """Give a standard stream that the caller has closed (`>&-`) the null device instead."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (as long as the process runs)


def _silence_stdout() -> None:
    """Discard what Python flushes to standard output at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
