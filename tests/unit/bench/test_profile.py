from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.profile_generation import main


def test_a_profile_is_a_trace_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tiny", "--device", "cpu", "--batch", "2", "--prompt-len", "8", "--steps", "2"]
    assert main([*arguments, "--out", str(tmp_path / "p")]) == 0
    trace = json.loads((tmp_path / "p" / "trace.json").read_text())
    steps = [
        event for event in trace["traceEvents"] if event.get("name") == "step" and event.get("ph") == "X"
    ]
    assert len(steps) >= 2
    assert "aten::" in (tmp_path / "p" / "cpu.txt").read_text()
    assert "Self CPU" in capsys.readouterr().out
