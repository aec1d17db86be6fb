"""`infer bench serve` against the real server: its counts are the server's own."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from infer.bench.report import read_report
from infer.cli.main import main
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.live_server import LiveServer, serve_model


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = tmp_path_factory.mktemp("tiny-llama")
    make_checkpoint("llama", directory, sizes=Sizes(context_len=2048))
    with serve_model(directory) as server:
        yield server


def made_tokens(live: LiveServer) -> float:
    """The server's own count of the tokens it has made."""
    with urllib.request.urlopen(f"{live.url}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if "generation_tokens_total" in line and line[0] != "#"
    )


def test_a_real_server_is_measured(live: LiveServer, tmp_path: Path) -> None:
    before = made_tokens(live)
    names = "baseline,w2_mixed,agent_session"
    arguments = ["--workload", names, "--vocab-size", "500", "--warmup", "0", "--out", str(tmp_path / "r")]
    assert main(["bench", "serve", "--url", live.url, *arguments]) == 0
    report = read_report(tmp_path / "r.json")
    rows = {row.name: row.figures for row in report.rows}
    assert list(rows) == names.split(",")
    assert all(figures["num_errors"].median == 0 for figures in rows.values()), report.notes
    assert sum(figures["num_output_tokens"].median for figures in rows.values()) == made_tokens(live) - before
    assert rows["agent_session"]["cache_hit_share"].median > 0.3  # every turn begins as the last one did
    assert rows["baseline"]["num_requests"].median == 10
    assert report.model == {"name": "tiny", "context_len": 2048}
    assert json.loads((tmp_path / "r.json").read_text())["config"]["kv_cache_backend"] == "paged"
    assert "| `baseline` |" in (tmp_path / "r.md").read_text()


def test_refused_requests_are_counted_and_said(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Token ids beyond the vocabulary: the run ends, its exit code says that it was not clean."""
    arguments = ["--workload", "w1_single", "--vocab-size", "9000", "--warmup", "0"]
    assert main(["bench", "serve", "--url", live.url, *arguments]) == 1
    assert "w1_single: 1 failed: HTTP 4" in capsys.readouterr().out
