"""Forms that only files bring: tables of numbers with outliers, and floats of 8 bits with a wide range."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.config.foreign import FILE_FORMS, hint_of_quantization
from infer.errors import CheckpointError
from infer.kernels.linear.coded import CodedForm, CodedWeights
from infer.layers.linear import Projected
from infer.loader.find.source import resolve_model
from infer.loader.forms import joined_form, stored_form
from infer.loader.load import load_model
from infer.quant.coded import CodedRows, Outliers, StoredCodes
from infer.quant.registry import FILE_SCHEMES
from infer.quant.rounding import NF4, fit_rows, round_rows
from infer.tools.quantize import Recipe, quantize_checkpoint
from scripts.make_checkpoint import Sizes, make_checkpoint


def test_their_names_are_no_values_of_a_setting() -> None:
    assert set(FILE_FORMS) == FILE_SCHEMES.keys() - {"runs"}
    assert all("a form that only files have" in hint_of_quantization(name) for name in FILE_FORMS)
    assert hint_of_quantization("gguf-q4_k").endswith("leave quantization out, or use gguf")


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        ([("e5m2", 256), ("e5m2", 256)], CodedForm("e5m2")),
        ([("e5m2", 256), ("fp8", 256)], None),
        ([("nf4", 64), ("nf4", 64)], CodedForm("nf4", 64)),
        ([("nf4", 64), ("nf4", 128)], CodedForm("nf4", 64)),
        ([("nf4", 64), ("fp4", 64)], None),
        ([("lut4", 256), ("lut4", 256)], CodedForm("lut4")),
        ([("lut4", 256), ("int4", 32)], None),
        ([("mxfp4", 32), ("int8", 32)], None),
        ([("int4", 32), ("int8", 32)], CodedForm("int8", 32)),
    ],
)
def test_parts_of_a_fused_matrix_share_a_form_or_are_unpacked(
    parts: list[tuple[str, int]], joined: CodedForm | None
) -> None:
    forms = [stored_form(StoredCodes(kind, 256, group)) for kind, group in parts]
    assert joined_form(forms, 256, [64] * len(parts)) == joined


def test_rows_with_tables_keep_them() -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 8, (6, 128), dtype=torch.uint8)
    rows = CodedRows(codes, 3, torch.rand(6, 2) + 0.5, 0, 64, table=torch.randn(6, 8))
    own = fit_rows(rows, CodedForm("lut4", 64))
    assert own is not None and own.tables is not None and own.tables.shape == (6, 16)
    weights = CodedWeights.empty(6, 128, "lut4", 64)
    weights.fill(0, *own)
    assert torch.equal(weights.dequantized(), rows.numbers())
    for form in (CodedForm("int4", 64), CodedForm("int8", 64), CodedForm("fp8")):
        assert fit_rows(rows, form) is None
    assert fit_rows(rows._replace(table=None), CodedForm("lut4", 64)) is None


def test_one_table_serves_all_rows_or_is_refused() -> None:
    weights = CodedWeights.empty(64, 128, "nf4", 64)
    codes, scales, table = torch.zeros(32, 128, dtype=torch.uint8), torch.ones(32, 2), torch.tensor([NF4])
    weights.fill(0, codes, scales, tables=table)
    weights.fill(32, codes + 15, scales, tables=table)
    assert sorted(set(weights.dequantized().flatten().tolist())) == [-1.0, 1.0]
    with pytest.raises(
        CheckpointError, match="different tables of nf4: .*; load the file with quantization=none"
    ):
        weights.fill(0, codes, scales, tables=table * 2)


@pytest.mark.parametrize("codes", ["nf4", "fp4", "lut4", "e5m2"])
def test_random_weights_can_be_rounded_to_them(codes: str) -> None:
    """For their speed alone: the error is that of 4 bits, or of two bits of significand."""
    numbers = torch.randn(40, 256) * 0.02
    form = CodedForm(codes, 0 if codes == "e5m2" else 64)
    weights = CodedWeights.empty(40, 256, *form)
    weights.fill(0, *round_rows(numbers, form))
    assert 0.01 < (weights.dequantized() - numbers).norm() / numbers.norm() < 0.12


def test_rows_in_another_order_take_their_outliers_along() -> None:
    dense = torch.where(torch.rand(9, 40) < 0.1, torch.randn(9, 40), torch.zeros(9, 40))
    dense[4] = 0
    starts = torch.nn.functional.pad(dense.count_nonzero(1).cumsum(0), (1, 0))
    outliers = Outliers(starts, dense.nonzero()[:, 1], dense[dense != 0])
    rows = torch.tensor([8, 4, 0, 3, 3])
    picked, found = outliers.pick(rows), torch.zeros(5, 40)
    found[picked.rows(), picked.columns] = picked.values
    assert torch.equal(found, dense[rows])


def test_a_file_in_e5m2_keeps_its_codes_on_a_gpu(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "dense", sizes=Sizes(hidden_size=64), dtype="bfloat16", seed=3)
    out = tmp_path / "e5m2"
    source = resolve_model(str(tmp_path / "dense"), show_progress=False)
    quantize_checkpoint(source, out, Recipe(scheme="fp8-channel"))
    tensors = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dtype is torch.float8_e4m3fn:
            tensors[name] = tensor.float().to(torch.float8_e5m2)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})

    def weights(quantization: str) -> dict[str, tuple[str, torch.Tensor]]:
        found = resolve_model(str(out), show_progress=False)
        loaded = load_model(found, device="cpu", dtype="float32", quantization=quantization, home="cuda")
        layers = {name: m.stored for name, m in loaded.model.named_modules() if isinstance(m, Projected)}
        return {name: (stored.scheme, stored.dequantized()) for name, stored in layers.items()}

    kept, plain = weights("auto"), weights("none")
    assert {scheme for name, (scheme, _) in kept.items() if name != "head"} == {"e5m2"}
    for name, (_, weight) in kept.items():
        torch.testing.assert_close(weight, plain[name][1], rtol=1e-6, atol=0)
