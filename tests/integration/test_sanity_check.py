"""The sanity check finds nothing wrong with a sound model, and says what is wrong with another."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import sanity_check
from scripts.make_checkpoint import make_checkpoint


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_sound_model_passes_every_check(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path / "model")
    row = sanity_check.check_model(str(tmp_path / "model"))
    assert row["loads"] == "ok, qwen3"
    assert {check: row[check] for check in sanity_check.CHECKS} == dict.fromkeys(sanity_check.CHECKS, "ok")


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    row = sanity_check.check_model(str(tmp_path))
    assert "config.json" in row["loads"]
