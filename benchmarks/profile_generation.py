"""Where the time of a step goes: a trace to look at, and tables of what took longest.

    python -m benchmarks.profile_generation [--out DIR] [--batch 8] [--prompt-len 128] [--steps 16]
                                            [--model DIR | --model-config DIR | --tiny] [--quantization FORM]

    DIR/trace.json     open it in chrome://tracing or ui.perfetto.dev
    DIR/kernels.txt    device kernels, by the time they took (a GPU only)
    DIR/increments.txt device kernels, by the time from the end of the one before to their own (a GPU only)
    DIR/cpu.txt        operators, by the CPU time they took themselves

The prompts are computed before the profiler starts, unless --prefill asks for them: what remains is
decoding, whose steps are all alike. Profiling slows a step down; take times from `infer bench decode`.

Kernels that start before the one before has ended (PDL) spend part of their time waiting for it, so their
times add up to more than a step. Increments add up to the step: they say what a kernel costs where it stands.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from infer.bench.offline import batch, warm_up
from infer.bench.target import BenchTarget, open_target
from infer.engine.engine import Engine
from infer.kernels.runtime.dispatch import synchronize
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request

NUM_ROWS = 40  # of a table


def fill(engine: Engine, target: BenchTarget, args: argparse.Namespace) -> None:
    """Put a batch into the engine that outlives the profile."""
    workload = batch(args.batch, args.prompt_len, 1, target.vocab_size, seed=0)
    params = SamplingParams(max_tokens=args.steps + 8, ignore_eos=True, temperature=0.6)
    for number, session in enumerate(workload.sessions):
        engine.add(
            Request(request_id=f"profiled-{number}", prompt=tuple(session.turns[0].ids), params=params)
        )


def run_prompts(engine: Engine, count: int) -> None:
    """Step until every sequence has its first token."""
    seen: set[str] = set()
    while len(seen) < count:
        seen |= {output.request_id for output in engine.step()}


def take_profile(engine: Engine, target: BenchTarget, steps: int) -> Any:
    """Profile so many steps."""
    activities = [ProfilerActivity.CPU]
    if target.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as taken:
        for _ in range(steps):
            with torch.profiler.record_function("step"):
                engine.step()
        synchronize(target.device)
    return taken


def write(taken: Any, directory: Path, *, on_gpu: bool) -> list[Path]:
    """The trace and the tables."""
    directory.mkdir(parents=True, exist_ok=True)
    averages = taken.key_averages()
    tables = {"cpu.txt": averages.table(sort_by="self_cpu_time_total", row_limit=NUM_ROWS)}
    if on_gpu:
        tables["kernels.txt"] = averages.table(sort_by="self_device_time_total", row_limit=NUM_ROWS)
    for name, table in tables.items():
        (directory / name).write_text(table, encoding="utf-8")
    taken.export_chrome_trace(str(directory / "trace.json"))
    return [directory / "trace.json", *(directory / name for name in tables)]


def increments(trace: Path, steps: int) -> str:
    """A table of kernels: how much later each ends than all before it, by name, grid and predecessor."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda event: event["ts"])
    found: dict[str, list[float]] = defaultdict(list)
    latest, before = None, ""
    for event in kernels:
        end, name = event["ts"] + event["dur"], event["name"].split("(")[0][-48:]
        grid = "x".join(str(size) for size in event["args"].get("grid", []))
        if latest is not None:
            found[f"{name} [{grid}] behind {before}"].append(max(end - latest, 0.0))
        latest, before = max(end, latest or end), name[:24]
    lines = [f"{'us/step':>9} {'us each':>8} {'per step':>8}"]
    for key, ends in sorted(found.items(), key=lambda item: -sum(item[1]))[:NUM_ROWS]:
        lines.append(f"{sum(ends) / steps:9.1f} {sum(ends) / len(ends):8.2f} {len(ends) / steps:8.1f}  {key}")
    total = sum(sum(ends) for ends in found.values())
    return "\n".join([*lines, f"{total / steps:9.1f} in all", ""])


def main(argv: list[str] | None = None) -> int:
    """Build an engine, fill it, profile it, write the files."""
    parser = argparse.ArgumentParser(description="Profile the steps of an engine.")
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--model-config", type=Path, help="random weights of the shape in DIR/config.json")
    parser.add_argument("--tiny", action="store_true", help="random weights of a tiny model")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--prefill", action="store_true", help="profile the prompts too")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--out", type=Path, default=Path("profile"), help="directory (default: profile)")
    args = parser.parse_args(argv)
    knobs = {name: getattr(args, name) for name in ("model", "device", "dtype", "quantization")}
    knobs["max_batch_size"] = args.batch
    target = open_target(knobs, model_config=args.model_config, is_tiny=args.tiny)
    engine = target.engine()
    warm_up(engine, target)
    fill(engine, target, args)
    if not args.prefill:
        run_prompts(engine, args.batch)
    taken = take_profile(engine, target, args.steps)
    on_gpu = target.device.type == "cuda"
    paths = write(taken, args.out, on_gpu=on_gpu)
    if on_gpu:
        paths.append(args.out / "increments.txt")
        paths[-1].write_text(increments(paths[0], args.steps), encoding="utf-8")
    for path in paths:
        print(path)
    print(paths[-1].read_text("utf-8"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
