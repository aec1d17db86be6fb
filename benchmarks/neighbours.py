"""What one request that asks more of the sampler costs its neighbours: a GPU decodes with and without it.

    python -m benchmarks.neighbours CFG_DIR [--rows 32] [--repeats 5] [--out FILE]

CFG_DIR holds a `config.json`; weights are random, of that shape. A batch of plain rows decodes, then the same
batch with the last row replaced by one that asks for a feature: penalties, a logit bias, `min_tokens`,
logprobs, a token mask, all of them. Runs of the two alternate, and a ratio is that of their medians: tokens
per second of the batch with the feature over those without. At least 0.98 is wanted.

Only steps in which all rows decode are timed. `prompt_logprobs` differ: their work is in the prompt. For them
the time of the whole run is compared, prompts included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infer.bench.report import commit, machine, versions
from infer.bench.target import BenchTarget
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.loader.random_weights import load_random
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request

PROMPT_LEN, NUM_TOKENS, WARM_STEPS = 128, 256, 16
WANTED = 0.98
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1,
}  # fmt: skip
BIAS: dict[str, Any] = {"logit_bias": dict.fromkeys(range(0, 3000, 10), -1.0)}
BANS: dict[str, Any] = {"min_tokens": NUM_TOKENS, "stop_token_ids": (1, 2, 3)}
FEATURES: Mapping[str, dict[str, Any]] = {
    "nothing": {},  # the noise of the measurement
    "penalties": PENALTIES,
    "logit_bias": BIAS,
    "min_tokens": BANS,
    "logprobs 20": {"logprobs": 20},
    "mask": {},
    "all": PENALTIES | BIAS | BANS | {"logprobs": 20},
    "prompt_logprobs 20": {"prompt_logprobs": 20},
}


def run(engine: Engine, num_rows: int, asked: dict[str, Any], *, has_mask: bool, is_whole: bool) -> float:
    """Seconds of a batch whose last row asks for something: from its first step, or while all rows decode."""
    rng = np.random.default_rng(7)
    engine.reset_prefix_cache()
    for number in range(num_rows):
        extra = asked if number == num_rows - 1 else {}
        params = SamplingParams(temperature=0.6, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True, **extra)
        prompt = tuple(rng.integers(10, 10_000, PROMPT_LEN).tolist())
        engine.add(Request(request_id=str(number), prompt=prompt, params=params))
    start = time.perf_counter()
    for _ in range(WARM_STEPS):
        engine.step()
    if has_mask:
        mask_last_row(engine)
    if not is_whole:
        start = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def mask_last_row(engine: Engine) -> None:
    """Let one row be sampled under a mask that allows every other id."""
    masks = engine._device.rows.masks  # type: ignore[attr-defined]
    masks.take(1).fill(0x55555555)
    masks.send(np.array([engine.scheduler.running[-1].row]))
    masks.has_any = False  # steps that are given no masks leave it there


def compare(engine: Engine, num_rows: int, name: str, repeats: int) -> dict[str, Any]:
    """Alternate batches with and without a feature; the first of each is not counted."""
    asked, is_whole = FEATURES[name], "prompt_logprobs" in FEATURES[name]
    plain, with_it = list[float](), list[float]()
    for _ in range(repeats + 1):
        plain.append(run(engine, num_rows, {}, has_mask=False, is_whole=is_whole))
        with_it.append(run(engine, num_rows, asked, has_mask=name == "mask", is_whole=is_whole))
    before, after = statistics.median(plain[1:]), statistics.median(with_it[1:])
    return {
        "plain_s": round(before, 4),
        "with_s": round(after, 4),
        "ratio": round(before / after, 4),
        "is_met": before / after >= WANTED,
    }


def main() -> int:
    """Measure, print, write; exits with 1 if a feature costs more than is wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, metavar="CFG_DIR")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU", file=sys.stderr)
        return 2
    loaded = load_random(args.config, dtype="bfloat16", device="cuda", max_seq_len=1024)
    engine = BenchTarget(loaded=loaded, config=EngineConfig.from_knobs(max_batch_size=args.rows)).engine()
    while engine.prepare():
        pass
    found: dict[str, Any] = {
        "model": args.config.name, "rows": args.rows, "commit": commit(), "versions": versions(),
        "machine": machine(),
    }  # fmt: skip
    for name in FEATURES:
        row = found[name] = compare(engine, args.rows, name, args.repeats)
        tokens = args.rows * (NUM_TOKENS - WARM_STEPS)
        print(f"{name:20} {row['ratio']:7.4f} of {tokens / row['plain_s']:8.0f} tok/s", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(found[name]["is_met"] for name in FEATURES) else 1


if __name__ == "__main__":
    sys.exit(main())
