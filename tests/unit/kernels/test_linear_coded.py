"""Coded weights: the layout, filling in any order, and products against the numbers they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infer.kernels.linear.coded import FLOATS, FOUR_BITS, TABLED, CodedWeights, pack, unpack

FORMS: dict[str, dict[str, Any]] = {
    "fp8": {"form": "fp8"},
    "fp8-128": {"form": "fp8", "group": 128},
    "fp8-blocks": {"form": "fp8", "group": 128, "scale_rows": 128},
    "int8": {"form": "int8"},
    "int8-32": {"form": "int8", "group": 32},
    "int8-minima": {"form": "int8", "group": 64, "has_minima": True},
    "int4": {"form": "int4"},
    "int4-32": {"form": "int4", "group": 32},
    "int4-128": {"form": "int4", "group": 128},
    "int4-256": {"form": "int4", "group": 256},
    "int4-minima": {"form": "int4", "group": 32, "has_minima": True},
    "e5m2": {"form": "e5m2"},
    "e5m2-blocks": {"form": "e5m2", "group": 128, "scale_rows": 128},
    "lut4": {"form": "lut4"},
    "nf4-64": {"form": "nf4", "group": 64},
    "fp4-128": {"form": "fp4", "group": 128},
}


class Filled:
    """A matrix filled in pieces, and the same numbers in float32, computed beside it."""

    def __init__(self, name: str, num_rows: int, size: int, device: str = "cpu", pieces: int = 3) -> None:
        torch.manual_seed(len(name) + num_rows + size)
        how = FORMS[name]
        self.weights = CodedWeights.empty(num_rows, size, **how, device=device)
        form, group = self.weights.form, self.weights.form.group or size
        num_groups = -(-size // group)
        scales = (torch.rand(num_rows, num_groups) + 0.5).half().float() * 0.01
        zeros: torch.Tensor | int = 0
        minima = tables = None
        if form.codes in FLOATS:
            codes = (torch.randn(num_rows, size) * 100).clamp(-448, 448).to(FLOATS[form.codes])
            least = torch.finfo(codes.dtype).smallest_normal
            codes.view(-1)[:3] = torch.tensor([least / 4, -3 * least / 4, 0.0]).to(codes.dtype)
        elif form.codes == "int8":
            codes = torch.randint(-128, 128, (num_rows, size), dtype=torch.int8)
        else:
            codes = torch.randint(0, 16, (num_rows, size), dtype=torch.uint8)
            scales = scales.half().float()
            if form.codes in TABLED:
                tables = torch.randn(num_rows if form.codes == "lut4" else 1, 16).bfloat16().float()
            elif not form.has_minima:
                zeros = torch.randint(0, 16, (num_rows, num_groups), dtype=torch.int32)
        if form.has_minima:
            minima = -torch.rand(num_rows, num_groups) * 0.1
        if form.scale_rows > 1:
            scales = scales[::128].repeat_interleave(128, dim=0)[:num_rows]
        expanded = [
            part if not isinstance(part, torch.Tensor) else part.repeat_interleave(group, 1)[:, :size]
            for part in (zeros, scales, 0 if minima is None else minima)
        ]
        wide = None if tables is None else tables.expand(num_rows, -1)
        values = codes.float() if wide is None else wide.gather(1, codes.long())
        self.numbers = (values - expanded[0]) * expanded[1] + expanded[2]
        step = -(-num_rows // pieces)
        if form.scale_rows > 1:
            step = -(-step // 128) * 128
        for first in reversed(range(0, num_rows, step)):
            rows = slice(first, min(first + step, num_rows))
            part = zeros[rows] if isinstance(zeros, torch.Tensor) else zeros
            self.weights.fill(
                first, codes[rows], scales[rows], None if minima is None else minima[rows], part,
                tables[rows] if form.codes == "lut4" and tables is not None else tables,
            )  # fmt: skip


def test_where_a_lane_finds_its_codes() -> None:
    """Written out for one lane: g = 3, t = 2 of the second block, columns 64 .. 127."""
    codes = torch.arange(32 * 128).reshape(32, 128)
    block = pack(codes.int(), "int8").flatten()[(1 * 2 + 1) * 1024 :][:1024].reshape(2, 32, 16)
    row, column = 16 + 3, 64 + 32 + 2 * 2
    first = [(row + r, column + 8 * c + e) for c in (0, 1) for e in (0, 1) for r in (0, 8)]
    expected = [codes[r, c + 16 * s].item() for s in (0, 1) for r, c in first]
    assert block[1, 3 * 4 + 2].tolist() == expected
    nibbles = (codes % 13).to(torch.uint8)
    words = pack(nibbles, "int4").flatten()[(1 * 2 + 1) * 512 :][:512].view(torch.int32).reshape(32, 4)
    word = int(words[3 * 4 + 2, 3]) & 0xFFFFFFFF
    column = 64 + 48 + 2 * 2
    places = [(row + r, column + 8 * c + e) for e in (0, 1) for c in (0, 1) for r in (0, 8)]
    assert [word >> 4 * n & 15 for n in range(8)] == [nibbles[place].item() for place in places]


def test_two_floats_of_8_bits_share_16() -> None:
    """The first as bfloat16 less 120 in its exponent; of the second four bits below and four between."""
    codes = torch.zeros(32, 128, dtype=torch.uint8)
    codes[0, 0], codes[8, 0] = 0b1_1010_011, 0b1_0110_101
    assert pack(codes, "fp8")[0, 0, :2].tolist() == [0b0011_0101, 0b1_011_1_101]


def test_codes_of_a_table_lie_row_by_row() -> None:
    """A lane's word of 16 columns: two and, eight further, two more, of row g and then of row g + 8."""
    codes = (torch.arange(32 * 128).reshape(32, 128) % 13).to(torch.uint8)
    words = pack(codes, "lut4").flatten()[(1 * 2 + 1) * 512 :][:512].view(torch.int32).reshape(32, 4)
    word = int(words[3 * 4 + 2, 3]) & 0xFFFFFFFF
    row, column = 16 + 3, 64 + 48 + 2 * 2
    places = [(row + r, column + 8 * c + e) for r in (0, 8) for c in (0, 1) for e in (0, 1)]
    assert [word >> 4 * n & 15 for n in range(8)] == [codes[place].item() for place in places]


@pytest.mark.parametrize("form", ["fp8", "int8", "int4", "lut4"])
def test_unpack_is_the_inverse_of_pack(form: str) -> None:
    codes = torch.randint(0, 16 if form in FOUR_BITS else 256, (96, 384), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes, form), form), codes)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("num_rows", "size"), [(100, 576), (64, 256), (33, 40)])
def test_rows_filled_in_any_order_stand_for_their_numbers(name: str, num_rows: int, size: int) -> None:
    filled = Filled(name, num_rows, size)
    torch.testing.assert_close(filled.weights.dequantized(), filled.numbers, rtol=1e-6, atol=1e-7)


def test_what_has_no_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="group must be 0, 32, 64 or a multiple of 128"):
        CodedWeights.empty(64, 256, "int4", group=48)
    with pytest.raises(ValueError, match="only integers have minima"):
        CodedWeights.empty(64, 256, "fp8", has_minima=True)
    for codes, group, has_minima in (("fp8", 64, False), ("int8", 128, True)):
        with pytest.raises(ValueError, match="rows that share scales have groups of whole 128s"):
            CodedWeights.empty(256, 256, codes, group, has_minima, scale_rows=128)
