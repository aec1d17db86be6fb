"""What the reports say on the pages of the docs, and what the benchmarks around them record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ablations import ABLATIONS
from benchmarks.gpu_table import provenance, read_peers
from benchmarks.machine import facts
from infer.bench.report import make_report, make_row, read_report, write_report
from scripts import docs

OLD: dict[str, Any] = {
    "engine": "infer",
    "model": "m",
    "device": "G",
    "torch": "2",
    "peers": [{"engine": "p"}],
}


def test_what_an_old_report_does_not_hold_is_not_guessed() -> None:
    said = docs.gpu_origin(OLD)
    assert "commit not recorded; date not recorded; version of the peers: p not recorded" in said


def test_a_new_report_of_a_gpu_says_where_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"engine": "p", "model": "m", "w": {"s": 1.0}}))
    peers = read_peers([path], ["p=1.2.3"])
    said = docs.gpu_origin(OLD | provenance() | {"peers": peers})
    assert "not recorded" not in said and "p 1.2.3" in said and "python" in said
    path.write_text(json.dumps({"engine": "p", "version": "9"}))
    assert read_peers([path], ["p=1.2.3"])[0]["version"] == "9"  # the file knows better
    assert {"python", "cpu", "commit", "date"} == set(facts())


def test_a_gpu_report_is_read_for_comparison_with_its_origin(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    rows = {"nano256": {"s": 2.0, "out_tok_s": 5.0}}
    path.write_text(json.dumps(OLD | rows | {"commit": "abc", "created": "2030-01-01", "version": "7"}))
    report = read_report(path)
    assert (report.commit, report.created, report.versions) == ("abc", "2030-01-01", {"engine": "infer 7"})


def test_every_table_says_of_which_commit_and_day_it_is() -> None:
    page = (docs.DOCS / "benchmarks.md").read_text(encoding="utf-8")
    reports = re.findall(r"^<!-- report (.*?): .*?-->\n(.*?)<!-- end -->", page, re.DOTALL | re.MULTILINE)
    measured = {name: text for name, text in reports if "*Not measured yet.*" not in text}
    assert len(measured) >= 8
    for name, text in measured.items():
        assert re.search(r"; commit [0-9a-f]{7,}(-dirty)?; .*; 20\d\d-\d\d-\d\d\. `", text), name


def test_every_ablation_has_its_sentences_on_the_page() -> None:
    page = docs.ablation_table("<!-- ablations -->\nSTALE\n<!-- end -->")
    assert "STALE" not in page
    for ablation in ABLATIONS:
        assert f"| `+{ablation.name}` |" in page and ablation.why in page and ablation.price in page
        assert ablation.above in page


def test_a_report_becomes_a_table_with_its_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "REPORTS", tmp_path / "benchmarks" / "reports")
    row = make_row("+paged w1_single", "", [{"speed_up": 1.5}], note="it is faster.")
    report = make_report("matrix", [row], model={}, config={}, seed=1, repeats=1, warmup=0)
    page = "<!-- report r.json: infer bench matrix -->\n<!-- end -->"
    assert "*Not measured yet.* `infer bench matrix`" in docs.benchmarks_page(page)
    write_report(report, tmp_path / "benchmarks" / "reports" / "r.json")
    made = docs.benchmarks_page(page)
    assert "| `+paged w1_single` | 1.5 x |" in made and "- `+paged w1_single`: it is faster." in made
    assert docs.benchmarks_page(made) == made


def test_an_interrupted_report_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "REPORTS", tmp_path / "benchmarks" / "reports")
    row = make_row("w", "", [{"speed_up": 1.5}])
    cut = make_report("matrix", [row], model={}, config={}, seed=1, repeats=1, warmup=0, is_partial=True)
    write_report(cut, tmp_path / "benchmarks" / "reports" / "r.json")
    with pytest.raises(SystemExit, match="was interrupted"):
        docs.benchmarks_page("<!-- report r.json: infer bench matrix -->\n<!-- end -->")
