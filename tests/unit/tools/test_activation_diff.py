from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from infer.errors import ConfigError
from infer.tools.activation_diff import TOLERANCE, DiffReport, compare, diff_models, main, record
from scripts.make_checkpoint import make_checkpoint
from tests.support.checkpoints import FAMILIES, MOE_FAMILIES, build_like, reference_model

TOKENS = [5, 9, 2, 11, 7, 3, 8, 1, 4]


@pytest.mark.parametrize("family", FAMILIES + MOE_FAMILIES)
def test_a_correct_model_agrees_in_every_module_of_the_weight_map(family: str) -> None:
    reference = reference_model(family)
    report = diff_models(build_like(reference), reference, TOKENS)

    assert report.first_difference is None
    names = [row.name for row in report.rows]
    assert names[0] == "embedding"
    assert names[-1] == "head"
    assert any(name.startswith("layers.2.attention.qkv") for name in names)
    assert ("layers.2.mlp.router" in names) == (family in MOE_FAMILIES)
    assert max(row.relative for row in report.rows) < TOLERANCE[torch.float32] / 10


@pytest.mark.parametrize(
    ("module", "rows", "named"),
    [
        ("layers.1.attention.qkv", slice(48, 49), "layers.1.attention.qkv[k]"),  # queries end at row 47
        ("layers.2.mlp.gate_up", slice(0, 1), "layers.2.mlp.gate_up[gate]"),
        ("layers.0.mlp_norm", slice(3, 4), "layers.0.mlp_norm"),
        ("layers.1.mlp.down", slice(7, 8), "layers.1.mlp.down"),
        ("norm", slice(0, 1), "norm"),
    ],
)
def test_the_first_tensor_that_parts_is_named(module: str, rows: slice, named: str) -> None:
    reference = reference_model("llama")
    ours = build_like(reference)
    ours.get_submodule(module).weight.data[rows] += 0.1  # type: ignore[operator, index]

    first = diff_models(ours, reference, TOKENS).first_difference

    assert first is not None
    assert first.name == named


def test_a_wrong_rotation_shows_in_the_output_of_attention() -> None:
    reference = reference_model("llama")
    ours = build_like(reference)
    ours.layers[0].attention.rotary.cos_PR.mul_(0.9)  # type: ignore[union-attr, operator]

    first = diff_models(ours, reference, TOKENS).first_difference

    assert first is not None
    assert first.name == "layers.0.attention.out"


def test_two_models_of_ours_are_compared_in_every_module() -> None:
    reference = reference_model("qwen3")
    left, right = build_like(reference), build_like(reference)
    assert diff_models(left, right, TOKENS).first_difference is None

    right.layers[1].attention.out.weight.data[0] += 1.0  # type: ignore[union-attr, operator, index]
    report = diff_models(left, right, TOKENS)

    assert report.first_difference is not None
    assert report.first_difference.name == "layers.1.attention.out"
    assert "layers.1.mlp.down" in [row.name for row in report.rows]


def test_nan_is_a_difference() -> None:
    nan = torch.tensor([[float("nan")]])
    report = compare({"a": nan}, {"a": torch.ones(1, 1)}, {"a": "a"}, tolerance=1.0)
    swapped = compare({"a": torch.ones(1, 1)}, {"a": nan}, {"a": "a"}, tolerance=1.0)

    assert report.first_difference is not None
    assert swapped.first_difference is not None


def test_other_shapes_are_a_difference() -> None:
    report = compare({"a": torch.ones(2, 3)}, {"a": torch.ones(2, 4)}, {"a": "a"}, tolerance=1.0)

    assert report.first_difference is not None


def test_models_with_nothing_in_common_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no module in common"):
        compare({"a": torch.ones(1)}, {"b": torch.ones(1)}, {}, tolerance=1.0)


def test_recording_leaves_no_hook_behind_and_numbers_repeated_calls() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)

    recording = record(model, lambda: model(torch.ones(1, 2)))

    assert list(recording) == ["0", "1", "0#2"]
    assert all(not module._forward_hooks for module in model.modules())


def test_hooks_are_removed_when_the_run_fails() -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    with pytest.raises(RuntimeError):
        record(model, lambda: model(torch.ones(1, 3)))
    assert not model[0]._forward_hooks


def test_the_table_marks_the_first_difference() -> None:
    ones = {"a": torch.ones(1, 2), "b": torch.ones(1, 2), "c": torch.ones(1, 2)}
    other = ones | {"b": torch.zeros(1, 2), "c": torch.zeros(1, 2)}
    text = str(compare(ones, other, {name: name for name in ones}, tolerance=0.1))

    assert [line.split()[0] for line in text.splitlines()] == ["name", "a", "b", "c", "first"]
    assert text.splitlines()[2].endswith("<-- first difference")
    assert text.endswith("first difference: b")
    assert str(DiffReport(())).endswith("the models agree")


def test_the_command_says_whether_two_checkpoints_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("llama", tmp_path / "a", seed=1)
    make_checkpoint("llama", tmp_path / "b", seed=2)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")

    assert main([a, a, "--tokens", "1,2,3"]) == 0
    assert main([a, b, "--tokens", "1,2,3"]) == 1
    assert "first difference: embedding" in capsys.readouterr().out
    assert main([a, str(tmp_path / "missing")]) == 2
    assert "error: " in capsys.readouterr().err
