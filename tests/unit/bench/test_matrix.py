"""What the matrix says of its rows, in words."""

from __future__ import annotations

import pytest

from benchmarks.ablations import ABLATIONS
from benchmarks.matrix import _row as row_of
from benchmarks.matrix import _sentence as sentence_of
from benchmarks.matrix import bench_matrix
from infer.errors import ConfigError


def test_an_unknown_ablation_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown ablation 'pagd'; did you mean 'paged'"):
        bench_matrix(None, only=("pagd",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gain", "is_best", "said"),
    [
        (2.0, True, "2.00 times better, because a start that was computed before"),
        (2.0, False, "2.00 times better here too"),
        (0.5, True, "2.00 times worse: the shared start is computed so fast"),
        (0.5, False, "2.00 times worse, and it has nothing to give here: nothing is shared"),
        (1.09, True, "no difference beyond 10%: the shared start is computed so fast"),
        (0.92, False, "no difference beyond 10%, as it should be: nothing is shared"),
    ],
)
def test_a_sentence_holds_whichever_way_it_went(gain: float, is_best: bool, said: str) -> None:
    prefix = next(ablation for ablation in ABLATIONS if ablation.name == "prefix")
    sentence = sentence_of(prefix, gain, 0.1, is_best=is_best)
    assert sentence.startswith(said) and sentence.endswith(".")


@pytest.mark.parametrize("gain", [0.7, 1.3])
def test_what_a_switch_that_changes_nothing_seems_to_do_is_called_noise(gain: float) -> None:
    """A reason why there should be no difference does not explain one."""
    idle = [ablation for ablation in ABLATIONS if ablation.is_idle_at_risk]
    assert [ablation.name for ablation in idle] == ["continuous", "program"]
    for ablation in idle:
        said = sentence_of(ablation, gain, 0.1, is_best=False)
        verdict = "1.43 times worse" if gain < 1 else "1.30 times better"
        expected = "which is the machine's noise and not the switch's doing, for it changes nothing here"
        assert said == f"{verdict}, {expected}: {ablation.price}."
        assert "noise" not in sentence_of(ablation, gain, 0.1, is_best=True)
        assert "no difference beyond 50%, as it should be" in sentence_of(ablation, gain, 0.5, is_best=False)


def test_a_row_whose_before_is_not_the_row_above_says_so() -> None:
    for ablation in ABLATIONS:
        runs = [{ablation.best.figure: 10.0}]
        note = row_of(ablation, ablation.best, runs, runs).note
        assert note.endswith(f" {ablation.above}") is bool(ablation.without), ablation.name
    program = next(ablation for ablation in ABLATIONS if ablation.name == "program")
    assert "every row above has it on" in program.above.lower()
