"""How long a user waits before anything happens, beside what we promise: with `benchmarks.bench startup`.

    python -m benchmarks.startup [--model DIR] [--repeats 5] [--out FILE]

Each figure is of fresh processes with warm file caches: the cost we can change, not the disk's. The targets
are for the best of the repeats on a quiet machine of two cores; a miss is said and is no error.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.bench import run
from infer.bench.report import read_report

TARGETS_S = {"import infer": 0.3, "infer --help": 0.5, "first token": 4.0, "server ready": 3.0}


def main(arguments: list[str]) -> int:
    """Measure, then hold the figures against the targets."""
    with tempfile.TemporaryDirectory() as directory:
        out = [] if "--out" in arguments else ["--out", str(Path(directory) / "startup.json")]
        arguments = [*arguments, *out]
        code = run(["startup", *arguments])
        if code == 0:
            path = Path(arguments[arguments.index("--out") + 1])
            for row in read_report(path if path.suffix == ".json" else Path(f"{path}.json")).rows:
                if row.name in TARGETS_S and row.figures:
                    best, target = row.figures["seconds"].low, TARGETS_S[row.name]
                    print(
                        f"{'met   ' if best <= target else 'MISSED'} {row.name}: {best:.2f} of {target:.1f} s"
                    )
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
