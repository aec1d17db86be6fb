"""The memory of a model, planned in a process of its own for a server that has no PyTorch."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from infer.client import planned
from infer.client.planned import Planned
from infer.config.settings import EngineConfig
from infer.errors import CheckpointError, EngineError


def test_a_plan_counts_the_cache(checkpoint: str) -> None:
    few, many = (
        EngineConfig.from_knobs(model=checkpoint, device="cpu", num_blocks=number) for number in (64, 4096)
    )
    plans = [planned._plan(config) for config in (few, many)]
    assert 0 < plans[0].num_bytes < plans[1].num_bytes and plans[1] == planned.plan_model(many)
    assert plans[1].fix(many) is many


def test_a_plan_fixes_a_cache_that_takes_what_is_free(checkpoint: str) -> None:
    config = EngineConfig.from_knobs(model=checkpoint, device="cpu", max_batch_size=2)
    plan = planned._plan(config)
    fixed = plan.fix(config)
    assert fixed.cache.num_blocks == plan.num_blocks and planned._plan(fixed) == Planned(plan.num_bytes)


def answered(monkeypatch: pytest.MonkeyPatch, output: bytes) -> None:
    process = SimpleNamespace(communicate=lambda given: (output, None))
    monkeypatch.setattr(planned, "spawn", lambda module: process)


def test_the_error_of_a_plan_is_that_of_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig.from_knobs(model=str(tmp_path), device="cpu")
    given = io.BytesIO(msgspec.json.encode(config))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=given))
    planned.main()
    answered(monkeypatch, b"a line of a log\n" + capsys.readouterr().out.encode())
    with pytest.raises(CheckpointError):
        planned.plan_model(config)


def test_a_plan_that_dies_is_an_error_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, b"Killed\n")
    with pytest.raises(EngineError, match="could not be planned:\nKilled"):
        planned.plan_model(EngineConfig())
