"""`infer serve` on a GPU whose engine makes an illegal access on demand, for tests of a live server.

    python -m tests.support.faulty_gpu_server [flags of infer serve]

A prompt that begins with the token POKE launches a kernel that writes where no memory is, before its step.
CUDA reports that later, and every call after it fails: the context is lost, and with it the process.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from infer.client import spawn
from infer.client.process import load_engine
from infer.client.process import main as engine_main
from infer.client.process_client import ProcessClient
from infer.client.supervisor import ProcessOptions
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.execution.order import StepOrder
from tests.support.oracle import first_tokens

try:
    import triton
    import triton.language as tl

    @triton.jit
    def _write(pointer, offset):  # type: ignore[no-untyped-def]
        tl.store(pointer + offset, 1.0)

except ImportError:  # a machine without a GPU, which imports the name of the token alone
    _write: Any = None  # type: ignore[no-redef]

THIS = "tests.support.faulty_gpu_server"
POKE = 500  # a tiny model's tokenizer has 512

_start = ProcessClient.start


def make_engine(config: EngineConfig) -> Engine:
    """The engine of `infer serve`, with a hook before its steps."""
    engine = load_engine(config)
    device: Any = engine._device
    run = device.run

    def run_or_poke(order: StepOrder) -> Any:
        if POKE in first_tokens(order):
            poke()
        return run(order)

    device.run = run_or_poke
    return engine


def poke() -> None:
    """Write to an address that is nobody's."""
    _write[(1,)](torch.zeros(1, device="cuda"), 1 << 44)


async def start_faulty(config: EngineConfig, options: ProcessOptions | None = None) -> ProcessClient:
    """What `ProcessClient.start` does, with the other engine."""
    return await _start(config, replace(options or ProcessOptions(), module=THIS))


if __name__ == "__main__":
    if len(sys.argv) == 1:  # an engine gets its orders on standard input
        sys.exit(engine_main(make_engine))
    from infer.cli.main import main

    spawn.ENGINE_MODULE = THIS
    ProcessClient.start = start_faulty  # type: ignore[method-assign]
    sys.exit(main(["serve", *sys.argv[1:]]))
