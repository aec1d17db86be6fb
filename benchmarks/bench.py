"""The benchmarks of single ideas, besides those of `infer bench`: what developers of the engine ask.

    python -m benchmarks.bench COMMAND [options]

    matrix       switch one idea on after the other and see what each is worth
    backends     attention and MLP next to their references: largest difference, times
    attention    decode attention alone, over scattered blocks
    memory       weights, cache, activations; paged against contiguous
    startup      fresh processes: imports, help, first token
    policies     every scheduling policy under four simulated loads

Flags, reports and exit codes are those of `infer bench`, whose commands work here, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from infer.cli import bench as cli
from infer.cli.answer import notice, write_out
from infer.cli.bench import BATCHES, LENGTHS, ONCE, OUT, REPORTED, SEED, THRICE, WHAT, Bench, Flags
from infer.cli.main import main
from infer.cli.readers import positive
from infer.errors import ConfigError

PROGRAM = "python -m benchmarks.bench"
BACKENDS: Flags = {
    "--batch N": (positive, "prompts at once", 4),
    "--prompt-len N": (positive, "tokens of each prompt", 64),
    "--steps N": (positive, "tokens generated for each", 32),
    "--only NAMES": (str, "combinations to run, with commas"),
    "--json": (bool, "print JSON lines, a row each, and no table"),
}
MATRIX: Flags = {
    "--only NAMES": (str, "ablations to run, with commas"),
    "--png FILE": (Path, "also draw a chart (needs matplotlib)"),
}
STARTUP: Flags = {"--model MODEL": (str, "default: the default model")} | THRICE
POLICIES: Flags = {"--num-requests N": (positive, "", 200)}


def _matrix(args: argparse.Namespace) -> int:
    from benchmarks.charts import can_draw, ratio_bars, write_png
    from benchmarks.matrix import bench_matrix, speed_ups

    if args.png is not None and not can_draw():  # better now than after the minutes that the figures take
        raise ConfigError("--png needs matplotlib: pip install 'infer[bench]', or leave --png out")
    report = bench_matrix(cli.open_bench(args), only=args.only.split(",") if args.only else ())
    if chart := speed_ups(report):
        write_out(ratio_bars(chart) + "\n")
        if args.png is not None:
            write_png("what each idea is worth", chart, args.png)
            notice(f"drew {args.png}")
    return cli.finish(args, report)


def _backends(args: argparse.Namespace) -> int:
    from benchmarks.backends import bench_backends

    sizes = {"count": args.batch, "prompt_len": args.prompt_len, "num_tokens": args.steps}
    only = args.only.split(",") if args.only else ()
    return cli.finish(args, bench_backends(cli.open_bench(args), **sizes, only=only))


def _attention(args: argparse.Namespace) -> int:
    from benchmarks.micro import bench_attention

    return cli.finish(
        args, bench_attention(cli.open_bench(args), batches=args.batches, contexts=args.lengths)
    )


def _memory(args: argparse.Namespace) -> int:
    from benchmarks.micro import bench_memory

    return cli.finish(args, bench_memory(cli.open_bench(args).target, seed=args.seed, tell=notice))


def _startup(args: argparse.Namespace) -> int:
    from benchmarks.micro import bench_startup

    return cli.finish(args, bench_startup(model=args.model, repeats=args.repeats, tell=notice))


def _policies(args: argparse.Namespace) -> int:
    from benchmarks.policies import sweep
    from infer.bench.report import make_report

    rows = sweep(num_requests=args.num_requests, seed=args.seed)
    note = "simulated: the same on every machine; over 30 s: sequences that waited longer for a token"
    facts = {"model": {}, "config": {}, "seed": args.seed, "repeats": 1, "warmup": 0}
    return cli.finish(args, make_report("policies", rows, **facts, notes=[note]))


def _of_engine(
    text: str, run: Callable[[argparse.Namespace], int], rows: Flags, *, is_tiny: bool = False
) -> Bench:
    what = {WHAT: cli.model_flags(is_tiny=is_tiny) | rows}
    return Bench(text, run, what, has_knobs=True, program=PROGRAM)


BENCHES: dict[str, Bench] = {
    "matrix": _of_engine(
        "switch one idea on after the other and see what each is worth",
        _matrix,
        MATRIX | SEED | ONCE | OUT,
        is_tiny=True,
    ),
    "backends": _of_engine(
        "attention and MLP next to their references: largest difference, times",
        _backends,
        BACKENDS | REPORTED,
    ),
    "attention": _of_engine(
        "decode attention alone, over scattered blocks", _attention, BATCHES | LENGTHS | REPORTED
    ),
    "memory": _of_engine("weights, cache, activations; paged against contiguous", _memory, SEED | OUT),
    "startup": Bench(
        "fresh processes: imports, help, first token", _startup, {WHAT: STARTUP | OUT}, program=PROGRAM
    ),
    "policies": Bench(
        "every scheduling policy under four simulated loads",
        _policies,
        {WHAT: POLICIES | SEED | OUT},
        program=PROGRAM,
    ),
}


def run(arguments: list[str]) -> int:
    """Run a benchmark of this file or of `infer bench`."""
    cli.BENCHES.update(BENCHES)
    return main(["bench", *arguments])


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
