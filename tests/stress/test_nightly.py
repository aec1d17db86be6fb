from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.stress import nightly
from tests.stress.nightly import Case, Journal, progress, run_case, run_seed, shrink
from tests.support.oracle import OracleDevice


def test_a_failing_case_shrinks_to_what_it_needs() -> None:
    def fails(case: Case) -> bool:
        return case.size >= 7 and not case.without & {"beams", "drafts"}

    least = shrink(Case(5), fails)
    assert least.size == 7
    assert set(nightly.FEATURES) - least.without == {"beams", "drafts"}
    assert "--seed 5 --size 7 --without aborts," in least.command


@pytest.mark.slow
def test_a_wrong_token_is_found_and_its_command_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose = OracleDevice.choose
    monkeypatch.setattr(
        OracleDevice, "choose", lambda *args: choose(*args) if len(args[1]) < 25 else choose(*args) ^ 1
    )
    monkeypatch.setattr(nightly, "SHRINK_S", 1.0)
    monkeypatch.setattr(nightly, "SIZE", 20)
    seed, events, report = run_seed(1)
    assert not events and report is not None and report.startswith(f"seed {seed} failed")
    command = report.rpartition("repeat it with: ")[2]
    assert nightly.main(command.split()[3:]) == 1
    assert "AssertionError" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(2))
def test_the_same_seed_is_the_same_case(seed: int) -> None:
    once, again = (run_case(Case(seed, size=25)) for _ in range(2))
    assert once == again and once["checked"] > 0


def test_a_journal_goes_on_where_a_run_was_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "night.jsonl"
    first = Journal(path, 3 * nightly.SIZE, 40)
    first.add(41, Counter(checked=7, steps=2), None)
    first.add(40, Counter(), "seed 40 failed")
    with path.open("a") as file:
        file.write('{"seed": 42, "ev')  # killed while it wrote
    again = Journal(path, 99, 1)
    assert again.seeds == first.seeds == range(40, 43)
    assert again.ended == {40, 41} and again.totals == first.totals and again.num_failed == 1
    again.add(42, Counter(checked=1), None)
    assert Journal(path, 99, 1).totals["checked"] == 8
    assert not Journal(None, 300, 5).ended


def test_a_line_says_how_fast_and_how_long() -> None:
    line = progress(60.0, 30, 10, 3334, 0)
    assert line == "    60 s: 30 of 3334 cases, 0 failed, 50 requests/s, 5 h 30 min left"


def test_ctrl_c_ends_with_a_line_that_says_how_to_go_on(tmp_path: Path) -> None:
    journal = tmp_path / "night.jsonl"
    command = [sys.executable, "-m", "tests.stress.nightly", "--jobs", "1", "--first-seed", "3"]
    with subprocess.Popen(
        [*command, "--journal", str(journal)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as night:
        assert night.stdout is not None
        assert night.stdout.readline().startswith("seeds 3 to ")
        night.send_signal(signal.SIGINT)
        out, error = night.communicate(timeout=600)
    assert night.returncode == 130
    assert f"cases; go on with: python -m tests.stress.nightly --journal {journal}" in out
    assert "KeyboardInterrupt" not in error
    assert Journal(journal, 1, 1).first_seed == 3


def test_without_a_journal_an_interrupted_run_says_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(journal: Journal, jobs: int) -> int:
        journal.add(9, Counter(checked=4711), None)
        raise KeyboardInterrupt

    monkeypatch.setattr(nightly, "run_many", interrupt)
    assert nightly.main(["--first-seed", "9"]) == 130
    out = capsys.readouterr().out
    assert "begin again with --first-seed 9" in out and "4,711 checked\n" in out
