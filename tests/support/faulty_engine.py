"""An engine process around the oracle that fails on demand: run it in place of `infer.client.process`.

The first token of a prompt may be an order. Only tests can start this module; the real engine process has
no such thing.

    CRASH    the process is killed in the middle of a step
    STUCK    the step never ends
    RAISE    the loop itself dies of an exception
    FORKED   leaves a child process behind that holds the pipes, then crashes
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from infer.cache.paged_pool import PagedKVCachePool
from infer.client.process import main
from infer.config.defaults import SIMULATED_STEPS
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.errors import CheckpointError
from infer.execution.device import StepResult
from infer.execution.order import StepMasks, StepOrder
from infer.scheduling.scheduler import Scheduler
from tests.support.oracle_text import VOCAB_SIZE, TextDevice

CRASH, STUCK, RAISE, FORKED = range(VOCAB_SIZE - 4, VOCAB_SIZE)
CONTEXT_LEN = 400


class FaultyDevice(TextDevice):
    """The oracle, with orders."""

    def compute(self, order: StepOrder, masks: StepMasks) -> StepResult:
        """Obey, or answer."""
        orders = self.first_tokens(order)
        if FORKED in orders:
            subprocess.Popen(["sleep", "600"])
        if CRASH in orders or FORKED in orders:
            os.kill(os.getpid(), signal.SIGKILL)
        if STUCK in orders:
            time.sleep(600)
        if RAISE in orders:
            raise KeyboardInterrupt
        return super().compute(order, masks)


def make_engine(config: EngineConfig) -> Engine:
    """A small engine; the model's name may be an order too."""
    if config.load.model == "broken":
        raise CheckpointError("the weights are broken")
    if config.load.model == "unexpected":
        print("something on standard output")
        raise ZeroDivisionError("a bug")
    if config.load.model is not None and os.path.exists(config.load.model):  # a switch for later starts
        raise CheckpointError("the weights are gone")
    pool = PagedKVCachePool(config.cache.num_blocks or 256, 4)
    scheduler = Scheduler(pool, resolve_scheduler(config, 4096, SIMULATED_STEPS))
    return Engine(scheduler, FaultyDevice(scheduler.state), context_len=CONTEXT_LEN, vocab_size=VOCAB_SIZE)


if __name__ == "__main__":
    sys.exit(main(make_engine))
