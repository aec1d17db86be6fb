"""Every scheduling policy under four simulated loads: figures that are the same on every machine.

sweep()          rows for a report: `python -m benchmarks.bench policies`
run_knobs(...)   one workload under any knobs: benchmarks/counts.py, benchmarks/micro.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from infer.bench.report import Row, make_row
from infer.bench.run_offline import OfflineResult
from infer.bench.simulated import run_simulated
from infer.bench.traces import draw_trace, to_workload
from infer.bench.workloads import Workload
from infer.config.settings import EngineConfig, knob_table
from infer.tools.step_cost import StepCost

# A machine that stays equally slow, whatever the default cost is fitted to, so that counts and
# reports of different commits can be compared: the default model in float32 on two cores.
SLOW_MACHINE = StepCost(base=0.036, per_token=0.0016, per_kv_token=0.000022, per_block=0.00013)


class SweepLoad(NamedTuple):
    """A load of the sweep: its trace, the knobs it needs, and the answers that each request asks for."""

    trace: str
    knobs: Mapping[str, Any] = {}
    n: int = 1


SWEEP_LOADS: Mapping[str, SweepLoad] = {
    "mixed": SweepLoad("mixed"),
    "shared_prefix": SweepLoad("shared_prefix"),
    "newcomers": SweepLoad("newcomers", {"prefill_chunk_size": 192}),  # a long prompt could fill a step
    "forks": SweepLoad("bursty", {"max_num_batched_tokens": 12}, n=8),  # 16 sequences, and tokens for 12
}
SWEEP_PACE = 2.0  # speed-up of the load's arrivals: enough for a queue, so that order matters
SWEEP_KNOBS: Mapping[str, Any] = {
    "num_blocks": 256,
    "max_batch_size": 16,
    "max_num_batched_tokens": 192,
    "prefill_chunk_size": 128,
}
SWEEP_FIGURES = (
    "output_tokens_per_s ttft_p50_s ttft_p99_s itl_p50_s itl_p99_s longest_wait_s num_starved "
    "num_preemptions cache_hit_share kv_use"
)
PATIENCE_S = 10.0  # deadline of a request of priority 0


def run_knobs(workload: Workload, *, n: int = 1, **knobs: Any) -> OfflineResult:
    """Run a workload on the slow machine, `n` answers for each request; `knobs` must give num_blocks."""
    return run_simulated(workload, EngineConfig.from_knobs(**knobs), SLOW_MACHINE, n=n)


def sweep_workload(name: str, *, num_requests: int, seed: int) -> Workload:
    """Return a built-in load at the pace of the sweep, every request with a deadline by its priority."""
    requests = []
    for item in draw_trace(name, num_requests=num_requests, seed=seed):
        arrival = item.arrival / SWEEP_PACE
        deadline = arrival + PATIENCE_S * (1 + item.priority)
        requests.append(msgspec.structs.replace(item, arrival=arrival, deadline=deadline))
    return to_workload(name, requests)


def sweep(*, num_requests: int = 200, seed: int = 0) -> list[Row]:
    """Return a row of latency, throughput and starvation for every policy under each load of the sweep.

    The machine is too slow for the load for a while and has short steps, or the order would not matter.
    """
    rows = []
    for load, (trace, own_knobs, n) in SWEEP_LOADS.items():
        knobs = {**SWEEP_KNOBS, **own_knobs}
        workload = sweep_workload(trace, num_requests=num_requests, seed=seed)
        for policy in knob_table()["scheduler_policy"].choices:
            figures = run_knobs(workload, n=n, scheduler_policy=policy, **knobs).figures()
            kept = {name: figures[name] for name in SWEEP_FIGURES.split() if name in figures}
            settings = {"scheduler_policy": policy, "pace": SWEEP_PACE, **knobs}
            about = f"{num_requests} requests{f' of {n} answers' * (n > 1)}, simulated"
            rows.append(make_row(f"{load} {policy}", about, [kept], settings=settings))
    return rows
