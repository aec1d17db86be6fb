"""The memory that a model would take, found before it is loaded: `python -m infer.client.planned`.

The plan needs PyTorch, which a server's own process never imports, so a process of its own makes it
(tools/memory_plan.py): knobs on its standard input, the bytes or an error on its standard output, as JSON.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from infer.client.messages import Failure, to_error, to_failure
from infer.client.spawn import spawn
from infer.config.settings import EngineConfig
from infer.errors import EngineError, InferError


def planned_bytes(config: EngineConfig) -> int:
    """The bytes of weights, KV cache and steps of an engine with these settings, of all its ranks."""
    process = spawn("infer.client.planned")
    output = process.communicate(msgspec.json.encode(config.knobs()))[0]
    try:
        found = msgspec.json.decode(output.splitlines()[-1], type=int | Failure)
    except (IndexError, msgspec.DecodeError):
        told = output.decode(errors="replace")
        raise EngineError(f"the memory of the model could not be planned:\n{told}") from None
    if isinstance(found, Failure):
        raise to_error(found)
    return found


def _plan(knobs: dict[str, Any]) -> int:
    from infer.tools.memory_plan import find_headers, find_machine, plan_memory

    config = EngineConfig.from_knobs(**knobs)
    load = config.load
    machine = find_machine(load.device, None, config.cache.device_memory)
    headers = find_headers(
        load.model, revision=load.revision, show_progress=False, model_impl=load.model_impl
    )
    return plan_memory(config, headers, machine).total * load.num_local_ranks


def main() -> None:
    """Answer one question."""
    try:
        found: int | Failure = _plan(msgspec.json.decode(sys.stdin.buffer.read()))
    except InferError as error:
        found = to_failure(error)
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
