"""Where the ids that a GPU sampled arrive on the host.

Steps are launched ahead of the one that is read, so there are several buffers, used in turn: none may be
written again before somebody has read it. Their memory is pinned, which lets the device copy while the
host does something else, and an event behind each copy says when it is done.

The other way needs no such care: what the host sends goes through memory of its own each time, which
torch's allocator keeps until the copy has run (`device_rows.send`), however many steps it stands behind.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from infer.execution.runner import StepResult
from infer.sampling.params import RowLogprobs
from infer.sampling.sampler import NO_TOKEN


class Results:
    """Pinned memory for the ids of the last few steps, and the events that say they have arrived."""

    def __init__(self, max_rows: int, device: torch.device, *, steps_ahead: int) -> None:
        self._is_cuda = device.type == "cuda"
        num_buffers = steps_ahead + 2  # of the steps ahead, of the one that is read, and a spare
        self._buffers = [
            torch.zeros(max_rows, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(num_buffers)
        ]
        self._events = [_event() for _ in range(num_buffers)] if self._is_cuda else []
        self._next = 0

    def take(self, ids_S: torch.Tensor) -> Callable[[], list[int]]:
        """Begin to copy ids to the host; call the result to wait for them."""
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        buffer = self._buffers[number][: ids_S.shape[0]]
        buffer.copy_(ids_S, non_blocking=True)
        if not self._is_cuda:
            ids: list[int] = buffer.tolist()
            return lambda: ids
        event = self._events[number]
        event.record()

        def wait() -> list[int]:
            event.synchronize()
            arrived: list[int] = buffer.tolist()
            return arrived

        return wait


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def to_result(
    num_chunks: int, sampling: list[int], ids: list[int], prompt_logprobs: dict[int, list[RowLogprobs]]
) -> StepResult:
    """What was sampled on the device: an id for each chunk whose number is in `sampling`."""
    rows: list[tuple[int, ...]] = [()] * num_chunks
    logprobs: list[tuple[RowLogprobs | None, ...]] = [()] * num_chunks
    for number, token_id in zip(sampling, ids, strict=True):
        rows[number] = (token_id,)
        logprobs[number] = (None,)
    return StepResult(rows, logprobs, prompt_logprobs, is_whole=NO_TOKEN not in ids)
