"""A small busy engine on the token oracle, for the tests of recording and replaying."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from infer.cache.memory import CacheSize
from infer.config.defaults import SIMULATED_STEPS
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.engine.build import make_pool
from infer.engine.engine import Engine
from infer.engine.observer import EngineObserver
from infer.engine.run_manifest import RunFacts, shareable_knobs
from infer.sampling.params import SamplingParams
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.request import Request
from infer.scheduling.scheduler import Scheduler
from infer.tools.record import Recorder
from tests.support.oracle import VOCAB_SIZE, OracleDevice

CONFIG = EngineConfig.from_knobs(
    max_batch_size=6,
    max_num_batched_tokens=24,
    prefill_chunk_size=10,
    preemption="swap",
    swap_blocks=12,
    block_size=4,
)
SIZE = CacheSize(num_blocks=16, block_size=4, bytes_per_token=8)
COST = PreemptionCost(swap_seconds=0.001, recompute_seconds=0.01)


def make_facts(config: EngineConfig = CONFIG) -> RunFacts:
    return RunFacts(
        version="0.0.0",
        model="oracle",
        fingerprint="0123456789abcdef",
        dtype="float32",
        device="cpu",
        num_threads=1,
        context_len=60,
        knobs=shareable_knobs(config),
        cache=SIZE,
        cost=COST,
        steps_ahead=0,
    )


def make_engine(
    observer: EngineObserver,
    *,
    policy_config: EngineConfig = CONFIG,
    fail_at: int | None = None,
    steps_ahead: int = 0,
) -> Engine:
    pool = make_pool(policy_config, replace(SIZE, num_host_blocks=policy_config.cache.swap_blocks))
    scheduler = Scheduler(pool, resolve_scheduler(policy_config, 60, SIMULATED_STEPS), cost=COST)
    runner = OracleDevice(pool, scheduler.state, policy_config.cache.swap_blocks)
    runner.fail_at = fail_at
    return Engine(
        scheduler, runner, context_len=60, vocab_size=VOCAB_SIZE, observer=observer, steps_ahead=steps_ahead
    )


def make_request(number: int, rng: random.Random) -> Request:
    start = [7, 8, 9, 10, 11, 12] if rng.random() < 0.5 else []
    params = SamplingParams(
        max_tokens=rng.randint(1, 16),
        n=rng.choice([1, 1, 1, 2]),
        logit_bias={5: 1.5} if number % 3 == 0 else {},
        stop=("end",) if number % 4 == 0 else (),
    )
    return Request(
        request_id=f"r{number}",
        prompt=tuple(start + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]),
        params=params,
        priority=rng.randrange(3),
        deadline=rng.choice([None, 2.5]),
        cache_salt=rng.choice(["", "tenant"]),
    )


def record_run(
    path: Path,
    *,
    seed: int = 0,
    num_requests: int = 14,
    fail_at: int | None = None,
    steps_ahead: int = 0,
    pace: float = 0.6,
) -> Engine:
    """Random arrivals and aborts on a cache far too small, recorded to `path`."""
    rng = random.Random(seed)
    with Recorder(path) as recorder:
        recorder.on_start(make_facts())
        engine = make_engine(recorder, fail_at=fail_at, steps_ahead=steps_ahead)
        number = 0
        while number < num_requests or engine.has_work:
            if number < num_requests and rng.random() < pace:
                engine.add(make_request(number, rng))
                number += 1
            if rng.random() < 0.08 and number:
                engine.abort(f"r{rng.randrange(number)}")
            if engine.scheduler.step == 9:
                engine.reset_prefix_cache()
            engine.step()
    return engine
