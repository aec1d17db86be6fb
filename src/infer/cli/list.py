"""`infer list`: the models that were downloaded to this disk."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

from infer.cli import flags
from infer.cli.answer import notice, write_out
from infer.config.knobs import format_bytes

HELP = "list the models that were downloaded"
DESCRIPTION = "List the models in this user's caches: the default model and models of the hub."
USAGE = "[options]"
EXAMPLES = """\
examples:
  infer list
  infer list --json
"""

FLAGS: flags.Rows = {"--json": (bool, "print one JSON object per model")}
HEADER = ("NAME", "REVISION", "SIZE", "DOWNLOADED", "PATH")


def run(args: argparse.Namespace) -> int:
    """Print a row per model and revision."""
    from infer.loader.find.cached import CachedModel, cached_models

    models = cached_models()
    if args.json:
        for model in models:
            facts: dict[str, Any] = dataclasses.asdict(model) | {"path": str(model.path)}
            write_out(json.dumps(facts, ensure_ascii=False) + "\n")
        return 0
    if not models:
        notice("no model is cached; 'infer fetch' downloads the default one, 'infer fetch org/name' another")
        return 0

    def row(model: CachedModel) -> tuple[str, ...]:
        revision = "-" if model.revision is None else " ".join([*model.refs, model.revision[:8]])
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.downloaded))
        return model.name, revision, format_bytes(model.num_bytes), at, str(model.path)

    rows = [HEADER, *map(row, models)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for cells in rows:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        write_out("  ".join(padded).rstrip() + "\n")
    return 0
