"""The measurement of this machine's ceilings."""

from __future__ import annotations

import pytest
import torch

from infer.bench import roofline
from infer.bench.roofline import best_seconds


@pytest.mark.parametrize(("seconds", "best"), [(0.0, 0.04), (0.5, 0.005)])
def test_calls_go_on_until_a_disturbance_has_ended(
    monkeypatch: pytest.MonkeyPatch, seconds: float, best: float
) -> None:
    now = 0.0

    def work() -> None:
        nonlocal now
        now += 0.04 if now < 0.4 else 0.005  # another program runs for 0.4 s

    monkeypatch.setattr(roofline, "perf_counter", lambda: now)
    assert best_seconds(work, torch.device("cpu"), seconds=seconds) == pytest.approx(best)
    assert now < 0.6
