"""`infer doctor`: what was found on this machine, what will be used, and what would make it faster."""

from __future__ import annotations

import argparse
import json

from infer.cli import flags
from infer.cli.answer import write_out
from infer.cli.interrupts import importing

HELP = "what this machine has for running models, and what would make it faster"
DESCRIPTION = "Print processor, compiler, kernels, GPU, memory and models, and what could be better."
USAGE = "[options]"
EXAMPLES = """\
examples:
  infer doctor
  infer doctor --json
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command its flags."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    flags.add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Examine the machine and print the findings."""
    with importing():
        from infer.tools.doctor import examine_machine

    report = examine_machine()
    if args.json:
        write_out(json.dumps({"machine": dict(report.rows), "advice": list(report.advice)}, indent=2) + "\n")
        return 0
    lines = [f"{name:<10} {value}" for name, value in report.rows]
    lines += ["", "faster:" if report.advice else "nothing to improve"]
    lines += [f"  - {sentence}" for sentence in report.advice]
    write_out("\n".join(lines) + "\n")
    return 0
