from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.charts import ratio_bars
from infer.bench.compare import compare
from infer.bench.render import cell, markdown_table, terminal, to_markdown
from infer.bench.report import (
    Report,
    command_line,
    make_report,
    make_row,
    read_report,
    revision_of,
    skip_row,
    write_report,
)
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
        ({"seed": "x"}, "is not a benchmark report: 'seed' is \"x\", expected `int`, got `str`"),
        ({"surprise": 1}, "unknown key 'surprise'"),
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
    with pytest.raises(ConfigError, match="'commit' is missing"):
        read_report(path)
    path.write_text("not json")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_report(path)


def test_every_committed_report_is_valid() -> None:
    for path in sorted((ROOT / "benchmarks" / "reports").glob("*.json")):
        if '"schema"' in path.read_text(encoding="utf-8"):  # older benchmarks write a form of their own
            read_report(path)


def test_the_revision_of_a_model_is_its_commit_or_the_hash_of_its_files(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"weights")
    assert revision_of(file) == f"sha256:{hashlib.sha256(b'weights').hexdigest()}"
    commit = "0123456789" * 4
    snapshot = tmp_path / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    assert revision_of(snapshot) == commit == revision_of(snapshot / "m.gguf")
    local = tmp_path / "snapshots" / "mine"
    local.mkdir(parents=True)
    (local / "config.json").write_text("{}")
    (local / "a.safetensors").write_bytes(b"1")
    first = revision_of(local)
    (local / "README.md").write_text("words")
    assert revision_of(local) == first and first.startswith("sha256:")
    (local / "a.safetensors").write_bytes(b"2")
    assert revision_of(local) != first


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


def test_times_that_differ_by_some_microseconds_are_the_same() -> None:
    def verdict(before: float, after: float) -> str:
        times = [report(value, value, figure="queue_p50_s") for value in (before, after)]
        return compare(times[0], times[1]).verdicts[0].verdict

    assert verdict(62e-6, 93e-6) == "same"
    assert verdict(1.0e-3, 1.3e-3) == "worse"


def test_one_repeat_gets_a_wider_band() -> None:
    assert compare(report(100.0), report(107.0, 107.0)).verdicts[0].verdict == "same"
    assert compare(report(100.0), report(109.0, 109.0)).verdicts[0].verdict == "better"


def test_errors_out_of_nowhere_are_worse() -> None:
    assert compare(report(0.0, figure="num_errors"), report(1.0, figure="num_errors")).worse
    assert not compare(report(0.0, figure="num_errors"), report(0.0, figure="num_errors")).worse


def both(*names: str, **fields: Any) -> Report:
    rows = [make_row(name, "", [{"output_tokens_per_s": 1.0}]) for name in names]
    facts: dict[str, Any] = {"model": {"name": "tiny"}, "config": {}, "seed": 1, "warmup": 0} | fields
    return make_report("offline", rows, repeats=1, **facts)


def test_what_is_not_comparable_is_said() -> None:
    found = compare(both("w", "a"), both("w", "b", model={"name": "large"}, seed=2))
    assert (found.only_before, found.only_after) == (["a"], ["b"])
    assert found.differences == ["model name: tiny and large", "seed: 1 and 2"]


def cached(*shares: float | None, **figures: float) -> Report:
    """A report of a server with one row per share."""
    base = {"output_tokens_per_s": 1.0} | figures
    rows = [
        make_row(f"w{i}", "", [base if share is None else base | {"cached_share": share}])
        for i, share in enumerate(shares)
    ]
    return make_report("serve", rows, repeats=1, model={"name": "tiny"}, config={}, seed=1, warmup=0)


def test_a_prefix_cache_that_was_warm_in_one_of_two_reports_is_said() -> None:
    found = compare(cached(0.02, 0.5, 0.1), cached(0.9, 0.55, 0.1))
    assert found.differences == [
        "cached share of prompt tokens of w0: 2 % and 90 %; one may have hit a warm prefix cache"
    ]
    assert compare(cached(0.9), cached(0.02)).differences != []
    assert compare(cached(0.2), cached(0.29)).differences == []


def at_speed(**ceilings: float) -> Report:
    """A report of two rows on a machine that was measured beside them."""
    rows = [make_row(name, "", [{"output_tokens_per_s": 1.0} | ceilings]) for name in ("w", "x")]
    return make_report("offline", rows, repeats=1, model={"name": "tiny"}, config={}, seed=1, warmup=0)


def test_a_machine_that_was_slower_in_one_of_two_reports_is_said_once() -> None:
    quick, slow = (
        at_speed(copy_gb_per_s=30.5, matmul_tflops=0.25),
        at_speed(copy_gb_per_s=16.7, matmul_tflops=0.26),
    )
    assert compare(quick, slow).differences == [
        "measured ceiling, copy: 30.5 GB/s and 16.7 GB/s; the machine itself was slower in the second, "
        "which may be the whole reason why figures are better or worse"
    ]
    assert (
        "copy: 16.7 GB/s and 30.5 GB/s; the machine itself was faster" in compare(slow, quick).differences[0]
    )
    assert compare(quick, at_speed(copy_gb_per_s=28.5, matmul_tflops=0.26)).differences == []
    assert compare(quick, at_speed(copy_gb_per_s=28.0), least_band=0.05).differences != []  # 8.2 % less
    assert (
        compare(quick, at_speed(copy_gb_per_s=16.7), least_band=0.5).differences == []
    )  # a band that was asked for
    assert compare(quick, at_speed()).differences == []  # not measured


def test_a_report_from_before_the_share_was_recorded_has_its_counts() -> None:
    old = cached(None, num_prompt_tokens=1000.0, num_cached_tokens=900.0)
    assert "90 % and 3 %" in compare(old, cached(0.03)).differences[0]
    assert compare(cached(None), cached(0.9)).differences == []  # a server that tells nothing
    empty = cached(None, num_prompt_tokens=0.0, num_cached_tokens=0.0)
    assert compare(empty, cached(0.9)).differences == []


def test_equal_values_are_no_difference_however_they_are_written() -> None:
    """A server's labels are text, an engine's knobs are not."""
    text, numbers = {"block_size": "16", "use": "True"}, {"block_size": 16, "use": True}
    assert compare(both("w", config=text), both("w", config=numbers)).differences == []


def test_reports_with_nothing_in_common_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"nothing to compare: .* 'offline' on a, b, c and 1 more"):
        compare(both("a", "b", "c", "d"), both("w"))
    with pytest.raises(
        ConfigError, match="nothing to compare"
    ):  # the same row, but no figure with a direction
        compare(report(1.0, figure="num_requests"), report(9.0, figure="num_requests"))


def test_a_skipped_row_is_not_compared() -> None:
    row = skip_row("graphs", "decode as one graph", "needs a GPU")
    rows = [*both("w").rows, row]
    skipped = make_report("matrix", rows, model={}, config={}, seed=1, repeats=1, warmup=0)
    found = compare(both("w", "graphs"), skipped)
    assert (found.only_before, [verdict.row for verdict in found.verdicts]) == (["graphs"], ["w"])


def test_an_interrupted_report_is_valid_and_says_so(tmp_path: Path) -> None:
    rows = [make_row("w", "", [{"output_tokens_per_s": 1.0}]), skip_row("x", "", "interrupted")]
    facts: dict[str, Any] = {"model": {}, "config": {}, "seed": 1, "warmup": 0, "repeats": 3}
    cut = make_report("offline", rows, is_partial=True, **facts)
    write_report(cut, tmp_path / "cut.json")
    assert read_report(tmp_path / "cut.json").is_partial
    assert "interrupted: this report is not complete" in cut.notes
    assert to_markdown(cut).startswith("# offline (interrupted)")
    assert compare(cut, report(1.0)).differences[-1] == "completeness: the first was interrupted"
    with pytest.raises(ConfigError, match="1 values for 3 repeats"):
        write_report(make_report("offline", rows, **facts), tmp_path / "whole.json")


def test_a_report_holds_no_key_and_no_place() -> None:
    arguments = ["bench", "serve", "--url", "http://me:secret@host:1/v1", "--api-key", "secret"]
    assert command_line(arguments) == "infer bench serve --url http://host:1/v1 --api-key ..."
    assert (
        command_line(["--api-key=secret", "--out", "/home/me/r.json"]) == "infer --api-key=... --out r.json"
    )
    assert command_line(["--note", "two words"]) == "infer --note 'two words'"


def test_errors_of_one_repeat_are_not_hidden_by_a_median() -> None:
    assert cell("num_errors", report(0.0, 0.0, 3.0, figure="num_errors").rows[0].figures["num_errors"]) == "3"


def test_a_table_of_a_server_says_what_was_not_told() -> None:
    figures = {f"ttft_p{percent}_s": percent / 1000 for percent in (50, 95, 99)}
    rows = [make_row("w", "", [figures | {"queue_mean_s": 0.25}]), make_row("v", "", [figures])]
    made = make_report("serve", rows, model={}, config={}, seed=1, repeats=1, warmup=0)
    table = markdown_table(made)
    assert "| `w` | 250 ms |" in table and "| `v` | not told |" in table
    assert "| `w` | 50 / 95 / 99 |" in table


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
    path.write_text(json.dumps({"engine": "other", "w": {"s": "fast"}}))
    with pytest.raises(ConfigError, match=r"row 'w': Expected `float \| null`, got `str`"):
        read_report(path)
    path.write_text(json.dumps({"engine": "other", "w": 5}))
    with pytest.raises(ConfigError, match="no results in a format"):
        read_report(path)


def test_a_row_stands_in_the_tables_that_it_has_figures_for() -> None:
    rows = [
        make_row("split", "", [{"weights_bytes": 2.0**20}]),
        make_row("paged", "", [{"mean_running": 3.0}]),
    ]
    made = make_report("memory", rows, model={}, config={}, seed=1, repeats=1, warmup=0)
    first, second = markdown_table(made).split("\n\n")
    assert "`split` | 1 MiB" in first and "paged" not in first
    assert "`paged` | 3" in second and "split" not in second


def test_a_report_of_nothing_has_a_table_still() -> None:
    row = skip_row("w", "", "interrupted")
    for kind in ("offline", "latency"):
        made = make_report(kind, [row], model={}, config={}, seed=1, repeats=1, warmup=0, is_partial=True)
        assert markdown_table(made) == "|  |  |\n|---|---:|\n| `w` | interrupted |\n"
        assert "interrupted\n" in terminal(made)


def test_ratios_are_drawn_on_both_sides_of_one() -> None:
    lines = ratio_bars([("a", 4.0), ("half", 0.5), ("none", 1.0)], width=6).splitlines()
    assert lines == ["a       │████ 4x", "half  ██│ 0.5x", "none    │ 1x"]
    assert ratio_bars([]) == "" and ratio_bars([("none", 1.0)]) == "none  │ 1x\n"
