"""What sampling costs, in milliseconds per call of `sample`.

    python -m benchmarks.sampling [--threads 1] [--repeats 20] [--out FILE]

Logits fall off like those of a trained model, with the 1.6th power of the rank: top-p 0.95 keeps about
a hundred tokens. `flat top-p` is the worst case: at a temperature of 20, top-p 0.95 keeps most of the
vocabulary. Penalties look back at 2,048 tokens, half of them output.
Of `--repeats` calls, or one second of calls if that is fewer, `wall` is the median time on the clock and
`cpu` the shortest time on the processor: whatever else the machine does only makes a call longer.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import torch

from benchmarks.machine import facts, parse, write
from infer.sampling.params import SamplingParams
from infer.sampling.sampler import SampleRow, sample

NUM_ROWS = (1, 8, 64)
VOCAB_SIZES = (49_152, 151_936)
CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k 40": SamplingParams(temperature=0.8, top_k=40),
    "top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "flat top-p": SamplingParams(temperature=20.0, top_p=0.95),
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
    ),
}


def make_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    """Each row a power law of the rank, its tokens shuffled."""
    generator = torch.Generator().manual_seed(0)
    by_rank = -1.6 * torch.log(torch.arange(1, vocab_size + 1, dtype=torch.float32))
    order = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(num_rows)])
    return by_rank[order]


def make_rows(params: SamplingParams, num_rows: int) -> list[SampleRow]:
    """Rows in the middle of a conversation."""
    tokens = torch.randint(0, VOCAB_SIZES[0], (2048,), generator=torch.Generator().manual_seed(1)).tolist()
    return [
        SampleRow(params=params, seed=i, position=2048, num_prompt=1024, tokens=tokens)
        for i in range(num_rows)
    ]


def measure(params: SamplingParams, logits_SV: torch.Tensor, repeats: int) -> tuple[float, float]:
    """Median wall and shortest CPU milliseconds of one call."""
    rows = make_rows(params, logits_SV.shape[0])
    sample(logits_SV, rows)
    wall: list[float] = []
    cpu: list[float] = []
    while len(wall) < repeats and (len(wall) < 3 or sum(wall) < 1000):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        sample(logits_SV, rows)
        cpu.append((time.process_time() - cpu_start) * 1e3)
        wall.append((time.perf_counter() - wall_start) * 1e3)
    return statistics.median(wall), min(cpu)


def main() -> None:
    """Measure every case and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1, help="PyTorch threads (default 1)")
    parser.add_argument("--repeats", type=int, default=20, help="calls per figure (default 20)")
    args = parse(parser)
    torch.set_num_threads(args.threads)

    print(f"torch {torch.__version__}, {args.threads} thread(s), {platform.machine()}; ms per call")
    print(f"{'rows':>5} {'vocab':>7}  {'case':<12} {'wall':>9} {'cpu':>9}")
    figures = []
    for num_rows in NUM_ROWS:
        for vocab_size in VOCAB_SIZES:
            logits = make_logits(num_rows, vocab_size)
            for name, params in CASES.items():
                wall_ms, cpu_ms = measure(params, logits, args.repeats)
                shape = {"rows": num_rows, "vocab": vocab_size, "case": name}
                figures.append({**shape, "wall_ms": wall_ms, "cpu_ms": cpu_ms})
                print(f"{num_rows:>5} {vocab_size:>7}  {name:<12} {wall_ms:>9.3f} {cpu_ms:>9.3f}")
    header = {"torch": torch.__version__, "threads": args.threads, "machine": facts()}
    write({**header, "figures": figures}, args.out)


if __name__ == "__main__":
    main()
