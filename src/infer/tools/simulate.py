"""The real engine on a virtual clock: what would this load do under that policy and that cache?

    trace ──► Engine (real) ──► Scheduler (real) ──► pool (real)
                  │
                  └──► SimulatedRunner: makes up the tokens, and moves the clock by what the step costs

Only the model is missing, so thousands of steps run in a second, and a policy that starves somebody,
thrashes the cache or wastes its budget does so here as it would on the machine. Requests come in when
the clock has reached their arrival; the clock jumps when there is nothing to do. Nothing depends on
the real time: the same trace gives the same figures, always.

    ├─ queue wait ─┤─ prompt ─┤
    arrival        first chunk  first token    ...    a gap    ...   last token
    ├────────── TTFT ──────────┤               ├─ ITL ─┤
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from time import perf_counter

from infer.cache.memory import size_cache
from infer.config.defaults import SIMULATED_STEPS
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.engine.build import make_pool
from infer.engine.engine import Engine
from infer.errors import InferError
from infer.execution.runner import StepResult, SyncRunner
from infer.scheduling.plan import StepPlan
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.request import StepOutput
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import Sequence
from infer.tools.step_cost import StepCost
from infer.tools.trace import VOCAB_SIZE, RequestMaker, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What came of one load under one configuration; seconds are virtual unless they say otherwise."""

    policy: str
    num_blocks: int
    num_finished: int
    num_refused: int  # could never be served, or the queue was full
    num_late: int  # finished after their deadline
    num_steps: int
    seconds: float
    output_tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    longest_gap: float  # between two tokens of one sequence: preempted, or left out
    longest_queue_wait: float  # from arrival to the first chunk
    num_preemptions: int
    cache_hit_rate: float  # of the prompt tokens admitted
    kv_use_mean: float  # share of blocks that sequences hold, over time
    kv_use_peak: float
    steps_per_real_second: float


class SimulatedRunner(SyncRunner):
    """A `Runner` that makes tokens up and keeps the clock."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.now = 0.0
        self.first_chunk: dict[str, float] = {}  # request -> when its first step began

    def run(self, plan: StepPlan, sequences: Seq[Sequence]) -> StepResult:
        """Advance the clock; the ids are new ones, so outputs never match somebody's prompt."""
        for seq in sequences:
            if seq.num_tokens == seq.num_prompt:
                self.first_chunk.setdefault(seq.group.request.request_id, self.now)
        self.now += self.cost.seconds(plan)
        ids = [tuple(VOCAB_SIZE - 1 - index for index in range(chunk.num_samples)) for chunk in plan.chunks]
        return StepResult(ids, [(None,) * len(row) for row in ids], {})

    def forget(self, seq_id: int) -> None:
        """Nothing is kept per sequence."""


class _Meter:
    """Collects what happens to the requests and to the cache."""

    def __init__(self, trace: Seq[TraceRequest], runner: SimulatedRunner) -> None:
        self._trace = trace
        self._runner = runner
        self._last_token: dict[str, float] = {}
        self.ttft: list[float] = []
        self.gaps: list[float] = []
        self.num_finished = self.num_late = self.num_refused = self.num_tokens = 0
        self.kv_seconds = self.kv_peak = 0.0

    def take(self, outputs: Seq[StepOutput], kv_use: float, seconds: float) -> None:
        now = self._runner.now
        self.kv_seconds += kv_use * seconds
        self.kv_peak = max(self.kv_peak, kv_use)
        for output in outputs:
            name = output.request_id
            last = self._last_token.get(name)
            if last is None:
                self.ttft.append(now - self._trace[int(name)].arrival)
            else:
                self.gaps.append(now - last)
            self._last_token[name] = now
            self.num_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                deadline = self._trace[int(name)].deadline
                self.num_finished += 1
                self.num_late += deadline is not None and now > deadline
                del self._last_token[name]


def simulate(trace: Seq[TraceRequest], config: EngineConfig, cost: StepCost) -> SimulationResult:
    """Run a trace, which is in the order of arrival, to its end; the config must give `num_blocks`."""
    assert config.cache.num_blocks is not None, "a simulation has no memory to size its cache from"
    runner = SimulatedRunner(cost)
    engine = _make_engine(trace, config, runner)
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    meter = _Meter(trace, runner)
    maker = RequestMaker()
    arrivals = deque(trace)
    num_steps = 0
    started = perf_counter()
    while arrivals or engine.has_work:
        while arrivals and arrivals[0].arrival <= runner.now:
            try:
                engine.add(maker.make(arrivals.popleft()))
            except InferError:
                meter.num_refused += 1
        if not engine.has_work:
            if arrivals:
                runner.now = arrivals[0].arrival
            continue
        before = runner.now
        outputs = engine.step()
        num_steps += 1
        # before the finished let go of their blocks this would be a little more
        kv_use = 1 - pool.num_free_blocks / pool.num_blocks
        meter.take(outputs, kv_use, runner.now - before)
    real_seconds = perf_counter() - started
    usage = pool.usage()
    waits = [runner.first_chunk[name] - trace[int(name)].arrival for name in runner.first_chunk]
    ttft, gaps = sorted(meter.ttft), sorted(meter.gaps)
    return SimulationResult(
        policy=config.scheduler.scheduler_policy,
        num_blocks=pool.num_blocks,
        num_finished=meter.num_finished,
        num_refused=meter.num_refused,
        num_late=meter.num_late,
        num_steps=num_steps,
        seconds=runner.now,
        output_tokens_per_second=meter.num_tokens / runner.now if runner.now else 0.0,
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        itl_p50=percentile(gaps, 50),
        itl_p99=percentile(gaps, 99),
        longest_gap=max(gaps, default=0.0),
        longest_queue_wait=max(waits, default=0.0),
        num_preemptions=scheduler.num_preemptions,
        cache_hit_rate=usage.num_hit_tokens / usage.num_queried_tokens if usage.num_queried_tokens else 0.0,
        kv_use_mean=meter.kv_seconds / runner.now if runner.now else 0.0,
        kv_use_peak=meter.kv_peak,
        steps_per_real_second=num_steps / real_seconds if real_seconds else 0.0,
    )


def compare(
    trace: Seq[TraceRequest],
    config: EngineConfig,
    cost: StepCost,
    *,
    policies: Seq[str],
    num_blocks: Seq[int],
) -> list[SimulationResult]:
    """One result for every policy and every size of the cache."""
    return [
        simulate(
            trace,
            replace(
                config,
                cache=replace(config.cache, num_blocks=count, kv_cache_memory=None),
                scheduler=replace(config.scheduler, scheduler_policy=policy),
            ),
            cost,
        )
        for count in num_blocks
        for policy in policies
    ]


def _make_engine(trace: Seq[TraceRequest], config: EngineConfig, runner: SimulatedRunner) -> Engine:
    max_seq_len = config.load.max_seq_len or max(item.prompt_len + item.output_len for item in trace)
    scheduler_config = resolve_scheduler(config, max_seq_len, SIMULATED_STEPS)
    size = size_cache(
        config.cache, scheduler_config, max_seq_len=max_seq_len, bytes_per_token=1, free_bytes=0
    )
    cost = PreemptionCost(
        swap_seconds=runner.cost.per_block / size.block_size, recompute_seconds=runner.cost.per_token
    )
    scheduler = Scheduler(
        make_pool(config, size), scheduler_config, cost=cost, keeps_cache=config.cache.keeps_cache
    )
    return Engine(scheduler, runner, context_len=max_seq_len, vocab_size=VOCAB_SIZE)


def percentile(ordered: Seq[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed; 0 of nothing."""
    if not ordered:
        return 0.0
    return ordered[max(0, -(-len(ordered) * int(percent) // 100) - 1)]
