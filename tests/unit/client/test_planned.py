"""The memory of a model, planned in a process of its own for a server that has no PyTorch."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from infer.client import planned
from infer.config.settings import EngineConfig
from infer.errors import CheckpointError, EngineError


def test_a_plan_counts_the_cache(checkpoint: str) -> None:
    few, many = (
        EngineConfig.from_knobs(model=checkpoint, device="cpu", num_blocks=number) for number in (64, 4096)
    )
    assert 0 < planned._plan(few.knobs()) < planned._plan(many.knobs()) == planned.planned_bytes(many)


def answered(monkeypatch: pytest.MonkeyPatch, output: bytes) -> None:
    process = SimpleNamespace(communicate=lambda given: (output, None))
    monkeypatch.setattr(planned, "spawn", lambda module: process)


def test_the_error_of_a_plan_is_that_of_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig.from_knobs(model=str(tmp_path), device="cpu")
    given = io.BytesIO(json.dumps(config.knobs()).encode())
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=given))
    planned.main()
    answered(monkeypatch, b"a line of a log\n" + capsys.readouterr().out.encode())
    with pytest.raises(CheckpointError):
        planned.planned_bytes(config)


def test_a_plan_that_dies_is_an_error_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, b"Killed\n")
    with pytest.raises(EngineError, match="could not be planned:\nKilled"):
        planned.planned_bytes(EngineConfig())
