"""The memory of a model, planned in a process of its own for a server that has no PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.client.planned import planned_bytes
from infer.config.settings import EngineConfig
from infer.errors import CheckpointError


def test_a_plan_counts_the_cache(checkpoint: str) -> None:
    few, many = (
        planned_bytes(EngineConfig.from_knobs(model=checkpoint, device="cpu", num_blocks=number))
        for number in (64, 4096)
    )
    assert 0 < few < many


def test_the_error_of_a_plan_is_that_of_a_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        planned_bytes(EngineConfig.from_knobs(model=str(tmp_path), device="cpu"))
