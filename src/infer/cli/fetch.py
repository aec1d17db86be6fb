"""`infer fetch`: bring a model to this disk ahead of time, and say where it lies."""

from __future__ import annotations

import argparse

from infer.cli import flags
from infer.cli.answer import write_out

HELP = "download a model, or the default one, for use without a network"
DESCRIPTION = "Download a model and print where it lies; one that is already here is not touched."
USAGE = "[MODEL] [options]"
EXAMPLES = """\
examples:
  infer fetch
  infer fetch org/name --revision main
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="hub id (org/name); nothing: the default model"
    )
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")
    flags.add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Resolve the model and print its path."""
    from infer.loader.find.source import resolve_model

    source = resolve_model(args.model, revision=args.revision, show_progress=True)
    write_out(f"{source.path}\n")
    return 0
