from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infer.bench.compare import compare
from infer.bench.report import Report, make_report, make_row, read_report, skip_row, write_report
from infer.errors import ConfigError

ROOT = Path(__file__).parents[3]


def report(*values: float, name: str = "w", figure: str = "output_tokens_per_s", **fields: Any) -> Report:
    row = make_row(name, "a workload", [{figure: value} for value in values])
    facts: dict[str, Any] = {"model": {"name": "tiny"}, "config": {}, "seed": 1, "warmup": 0} | fields
    return make_report("offline", [row], repeats=len(values), **facts)


def test_a_report_survives_the_disk(tmp_path: Path) -> None:
    made = report(1.0, 3.0, 2.0)
    write_report(made, tmp_path / "sub" / "r.json")
    read = read_report(tmp_path / "sub" / "r.json")
    assert read == made
    figure = read.rows[0].figures["output_tokens_per_s"]
    assert (figure.median, figure.low, figure.high, figure.values) == (2.0, 1.0, 3.0, [1.0, 3.0, 2.0])
    assert {"cpu", "num_cpus", "memory_mib"} <= set(read.machine)
    assert {"infer", "python"} <= set(read.versions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2; this version reads infer-bench 1"),
        ({"seed": "x"}, r"Expected `int`, got `str` - at `\$.seed`"),
        ({"surprise": 1}, "unknown field `surprise`"),
        ({"repeats": 5}, "1 values for 5 repeats"),
        ({"rows": [{"name": "w", "about": "", "settings": {}, "figures": {}}]}, "say why it was skipped"),
    ],
)
def test_a_broken_report_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "r.json"
    write_report(report(1.0), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        read_report(path)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_report(report(1.0), path)
    raw = json.loads(path.read_text())
    del raw["commit"]
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="missing required field `commit`"):
        read_report(path)
    path.write_text("not json")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_report(path)


def test_every_committed_report_is_valid() -> None:
    for path in sorted((ROOT / "benchmarks" / "reports").glob("*.json")):
        if '"schema"' in path.read_text(encoding="utf-8"):  # older benchmarks write a form of their own
            read_report(path)


def test_a_change_within_the_spread_of_the_repeats_is_no_change() -> None:
    noisy = compare(report(90.0, 100.0, 110.0), report(98.0, 107.0, 109.0)).verdicts[0]
    assert noisy.verdict == "same"
    assert noisy.band == pytest.approx(0.1)
    quiet = compare(report(99.9, 100.0, 100.1), report(106.9, 107.0, 107.1)).verdicts[0]
    assert (quiet.verdict, quiet.band) == ("better", 0.02)
    assert quiet.change == pytest.approx(0.07)


def test_lower_is_better_where_time_is_measured() -> None:
    slower = compare(report(1.0, 1.0, figure="ttft_p50_s"), report(1.2, 1.2, figure="ttft_p50_s"))
    assert [verdict.figure for verdict in slower.worse] == ["ttft_p50_s"]
    faster = compare(report(1.2, 1.2, figure="ttft_p50_s"), report(1.0, 1.0, figure="ttft_p50_s"))
    assert not faster.worse
    assert compare(report(1.0, figure="num_requests"), report(9.0, figure="num_requests")).verdicts == []


def test_one_repeat_gets_a_wider_band() -> None:
    assert compare(report(100.0), report(107.0, 107.0)).verdicts[0].verdict == "same"
    assert compare(report(100.0), report(109.0, 109.0)).verdicts[0].verdict == "better"


def test_errors_out_of_nowhere_are_worse() -> None:
    assert compare(report(0.0, figure="num_errors"), report(1.0, figure="num_errors")).worse
    assert not compare(report(0.0, figure="num_errors"), report(0.0, figure="num_errors")).worse


def test_what_is_not_comparable_is_said() -> None:
    found = compare(report(1.0, name="a"), report(1.0, name="b", model={"name": "large"}, seed=2))
    assert (found.only_before, found.only_after) == (["a"], ["b"])
    assert found.differences == ["model name: tiny and large", "seed: 1 and 2"]


def test_a_skipped_row_is_not_compared() -> None:
    made = report(1.0)
    row = skip_row("graphs", "decode as one graph", "needs a GPU")
    both = make_report("matrix", [row], model={}, config={}, seed=1, repeats=1, warmup=0)
    assert compare(made, both).only_before == ["w"]


def test_other_engines_results_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(
        json.dumps(
            {
                "engine": "other",
                "model": "tiny",
                "startup_s": 1.0,
                "w": {"s": 2.0, "out_tok_s": 50.0, "in_tok_s": 5.0, "note": "n"},
            }
        )
    )
    verdicts = compare(read_report(path), report(100.0)).verdicts
    assert [(verdict.figure, verdict.verdict) for verdict in verdicts] == [("output_tokens_per_s", "better")]
    path.write_text(json.dumps({"engine": "other", "w": 5}))
    with pytest.raises(ConfigError, match="no results that are understood"):
        read_report(path)
