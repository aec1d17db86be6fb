"""A device half in a process of its own: it is told orders through shared memory, and answers what it drew.

    engine ── order ──► shared memory ──► device half ── ids, logprobs ──► pipe

The process loads the same checkpoint. It knows no scheduler and no request: whatever its device half needs
must survive the way through the buffer, and nothing may be kept of a buffer that is used again. That orders
say all that they must is what the oracle tests (oracle.py).
"""

from __future__ import annotations

import os
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any
from unittest import mock

import numpy as np

from infer.config.settings import EngineConfig
from infer.engine import machine
from infer.engine.build import build_engine
from infer.engine.engine import Engine
from infer.execution.device import StepResult
from infer.execution.order import StepMasks, StepOrder, read, to_bytes
from infer.loader.find.source import resolve_model
from infer.loader.load import load_model

SLOT_BYTES, NUM_SLOTS = 1 << 16, 8  # orders under way lie in a ring


def slot(step: int) -> slice:
    """Where in the ring the order of a step lies."""
    first = step % NUM_SLOTS * SLOT_BYTES
    return slice(first, first + SLOT_BYTES)


def make_engine(path: str, knobs: dict[str, Any], *, on_gpu: bool) -> Engine:
    """An engine of the checkpoint, with the device half of a GPU or of a CPU; its products are the CPU's."""
    source = resolve_model(path, revision=None, show_progress=False)
    loaded = load_model(source, dtype="float32", device="cpu")
    with mock.patch.object(machine, "has_gpu_kernels", lambda device: on_gpu):
        return build_engine(EngineConfig.from_knobs(**knobs), loaded)


def serve_orders(path: str, knobs: dict[str, Any], on_gpu: bool, memory_name: str, pipe: Connection) -> None:
    """The process: obey until the pipe is closed."""
    memory = SharedMemory(memory_name)
    assert memory.buf is not None
    device = make_engine(path, knobs, on_gpu=on_gpu).device
    pipe.send("ready")
    steps: dict[int, Any] = {}
    while True:
        try:
            kind, step, *rest = pipe.recv()
        except EOFError:
            break
        if kind == "order":
            steps[step] = device.run(read(memory.buf[slot(step)]))
        elif kind == "masks":
            numbers, positions, lines_KW = rest
            steps[step].masks(len(numbers))[:] = lines_KW
            steps[step].sample(numbers, positions)
        else:
            pipe.send(tuple(steps.pop(step).wait()))
    os._exit(0)  # the memory is the other process's to give back


class SecondDevice:
    """The other end of the process."""

    def __init__(self, path: str, knobs: dict[str, Any], *, on_gpu: bool) -> None:
        context = get_context("spawn")
        self._memory = SharedMemory(create=True, size=NUM_SLOTS * SLOT_BYTES)
        assert self._memory.buf is not None
        self._buffer = self._memory.buf
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve_orders, args=(path, knobs, on_gpu, self._memory.name, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        assert self._answer() == "ready"

    def run(self, order: StepOrder) -> None:
        """Tell it an order."""
        body, start = to_bytes(order), slot(order.step).start
        assert len(body) <= SLOT_BYTES
        self._buffer[start : start + len(body)] = body
        self._pipe.send(("order", order.step))

    def sample(self, step: int, masks: StepMasks) -> None:
        """Tell it the masks of a step."""
        self._pipe.send(("masks", step, [*masks.numbers], [*masks.positions], np.array(masks.lines_KW)))

    def wait(self, step: int) -> StepResult:
        """What it made of a step."""
        self._pipe.send(("wait", step))
        result = StepResult(*self._answer())
        self._buffer[slot(step)] = b"\xff" * SLOT_BYTES  # nothing may be read from it later
        return result

    def _answer(self) -> Any:
        assert self._pipe.poll(120), "the second process does not answer"
        return self._pipe.recv()

    def close(self) -> None:
        """End the process and give back the memory."""
        self._pipe.close()
        self._process.join(30)
        assert self._process.exitcode == 0
        self._memory.close()
        self._memory.unlink()
