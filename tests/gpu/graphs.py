"""What tests on a GPU do with CUDA graphs: capture, replay on other numbers, compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from infer.kernels.runtime import dispatch

T = TypeVar("T")

FEW_SIZES: dict[str, Any] = {"max_batch_size": 8, "max_num_batched_tokens": 1024}
"""Knobs of an engine that is soon ready: 19 sizes of steps are compiled ahead, where the defaults have 80."""


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def capture(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record `step` after it has run once: a capture wants compiled kernels. Replays fill the outputs."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph, outputs


def check_that_starting_early_leaves_no_trace(
    step: Callable[[], tuple[torch.Tensor, ...]],
    x: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_replays: int,
) -> None:
    """A step over `x` gives the same bits whether kernels start before the one before has ended or after."""
    captured = []
    for is_ahead in (False, True):
        monkeypatch.setattr(dispatch, "PDL", is_ahead)
        captured.append(capture(step))
    (late_graph, late), (early_graph, early) = captured
    for _ in range(num_replays):
        x.copy_(random(*x.shape))
        late_graph.replay()
        early_graph.replay()
        assert all(output.isfinite().all() for output in early)
        assert all(torch.equal(*pair) for pair in zip(early, late, strict=True))
