"""Check and time every kernel: one table and one report, then the benchmarks with tables of their own.

    python -m benchmarks.kernels.run_all [--out FILE] [--device cpu|cuda]

It needs nothing but PyTorch and, for the kernels, Triton. What only a GPU has is left out on a CPU.
"""

from __future__ import annotations

import sys
from importlib import import_module

import torch

from benchmarks.kernels.report import run_benchmark

# file: what makes its cases, for the common table
CASES = {
    "rms_norm": "rms_norm_cases",
    "rope": "rope_cases",
    "heads": "heads_cases",
    "gated_activation": "gated_activation_cases",
    "linear_pdl": "linear_pdl_cases",
    "moe": "experts_cases",
    "sample_rows": "sample_rows_cases",
}
PROGRAMS = (
    "attention_decode",
    "attention_prefill",
    "linear_coded",
    "linear_small",
)  # with tables of their own; GPU only
PARTS = ("linear_pairs", "linear_sweep", "report", "timing", "run_all")  # of the others; nothing to time


def main(argv: list[str] | None = None) -> int:
    """Run every benchmark beside this file; the exit code is the worst of theirs."""
    benchmarks = [
        getattr(import_module(f"benchmarks.kernels.{file}"), cases) for file, cases in CASES.items()
    ]
    code = run_benchmark("time every kernel", benchmarks, argv)
    if torch.cuda.is_available() and "cpu" not in (argv if argv is not None else sys.argv):
        for file in PROGRAMS:
            print(f"\n{file}", flush=True)
            code = max(code, import_module(f"benchmarks.kernels.{file}").main([]))
    return code


if __name__ == "__main__":
    sys.exit(main())
