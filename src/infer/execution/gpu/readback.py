"""Where the ids that a GPU sampled arrive on the host, and the object that waits for them.

Steps are launched ahead of the one that is read, so there are several buffers, used in turn: none may be
written again before it has been read. Their memory is pinned, which lets the device copy while the host
does something else, and an event behind each copy says when it is done.

The other way needs no such care: what the host sends goes through memory of its own each time, which
torch's allocator keeps until the copy has run (`rows.send`), however many steps it stands behind.
"""

from __future__ import annotations

import torch

from infer.errors import DeviceLost
from infer.execution.runner import StepResult
from infer.sampling.params import RowLogprobs
from infer.sampling.sampler import NO_TOKEN


class PendingStep:
    """A step that was launched and whose ids are on their way; call it to wait for its result."""

    __slots__ = ("_buffer", "_event", "_places", "_prompt_logprobs", "_step", "num_chunks")

    def __init__(
        self, step: int, buffer: torch.Tensor, event: torch.cuda.Event | None, num_chunks: int
    ) -> None:
        self._step, self._buffer, self._event = step, buffer, event
        self.num_chunks = num_chunks
        self._places: list[tuple[int, int]] | None = None
        self._prompt_logprobs: dict[int, list[RowLogprobs]] = {}

    def scatter(
        self, places: list[tuple[int, int]], prompt_logprobs: dict[int, list[RowLogprobs]] | None = None
    ) -> PendingStep:
        """Let only some chunks have an id: pairs of a chunk's number and its id's place in the buffer."""
        self._places, self._prompt_logprobs = places, prompt_logprobs or {}
        return self

    def __call__(self) -> StepResult:
        """Wait for the ids; raises `DeviceLost` where the device failed."""
        try:
            if self._event is not None:
                self._event.synchronize()
            arrived: list[int] = self._buffer.tolist()
        except torch.AcceleratorError as error:
            raise DeviceLost(f"the device failed in step {self._step}") from error
        if self._places is None:  # one id for each chunk, in order
            is_whole = NO_TOKEN not in arrived
            return StepResult(list(zip(arrived)), [(None,)] * len(arrived), {}, is_whole)
        ids: list[tuple[int, ...]] = [()] * self.num_chunks
        logprobs: list[tuple[RowLogprobs | None, ...]] = [()] * self.num_chunks
        for number, place in self._places:
            ids[number], logprobs[number] = (arrived[place],), (None,)
        is_whole = all(NO_TOKEN not in row for row in ids)
        return StepResult(ids, logprobs, self._prompt_logprobs, is_whole)


class Readback:
    """Pinned memory for the ids of the last few steps, and the events that say they have arrived."""

    def __init__(self, max_rows: int, device: torch.device, *, steps_ahead: int) -> None:
        self._is_cuda = device.type == "cuda"
        num_buffers = steps_ahead + 2  # of the steps ahead, of the one that is read, and a spare
        self._buffers = [
            torch.zeros(max_rows, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(num_buffers)
        ]
        self._events = [_event() if self._is_cuda else None for _ in range(num_buffers)]
        self._next = 0

    def take(self, step: int, ids_S: torch.Tensor, num_chunks: int) -> PendingStep:
        """Begin to copy the ids of a step to the host."""
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        buffer, event = self._buffers[number][: ids_S.shape[0]], self._events[number]
        buffer.copy_(ids_S, non_blocking=True)
        if event is not None:
            event.record()
        return PendingStep(step, buffer, event, num_chunks)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
