"""Launches that were made before, on a real GPU: the numbers of the long way, in a graph and out of it."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.elementwise.rms_norm import add_rms_norm, add_rms_norm_reference
from infer.kernels.runtime import launch
from tests.gpu.graphs import capture

pytestmark = pytest.mark.gpu


def make(num_rows: int, size: int, seed: int, offset: int = 0) -> torch.Tensor:
    """Rows that begin `offset` elements into a piece of memory."""
    generator = torch.Generator("cuda").manual_seed(seed)
    flat = torch.randn(num_rows * size + offset, generator=generator, device="cuda", dtype=torch.bfloat16)
    return flat[offset:].view(num_rows, size)


def check(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    y, total = add_rms_norm(x, residual, weight, eps=1e-6)
    expected_y, expected_total = add_rms_norm_reference(x, residual, weight, 1e-6, 0.0)
    torch.testing.assert_close(total, expected_total, rtol=0, atol=0)
    torch.testing.assert_close(y.float(), expected_y.float(), rtol=2e-2, atol=2e-2)


@torch.inference_mode()
def test_the_second_launch_is_not_asked_for_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_known", {})
    weight = make(1, 512, 0)[0]
    for seed in range(1, 6):  # other memory each time
        check(make(700, 512, seed), make(700, 512, seed + 10), weight)
    assert len(launch._known) == 1
    check(make(700, 512, 7, offset=1), make(700, 512, 8), weight)  # no multiple of 16
    assert len(launch._known) == 1
    check(make(701, 512, 9), make(701, 512, 10), weight)
    assert len(launch._known) == 2


@torch.inference_mode()
def test_a_launch_that_was_made_before_can_be_captured() -> None:
    weight, residual = make(1, 512, 0)[0], make(700, 512, 1)
    x = make(700, 512, 2)
    graph, (y, total) = capture(lambda: add_rms_norm(x, residual, weight, eps=1e-6))
    x.copy_(make(700, 512, 3))
    graph.replay()
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
    expected, _ = add_rms_norm_reference(x, residual, weight, 1e-6, 0.0)
    torch.testing.assert_close(y.float(), expected.float(), rtol=2e-2, atol=2e-2)
