"""What a kernel benchmark prints and writes: one table and one JSON file."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from benchmarks.kernels.timing import Case, Result, copy_bandwidth, measure
from benchmarks.machine import parse, today, write
from infer.bench.report import commit
from infer.kernels.runtime.dispatch import triton

MakeCases = Callable[[torch.device], Iterable[Case]]


def run_benchmark(description: str, benchmarks: Iterable[MakeCases], argv: list[str] | None = None) -> int:
    """Parse the flags, measure every case, print the table, write the report; the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU if there is one")
    parser.add_argument("--commit", help="what to report where git is not there to ask")
    arguments = parse(parser, argv)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    bandwidth = copy_bandwidth(device) if device.type == "cuda" else None
    results = []
    with torch.inference_mode():
        for make_cases in benchmarks:
            for case in make_cases(device):
                print(f"{case.kernel} {case.shape}", file=sys.stderr)
                results += measure(case, device, bandwidth)

    facts = environment(device) | {"copy_gb_per_s": bandwidth}
    if arguments.commit:
        facts["commit"] = arguments.commit
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(table(results))
    if arguments.out:
        report = {"environment": facts, "results": [result.as_dict() for result in results]}
        write(report, arguments.out)
    num_failed = sum(not result.passed for result in results)
    print(f"{len(results) - num_failed} of {len(results)} agree with the reference")
    return 1 if num_failed else 0


def environment(device: torch.device) -> dict[str, object]:
    """Everything that must be the same for two reports to be compared."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": None if triton is None else triton.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": today(),
    }


def cpu_name() -> str:
    """The processor's own name for itself, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x{len(names)}" if names else platform.machine()


def table(results: Iterable[Result]) -> str:
    """Aligned columns; `*` marks a rate that the cache, not memory, has served."""
    header = ("kernel", "shape", "dtype", "implementation", "us", "GB/s", "of copy", "max error", "check")
    rows = [header, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(result: Result) -> tuple[str, ...]:
    share = "" if result.copy_share is None else f"{result.copy_share:.0%}{'*' if result.from_cache else ''}"
    return (
        result.kernel,
        result.shape,
        result.dtype,
        result.implementation,
        f"{result.median_us:.1f}",
        f"{result.gb_per_s:.0f}",
        share,
        f"{result.max_error:.1e}",
        "ok" if result.passed else "WRONG",
    )
