"""`infer rm`: remove a downloaded model from this disk."""

from __future__ import annotations

import argparse
import sys

from infer.cli import flags
from infer.cli.answer import notice
from infer.config.knobs import format_bytes
from infer.errors import ConfigError

HELP = "remove a downloaded model from the cache"
DESCRIPTION = "Remove a model that 'infer list' shows. Models outside the cache are not touched."
USAGE = "NAME [options]"
EXAMPLES = """\
examples:
  infer rm org/name
  infer rm org/name --revision main --yes
"""
FLAGS: flags.Rows = {
    "name NAME": (str, "the name of a model, as 'infer list' shows it"),
    "--revision TEXT": (str, "only this branch, tag or commit of it"),
    "--yes": (bool, "do not ask"),
}


def run(args: argparse.Namespace) -> int:
    """Find the model, ask, remove it, and say how much space is free again."""
    from infer.loader.find.cached import find_cached, remove_cached

    found = find_cached(args.name, args.revision)
    revisions = f"{len(found)} revisions, " if len(found) > 1 else ""
    size = format_bytes(sum(model.num_bytes for model in found))
    if not args.yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"to remove {args.name} without a terminal to ask at, add --yes")
        said = input(f"remove {args.name} ({revisions}{size}) from {found[0].path.parent}? [y/N] ")
        if said.strip().lower() not in ("y", "yes"):
            notice("nothing was removed")
            return 0
    notice(f"removed {args.name}: {format_bytes(remove_cached(found))} freed")
    return 0
