"""Speculative decoding on and off, side by side: output tokens per second, and the time to a first token.

    python -m benchmarks.speculation CFG_DIR --draft CFG_DIR --out benchmarks/reports/speculation-h200.json

A CFG_DIR holds a `config.json`; weights are random, so drafts are kept by chance (`synthetic_acceptance`),
each with the probability of `--acceptance`. All of it is timed: looking drafts up or computing them, judging
them, choosing how many, and what the host does between steps. The engines have the same weights and take
turns, workload by workload; a ratio is the median over rounds of the speed with drafts by the speed without.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_table import requests_of, run
from benchmarks.machine import add_allow_dirty, refuse_dirty, today
from infer.bench.report import commit, machine, versions
from infer.bench.target import BenchTarget
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.loader.random_weights import load_random
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request

PROMPT_LEN = 1024  # tokens of the prompt whose first token is timed


def make_engines(target: BenchTarget, modes: dict[str, dict[str, Any]]) -> dict[str, Engine]:
    """An engine for each mode, all ready."""
    engines = {}
    for name, knobs in modes.items():
        engines[name] = engine = target.engine(**knobs)
        while engine.prepare():
            pass
        costs = engine.speculation and engine.speculation.costs
        print(f"  {name}: steps {costs}", flush=True)
    return engines


def first_token_s(engine: Engine, number: int) -> float:
    """Seconds from adding a request to its first token."""
    prompt = tuple((token * 31 + number) % 10_000 for token in range(PROMPT_LEN))
    params = SamplingParams(temperature=0.6, max_tokens=4, ignore_eos=True, seed=number)
    start = time.perf_counter()
    engine.add(Request(request_id=f"first-{number}", prompt=prompt, params=params))
    found = 0.0
    while engine.has_work:
        if engine.step() and not found:
            found = time.perf_counter() - start
    return found


def measure(engines: dict[str, Engine], batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each batch and mode."""
    rows = []
    for batch in batches:
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        drafted: dict[str, tuple[int, int, int]] = {}
        for turn in range(rounds + 1):  # the first is not counted
            for name, engine in engines.items():
                engine.reset_prefix_cache()
                requests = requests_of("b128_256_256", f"{name}-{batch}-{turn}")[:batch]
                totals = engine.speculation.totals if engine.speculation else None
                before = (totals.num_windows, totals.num_drafts, totals.num_accepted) if totals else (0, 0, 0)
                seconds = run(engine, requests)
                if totals is not None:
                    after = totals.num_windows, totals.num_drafts, totals.num_accepted
                    drafted[name] = (after[0] - before[0], after[1] - before[1], after[2] - before[2])
                if turn:
                    speeds[name].append(sum(r.params.max_tokens or 0 for r in requests) / seconds)
        for name, found in speeds.items():
            ratios = [mine / base for mine, base in zip(found, speeds["off"], strict=True)]
            windows, drafts, kept = drafted.get(name, (0, 0, 0))
            row = {
                "batch": batch, "mode": name, "out_tok_s": round(statistics.median(found), 1),
                "ratio": round(statistics.median(ratios), 4), "least": round(min(ratios), 4),
                "largest": round(max(ratios), 4), "windows": windows, "drafts": drafts, "kept": kept,
            }  # fmt: skip
            rows.append(row)
            print(
                f"  batch {batch:4} {name:12} {row['out_tok_s']:9.1f} tok/s  {row['ratio']:.3f} "
                f"[{row['least']:.3f} .. {row['largest']:.3f}]  {windows} windows, {kept} of {drafts} kept",
                flush=True,
            )
    return rows


def measure_first(engines: dict[str, Engine], rounds: int) -> dict[str, float]:
    """The median milliseconds to a first token, by mode."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for place, (name, engine) in enumerate(engines.items()):
            seconds = first_token_s(engine, 100 * turn + place)
            if turn:
                found[name].append(1e3 * seconds)
    return {name: round(statistics.median(each), 2) for name, each in found.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="directory with the config.json of the model")
    parser.add_argument("--draft", type=Path, help="directory with the config.json of a model that drafts")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 128])
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--quantization", nargs="+", default=["none"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--knobs", type=json.loads, default={}, help="JSON of further knobs for all engines")
    parser.add_argument("--out", type=Path)
    add_allow_dirty(parser)
    args = parser.parse_args()
    refuse_dirty(parser, args)
    report: dict[str, Any] = {
        "date": today(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }
    report |= {"model": args.config.name, "acceptance": args.acceptance, "cells": {}}
    for quantization in args.quantization:
        knobs = {
            "max_seq_len": 4096,
            "device": args.device,
            "num_blocks": 8192,
            "max_batch_size": 128,
        } | args.knobs
        config = EngineConfig.from_knobs(**knobs)
        loaded = load_random(
            args.config, device=args.device, quantization=quantization, max_seq_len=config.load.max_seq_len
        )
        target = BenchTarget(loaded=loaded, config=config, is_random=True)
        modes: dict[str, dict[str, Any]] = {
            "off": {},
            "ngram": {"speculative_method": "ngram", "synthetic_acceptance": args.acceptance},
        }
        if args.draft is not None:
            modes["draft_model"] = {"draft_model": str(args.draft), "synthetic_acceptance": args.acceptance}
            modes["tree"] = modes["draft_model"] | {"speculative_method": "tree"}
        print(f"{args.config.name}, weights {quantization}", flush=True)
        engines = make_engines(target, modes)
        rows = measure(engines, args.batches, args.rounds)
        report["cells"][quantization] = {"rows": rows, "first_token_ms": measure_first(engines, args.rounds)}
        print("  first token ms:", report["cells"][quantization]["first_token_ms"], flush=True)
        del engines, target, loaded
        gc.collect()
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
