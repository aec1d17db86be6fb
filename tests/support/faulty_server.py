"""`infer serve` around an engine that fails on demand, for tests of a live server.

    python -m tests.support.faulty_server [flags of infer serve]

Scheduler, loop, processes and wire are the real ones; the model is the oracle, and the first token of a
prompt may be an order. The model's directory is only read for its tokenizer. A dead engine is replaced
after a moment, at most MAX_RESTARTS times, so that a test sees the end of a server's patience soon.

    CRASH    the engine's process is killed in the middle of a step
    STUCK    the step never ends
    SLOW     the step takes 10 ms, as do all others of the request
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace

from infer.cache.paged_pool import PagedKVCachePool
from infer.client import spawn
from infer.client.process import main as engine_main
from infer.client.process_client import ProcessClient
from infer.client.supervisor import ProcessOptions, RestartPolicy
from infer.config.defaults import SIMULATED_STEPS
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.errors import ConfigError
from infer.execution.device import StepResult
from infer.execution.order import StepMasks, StepOrder
from infer.scheduling.scheduler import Scheduler
from tests.support.oracle_text import VOCAB_SIZE, TextDevice

THIS = "tests.support.faulty_server"
ABSENT, ENDLESS = "cuda:99", "cuda:98"
CRASH, STUCK, SLOW = 500, 501, 502  # a tiny model's tokenizer has 512
MAX_RESTARTS = 3
CONTEXT_LEN = 400

_start = ProcessClient.start


class ObedientDevice(TextDevice):
    """The oracle, with orders."""

    def compute(self, order: StepOrder, masks: StepMasks) -> StepResult:
        """Obey, or answer."""
        orders = self.first_tokens(order)
        if CRASH in orders:
            os.kill(os.getpid(), signal.SIGKILL)
        if STUCK in orders:
            time.sleep(600)
        if SLOW in orders:
            time.sleep(0.01)
        return super().compute(order, masks)


def make_engine(config: EngineConfig) -> Engine:
    """A small engine; no machine has its 100th GPU, and the 99th takes for ever to load."""
    if config.load.device == ABSENT:
        raise ConfigError(f"device is {ABSENT}, which is not here")
    if config.load.device == ENDLESS:
        time.sleep(600)
    pool = PagedKVCachePool(256, 4, use_prefix_caching=config.cache.caches_prefixes)
    scheduler = Scheduler(pool, resolve_scheduler(config, 4096, SIMULATED_STEPS))
    return Engine(scheduler, ObedientDevice(scheduler.state), context_len=CONTEXT_LEN, vocab_size=VOCAB_SIZE)


async def start_faulty(config: EngineConfig, options: ProcessOptions | None = None) -> ProcessClient:
    """What `ProcessClient.start` does, with the other engine."""
    policy = RestartPolicy(max_restarts=MAX_RESTARTS, first_delay=0.01, max_delay=0.01)
    return await _start(config, replace(options or ProcessOptions(), module=THIS, policy=policy))


if __name__ == "__main__":
    if len(sys.argv) == 1:  # an engine gets its orders on standard input
        sys.exit(engine_main(make_engine))
    from infer.cli.main import main
    from infer.server.processes import workers

    workers.PING_TIMEOUT = 2.0  # a test stops a process
    spawn.ENGINE_MODULE = THIS
    ProcessClient.start = start_faulty  # type: ignore[method-assign]
    sys.exit(main(["serve", *sys.argv[1:]]))
