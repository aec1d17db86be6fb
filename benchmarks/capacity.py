"""How many sequences one memory holds: the paged cache against the contiguous one.

    python -m benchmarks.capacity [--requests 1500] [--out benchmarks/reports/capacity.json]

The same requests, the same memory (32 times the longest sequence), the real scheduler and pools, and no
model: every sequence gets its next token at once. All requests are there from the start, so the cache
is the only limit; a figure is the mean over the steps in which a request still waited.

    running         sequences at once
    KV use          slots that hold a token, of all slots
    fragmentation   slots of sequences that hold none, of all slots of sequences
    recomputed      tokens computed a second time because of a preemption, of all

Mixed workload: prompts of 16 to 1,500 tokens (most are short), outputs of 8 to 500, max_seq_len 2048.
Nothing is shared between requests, so that prefix caching adds nothing. Targets: paged holds at least
3 times the sequences, at most 5 % fragmentation, more than 80 % KV use.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import asdict, dataclass

from benchmarks.machine import facts, parse, write
from infer.cache.paged_pool import PagedKVCachePool
from infer.config.defaults import SIMULATED_STEPS
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.scheduling.request import Request
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import Sequence, SequenceGroup

MAX_SEQ_LEN = 2048
NUM_SLOTS = 32 * MAX_SEQ_LEN
MAX_BATCH_SIZE = 512


@dataclass(frozen=True, slots=True)
class Figures:
    """One layout of the cache under load."""

    layout: str
    running: float
    kv_use: float
    fragmentation: float
    recomputed: float
    num_preemptions: int
    num_steps: int


def make_lengths(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, output) lengths; most are short, some are very long."""
    rng = random.Random(seed)

    def draw(median: float, spread: float, low: int, high: int) -> int:
        return min(max(int(rng.lognormvariate(math.log(median), spread)), low), high)

    return [(draw(150, 1.0, 16, 1500), draw(120, 0.8, 8, 500)) for _ in range(count)]


def make_pool(layout: str) -> PagedKVCachePool:
    """The same memory, cut in one way or the other."""
    if layout == "contiguous":
        count = NUM_SLOTS // MAX_SEQ_LEN
        return PagedKVCachePool(count, MAX_SEQ_LEN, use_prefix_caching=False, max_blocks_per_sequence=1)
    block_size = int(layout.split()[-1])
    return PagedKVCachePool(NUM_SLOTS // block_size, block_size, use_prefix_caching=False)


def run(layout: str, lengths: list[tuple[int, int]]) -> Figures:
    """Serve all requests and average over the steps in which the cache was in demand."""
    pool = make_pool(layout)
    config = EngineConfig.from_knobs(max_batch_size=MAX_BATCH_SIZE, preemption="recompute")
    scheduler = Scheduler(pool, resolve_scheduler(config, 4096, SIMULATED_STEPS))
    for number, (num_prompt, num_output) in enumerate(lengths):
        request = Request(request_id=str(number), prompt=(number % 1000,) * num_prompt)
        group = SequenceGroup(request, max_total=num_prompt + num_output, stop_ids=(), seed=0)
        seq = Sequence(number, group, 0, list(request.prompt))
        seq.arrival = number
        scheduler.add(seq)
    samples: list[tuple[int, float, float]] = []
    num_computed = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.advance(plan)
        scheduler.commit(plan)
        num_computed += plan.chunks.num_tokens
        if scheduler.num_waiting:
            usage = scheduler.usage()
            num_filled = usage.num_used * pool.block_size - usage.num_unfilled_slots
            samples.append((len(scheduler.running), num_filled / NUM_SLOTS, usage.fragmentation))
        for chunk, seq in zip(plan.chunks, plan.chunks.sequences, strict=True):
            if chunk.num_samples:
                seq.tokens.append(0)
                if chunk.stop + 1 >= seq.group.max_total:
                    scheduler.remove(seq)
    samples = samples[len(samples) // 10 :]  # the first prompts fill an empty cache
    running, kv_use, fragmentation = (sum(column) / len(samples) for column in zip(*samples, strict=True))
    num_needed = sum(num_prompt + num_output - 1 for num_prompt, num_output in lengths)
    return Figures(
        layout=layout,
        running=running,
        kv_use=kv_use,
        fragmentation=fragmentation,
        recomputed=1 - num_needed / num_computed,
        num_preemptions=scheduler.num_preemptions,
        num_steps=scheduler.step,
    )


def main() -> None:
    """Run every layout, print the table, write the report."""
    parser = argparse.ArgumentParser(description="sequences per memory: paged against contiguous")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser)
    lengths = make_lengths(args.requests, args.seed)
    rows = [run(layout, lengths) for layout in ("contiguous", "paged, block size 16", "paged, block size 32")]
    print(", ".join(facts().values()))
    print(f"{args.requests} requests, {NUM_SLOTS} slots, max_seq_len {MAX_SEQ_LEN}, seed {args.seed}\n")
    for row in rows:
        print(
            f"{row.layout:<22} {row.running:6.1f} running ({row.running / rows[0].running:4.1f}x)   "
            f"KV use {row.kv_use:5.1%}   fragmentation {row.fragmentation:5.1%}   "
            f"recomputed {row.recomputed:5.1%} ({row.num_preemptions} preemptions)   {row.num_steps} steps"
        )
    paged = rows[1]
    met = {
        "paged holds 3 times the sequences": paged.running >= 3 * rows[0].running,
        "fragmentation < 5 %": paged.fragmentation < 0.05,
        "KV use > 80 %": paged.kv_use > 0.8,
    }
    for name, is_met in met.items():
        print(f"{'met ' if is_met else 'MISSED'} {name}")
    report = {
        "benchmark": "capacity",
        "machine": facts(),
        "requests": args.requests,
        "seed": args.seed,
        "num_slots": NUM_SLOTS,
        "max_seq_len": MAX_SEQ_LEN,
        "rows": [asdict(row) for row in rows],
        "targets_met": met,
    }
    write(report, args.out)


if __name__ == "__main__":
    main()
