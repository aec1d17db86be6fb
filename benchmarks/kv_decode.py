"""Decode steps of many long sequences, with a KV cache of several types: what 8 bits are worth on a GPU.

    python -m benchmarks.kv_decode CFG_DIR [--kv auto fp8 int8] [--rows 64] [--context 8000] [--layers 12]

CFG_DIR holds a `config.json`; weights are random. Every row has a prompt of its own, of `--context` tokens.
Once all of them decode, steps are timed. `--layers` takes fewer layers than the config says: prompts are read
sooner, and the head's share of a step is larger than in the whole model, so the gain shown is smaller.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import facts, parse, write
from infer.bench.target import BenchTarget
from infer.config.settings import EngineConfig
from infer.loader.random_weights import load_random
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request

NUM_STEPS = 40


def measure(directory: Path, kv: str, rows: int, context: int) -> dict[str, float]:
    """Seconds of a step in which every row decodes, the median of some."""
    knobs: dict[str, Any] = {"kv_cache_dtype": kv, "max_batch_size": rows, "use_prefix_caching": False}
    knobs["scheduler_policy"] = "prefill_first"  # no row ends while another's prompt is computed
    loaded = load_random(directory, dtype="bfloat16", device="cuda", max_seq_len=context + 2 * NUM_STEPS)
    engine = BenchTarget(loaded=loaded, config=EngineConfig.from_knobs(**knobs)).engine()
    for number in range(rows):
        prompt = tuple(random.Random(number).choices(range(10_000), k=context))
        params = SamplingParams(temperature=0.6, max_tokens=NUM_STEPS + 20, ignore_eos=True, seed=number)
        engine.add(Request(request_id=str(number), prompt=prompt, params=params))
    began, seen = time.perf_counter(), dict.fromkeys(map(str, range(rows)), 0)
    while min(seen.values()) < 8:  # all decode, and the graph of this size is captured
        for output in engine.step():
            seen[output.request_id] += len(output.token_ids)
    prompts_s, times = time.perf_counter() - began, list[float]()
    while len(times) < NUM_STEPS // 2:
        start = time.perf_counter()
        num_outputs = len(engine.step())
        assert num_outputs == rows, f"{num_outputs} of {rows} rows decode"
        times.append(time.perf_counter() - start)
    tokens = engine.scheduler.pool.num_blocks * engine.scheduler.pool.block_size
    return {
        "step_ms": round(1e3 * statistics.median(times), 3),
        "out_tok_s": round(rows / statistics.median(times), 1),
        "prompts_s": round(prompts_s, 2),
        "kv_cache_tokens": tokens,
    }


def main() -> None:
    """Measure the types one after the other and print a row of each."""
    parser = argparse.ArgumentParser(description="time decode steps of long sequences")
    parser.add_argument("config", type=Path, help="a directory with a config.json")
    parser.add_argument("--kv", nargs="+", default=["auto", "fp8", "int8"], help="values of kv_cache_dtype")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=8000, help="tokens of each prompt")
    parser.add_argument("--layers", type=int, default=None, help="default: as the config says")
    args = parse(parser)
    found: dict[str, object] = {"machine": facts(), "model": args.config.name, "layers": args.layers}
    with tempfile.TemporaryDirectory() as directory:
        config = json.loads((args.config / "config.json").read_text(encoding="utf-8"))
        if args.layers is not None:
            config["num_hidden_layers"] = args.layers
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for kv in args.kv:
            found[kv] = row = measure(Path(directory), kv, args.rows, args.context)
            print(f"{kv:6} {row}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    if args.out:
        write(found, args.out)


if __name__ == "__main__":
    main()
