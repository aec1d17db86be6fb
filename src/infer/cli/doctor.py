"""`infer doctor`: what was found on this machine, what will be used, and what would make it faster."""

from __future__ import annotations

import argparse
import json

from infer.cli import flags
from infer.cli.answer import write_out
from infer.cli.interrupts import importing

EXAMPLES = """\
examples:
  infer doctor
  infer doctor --json
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine has for running models, and what would make it faster",
        description="Print processor, compiler, kernels, GPU, memory and models, and what could be better.",
        usage="infer doctor [options]",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
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
