"""`infer fetch`: download a model ahead of time, and print its path."""

from __future__ import annotations

import argparse

from infer.cli import flags
from infer.cli.answer import write_out

HELP = "download a model, or the default one, for use without a network"
DESCRIPTION = "Download a model and print its path; a model that is already here is left as it is."
USAGE = "[MODEL] [options]"
EXAMPLES = """\
examples:
  infer fetch
  infer fetch org/name --revision main
"""


FLAGS: flags.Rows = {
    "model [MODEL]": (str, "hub id (org/name); if left out: the default model"),
    "--revision TEXT": (str, "branch, tag or commit of a hub id"),
}


def run(args: argparse.Namespace) -> int:
    """Resolve the model and print its path."""
    from infer.loader.find.source import resolve_model

    source = resolve_model(args.model, revision=args.revision, show_progress=True)
    write_out(f"{source.path}\n")
    return 0
