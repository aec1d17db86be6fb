"""What the engine's own Python costs: microseconds of CPU per decode step, with a device that does nothing.

    python -m benchmarks.engine_cpu [--repeats 20] [--profile 256] [--out benchmarks/reports/engine-cpu.json]

A GPU works while the CPU plans the next step, so this cost is hidden as long as it is the smaller of the
two. It decides how small a model and how slow a host may be before tokens wait for Python. Everything is
as on a GPU (scheduler, books, a device half that keeps its state on the device, one step late), but that the
captured step and the kernel that updates block tables are replaced by nothing, and ids are canned. What a
GPU's driver takes for launches, copies and events comes on top (benchmarks/gpu_table.py has all of it).

All rows decode, each at another place of its block, so that every step crosses the block boundaries of
one in `block_size`. A figure is CPU time: the mean over a run of 64 steps, the best and the median of
`--repeats` runs; whatever disturbs a run makes it slower. `--profile ROWS` says which functions it is.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.machine import facts, parse, write
from infer.config.settings import EngineConfig
from infer.engine import build, machine
from infer.engine.engine import Engine
from infer.execution.gpu import rows as device_rows
from infer.execution.gpu.device import GpuDevice
from infer.loader.random_weights import load_random
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request

STEPS = 64
BLOCK_SIZE = 16
MAX_TOKENS = 2000
TARGETS_US = {1: 100.0, 256: 250.0}
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def make_engine(num_rows: int) -> Engine:
    """An engine whose rows all decode, and whose device does nothing from now on."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
        loaded = load_random(Path(directory), dtype="float32", device="cpu")
    knobs = {
        "block_size": BLOCK_SIZE,
        "max_batch_size": num_rows,
        "num_blocks": num_rows * (MAX_TOKENS // BLOCK_SIZE + 4),
    }
    with mock.patch.object(machine, "has_gpu_kernels", lambda device: True):
        engine = build.build_engine(EngineConfig.from_knobs(**knobs), loaded)
    device = engine._device
    assert isinstance(device, GpuDevice) and engine._steps_ahead
    for number in range(num_rows):
        params = SamplingParams(temperature=0.6, max_tokens=MAX_TOKENS, ignore_eos=True, seed=number)
        prompt = tuple((number * 31 + place * 7) % 500 for place in range(2 + number % BLOCK_SIZE))
        engine.add(Request(request_id=f"cpu-{number}", prompt=prompt, params=params))
    for _ in range(4):
        engine.step()
    no_logits = torch.empty(0)  # nothing asks for logprobs
    device.graphs.forward = lambda size: None  # type: ignore[method-assign]
    device.graphs.sample = lambda size: no_logits  # type: ignore[method-assign]
    ids_S = device.launcher.scratch.ids_S
    ids_S.copy_(torch.arange(len(ids_S)) % 500)
    run_steps(engine, BLOCK_SIZE)
    assert len(engine.scheduler.running) == num_rows, "a step failed: the log says why"
    return engine


def run_steps(engine: Engine, count: int) -> float:
    """CPU microseconds per step."""
    with mock.patch.object(device_rows, "apply_table_diffs", lambda tables_RB, diffs_K3: None):
        start = time.thread_time()
        for _ in range(count):
            engine.step()
        return (time.thread_time() - start) / count * 1e6


def measure(num_rows: int, repeats: int) -> list[float]:
    """Microseconds per step of some runs."""
    engine = make_engine(num_rows)
    runs = []
    for number in range(repeats):
        if number % 25 == 24:  # its requests are about to end: start over
            engine = make_engine(num_rows)
        gc.collect()
        gc.disable()  # a collection is no step's own
        runs.append(run_steps(engine, STEPS))
        gc.enable()
    return runs


def profile(num_rows: int) -> None:
    """Print which functions the time of a step is spent in; the profiler makes calls dearer than they are."""
    engine = make_engine(num_rows)
    profiler = cProfile.Profile()
    profiler.enable()
    run_steps(engine, 8 * STEPS)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    """Print the figures, and write them where `--out` says."""
    parser = argparse.ArgumentParser(description="microseconds of CPU per decode step, without a device")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument(
        "--profile", type=int, metavar="ROWS", help="attribute a step of so many rows instead"
    )
    args = parse(parser)
    torch.set_num_threads(1)
    if args.profile is not None:
        profile(args.profile)
        return
    print(", ".join(facts().values()), f"block_size {BLOCK_SIZE}, {args.repeats} runs\n", sep=", ")
    rows: list[dict[str, Any]] = []
    for num_rows in args.rows:
        runs = measure(num_rows, args.repeats)
        row = {"rows": num_rows, "best_us": min(runs), "median_us": statistics.median(runs)}
        rows.append(row)
        print(f"{num_rows:>4} rows {row['best_us']:>9.1f} us per step, median {row['median_us']:.1f}")
    few, many = rows[0], rows[-1]
    slope = (many["best_us"] - few["best_us"]) / max(many["rows"] - few["rows"], 1)
    met = {
        f"{row['rows']} rows <= {TARGETS_US[row['rows']]:.0f} us": row["best_us"] <= TARGETS_US[row["rows"]]
        for row in rows
        if row["rows"] in TARGETS_US
    }
    print(f"slope {slope:.2f} us per row")
    for name, is_met in met.items():
        print(f"{'met ' if is_met else 'MISSED'} {name}")
    report = {
        "benchmark": "engine_cpu",
        "machine": facts(),
        "repeats": args.repeats,
        "rows": rows,
        "slope_us_per_row": slope,
        "targets_met": met,
    }
    write(report, args.out)


if __name__ == "__main__":
    main()
