"""Which kernels run on which GPU, as computed from profiles, and what `infer doctor --kernels` prints."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest
import torch

from infer.cli.main import main
from infer.config.profiles.find import KNOWN_GPUS
from infer.kernels.runtime.choice import Declined, Way, choose, explain
from scripts.make_checkpoint import make_checkpoint
from tests.data.record_kernel_choices import COMMON, FILE, MODELS, lines

WAYS: tuple[Way[int, str], ...] = (
    Way("few", lambda count: "a" if count < 3 else Declined("only for less than 3")),
    Way("even", lambda count: "b" if count % 2 == 0 else Declined("only for even numbers")),
    Way("rest", lambda count: "c"),
)


def test_the_first_way_that_covers_a_problem_runs() -> None:
    assert [choose(WAYS, count) for count in (1, 4, 5)] == ["a", "b", "c"]
    assert explain(WAYS, 5) == ("rest", (("few", "only for less than 3"), ("even", "only for even numbers")))
    with pytest.raises(AssertionError, match="no kernel covers 5"):
        choose(WAYS[:2], 5)


def test_kernels_of_models_on_gpus_are_those_recorded() -> None:
    """After a wanted change: python -m tests.data.record_kernel_choices"""
    found = "\n".join(lines()).strip().splitlines()
    changed = list(difflib.unified_diff(FILE.read_text().splitlines(), found, "recorded", "now", n=0))
    assert not changed, "\n".join(changed)


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(COMMON | MODELS["qwen3-0.6b"] | {"hidden_act": "silu"}))
    return str(file)


def test_doctor_explains_each_kernel(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--kernels", model, "--profile", "l4"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("NVIDIA L4, compute capability 8.9, 58 SMs; profile generic: nothing was measured")
    assert (
        "layers.*.attention.qkv   1024 -> 4096, bfloat16\n            1 tokens  Triton, dot products\n"
        in text
    )
    assert "not CUDA C++, pdl.cu: only for compute capability 9.0 and 132 SMs" in text


def test_doctor_says_the_same_in_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--kernels", model, "--profile", "h200", "--quantization", "fp8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["gpu"], report["profile"]) == ("NVIDIA H200", "hopper_h200")
    first = report["kernels"]["layers.*.mlp.gate_up (1024 -> 6144, fp8)"][0]
    assert (first["first"], first["last"], first["kernel"]) == (1, 16, "CUDA C++, pdl.cu")


def test_doctor_explains_the_heads_of_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("gemma4", tmp_path)
    assert main(["doctor", "--kernels", str(tmp_path), "--profile", "h200", "-pp", "1", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    names = [name for name in kernels if name.startswith("attention, fresh prompts")]
    assert [name.partition("(")[2] for name in names] == [
        "4 heads of 16, 2 of keys)",
        "4 heads of 32, 2 of keys)",
    ]
    for name in names:
        assert ["cuDNN", "layers have heads of several sizes"] in kernels[name][0]["declined"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile", "l4"], "add --kernels MODEL, or leave them out"),
        (["--quantization", "fp8"], "add --kernels MODEL, or leave them out"),
        (["--kernels", "attention"], "model 'attention': there is no such file or directory"),
        (["--kernels", "MODEL"], "of a GPU, but none is here; add --profile with one of a100, "),
        (["--kernels", "MODEL", "--profile", "h200", "--attention-backend", "c"], "needs a CPU"),
    ],
)
def test_doctor_refuses_what_it_cannot_explain(
    flags: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["doctor", *(model if flag == "MODEL" else flag for flag in flags)]) == 2
    assert message in capsys.readouterr().err


def test_every_known_gpu_has_a_profile() -> None:
    generations = {gpu.capability for gpu in KNOWN_GPUS.values()}
    assert {(8, 0), (8, 9), (9, 0), (12, 0)} <= generations
    assert {gpu.profile.name for gpu in KNOWN_GPUS.values()} == {"hopper_h200", "generic"}
