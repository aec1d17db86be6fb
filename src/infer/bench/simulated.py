"""The real engine on a virtual clock: how would a load behave with a given policy and cache?

    workload ──► Engine (real) ──► Scheduler (real) ──► pool (real)
                     │
                     └──► SimulatedDevice: makes up the tokens, and advances the clock by the step's cost

Only the model is missing, so thousands of steps run in a second, and a policy that starves a request,
thrashes the cache or wastes its budget does so here as it would on the machine. Requests are added when
the clock reaches their arrival; the clock jumps ahead when there is nothing to do. Nothing depends on
real time: the same workload gives the same figures on every machine. That makes them suitable for comparing
policies and cache sizes (`infer simulate`, `benchmarks/policies.py`), and for a CI gate that does not depend
on the load of the build machine (benchmarks/counts.py).

    ├─ queue wait ─┤─ prompt ─┤
    arrival        first chunk  first token    ...    a gap    ...   last token
    ├────────── TTFT ──────────┤               ├─ ITL ─┤
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from infer.bench.run_offline import OfflineResult, run_offline
from infer.bench.workloads import Workload
from infer.cache.memory import size_cache
from infer.config.defaults import SIMULATED_STEPS
from infer.config.profiles.generic import GENERIC
from infer.config.profiles.profile import SchedulingProfile
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.config.speculation import SpeculationConfig
from infer.engine.build import make_pool
from infer.engine.engine import Engine
from infer.engine.speculation import Speculation
from infer.errors import ConfigError
from infer.execution.device import StepResult, SyncDevice
from infer.execution.host_sampling import SyntheticJudge, drafts_of
from infer.execution.order import StepMasks, StepOrder
from infer.scheduling import sequence
from infer.scheduling.plan import StepPlan
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.scheduler import Scheduler
from infer.speculative.adaptive import DraftLengths, StepCosts
from infer.tools.step_cost import Ranks, StepCost

VOCAB_SIZE = 1 << 32  # any large number, because ids are made up


class MadeUpDrafts:
    """Drafts for a load without texts: a random number of them is accepted."""

    is_late = False

    def __init__(self) -> None:
        self._sequences: Sequence[sequence.Sequence] = ()

    def note(self, plan: StepPlan) -> bool:
        """Ignore a plan that is about to run, and return False: there is no head."""
        return False

    def is_ready(self, seq: sequence.Sequence) -> bool:
        """Return True, because drafts are always possible."""
        return True

    def fitted(self, sequences: Sequence[sequence.Sequence], counts: list[int]) -> list[int]:
        """Return the counts unchanged."""
        return counts

    def begin(self, sequences: Sequence[sequence.Sequence]) -> None:
        """Store the sequences to draft for."""
        self._sequences = sequences

    def go_on(self, sequences: Sequence[sequence.Sequence], counts: Sequence[int], *, verifies: bool) -> None:
        """Do nothing: drafts are made in `collect`."""

    def collect(self) -> list[tuple[int, ...]]:
        """Return as many ids as each sequence has room for."""
        return [(0,) * len(seq.drafts) for seq in self._sequences]

    def num_missed(self, seq: sequence.Sequence) -> int:
        """Return 0, because no text is missed."""
        return 0

    def take_missed(self) -> int:
        """Return 0, because no text is missed."""
        return 0


class SimulatedDevice(SyncDevice):
    """A device half that makes up ids, and is the clock of the run."""

    def __init__(self, cost: StepCost, acceptance: float = 0.0, ranks: Ranks | None = None) -> None:
        """`acceptance` is the probability that a draft is right; `ranks` split a step of this `cost`."""
        self.cost = cost if ranks is None else ranks.divide(cost)
        self.ranks = ranks
        self.now = self.compute_s = self.communication_s = 0.0
        self._judge = SyntheticJudge(acceptance)

    def compute(self, order: StepOrder, masks: StepMasks) -> StepResult:
        """Advance the clock; ids are the vocabulary's last ones, so outputs match no prompt of the load."""
        num_kv_tokens = int(order.stops.sum())
        compute_s = self.cost.seconds(order.num_tokens, num_kv_tokens, len(order.transfers))
        wait_s = 0.0 if self.ranks is None else self.ranks.communication_s(order.num_tokens)
        self.compute_s, self.communication_s = self.compute_s + compute_s, self.communication_s + wait_s
        self.now += compute_s + wait_s
        drawn: list[int] = (order.num_sampled * order.num_draws).tolist()
        ids = [tuple(range(VOCAB_SIZE - 1, VOCAB_SIZE - 1 - count, -1)) for count in drawn]
        for number, drafts in drafts_of(order).items():
            ids[number] = ids[number][: self._judge(ids[number], drafts)]
        return StepResult(ids, [(None,) * len(row) for row in ids], {})

    def seconds(self) -> float:
        """Return the virtual time."""
        return self.now

    def wait_until(self, when: float) -> None:
        """Advance the clock to this time, unless it is past."""
        self.now = max(self.now, when)


def run_simulated(
    workload: Workload,
    config: EngineConfig,
    cost: StepCost,
    profile: SchedulingProfile = GENERIC.scheduling,
    *,
    n: int = 1,
    device: SimulatedDevice | None = None,
) -> OfflineResult:
    """Run a workload through the engine's decisions to its end; the config must give `num_blocks`.

    Every request has `n` answers. A `device` from the caller uses its own cost.
    """
    assert config.cache.num_blocks is not None, "a simulation has no memory to size its cache from"
    max_seq_len = config.load.max_seq_len or workload.longest
    scheduler_config = resolve_scheduler(config, max_seq_len, SIMULATED_STEPS, profile)
    size = size_cache(
        config.cache, scheduler_config, max_seq_len=max_seq_len, bytes_per_token=1, free_bytes=0
    )
    device = device or SimulatedDevice(cost, config.speculation.synthetic_acceptance or 0.0)
    cost = device.cost
    prices = PreemptionCost(swap_seconds=cost.per_block / size.block_size, recompute_seconds=cost.per_token)
    scheduler = Scheduler(
        make_pool(config, size), scheduler_config, cost=prices, keeps_cache=config.cache.keeps_cache
    )
    engine = Engine(
        scheduler,
        device,
        context_len=max_seq_len,
        vocab_size=VOCAB_SIZE,
        clock=device.seconds,
        speculation=_make_speculation(config.speculation, scheduler, cost),
    )
    return run_offline(engine, workload, clock=device, sample_every=1, n=n)


def _make_speculation(
    settings: SpeculationConfig, scheduler: Scheduler, cost: StepCost
) -> Speculation | None:
    """Return speculation whose drafts cost nothing to make; None: it is off."""
    if not settings.is_on:
        return None
    if settings.synthetic_acceptance is None or settings.draft_model is not None:
        raise ConfigError(
            "a simulation has no texts to guess from and no draft model; give synthetic_acceptance, the "
            "probability that a guess is right, and no draft_model, or leave speculative decoding out"
        )
    pairs = [(num_tokens, cost.seconds(num_tokens, 0, 0)) for num_tokens in (1, 2)]
    return Speculation(
        scheduler,
        DraftLengths(StepCosts.measured(pairs)),
        drafter=MadeUpDrafts(),
        max_drafts=settings.max_drafts,
        max_rows=scheduler.config.max_batch_size,
        vocab_size=VOCAB_SIZE,
        is_adaptive=settings.adaptive_speculation,
        is_synthetic=True,
    )


# -- infer simulate: policies and cache sizes side by side -----------------------------------------------


def simulate(
    workload: Workload, config: EngineConfig, cost: StepCost, ranks: Ranks | None = None
) -> dict[str, Any]:
    """Run a workload to its end and return the results; the config must give `num_blocks`.

    Seconds are virtual unless they say otherwise.
    """
    started = perf_counter()
    device = SimulatedDevice(cost, config.speculation.synthetic_acceptance or 0.0, ranks)
    result = run_simulated(workload, config, cost, device=device)
    real_seconds = perf_counter() - started
    figures = result.figures()
    done = [trace for trace in result.traces if trace.is_ok]
    ends = [(trace.ended, workload.sessions[trace.session].deadline) for trace in done]
    held = sum(use * spent for use, spent in zip(result.kv_use, result.step_s, strict=True))
    times = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
    return {
        "policy": config.scheduler.scheduler_policy,
        "num_blocks": result.num_blocks,
        "num_ranks": 1 if ranks is None else ranks.size,
        "compute_seconds": device.compute_s,
        "communication_seconds": device.communication_s,  # sum over all steps, per rank
        "num_finished": len(done),
        "num_refused": int(figures["num_errors"]),  # requests that could never be served, or met a full queue
        "num_late": sum(deadline is not None and ended > deadline for ended, deadline in ends),
        "num_steps": len(result.step_s),
        "seconds": result.seconds,
        "output_tokens_per_second": figures.get("output_tokens_per_s", 0.0),
        **{name: figures.get(f"{name}_s", 0.0) for name in times},
        # longest time between two tokens of a sequence, because it was preempted or left out of steps
        "longest_gap": figures.get("longest_gap_s", 0.0),
        # longest time from arrival to the first chunk
        "longest_queue_wait": max((trace.queue_s or 0.0 for trace in result.traces), default=0.0),
        "num_preemptions": int(figures["num_preemptions"]),
        "cache_hit_rate": figures.get("cache_hit_share", 0.0),  # share of prompt tokens
        "kv_use_mean": held / result.seconds if result.seconds else 0.0,  # share of blocks held, over time
        "kv_use_peak": max(result.kv_use, default=0.0),
        "steps_per_real_second": len(result.step_s) / real_seconds if real_seconds else 0.0,
    }


def compare(
    workload: Workload,
    config: EngineConfig,
    cost: StepCost,
    *,
    policies: Sequence[str],
    num_blocks: Sequence[int],
    ranks: Sequence[Ranks | None] = (None,),
) -> list[dict[str, Any]]:
    """Return a result for every combination of policy, cache size and number of ranks."""
    return [
        simulate(
            workload,
            replace(
                config,
                cache=replace(config.cache, num_blocks=count, kv_cache_memory=None),
                scheduler=replace(config.scheduler, scheduler_policy=policy),
            ),
            cost,
            group,
        )
        for group in ranks
        for count in num_blocks
        for policy in policies
    ]
