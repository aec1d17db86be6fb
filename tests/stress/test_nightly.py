from __future__ import annotations

import pytest

from tests.stress import nightly
from tests.stress.nightly import Case, run_case, run_seed, shrink
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
