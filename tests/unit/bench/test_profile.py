from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.profile_generation import increments, main


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


def test_increments_add_up_to_the_time_from_the_first_end_to_the_last(tmp_path: Path) -> None:
    def kernel(name: str, ts: float, dur: float) -> dict[str, object]:
        return {"cat": "kernel", "name": f"{name}(float*)", "ts": ts, "dur": dur, "args": {"grid": [4, 1, 1]}}

    events = [kernel("one", 0, 10), kernel("early", 5, 10), kernel("hidden", 6, 3), kernel("late", 20, 5)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    table = increments(path, steps=1).splitlines()
    ends = {line.split()[3]: float(line.split()[0]) for line in table[1:-1]}
    assert ends == {"early": 5.0, "hidden": 0.0, "late": 10.0}
    assert table[-1].split()[0] == "15.0"
