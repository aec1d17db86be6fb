"""`benchmarks.bench backends`: differences are found where they are, and only there."""

from __future__ import annotations

import json

import pytest

from benchmarks.backends import COMBINATIONS, GreedyOutput, compare
from benchmarks.bench import BENCHES
from infer.cli import bench as bench_cli
from infer.cli.main import main


@pytest.fixture(autouse=True)
def with_the_repositorys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cli, "BENCHES", bench_cli.BENCHES | BENCHES)


def test_differences_count_until_the_outputs_part() -> None:
    expected = [GreedyOutput([1, 2, 3], [-0.5, -1.0, -2.0, -3.0]), GreedyOutput([4], [-1.0])]
    same = [GreedyOutput([1, 2, 3], [-0.5, -1.25, -2.0, -3.0]), GreedyOutput([4], [-1.0])]
    assert compare(same, expected) == (0.25, 4)
    parted = [GreedyOutput([1, 9, 3], [-0.5, -1.125, -7.0, -8.0]), GreedyOutput([4], [-1.0])]
    assert compare(parted, expected) == (0.125, 2)


def test_rows_are_json_lines_and_agree(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "backends", "--tiny", "--repeats", "1", "--prompt-len", "9", "--steps", "4", "--json"]
    assert main(words) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["name"] for row in rows] == list(COMBINATIONS)
    assert all(row["largest_difference"] < 1e-4 and row["same_tokens"] == 16 for row in rows)
    assert all(row["output_tokens_per_s"] > 0 for row in rows)
    assert rows[-1]["largest_difference"] == 0


def test_an_unknown_combination_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "backends", "--tiny", "--only", "fst"]) == 2
    assert "--only must be some of fast, " in capsys.readouterr().err
