"""The gate that no busy machine can trip: what the scheduler and the cache decide, in counts.

    python -m benchmarks.counts            compare with benchmarks/reports/counts.json
    python -m benchmarks.counts --write    write it, after a change that was meant to change decisions

Steps, preemptions, cache hits and tokens per step of fixed workloads, with no model and no clock
(`infer.bench.simulated`). tests/unit/bench/test_counts.py runs the comparison in CI.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.policies import run_knobs
from infer.bench.workloads import make_workload

EXPECTED = Path(__file__).parent / "reports" / "counts.json"
GATE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "static": (
        "continuous_batching",
        {"batching_mode": "static", "kv_cache_backend": "contiguous", "num_blocks": 128, "max_batch_size": 8},
    ),
    "continuous": ("continuous_batching", {"num_blocks": 512, "max_batch_size": 8}),
    "paged, small cache": ("paged_attention", {"num_blocks": 128, "max_batch_size": 48}),
    "swap": (
        "paged_attention",
        {"num_blocks": 96, "max_batch_size": 48, "swap_blocks": 512, "preemption": "swap"},
    ),
    "chunked": ("chunked_prefill", {"num_blocks": 2048, "prefill_chunk_size": 128}),
    "prefix": ("prefix_caching", {"num_blocks": 512}),
    "no prefix": ("prefix_caching", {"num_blocks": 512, "use_prefix_caching": False}),
    "sessions": ("agent_session", {"num_blocks": 1024}),
    "round robin": ("w2_mixed", {"num_blocks": 1024, "scheduler_policy": "decode_round_robin"}),
    "one by one": ("baseline", {"num_blocks": 512}),
    "drafts": ("baseline", {"num_blocks": 512, "num_speculative_tokens": 4, "synthetic_acceptance": 0.7}),
}


def counts() -> dict[str, dict[str, float]]:
    """Return steps, preemptions, cache hits and tokens per step of each row of GATE; no times."""
    found = {}
    for name, (workload, knobs) in GATE.items():
        result = run_knobs(make_workload(workload, seed=42), **knobs)
        found[name] = {
            **result.counters,
            "num_errors": sum(not trace.is_ok for trace in result.traces),
            "tokens_per_step": round(result.counters["num_step_tokens"] / result.counters["num_steps"], 3),
            "peak_running": max(result.running),
        }
    return found


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
