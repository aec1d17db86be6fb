"""Time the sampler of a decode step: greedy rows, plain draws, and filters on peaked and on flat logits.

python -m benchmarks.kernels.sample_rows [--out FILE] [--device cpu|cuda]

The bytes are those of one read of the logits. Logits like a trained model's (`peaked`: a few tokens stand
out) leave the filters a few hundred candidates; nearly flat ones make them weigh the row in buckets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.kernels.report import run_benchmark
from benchmarks.kernels.timing import Case
from infer.kernels.sampling.sample_line import NUM_FIELDS, SampleLine
from infer.kernels.sampling.sample_rows import SampleScratch, sample_rows, sample_rows_reference
from infer.kernels.sampling.sample_state import SampleState, enter_rows

VOCAB_SIZE = 151_936
# name: temperature, top_k, top_p, min_p, how far the logits spread
KINDS: dict[str, tuple[float, int, float, float, float]] = {
    "greedy": (0.0, 0, 1.0, 0.0, 1.0),
    "draw": (0.6, 0, 1.0, 0.0, 1.0),
    "draw, penalties": (0.6, 0, 1.0, 0.0, 1.0),
    "min-p": (0.6, 0, 1.0, 0.05, 3.0),
    "top-k 20, top-p 0.95, peaked": (0.6, 20, 0.95, 0.0, 3.0),
    "top-p 0.95, peaked": (0.6, 0, 0.95, 0.0, 4.0),
    "top-p 0.95, flat": (1.0, 0, 0.95, 0.0, 1.0),
}


def sample_rows_cases(device: torch.device) -> Iterator[Case]:
    """Each kind of row, alone and in a batch."""
    on_gpu = device.type == "cuda"
    for num_rows in (1, 32, 256) if on_gpu else (1, 4):
        for kind in KINDS:
            yield _case(kind, num_rows, torch.bfloat16 if on_gpu else torch.float32, device)


def _case(kind: str, num_rows: int, dtype: torch.dtype, device: torch.device) -> Case:
    temperature, top_k, top_p, min_p, spread = KINDS[kind]
    state = SampleState.empty(num_rows, device, VOCAB_SIZE)
    lines = [
        SampleLine(
            row, int("penalties" in kind), top_k, seed=row, temperature=temperature, top_p=top_p, min_p=min_p,
            repetition=1.1 if "penalties" in kind else 1.0,
        ).pack()
        for row in range(num_rows)
    ]  # fmt: skip
    entries = torch.frombuffer(bytearray().join(lines), dtype=torch.int64).view(num_rows, NUM_FIELDS)
    enter_rows(state, entries.to(device))
    scratch = SampleScratch(num_rows, VOCAB_SIZE, device)
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    positions = torch.arange(num_rows, device=device) + 100

    element = torch.empty((), dtype=dtype).element_size()
    return Case(
        kernel="sample_rows",
        shape=f"[{num_rows}, {VOCAB_SIZE}] {kind}",
        dtype=dtype,
        num_bytes=num_rows * VOCAB_SIZE * element,
        make_inputs=lambda: ((torch.randn(num_rows, VOCAB_SIZE, device=device) * spread).to(dtype),),
        reference=lambda logits: sample_rows_reference(logits, state, rows, positions),
        implementations={
            "infer": lambda logits: sample_rows(logits, state, rows, positions, scratch).clone(),
        },
    )


if __name__ == "__main__":
    sys.exit(run_benchmark("time sample_rows", [sample_rows_cases]))
