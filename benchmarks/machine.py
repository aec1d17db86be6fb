"""What a report must say about where, when and of what it was made; and the flags of a report.

A report of a tree with uncommitted changes names a commit that did not make it. So it is refused before the
work, unless `--allow-dirty` asks for it; its commit then ends in `-dirty`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infer.bench.report import commit, machine


def facts() -> dict[str, str]:
    """Return Python, CPU, GPU, commit and date; reports that differ in the first three do not compare."""
    found = machine()
    return {
        "python": platform.python_version(),
        "cpu": f"{found['cpu']}, {found['num_cpus']} threads",
        **({"gpu": str(found["gpu"])} if "gpu" in found else {}),
        "commit": commit(),
        "date": today(),
    }


def today() -> str:
    """Return the moment a report is made."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments, with `--out FILE` and `--allow-dirty` added; refuse a report of a dirty tree."""
    parser.add_argument("--out", type=Path, help="write the report to this JSON file")
    add_allow_dirty(parser)
    args = parser.parse_args(argv)
    if args.out is not None:
        refuse_dirty(parser, args)
    return args


def add_allow_dirty(parser: argparse.ArgumentParser) -> None:
    """Add the flag by which a report of uncommitted changes is asked for."""
    parser.add_argument(
        "--allow-dirty", action="store_true", help="write a report of a tree with uncommitted changes"
    )


def refuse_dirty(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program where the tree has uncommitted changes and `--allow-dirty` was not given."""
    if not args.allow_dirty and commit().endswith("-dirty"):
        parser.error("the tree has uncommitted changes; commit them, or mark the report with --allow-dirty")


def write(report: Mapping[str, Any], path: Path | None) -> None:
    """Write a report where a path was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
