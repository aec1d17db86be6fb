"""How long a user waits before anything happens: imports, `--help`, the first token.

    python benchmarks/startup.py [--model DIR] [--runs 5] [--out FILE]

Each figure is the best of several fresh processes, with warm file caches: the cost we can change, not
the disk's. `first token` is from the start of the process to the first byte on standard output, with
the default model unless `--model` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from time import perf_counter

TARGETS_S = {"import infer": 0.3, "infer --help": 0.5, "first token": 4.0}


def process_s(arguments: list[str]) -> float:
    """Seconds until a process has ended."""
    started = perf_counter()
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - started


def first_byte_s(arguments: list[str]) -> float:
    """Seconds until a process has written its first byte; the rest of its output is not waited for."""
    started = perf_counter()
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"no output from {' '.join(arguments)}")
        elapsed = perf_counter() - started
        process.stdout.read()
    return elapsed


def main() -> None:
    """Measure, print a table and, if asked, write a report."""
    parser = argparse.ArgumentParser(description="Measure start-up times.")
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    infer = [sys.executable, "-m", "infer"]
    model = ["--model", args.model] if args.model else []
    generate = [*infer, "generate", "Why is the sky blue?", "--max-tokens", "4", "--temperature", "0", *model]
    figures = {
        "python": min(process_s([sys.executable, "-c", ""]) for _ in range(args.runs)),
        "import infer": min(process_s([sys.executable, "-c", "import infer"]) for _ in range(args.runs)),
        "infer --help": min(process_s([*infer, "--help"]) for _ in range(args.runs)),
        "import torch": min(process_s([sys.executable, "-c", "import torch"]) for _ in range(args.runs)),
        "first token": min(first_byte_s(generate) for _ in range(args.runs)),
    }
    for name, seconds in figures.items():
        target = f"   target {TARGETS_S[name]:.1f} s" if name in TARGETS_S else ""
        print(f"{name:<14} {seconds:6.2f} s{target}")
    if args.out:
        machine = {"machine": platform.machine(), "python": platform.python_version()}
        args.out.write_text(json.dumps({"seconds": figures, **machine}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
