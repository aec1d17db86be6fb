"""The real scheduler and the real cache books under a workload, with no model and on a virtual clock.

What comes out are decisions: how many steps, how full they were, who was preempted, what the cache found.
They follow from the workload and the knobs alone and are equal on every machine, which makes them fit for
a gate that no load on a build machine can trip (`counts`), and for comparing policies (`sweep`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infer.bench.metrics import RequestTrace
from infer.bench.report import Row, make_row
from infer.bench.run_offline import DriveResult, drive
from infer.bench.workloads import Arrival, Session, Turn, Workload, make_workload
from infer.cache.memory import size_cache
from infer.config.defaults import SIMULATED_STEPS
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig, knob_table
from infer.engine.build import make_pool
from infer.engine.engine import Engine
from infer.scheduling.scheduler import Scheduler
from infer.tools.simulate import SimulatedRunner
from infer.tools.step_cost import StepCost
from infer.tools.trace import VOCAB_SIZE, RequestMaker
from infer.tools.trace import make_workload as make_trace

SWEEP_LOADS = ("mixed", "shared_prefix")
SWEEP_PACE = 2.0  # times the arrivals of the simulator's load: enough for a queue, so that order matters
SWEEP_KNOBS: Mapping[str, Any] = {
    "num_blocks": 256,
    "max_batch_size": 16,
    "max_num_batched_tokens": 192,
    "prefill_chunk_size": 128,
}
PATIENCE_S = 10.0  # of a request of priority 0
# A machine that stays as slow as it is, whatever the simulator's own default is fitted to, so that counts and
# reports of different commits can be compared: the default model in float32 on two cores.
SLOW_MACHINE = StepCost(base=0.036, per_token=0.0016, per_kv_token=0.000022, per_block=0.00013)


def run_virtual(workload: Workload, cost: StepCost = SLOW_MACHINE, **knobs: Any) -> DriveResult:
    """A workload through the engine's decisions; `knobs` must give num_blocks."""
    config = EngineConfig.from_knobs(**knobs)
    max_seq_len = config.load.max_seq_len or workload.longest
    scheduler_config = resolve_scheduler(config, max_seq_len, SIMULATED_STEPS)
    size = size_cache(
        config.cache, scheduler_config, max_seq_len=max_seq_len, bytes_per_token=1, free_bytes=0
    )
    runner = SimulatedRunner(cost)
    scheduler = Scheduler(make_pool(config, size), scheduler_config, keeps_cache=config.cache.keeps_cache)
    engine = Engine(scheduler, runner, context_len=max_seq_len, vocab_size=VOCAB_SIZE)

    def wait(seconds: float) -> None:
        runner.now += seconds + 1e-9  # past the arrival, whatever the rounding

    result = drive(engine, workload, clock=lambda: runner.now, wait=wait, sample_every=1)
    for trace in result.traces:
        trace.queue_s = _queue_s(trace, runner)
    return result


def _queue_s(trace: RequestTrace, runner: SimulatedRunner) -> float | None:
    first = runner.first_chunk.get(f"{trace.session}.{trace.turn}")
    return None if first is None else max(0.0, first - trace.asked)


def trace_workload(name: str, *, num_requests: int, seed: int, pace: float = 1.0) -> Workload:
    """A load of the simulator as a workload: its lengths, prefixes and urgency, arrivals `pace` as fast."""
    maker = RequestMaker()
    sessions = tuple(
        Session(
            turns=(Turn(ids=maker.make(item).prompt, max_tokens=item.output_len),),
            start_s=item.arrival / pace,
            priority=item.priority,
            deadline=item.arrival / pace + PATIENCE_S * (1 + item.priority),
        )
        for item in make_trace(name, num_requests=num_requests, seed=seed)
    )
    return Workload(name=name, about="", arrival=Arrival(kind="open", rate=1.0), sessions=sessions)


def sweep(*, num_requests: int = 200, seed: int = 0) -> list[Row]:
    """Every policy under a mixed load and one with shared prefixes: latency, throughput, who starved.

    The machine is too slow for the load for a while and its steps are short, or the order would not matter.
    """
    rows = []
    for load in SWEEP_LOADS:
        workload = trace_workload(load, num_requests=num_requests, seed=seed, pace=SWEEP_PACE)
        for policy in knob_table()["scheduler_policy"].choices:
            result = run_virtual(workload, scheduler_policy=policy, **SWEEP_KNOBS)
            figures = result.figures()
            kept = (
                "output_tokens_per_s",
                "ttft_p50_s",
                "ttft_p99_s",
                "itl_p50_s",
                "itl_p99_s",
                "longest_wait_s",
                "num_starved",
                "num_preemptions",
                "cache_hit_share",
                "kv_use",
            )
            rows.append(
                make_row(
                    f"{load} {policy}",
                    f"{num_requests} requests, simulated",
                    [{name: figures[name] for name in kept if name in figures}],
                    settings={"scheduler_policy": policy, "pace": SWEEP_PACE, **SWEEP_KNOBS},
                )
            )
    return rows


# -- the gate -----------------------------------------------------------------------------------------

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
}


def counts(names: Sequence[str] = tuple(GATE)) -> dict[str, dict[str, float]]:
    """Steps, preemptions, cache hits and tokens per step of each row of GATE; no times."""
    found = {}
    for name in names:
        workload, knobs = GATE[name]
        result = run_virtual(make_workload(workload, seed=42), **knobs)
        errors = sum(not trace.is_ok for trace in result.traces)
        steps = result.counters["num_steps"]
        found[name] = {
            **result.counters,
            "num_errors": errors,
            "tokens_per_step": round(result.counters["num_step_tokens"] / steps, 3),
            "peak_running": max(result.running),
        }
    return found
