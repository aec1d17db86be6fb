"""Check and time every kernel; one table, one report.

python benchmarks/kernels/run_all.py [--out FILE] [--device cpu|cuda]

It needs nothing but PyTorch and, for the kernels, Triton; the package need not be installed.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Make the checkout importable, then run every benchmark beside this file."""
    root = Path(__file__).resolve().parents[2]
    sys.path[:1] = [str(root), str(root / "src")]  # instead of this file's own folder

    from benchmarks.kernels.gated_activation import gated_activation_cases
    from benchmarks.kernels.linear_ahead import linear_ahead_cases
    from benchmarks.kernels.report import run_benchmark
    from benchmarks.kernels.rms_norm import rms_norm_cases
    from benchmarks.kernels.rope import rope_cases

    benchmarks = [rms_norm_cases, rope_cases, gated_activation_cases, linear_ahead_cases]
    return run_benchmark("time every kernel", benchmarks)


if __name__ == "__main__":
    sys.exit(main())
