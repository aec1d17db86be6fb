"""What every subcommand of `infer bench` has: a parser, a seed, repeats, and a report at the end."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from infer.cli import flags
from infer.cli.answer import notice, write_out
from infer.cli.readers import positive
from infer.errors import ConfigError

if TYPE_CHECKING:
    from infer.bench.report import Report

INTERRUPTED = 130  # the exit code after Ctrl-C; what was measured by then is printed and written

WORKLOADS = """\
workloads: baseline, continuous_batching, paged_attention, chunked_prefill, prefix_caching, w1_single,
w2_mixed (:16, :64), w3_shared_prefix (:16, :64), agent_session and chat_serving (:short, :mid, :long);
and the lists other engines are timed on: nano256, b1_256_256, b8_256_256, b32_256_256, b128_256_256,
prefill_8x4096. 'all' is the first ten for a server and the last six offline; 'peer' the last six.
"""


def new_bench(
    benches: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help_text: str,
    run: Callable[[argparse.Namespace], int],
    *,
    epilog: str = "",
    usage: str = "[options]",
) -> argparse.ArgumentParser:
    """Register a subcommand of `infer bench`."""
    parser = benches.add_parser(
        name,
        help=help_text,
        description=help_text[0].upper() + help_text[1:] + ".",
        usage=f"infer bench {name} {usage}",
        epilog=epilog,
        formatter_class=flags.HelpFormatter,
        allow_abbrev=False,
    )

    def checked(args: argparse.Namespace) -> int:
        if hasattr(args, "out"):
            check_out(args)
        return run(args)

    parser.set_defaults(run=checked)
    return parser


def add_output(group: argparse._ArgumentGroup, *, repeats: int | None = 3, has_seed: bool = True) -> None:
    """The flags of a seed and of repeats, where there are such, and of the report."""
    if has_seed:
        group.add_argument(
            "--seed", metavar="N", type=int, default=42, help="seed of the prompts (default: 42)"
        )
    if repeats is not None:
        group.add_argument(
            "--repeats",
            metavar="N",
            type=positive,
            default=repeats,
            help=f"runs of each (default: {repeats})",
        )
    group.add_argument("--out", metavar="FILE", type=Path, help="write the report: FILE.json and FILE.md")


def finish(args: argparse.Namespace, report: Report) -> int:
    """Print the tables, write the report where it was asked for; the exit code."""
    from infer.bench.render import terminal, to_markdown
    from infer.bench.report import write_report

    write_out(terminal(report))
    if args.out is not None:
        path = _report_path(args.out)
        write_report(report, path)
        path.with_suffix(".md").write_text(to_markdown(report), encoding="utf-8")
        notice(f"wrote {path} and {path.with_suffix('.md').name}")
    has_errors = any(row.figures["num_errors"].high for row in report.rows if "num_errors" in row.figures)
    has_errors |= any(row.skipped.startswith("failed") for row in report.rows)
    return INTERRUPTED if report.is_partial else 1 if has_errors else 0


def check_out(args: argparse.Namespace) -> None:
    """Refuse a report that could not be written before minutes are spent on it."""
    if args.out is None:
        return
    path = _report_path(args.out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not path.stat().st_size:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write the report {path}: {error.strerror}") from None


def _report_path(out: Path) -> Path:
    return out if out.suffix == ".json" else out.with_name(out.name + ".json")
