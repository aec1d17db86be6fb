"""A rank with a fault on its GPU: `python -m tests.support.faulty_gpu_rank`, in place of a rank's process.

INFER_TEST_FAULT says which: `poke` writes where no memory is instead of computing the 40th step, and launches
nothing after it; `capture` fails to capture the steps with more than 512 prompt tokens.
"""

from __future__ import annotations

import os
import sys
from unittest import mock

from infer.client import rank_process
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.graphs import CapturedStep, StepGraphs, StepSize
from infer.execution.order import StepOrder
from tests.support.faulty_gpu_server import poke

_compute, _record = GpuDevice.compute_part, StepGraphs._record
_orders: list[int] = []


def compute_or_poke(device: GpuDevice, order: StepOrder) -> None:
    """Compute a step, or go astray."""
    _orders.append(order.step)
    if len(_orders) == 40:
        poke()
    else:
        _compute(device, order)


def record_or_fail(graphs: StepGraphs, size: StepSize) -> CapturedStep:
    """Capture a step, or fail as a full GPU would."""
    if size.num_tokens > 512:
        raise RuntimeError("no room for this graph")
    return _record(graphs, size)


if __name__ == "__main__":
    if os.environ["INFER_TEST_FAULT"] == "poke":
        mock.patch.object(GpuDevice, "compute_part", compute_or_poke).start()
    else:
        mock.patch.object(StepGraphs, "_record", record_or_fail).start()
    sys.exit(rank_process.main())
