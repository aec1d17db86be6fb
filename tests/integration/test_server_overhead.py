"""The benchmarks of what a server and a front cost run and have every figure; how fast is not asked here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server_overhead import TARGETS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_smallest_run_has_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    small = [
        "--streams",
        "2",
        "--tokens",
        "64",
        "--steps-per-second",
        "50",
        "--out",
        str(out),
        "--allow-dirty",
    ]
    command = [sys.executable, "-m", "benchmarks.server_overhead", *small]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, 1), done.stderr  # 1: a target was missed, as on a busy machine
    report = json.loads(out.read_text())
    assert report == json.loads(done.stdout)
    assert set(report["machine"]) == {"python", "cpu", "commit", "date"} and report["load_before"] >= 0
    figures = report["figures"]
    assert TARGETS.keys() <= figures.keys() and all(
        isinstance(each, int | float) for each in figures.values()
    )
    assert figures["tokens_per_s"] > 0 and figures["tokens_per_core_s"] > 0
    assert figures["first_token_with_engine_ms_p50"] >= figures["first_token_ms_p50"]


@pytest.mark.slow
def test_a_front_is_compared_with_the_server_that_it_forwards_to(checkpoint: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.front_overhead", checkpoint, "--requests", "8"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "--out", str(out), "--allow-dirty"], cwd=ROOT, env=environment, check=True, timeout=240
    )
    figures = json.loads(out.read_text())["figures"]
    assert set(figures) == {"server", "front", "added by front"}
    assert all(row["p25"] <= row["p50"] <= row["p75"] for row in figures.values())
