"""An engine process whose model costs nothing, for benchmarks of everything around the model.

Started in place of `infer.client.process`: `ProcessOptions(module="benchmarks.ipc_engine")`.
Scheduler, cache books, loop and messages are the real ones; a step "samples" token 1 for every sequence, at
once, or at the pace that the `seed` knob gives in steps per second.
"""

from __future__ import annotations

import sys
import time

from infer.cache.memory import CacheSize
from infer.client.process import main
from infer.config.defaults import SIMULATED_STEPS
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.engine.build import make_pool
from infer.engine.engine import Engine
from infer.execution.device import StepResult, SyncDevice
from infer.execution.order import StepMasks, StepOrder
from infer.scheduling.scheduler import Scheduler


class NullDevice(SyncDevice):
    """Sample token 1 for every row; no more than `pace` steps per second, where that is not 0."""

    def __init__(self, pace: float) -> None:
        self._interval = 1 / pace if pace else 0.0
        self._next = 0.0

    def compute(self, order: StepOrder, masks: StepMasks) -> StepResult:
        """Wait for the next tick and draw."""
        now = time.monotonic()
        if self._next > now:
            time.sleep(self._next - now)
        self._next = max(self._next, now) + self._interval
        counts = order.num_draws.tolist()
        return StepResult([(1,) * count for count in counts], [(None,) * count for count in counts], {})


def make_engine(config: EngineConfig) -> Engine:
    """An engine for 4096 tokens per sequence; the seed knob holds the pace."""
    pool = make_pool(config, CacheSize(65536, 16, bytes_per_token=1))
    device = NullDevice(config.scheduler.seed)
    return Engine(
        Scheduler(pool, resolve_scheduler(config, 4096, SIMULATED_STEPS)),
        device,
        context_len=4096,
        vocab_size=1000,
    )


if __name__ == "__main__":
    sys.exit(main(make_engine))
