"""Phases of a start: in order, added up, and one end of a log line."""

from __future__ import annotations

import pytest

from infer.engine import phases as module
from infer.engine.phases import Phases, spell_phases


def test_phases_are_timed_in_order_and_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 10.0, 12.0, 20.0, 20.5])
    monkeypatch.setattr(module, "perf_counter", lambda: next(ticks))
    phases = Phases()
    with phases("load weights"):
        pass
    with pytest.raises(ZeroDivisionError), phases("compile"):
        raise ZeroDivisionError
    with phases("load weights"):
        pass
    assert phases == {"load weights": 1.5, "compile": 2.0}
    assert spell_phases(phases) == "load_weights_s=1.50 compile_s=2.00"
