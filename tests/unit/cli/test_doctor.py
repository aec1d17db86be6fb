from __future__ import annotations

import json

import pytest

from infer.cli.main import main
from infer.engine import machine_report
from infer.kernels.cpu.library import library, use_library


def doctor(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, str], list[str]]:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    return report["machine"], report["advice"]


def test_names_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    machine, _ = doctor(capsys)
    found = {
        "processor",
        "features",
        "threads",
        "compiler",
        "C kernels",
        "weights",
        "GPU",
        "memory",
        "models",
    }
    assert set(machine) == found | {"PyTorch"}
    assert all(machine.values())


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_says_how_weights_will_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(capsys)[0]["weights"].startswith("int4 where a file has 4 bits, int8 elsewhere")


def test_without_kernels_it_says_so_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    with use_library(None):
        machine, advice = doctor(capsys)
    assert machine["C kernels"] == "none: the C kernels are switched off" and machine["weights"] == "fp32"
    assert any("C kernels could not be built" in sentence or "C compiler" in sentence for sentence in advice)


def test_without_a_compiler_it_advises_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_report, "find_compiler", lambda: None)
    with use_library(None):
        machine, advice = doctor(capsys)
    assert machine["compiler"] == "none" and "install a C compiler" in advice[0]


def test_people_get_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("processor ")
