"""What planning costs: microseconds per step of the scheduler and the cache's books, without a model.

    python -m benchmarks.scheduler [--repeats 40] [--out benchmarks/reports/scheduler.json]

A step is `Scheduler.plan()` and `Scheduler.commit()`; sequences decode for ever, so every step serves all
of them, and one in `block_size` of each sequence's tokens crosses a block boundary. Each figure is CPU
time: the mean over a run of 64 steps (four times round the blocks), the best of `--repeats` runs,
because everything that disturbs a run makes it slower.

Targets: at most 100 us at 64 running sequences and 250 us at 256; at most 1 us per further sequence;
no more with 10,000 requests waiting than with none.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from typing import Any

from benchmarks.machine import facts, parse, write
from infer.cache.paged_pool import PagedKVCachePool
from infer.config.defaults import SIMULATED_STEPS
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import Sequence, SequenceGroup

STEPS = 64
BLOCK_SIZE = 16
PROMPT_LEN = 32
TARGETS_US = {64: 100.0, 256: 250.0}


def make_scheduler(num_running: int, num_waiting: int, *, policy: str) -> Scheduler:
    """A scheduler that has computed the prompts of the running ones; the others wait for a place."""
    pool = PagedKVCachePool(num_running * 4096 // BLOCK_SIZE, BLOCK_SIZE)
    config = EngineConfig.from_knobs(
        max_batch_size=num_running,
        max_num_batched_tokens=16384,
        scheduler_policy=policy,
        max_wait_steps=10**9,
    )
    scheduler = Scheduler(pool, resolve_scheduler(config, 4096, SIMULATED_STEPS))
    params = SamplingParams(max_tokens=4000)
    for number in range(num_running + num_waiting):
        prompt = tuple((number * 31 + place * 7) % 1000 for place in range(PROMPT_LEN))
        request = Request(request_id=str(number), prompt=prompt, params=params)
        group = SequenceGroup(request, max_total=PROMPT_LEN + 4000, stop_ids=(), seed=0)
        seq = Sequence(number, group, 0, list(prompt))
        seq.arrival = number
        scheduler.add(seq)
    while any(seq.num_output < 1 for seq in scheduler.running) or len(scheduler.running) < num_running:
        run_steps(scheduler, 1)
    return scheduler


def run_steps(scheduler: Scheduler, count: int) -> float:
    """CPU seconds of plan and commit; between them every sequence gets its token, off the clock."""
    seconds = 0.0
    for number in range(count):
        start = time.process_time()
        plan = scheduler.plan()
        scheduler.advance(plan)
        scheduler.commit(plan)
        seconds += time.process_time() - start
        for chunk, seq in zip(plan.chunks, plan.chunks.sequences, strict=True):
            if chunk.num_samples:
                seq.tokens.append((seq.seq_id * 17 + number) % 1000)
    return seconds


def measure(num_running: int, num_waiting: int, repeats: int, policy: str = "fcfs") -> float:
    """Microseconds per step, the best run."""
    scheduler = make_scheduler(num_running, num_waiting, policy=policy)
    best = float("inf")
    for number in range(repeats):
        if number % 30 == 29:  # sequences have grown long: start over
            scheduler = make_scheduler(num_running, num_waiting, policy=policy)
        gc.collect()
        gc.disable()  # a collection is no step's own
        best = min(best, run_steps(scheduler, STEPS))
        gc.enable()
    return best / STEPS * 1e6


def measure_all(repeats: int) -> dict[str, Any]:
    """Every figure, and whether the targets are met."""
    rows = [
        {"running": running, "waiting": waiting, "us_per_step": measure(running, waiting, repeats)}
        for running, waiting in itertools.product((1, 64, 256), (0, 10_000))
    ]
    by_size = {row["running"]: row["us_per_step"] for row in rows if row["waiting"] == 0}
    busy = {row["running"]: row["us_per_step"] for row in rows if row["waiting"]}
    slope = (by_size[256] - by_size[64]) / 192
    policies = {
        name: measure(64, 100, max(repeats // 4, 3), name)
        for name in ("fcfs", "prefill_first", "decode_round_robin", "priority", "deadline")
    }
    met = {f"{size} running <= {limit:.0f} us": by_size[size] <= limit for size, limit in TARGETS_US.items()}
    met["slope <= 1 us per sequence"] = slope <= 1.0
    met["flat in waiting (10 %)"] = all(busy[size] <= 1.1 * by_size[size] + 5 for size in (64, 256))
    return {"rows": rows, "slope_us_per_sequence": slope, "policies_at_64": policies, "targets_met": met}


def main() -> None:
    """Print the figures, and write them where `--out` says."""
    parser = argparse.ArgumentParser(description="microseconds per step of the scheduler, without a model")
    parser.add_argument("--repeats", type=int, default=40)
    args = parse(parser)
    figures = measure_all(args.repeats)
    print(", ".join(facts().values()), f"block_size {BLOCK_SIZE}, best of {args.repeats}\n", sep=", ")
    for row in figures["rows"]:
        print(
            f"{row['running']:>4} running {row['waiting']:>6} waiting {row['us_per_step']:>9.1f} us per step"
        )
    print(f"slope {figures['slope_us_per_sequence']:.2f} us per running sequence")
    for name, us in figures["policies_at_64"].items():
        print(f"{name:<20} {us:>9.1f} us per step at 64 running, 100 waiting")
    for name, is_met in figures["targets_met"].items():
        print(f"{'met ' if is_met else 'MISSED'} {name}")
    write({"benchmark": "scheduler", "machine": facts(), "repeats": args.repeats, **figures}, args.out)


if __name__ == "__main__":
    main()
