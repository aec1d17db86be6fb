"""What it costs that several ranks compute a model: milliseconds of a step, alone and as ranks on one GPU.

    nvidia-cuda-mps-control -d          without it, processes take turns on a GPU, milliseconds each
    python -m benchmarks.tensor_parallel CFG_DIR [--ranks 1 2] [--stages 1 2] [--rows 1 32] [--out FILE]
    echo quit | nvidia-cuda-mps-control

CFG_DIR holds a `config.json`; weights are random, of that shape. On one GPU, ranks read together what one
process reads, so what is more is the cost of the exchanges and of what they keep from being fused; stages
read one after the other what one process reads. With `--device cuda` each rank has a GPU of its own.
`--profile` prints the kernels of rank 0; `exchange` is the one of sums, `hear` that of what stages pass on,
and the time that they wait for the other ranks is part of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapters import speed
from benchmarks.machine import parse, today, write
from infer.bench.report import commit, machine, versions
from infer.client import rank_group, rank_process
from infer.client.messages import RankLaunch
from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.engine.engine import Engine
from infer.engine.rank_worker import open_link, serve_rank
from infer.loader.load import LoadedModel, choose_device
from infer.loader.random_weights import load_random
from infer.loader.rank_placement import node_device, rank_device, rank_of
from infer.loader.slices import Rank

SHAPE = "INFER_BENCH_SHAPE"  # environment variable of a rank: the folder of its config.json
PROFILED = 20  # tokens


def load(shape: str, config: EngineConfig, rank: Rank) -> LoadedModel:
    """Return the random weights of one rank."""
    asked = config.load
    device = choose_device(rank_device(asked, rank.number_of_all))
    if device.index is not None:
        torch.cuda.set_device(device)
    return load_random(
        Path(shape), dtype=asked.dtype, device=str(device), quantization=asked.quantization,
        max_seq_len=asked.max_seq_len, seed=rank.number, rank=rank,
    )  # fmt: skip


def serve(launch: RankLaunch) -> None:
    """Be a rank other than 0, with random weights."""
    config = launch.config
    link = open_link(launch.memory, launch.rank, config.load.num_ranks, config.load.pipeline_parallel_size)
    loaded = load(os.environ[SHAPE], config, rank_of(config.load, launch.rank))
    serve_rank(loaded, link, lambda: rank_process._report_done(launch.report))


def step_ms(engine: Engine, num_rows: int, num_tokens: int, tag: str) -> float:
    """Return the milliseconds of a step in which all rows decode."""
    return 1e3 * num_rows / speed(engine, num_rows, num_tokens, [], tag)


def measure(args: argparse.Namespace, size: int, stages: int) -> dict[int, list[float]]:
    """Return the milliseconds of a step by its rows, once for each repeat."""
    config = EngineConfig.from_knobs(
        model=str(args.config), device=args.device, dtype=args.dtype, quantization=args.quantization,
        tensor_parallel_size=size, pipeline_parallel_size=stages, max_batch_size=max(args.rows),
        max_seq_len=1024, use_prefix_caching=False, max_num_batched_tokens=1024, kv_cache_memory="256MiB",
    )  # fmt: skip
    ranks = rank_group.RankProcesses(config, 1, node_device(config.load)) if size * stages > 1 else None
    try:
        loaded = load(str(args.config), config, rank_of(config.load, 0))
        if ranks is not None:
            ranks.wait()
            loaded = dataclasses.replace(loaded, ranks=ranks)
        engine = build_engine(config, loaded)
        while engine.prepare():
            pass
        found = {
            rows: [
                step_ms(engine, rows, args.tokens, f"{rows}-{repeat}") for repeat in range(args.repeats + 1)
            ]
            for rows in args.rows
        }
        if args.profile:
            print_profile(engine, args.rows[0])
    finally:
        if ranks is not None:
            ranks.close()
    return {rows: times[1:] for rows, times in found.items()}  # the first warms up


def print_profile(engine: Engine, num_rows: int) -> None:
    """Print the kernels of some steps on rank 0 by their time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step_ms(engine, num_rows, PROFILED, "profile")
    rows: list[Any] = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
    for row in rows[:16]:
        each = row.self_device_time_total / PROFILED, row.count / PROFILED
        print(f"{each[0]:9.1f} us a step {each[1]:6.1f} x  {row.key[:80]}")


def main() -> int:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    args = parse(parser)
    os.environ[SHAPE], rank_group.RANK_MODULE = str(args.config), "benchmarks.tensor_parallel"
    found = {each: measure(args, *each) for each in product(args.ranks, args.stages)}
    first = {rows: statistics.median(times) for rows, times in next(iter(found.values())).items()}
    for (size, stages), by_rows in found.items():
        for rows, times in by_rows.items():
            median, rounded = statistics.median(times), [round(time, 3) for time in times]
            ratio = f"{median / first[rows]:5.2f}x   of {rounded}"
            print(f"{size} ranks {stages} stages {rows:3} rows  {median:8.3f} ms a step   {ratio}")
    named = {name: value for name, value in vars(args).items() if name not in ("out", "allow_dirty")}
    by_name = {f"{size} ranks, {stages} stages": times for (size, stages), times in found.items()}
    report = {"arguments": named | {"config": args.config.name}, "step_ms": by_name}
    about = {"created": today(), "commit": commit(), "versions": versions(), "machine": machine()}
    write(about | report, args.out)
    return 0


if __name__ == "__main__":
    if os.environ.get(SHAPE) and len(sys.argv) == 1:
        rank_process._serve = serve
        raise SystemExit(rank_process.main())
    raise SystemExit(main())
