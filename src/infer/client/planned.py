"""Estimate the memory that a model will take before it is loaded: `python -m infer.client.planned`.

The plan needs PyTorch, which the server's process never imports, so a separate process makes it
(tools/memory_plan.py): settings on its standard input, the bytes or an error on its standard output, as JSON.

On a CPU, a cache without an explicit size takes a share of the memory that is free when it is allocated. So a
plan includes the number of blocks: a model that is loaded later, with more or less free memory, gets exactly
these blocks, as its server expects. On a GPU, `device_memory` decides how much memory a model takes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import cast

import msgspec

from infer.client.messages import Failure, to_error, to_failure
from infer.client.spawn import spawn, write_orders
from infer.config.settings import EngineConfig
from infer.errors import EngineError, InferError


@dataclass(frozen=True, slots=True)
class Planned:
    """The memory that a model will take."""

    num_bytes: int  # bytes of weights, KV cache and steps, of all its ranks on this machine
    num_blocks: int | None = None  # blocks of the planned cache; None: the settings decide

    def fix(self, config: EngineConfig) -> EngineConfig:
        """Return the settings with the cache size that was planned."""
        if self.num_blocks is None:
            return config
        return replace(config, cache=replace(config.cache, num_blocks=self.num_blocks))


def plan_model(config: EngineConfig) -> Planned:
    """Plan the memory of an engine with these settings."""
    orders = write_orders(config)
    process = spawn("infer.client.planned")
    output = process.communicate(orders)[0]
    try:
        found = msgspec.json.decode(output.splitlines()[-1], type=Planned | Failure)
    except (IndexError, msgspec.DecodeError):
        told = output.decode(errors="replace")
        raise EngineError(f"the memory of the model could not be planned:\n{told}") from None
    if isinstance(found, Failure):
        raise to_error(found)
    return found


def _plan(config: EngineConfig) -> Planned:
    from infer.tools.memory_needs import find_headers, find_machine
    from infer.tools.memory_plan import plan_memory

    load, cache = config.load, config.cache
    machine = find_machine(load.device, None, cache.device_memory)
    headers = find_headers(
        load.model, revision=load.revision, show_progress=False, model_impl=load.model_impl
    )
    plan = plan_memory(config, headers, machine)
    is_sized = cache.num_blocks is not None or cache.kv_cache_memory is not None or machine.kind == "gpu"
    num_blocks = None if is_sized else plan.knobs()["num_blocks"]
    return Planned(plan.total * load.num_local_ranks, cast("int | None", num_blocks))


def main() -> None:
    """Plan one model, from standard input to standard output."""
    try:
        found: Planned | Failure = _plan(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig))
    except InferError as error:
        found = to_failure(error)
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
