from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from infer.bench.floors import Ceilings
from infer.bench.report import make_report, make_row, read_report, write_report
from tests.unit.cli.conftest import Outcome

Infer = Callable[..., Outcome]


def write(path: Path, *values: float) -> str:
    row = make_row("w", "", [{"output_tokens_per_s": value} for value in values])
    facts = {"model": {}, "config": {}, "seed": 1, "repeats": len(values), "warmup": 0}
    write_report(make_report("offline", [row], **facts), path)  # type: ignore[arg-type]
    return str(path)


def test_compare_says_what_changed_and_fails_if_it_got_worse(infer: Infer, tmp_path: Path) -> None:
    fast, slow = write(tmp_path / "a.json", 100.0, 101.0), write(tmp_path / "b.json", 80.0, 81.0)
    worse = infer("bench", "compare", fast, slow)
    assert worse.code == 1
    assert "worse" in worse.out and "-19.9%" in worse.out
    better = infer("bench", "compare", slow, fast)
    assert better.code == 0 and "1 better, 0 worse, 0 same" in better.out
    same = infer("bench", "compare", fast, fast, "--all")
    assert same.code == 0 and "+0.0%" in same.out


def test_a_report_that_is_none_is_refused(infer: Infer, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"a": 1}))
    outcome = infer("bench", "compare", str(path), str(path))
    assert outcome.code == 2
    assert "is not a benchmark report" in outcome.err


def test_without_a_command_there_is_help(infer: Infer) -> None:
    outcome = infer("bench")
    assert outcome.code == 2
    assert "infer bench serve" in outcome.err


def test_policies_are_compared_without_a_model(infer: Infer, tmp_path: Path) -> None:
    outcome = infer("bench", "policies", "--num-requests", "20", "--out", str(tmp_path / "p"))
    assert outcome.code == 0, outcome.err
    assert "mixed prefill_first" in outcome.out
    assert read_report(tmp_path / "p.json").kind == "policies"
    assert "| `mixed fcfs` |" in (tmp_path / "p.md").read_text()


def test_a_tiny_model_is_timed_and_reported(
    infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ceilings = Ceilings(copy_bytes_per_s=1e9, matmul_flops_per_s=1e9)  # to measure them takes seconds
    monkeypatch.setattr("infer.bench.offline.measure_ceilings", lambda device, dtype: ceilings)
    path = tmp_path / "d.json"
    arguments = ("decode", "--tiny", "--batches", "1,2", "--context", "8", "--steps", "3", "--repeats", "2")
    outcome = infer("bench", *arguments, "--device", "cpu", "--num-threads", "1", "--out", str(path))
    assert outcome.code == 0, outcome.err
    assert "batch 2" in outcome.out
    report = read_report(path)
    assert (report.kind, report.repeats, report.config["num_threads"]) == ("decode", 2, 1)
    assert str(tmp_path) not in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("offline", "--tiny", "--workload", "nan256"), "did you mean 'nano256'"),
        (("decode", "--tiny", "--batches", "1,x"), "expected numbers of 1 or more"),
        (("offline", "--model", "a", "--model-config", "b"), "give one of them"),
        (("serve", "--url", "nowhere"), "must start with http://"),
        (("serve", "--url", "http://127.0.0.1:9"), "is the server running"),
        (("serve", "--url", "http://127.0.0.1:9", "--slo", "x"), "an SLO looks like"),
        (("matrix", "--repeats", "0"), "must be 1 or more"),
    ],
)
def test_mistakes_are_explained(infer: Infer, arguments: tuple[str, ...], message: str) -> None:
    outcome = infer("bench", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
