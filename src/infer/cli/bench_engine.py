"""The subcommands of `infer bench` that run an engine here, without a server."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from infer.cli import flags
from infer.cli.answer import notice, write_out
from infer.cli.bench_report import WORKLOADS, add_output, finish, new_bench
from infer.cli.interrupts import importing
from infer.cli.readers import numbers, positive
from infer.errors import ConfigError

if TYPE_CHECKING:
    from infer.bench.report import Report
    from infer.bench.target import Target


def add_engine_benches(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register all of them."""
    _add_engine(benches, "offline", "throughput of whole workloads, beside the machine's roofline", _offline)
    _add_engine(benches, "latency", "one request at a time: first token, each token, the whole", _latency)
    _add_engine(benches, "prefill", "prompts alone: tokens per second and share of the matmul rate", _prefill)
    _add_engine(benches, "decode", "decoding alone: step time at several batch sizes", _decode)
    _add_engine(benches, "attention", "decode attention alone, over scattered blocks", _attention)
    _add_engine(benches, "memory", "weights, cache, activations; paged against contiguous", _memory)
    _add_engine(benches, "matrix", "switch one idea on after the other and see what each is worth", _matrix)


def _add_engine(
    benches: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help_text: str,
    run: Callable[[argparse.Namespace, Target], Report],
) -> None:
    def measure(args: argparse.Namespace) -> int:
        return finish(args, run(args, _open(args)))

    parser = new_bench(benches, name, help_text, measure, epilog=WORKLOADS if name == "offline" else "")
    group = parser.add_argument_group("what to run")
    group.add_argument(
        "--model-config",
        metavar="DIR",
        type=Path,
        help="random weights of the shape in DIR/config.json instead of a model",
    )
    group.add_argument(
        "--tiny",
        action=argparse.BooleanOptionalAction,
        default=name == "matrix",
        help="random weights of a tiny model"
        + ("; the default here, --no-tiny: the default model" if name == "matrix" else ""),
    )
    if name == "offline":
        group.add_argument("--workload", metavar="NAMES", default="all", help="names with commas")
    if name in ("decode", "attention"):
        group.add_argument(
            "--batches", metavar="NUMBERS", type=numbers, default="1,8,32", help="(default: 1,8,32)"
        )
    if name == "decode":
        group.add_argument("--context", metavar="N", type=positive, default=512, help="(default: 512)")
        group.add_argument("--steps", metavar="N", type=positive, default=64, help="(default: 64)")
    if name in ("prefill", "attention"):
        group.add_argument(
            "--lengths",
            metavar="NUMBERS",
            type=numbers,
            default="128,512,2048",
            help="(default: 128,512,2048)",
        )
    if name == "matrix":
        group.add_argument("--only", metavar="NAMES", help="ablations to run, with commas")
        group.add_argument("--png", metavar="FILE", type=Path, help="also draw a chart (needs matplotlib)")
    add_output(group, repeats={"memory": None, "matrix": 1}.get(name, 3))
    flags.add_knob_flags(parser, without={"seed"})
    flags.add_common_flags(parser)


def _open(args: argparse.Namespace) -> Target:
    knobs = flags.knobs_from(args)
    if getattr(args, "png", None) is not None:
        from infer.bench.render import can_draw

        if not can_draw():  # better now than after the minutes that the figures take
            raise ConfigError("--png needs matplotlib: pip install 'infer[bench]', or leave --png out")
    if args.model_config is not None and knobs.get("model") is not None:
        raise ConfigError("--model and --model-config both name a model; give one of them")
    with importing():
        from infer.bench.target import open_target

    is_tiny = args.tiny and args.model_config is None and knobs.get("model") is None
    return open_target(knobs, model_config=args.model_config, is_tiny=is_tiny)


def _offline(args: argparse.Namespace, target: Target) -> Report:
    from infer.bench.offline import bench_offline
    from infer.bench.workloads import read_names

    names = read_names(args.workload, group="offline")
    return bench_offline(target, names, seed=args.seed, repeats=args.repeats, tell=notice)


def _latency(args: argparse.Namespace, target: Target) -> Report:
    from infer.bench.offline import bench_latency

    return bench_latency(target, seed=args.seed, repeats=args.repeats, tell=notice)


def _prefill(args: argparse.Namespace, target: Target) -> Report:
    from infer.bench.offline import bench_prefill

    lengths = args.lengths
    return bench_prefill(target, lengths=lengths, seed=args.seed, repeats=args.repeats, tell=notice)


def _decode(args: argparse.Namespace, target: Target) -> Report:
    from infer.bench.offline import bench_decode

    return bench_decode(
        target,
        batches=args.batches,
        context=args.context,
        num_steps=args.steps,
        seed=args.seed,
        repeats=args.repeats,
        tell=notice,
    )


def _attention(args: argparse.Namespace, target: Target) -> Report:
    from infer.bench.micro import bench_attention

    return bench_attention(
        target,
        batches=args.batches,
        contexts=args.lengths,
        seed=args.seed,
        repeats=args.repeats,
        tell=notice,
    )


def _memory(args: argparse.Namespace, target: Target) -> Report:
    from infer.bench.micro import bench_memory

    return bench_memory(target, seed=args.seed, tell=notice)


def _matrix(args: argparse.Namespace, target: Target) -> Report:
    from infer.bench.matrix import bench_matrix, speed_ups
    from infer.bench.render import ratio_bars, write_png

    only = args.only.split(",") if args.only else ()
    report = bench_matrix(target, seed=args.seed, repeats=args.repeats, tell=notice, only=only)
    if chart := speed_ups(report):
        write_out(ratio_bars(chart) + "\n")
        if args.png is not None:
            write_png("what each idea is worth", chart, args.png)
            notice(f"drew {args.png}")
    return report
