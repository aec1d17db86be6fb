from __future__ import annotations

import json
import re

import pytest
import torch

from infer.cli.main import main
from infer.kernels.cpu.library import library
from infer.kernels.runtime.profiles import explained_profile
from infer.loader.find import default_model
from infer.loader.formats.gguf_quants import FOUR_BITS
from infer.tools import doctor as machine_report
from tests.support.c_library import use_library


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
        "products",
        "attention",
        "decoding",
        "MLP",
        "GPU",
        "profile",
        "memory",
        "models",
        "transformers",
    }
    assert set(machine) == found | {"PyTorch"}
    assert all(machine.values())
    profile, why = explained_profile(torch.device("cuda" if torch.cuda.device_count() else "cpu"))
    assert machine["profile"] == f"{profile.name}: {why}"


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_says_how_weights_will_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(capsys)[0]["weights"].startswith("int4 where a file has 4 bits, int8 elsewhere")


@pytest.mark.parametrize(
    ("has_amx", "weights"), [(False, "fp32"), (True, "fp32, bf16 for files in bfloat16")]
)
def test_without_kernels_it_says_so_and_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_amx: bool, weights: str
) -> None:
    monkeypatch.setattr(machine_report, "cpu_has_amx", lambda: has_amx)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with use_library(None):
        machine, advice = doctor(capsys)
    assert machine["C kernels"] == "none: a test does without" and machine["weights"] == weights
    assert any("C kernels could not be built" in sentence or "C compiler" in sentence for sentence in advice)
    assert not any("4 bits" in sentence for sentence in advice)  # without kernels they are no faster


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_what_it_says_of_4_bits_is_what_auto_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    _, advice = doctor(capsys)
    named = set(re.findall(r"\bQ\w+", advice[-1]))
    assert named == {"Q4_0", "Q4_1", "Q4_K"}
    assert named <= {kind.name for kind in FOUR_BITS}
    assert default_model.FILE.split(".")[-2] in named
    assert "--quantization int4" in advice[-1]


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
