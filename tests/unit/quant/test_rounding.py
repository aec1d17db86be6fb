"""Numbers and a file's codes in the forms that a GPU keeps: how near, and that codes are not touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infer.kernels.linear.coded import CodedForm, CodedWeights
from infer.kernels.linear.coded_linear import look_up
from infer.loader.formats.gguf import GGMLType
from infer.loader.formats.gguf_quants import ROUNDED, SUPPORTED, coded_rows, dequantize, stored_codes
from infer.loader.forms import joined_form, rounded_form, stored_form
from infer.quant.coded import CodedRows, StoredCodes
from infer.quant.rounding import CodedPart, fit_rows, round_rows
from tests.unit.loader.test_gguf_quants import random_blocks


def numbers(part: CodedPart, form: CodedForm) -> torch.Tensor:
    """What a part stands for once it is in place."""
    weights = CodedWeights.empty(part.codes.shape[0], part.codes.shape[1], *form)
    weights.fill(0, *part)
    everything = weights.dequantized()
    ids = torch.arange(len(everything)).flip(0)
    assert torch.equal(look_up(weights, ids, torch.float32), everything[ids])
    return everything


@pytest.mark.parametrize(
    ("scheme", "size", "form"),
    [
        ("fp8", 100, CodedForm("fp8")),
        ("int8", 100, CodedForm("int8")),
        ("int4", 256, CodedForm("int4", 128)),
        ("int4", 576, CodedForm("int4", 64)),
        ("int4", 96, CodedForm("int4", 32)),
        ("int4", 100, CodedForm("int8")),
    ],
)
def test_the_form_of_what_is_rounded(scheme: str, size: int, form: CodedForm) -> None:
    assert rounded_form(scheme, size) == form


def test_the_largest_weight_of_a_row_has_the_largest_code() -> None:
    rows = torch.tensor([[0.5, -2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [-7.0, 3.5, 1.75, 0.25]])
    eight = round_rows(rows, CodedForm("int8"))
    assert eight.codes.tolist() == [[32, -127, 64, 0], [0, 0, 0, 0], [-127, 64, 32, 5]]
    assert torch.allclose(eight.scales[:, 0], torch.tensor([2 / 127, 0.0, 7 / 127]), atol=1e-9)
    floats = round_rows(rows, CodedForm("fp8"))
    assert floats.codes.float().tolist() == [[112, -448, 224, 0], [0, 0, 0, 0], [-448, 224, 112, 16]]


@pytest.mark.parametrize(("form", "steps"), [(CodedForm("int8"), 254), (CodedForm("int8", 32), 254)])
def test_integers_of_8_bits_err_by_half_a_step(form: CodedForm, steps: int) -> None:
    rows = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    error = (numbers(round_rows(rows, form), form) - rows).abs()
    width = rows.view(7, -1, form.group or 96).abs().amax(2)
    assert bool((error.view(7, -1, form.group or 96).amax(2) <= width / steps * 1.0001).all())


def test_floats_of_8_bits_err_by_a_sixteenth_of_a_weight() -> None:
    rows = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    form = CodedForm("fp8")
    error = (numbers(round_rows(rows, form), form) - rows).abs()
    smallest = rows.abs().amax(1, keepdim=True) / 448 * 2**-9
    assert bool((error <= torch.maximum(rows.abs() / 16, smallest)).all())


@pytest.mark.parametrize("size", [256, 192, 96])
def test_fitted_steps_of_4_bits_err_less_than_those_between_the_extremes(size: int) -> None:
    rows = torch.randn(64, size, generator=torch.Generator().manual_seed(1))
    form = rounded_form("int4", size)
    group = form.group
    error = (numbers(round_rows(rows, form), form) - rows).norm()
    groups = rows.view(64, -1, group)
    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = (most - least) / 15
    least = (least / step).round() * step  # one of the steps is 0
    plain = ((groups - least) / step).round().clamp(0, 15) * step + least
    assert error < 0.97 * (plain - groups).norm()


@pytest.mark.parametrize("form", [CodedForm("int4", 32, True), CodedForm("int4", 32)])
def test_weights_that_are_16_steps_stay_what_they_are(form: CodedForm) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (8, 4, 32), generator=generator)
    codes[:, :, 0], codes[:, :, 1] = 0, 15
    rows = ((codes - 6) * (torch.rand(8, 4, 1, generator=generator) + 0.1)).flatten(1)
    torch.testing.assert_close(numbers(round_rows(rows, form), form), rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("least", "most"), [(0.5, 1.0), (-1.0, -0.5), (0.9, 1.0), (-0.01, 1.0)])
def test_weights_of_one_sign_have_steps_from_0_on(group: int, least: float, most: float) -> None:
    """16 steps that reach from 0 to the largest, evenly, err by 1 / sqrt(12) of one."""
    generator, form = torch.Generator().manual_seed(4), CodedForm("int4", group)
    rows = torch.rand(16, 256, generator=generator) * (most - least) + least
    error = (numbers(round_rows(rows, form), form) - rows).square().mean().sqrt()
    step = (max(most, 0) - min(least, 0)) / 15
    assert error <= 1.1 * step / 12**0.5, float(error / step)


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_type_of_gguf(name: str) -> None:
    """Codes are those of the blocks; only groups of 16 are rounded anew, to 8 bits in groups of 32."""
    kind = GGMLType[name]
    packed = torch.from_numpy(random_blocks(kind, rows=7, blocks=4))
    expected, rows = dequantize(packed, kind), coded_rows(packed, kind)
    codes = stored_codes(kind, 512)
    form = codes and stored_form(codes)
    if isinstance(rows, torch.Tensor):
        assert form is None and torch.equal(rows, expected)
        return
    assert form is not None
    torch.testing.assert_close(rows.numbers(), expected, rtol=1e-6, atol=0)
    if expected.shape[1] % 32:
        return
    fitted = fit_rows(rows, form)
    assert (name in ROUNDED) == (rows.groups in (8, 16)), "the start line says which are not kept"
    if name in ROUNDED:
        assert fitted is None and form == CodedForm("int8", 32, form.has_minima)
        error = (numbers(round_rows(expected, form), form) - expected).view(7, -1, 32).abs().amax(2)
        assert bool((error <= expected.view(7, -1, 32).abs().amax(2) / 254 * 1.0001).all())
        return
    assert fitted is not None
    torch.testing.assert_close(
        numbers(fitted, form), expected, rtol=2e-6, atol=float(expected.abs().max()) * 1e-6
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("group", [32, 96, 256])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_codes_of_a_file_are_not_touched(bits: int, group: int, has_zeros: bool) -> None:
    rng, size = np.random.default_rng(bits), 192
    num_groups = -(-size // group)
    codes = torch.from_numpy(rng.integers(0, 1 << bits, (9, size), dtype=np.uint8))
    zeros = torch.from_numpy(rng.integers(0, 1 << bits, (9, num_groups))).short()
    rows = CodedRows(
        codes, bits, torch.from_numpy(rng.random((9, num_groups), dtype=np.float32)).half().float(),
        zeros if has_zeros else 1 << bits - 1, group,
    )  # fmt: skip
    kind = "int4" if bits <= 4 else "int8"
    form = stored_form(StoredCodes(kind, size, group, kind == "int8" and has_zeros))
    assert form is not None
    fitted = fit_rows(rows, form)
    assert fitted is not None
    torch.testing.assert_close(numbers(fitted, form), rows.numbers(), rtol=1e-5, atol=1e-5)


def test_what_fits_no_form() -> None:
    codes = torch.zeros(2, 64, dtype=torch.uint8)
    by_column = CodedRows(codes, 4, torch.ones(2, 2), 8, torch.arange(64) % 2)
    assert fit_rows(by_column, CodedForm("int4", 32)) is None
    assert stored_form(StoredCodes("int4", 64, 0)) is None
    assert stored_form(StoredCodes("int4", 96, 48)) is None
    assert fit_rows(CodedRows(codes, 8, torch.ones(2, 1), 0, 64), CodedForm("int4")) is None
    wide = CodedRows(codes + 255, 8, torch.ones(2, 1), 0, 64)
    assert fit_rows(wide, CodedForm("int8")) is None  # 255 is no signed byte


def test_rows_share_scales_only_where_a_layout_has_them() -> None:
    def form_of(kind: str, group: int, has_minima: bool = False) -> CodedForm | None:
        return stored_form(StoredCodes(kind, 512, group, has_minima, scale_rows=128))

    assert form_of("fp8", 128) == CodedForm("fp8", 128, False, 128)
    assert form_of("fp8", 64) == CodedForm("fp8", 64)
    assert form_of("fp8", 192) == CodedForm("fp8", 64)
    assert form_of("int8", 128, True) == CodedForm("int8", 128, True)
    for group in (32, 64, 96, 128, 256, 384):
        for codes, has_minima in (("fp8", False), ("int8", False), ("int8", True), ("int4", False)):
            form = form_of(codes, group, has_minima)
            assert form is not None
            form.check()


def test_the_form_of_a_fused_matrix() -> None:
    four, eight, blocks = CodedForm("int4", 128), CodedForm("int8"), CodedForm("fp8", 128, False, 128)
    assert joined_form([four, CodedForm("int4", 32, True)], 256, [64, 64]) == CodedForm("int4", 32, True)
    assert joined_form([four, eight], 256, [64, 64]) == CodedForm("int8", 128)
    assert joined_form([eight, eight], 100, [7, 5]) == eight
    assert joined_form([blocks, blocks], 256, [128, 100]) == blocks
    assert joined_form([blocks, blocks], 256, [96, 128]) == CodedForm("fp8", 128)
    assert joined_form([CodedForm("int8", 128, False, 128), CodedForm("int8", 128, True)], 256, [128, 8]) == (
        CodedForm("int8", 128, True)
    )
    assert joined_form([four, None], 256, [64, 64]) is None and joined_form([], 256, [64]) is None
    assert joined_form([four, CodedForm("fp8")], 256, [64, 64]) is None
