"""Which steps are captured, and what becomes of those that cannot be; nothing is recorded without a GPU."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from infer.engine.graphs import StepGraphs, StepSize

SIZE = StepSize(4, 0)


class Recorder:
    """In place of `StepGraphs._record`: fails for want of memory as often as told."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.num_replays = 0

    def record(self, size: StepSize) -> torch.cuda.CUDAGraph:
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return cast(torch.cuda.CUDAGraph, self)

    def replay(self) -> None:
        self.num_replays += 1


class Steps:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
        self.launched: list[StepSize] = []
        self.emptied = 0
        self.recorder = Recorder(num_failures)
        self.graphs = StepGraphs(self.launched.append, lambda: None, max_rows=4, max_tokens=0, captures=True)
        monkeypatch.setattr(self.graphs, "_record", self.recorder.record)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty)

    def _empty(self, *_: Any) -> None:
        self.emptied += 1


def test_memory_kept_for_later_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, num_failures=0)
    assert steps.graphs.ensure(SIZE) and not steps.graphs.ensure(SIZE)
    steps.graphs.run(SIZE)
    assert (steps.emptied, steps.recorder.num_replays, steps.launched) == (0, 1, [SIZE])


def test_a_capture_without_room_is_tried_again_with_all_that_can_be_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch, num_failures=1)
    assert steps.graphs.ensure(SIZE)
    steps.graphs.run(SIZE)
    assert (steps.emptied, steps.recorder.num_replays) == (1, 1)


def test_a_step_that_cannot_be_captured_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, num_failures=2)
    assert steps.graphs.ensure(SIZE) and not steps.graphs.ensure(SIZE)
    steps.graphs.run(SIZE)
    assert (steps.recorder.num_replays, steps.launched) == (0, [SIZE, SIZE])


def test_idle_time_captures_every_size_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, num_failures=0)
    while steps.graphs.prepare():
        pass
    assert steps.launched == [StepSize(1, 0), StepSize(2, 0), StepSize(4, 0)]
