"""What LoRA adapters cost: tokens per second of a batch that decodes, without adapters and with several.

    python -m benchmarks.adapters CFG_DIR [--rows 32] [--adapters 8] [--rank 16] [--device cuda] [--out FILE]

CFG_DIR holds a `config.json`; weights and adapters are random, of that shape, and every matrix is adapted.
Three kinds of batches:

    without    an engine that has no room for adapters
    unused     an engine that has, and no request names one: it must be as fast
    adapted    the same engine, the rows spread over the adapters
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from benchmarks.machine import parse, today, write
from infer.bench.report import commit, machine, versions
from infer.config.settings import EngineConfig
from infer.engine.adapters import LoadedAdapter
from infer.engine.build import build_engine
from infer.engine.engine import Engine
from infer.loader.random_weights import load_random
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request

PROMPT = 16


def fill(engine: Engine, num_adapters: int, rank: int) -> list[str]:
    """Put random adapters into an engine; returns their names."""
    adapters, names = engine.adapters, [f"adapter-{number}" for number in range(num_adapters)]
    for slot, name in enumerate(names, 1):
        for stack in adapters._bank.stacks.values():
            like, size = stack.a, stack.a.shape[-1]
            for part, rows in enumerate(stack.parts):
                a_RK = torch.randn(rank, size, device=like.device, dtype=like.dtype) * size**-0.5
                stack.fill(
                    slot, part, a_RK, torch.randn(rows, rank, device=like.device, dtype=like.dtype) * 0.01
                )
        adapters.loaded[name] = LoadedAdapter(slot, "", name)
    return names


def speed(engine: Engine, num_rows: int, num_tokens: int, names: list[str], tag: str) -> float:
    """Tokens per second once all rows decode."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for row in range(num_rows):
        prompt = tuple(100 + (7 * row + place) % 90 for place in range(PROMPT))
        adapter = names[row % len(names)] if names else ""
        engine.add(Request(request_id=f"{tag}-{row}", prompt=prompt, params=params, adapter=adapter))
    made = 0
    while made < num_rows:  # the prompts, and a first token of each
        made += sum(len(output.token_ids) for output in engine.step())
    start, counted = time.perf_counter(), 0
    while engine.has_work:
        counted += sum(len(output.token_ids) for output in engine.step())
    return counted / (time.perf_counter() - start)


def main() -> int:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    args = parse(parser)

    knobs = {"max_batch_size": args.rows, "max_seq_len": 1024, "use_prefix_caching": False}
    found: dict[str, list[float]] = {"without": [], "unused": [], "adapted": []}
    for has_room in (False, True):  # one engine after the other: each binds the model anew
        loaded = load_random(args.config, dtype=args.dtype, device=args.device, max_seq_len=1024)
        lora = (
            {"enable_lora": True, "max_loras": args.adapters, "max_lora_rank": args.rank} if has_room else {}
        )
        engine = build_engine(EngineConfig.from_knobs(**(knobs | lora)), loaded)
        while engine.prepare():
            pass
        names = fill(engine, args.adapters, args.rank) if has_room else []
        kinds = {"unused": [], "adapted": names} if has_room else {"without": list[str]()}
        for repeat in range(args.repeats + 1):
            for kind, chosen in kinds.items():
                rate = speed(engine, args.rows, args.tokens, chosen, f"{kind}-{repeat}")
                if repeat:  # the first warms up
                    found[kind].append(rate)
        del engine, loaded
    medians = {kind: statistics.median(rates) for kind, rates in found.items()}
    for kind, rate in medians.items():
        share = 100 * (1 - rate / medians["without"])
        print(f"{kind:8} {rate:10.0f} tok/s   {share:5.1f} % slower   of {[*map(round, found[kind])]}")
    rates = {name: {"median": statistics.median(all_), "all": all_} for name, all_ in found.items()}
    named = {name: value for name, value in vars(args).items() if name not in ("out", "allow_dirty")}
    report = {"arguments": named | {"config": args.config.name}, "tok_s": rates}
    write(
        {"created": today(), "commit": commit(), "versions": versions(), "machine": machine()} | report,
        args.out,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
