"""The gate that no busy machine can trip: what the scheduler and the cache decide, in counts.

    python -m benchmarks.counts            compare with benchmarks/reports/counts.json
    python -m benchmarks.counts --write    write it, after a change that was meant to change decisions

Steps, preemptions, cache hits and tokens per step of fixed workloads, with no model and no clock; see
`infer.bench.simulated`. tests/unit/bench/test_counts.py runs the comparison in CI.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from infer.bench.simulated import counts

EXPECTED = Path(__file__).parent / "reports" / "counts.json"


def differences(found: dict[str, dict[str, float]], expected: dict[str, dict[str, float]]) -> list[str]:
    """Every count that is not as expected."""
    lines = []
    for name in expected | found:
        old, new = expected.get(name, {}), found.get(name, {})
        lines += [
            f"{name}: {count} was {old.get(count)}, is {new.get(count)}"
            for count in old | new
            if old.get(count) != new.get(count)
        ]
    return lines


def main() -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description="Compare the engine's decisions with those on file.")
    parser.add_argument("--write", action="store_true", help="make what is found the expectation")
    args = parser.parse_args()
    found = counts()
    if args.write:
        EXPECTED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    lines = differences(found, json.loads(EXPECTED.read_text(encoding="utf-8")))
    print("\n".join(lines) or "as expected")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
