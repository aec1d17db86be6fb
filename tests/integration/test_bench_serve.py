"""`infer bench serve` against the real server: its counts are the server's own."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer import __version__
from infer.bench.report import read_report
from infer.bench.workloads import SERVING, Workload, make_workload
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


@pytest.fixture
def arrive_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sessions of each load, without the waiting between their arrivals: most of what they take."""

    def at_once(name: str, **options: Any) -> Workload:
        made = make_workload(name, **options)
        return replace(made, sessions=tuple(replace(session, start_s=0.0) for session in made.sessions[:4]))

    monkeypatch.setattr("infer.bench.serve.make_workload", at_once)


@pytest.mark.usefixtures("arrive_at_once")
def test_every_workload_is_measured_on_a_real_server(live: LiveServer, tmp_path: Path) -> None:
    """Also that its 512 tokens are found out: ids of larger vocabularies would be refused."""
    before = made_tokens(live)
    arguments = ["--workload", "all", "--seed", "42", "--warmup", "0", "--out", str(tmp_path / "r")]
    assert main(["bench", "serve", "--url", live.url, *arguments]) == 0
    report = read_report(tmp_path / "r.json")
    rows = {row.name: row.figures for row in report.rows}
    assert list(rows) == list(SERVING)
    assert all(figures["num_errors"].median == 0 for figures in rows.values()), report.notes
    counted = sum(figures["num_output_tokens"].median for figures in rows.values())
    assert counted + 1 == made_tokens(live) - before  # one more to find out which ids it takes
    assert rows["agent_session"]["cache_hit_share"].median > 0.3  # every turn begins as the last one did
    assert rows["baseline"]["num_requests"].median == 4
    assert all("queue_mean_s" in figures for figures in rows.values())
    assert report.model == {"name": "tiny", "context_len": 2048, "dtype": "float32", "weights": "fp32"}
    assert report.config["kv_cache_backend"] == "paged"
    assert report.versions["server"] == __version__
    page = (tmp_path / "r.md").read_text()
    assert "| `baseline` |" in page and "not told" not in page


def test_a_load_in_the_words_of_other_benchmarks_is_what_the_server_gets(
    live: LiveServer, tmp_path: Path
) -> None:
    before = made_tokens(live)
    load = ["--num-prompts", "6", "--request-rate", "50", "--max-concurrency", "2"]
    sizes = ["--random-input-len", "20", "--random-output-len", "4"]
    how = ["--warmup", "0", "--out", str(tmp_path / "r")]
    assert main(["bench", "serve", "--base-url", live.url, *load, *sizes, *how]) == 0
    [row] = read_report(tmp_path / "r.json").rows
    assert row.settings["arrival"] == "open loop, 50 per second (Poisson), at most 2 at once"
    figures = {
        name: row.figures[name].median for name in ("num_requests", "num_prompt_tokens", "num_output_tokens")
    }
    assert figures == {"num_requests": 6, "num_prompt_tokens": 120, "num_output_tokens": 24}
    assert made_tokens(live) - before == 24 + 1  # one to find out which ids it takes


def test_refused_requests_are_counted_and_said(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Token ids beyond the vocabulary: the run ends, its exit code says that it was not clean."""
    arguments = ["--workload", "w1_single", "--vocab-size", "9000", "--warmup", "0"]
    assert main(["bench", "serve", "--url", live.url, *arguments]) == 1
    assert "w1_single: 1 failed: HTTP 4" in capsys.readouterr().out


def test_a_soak_has_a_verdict(live: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--concurrency", "6", "--duration", "2", "--out", str(tmp_path / "r")]
    assert main(["bench", "serve", "--url", live.url, *arguments]) == 0
    [row] = read_report(tmp_path / "r.json").rows
    assert row.note == "passed" and row.figures["num_errors"].median == 0
    assert row.figures["num_requests"].median > 0 and "host_drift_share" in row.figures
    assert "soak: passed" in capsys.readouterr().out
    assert main(["bench", "serve", "--url", live.url, *arguments[:4], "--slo", "ttft=0.000001"]) == 1
