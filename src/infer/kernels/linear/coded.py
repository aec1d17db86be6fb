"""Weights of 8 or 4 bits on a GPU: codes in the order in which the lanes of a kernel read them, and scales.

    fp8     w = scale * code                  a float of 8 bits, e4m3
    e5m2    w = scale * code                  the other float of 8 bits: the upper half of a float16
    int8    w = scale * code  (+ minimum)     -128 .. 127
    int4    w = scale * (code - zero)         0 .. 15, and so is zero;  or  scale * code + minimum
    mxfp4   w = scale * code                  a float of 4 bits, e2m1; scales are powers of two
    lut4    w = scale * table[code]           each row has a table of 16 numbers
    nf4     w = scale * table[code]           one table for the matrix; fp4 is the same with another table

There is one scale, zero and minimum for each `group` adjacent columns of a row, or for the whole row.

Tensor cores take W from registers, 16 rows by 16 columns at a time: with g = lane / 4 and t = lane % 4, a
lane holds the columns 2t, 2t+1, 2t+8, 2t+9 of the rows g and g+8. The codes that a lane needs from 64 columns
are contiguous, so they are read in pieces of 16 bytes, without bank conflicts, and unpacked in pairs:

    cells     [N / 32 bands][K / 128]: the codes of 32 rows and 128 columns, then their scales and minima,
              [groups][32 rows] each, in float32; everything that a kernel multiplies next comes in one copy
    codes     [2 times 64 columns][2 blocks of 16 rows] and in a block, from the slowest axis to the fastest:
      8 bits  half of the columns, g, t, 16 columns, column + 8, column + 1, row + 8          1,024 bytes
      4 bits  g, t, 16 columns, column + 1, column + 8; row g in the low nibble, g + 8 above   512 bytes
      tables  g, t, 16 columns, row + 8, column + 8; column in the low nibble, column + 1 above  512 bytes
    scales    with one scale per row, [N / 32][32 rows]; if 128 rows share scales, [N / 32][groups]
    tables    of lut4, [N / 32][32 rows][16], in float32; of nf4 and fp4, [16]

Two fp8 codes share 16 bits, and the sign and the rest of the first code are at their places in bfloat16, so
one instruction extracts them. A band, 32 rows, is contiguous along K, so a kernel may copy any number of its
columns at once. Rows are padded to whole bands, columns to multiples of 128, with zeros.

The zero of a 4-bit group is stored in the last four bits of its scale, which leaves 20 significant bits. The
16-bit scales of files lose nothing; a float32 scale is rounded by at most one part in a million.

Shapes:  M tokens, N rows (outputs), K columns (inputs), R rows of a part, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from infer.errors import CheckpointError
from infer.kernels.linear.outliers import SparseRows

BAND, CELL_COLUMNS = 32, 128
TABLED = ("lut4", "nf4", "fp4")
FOUR_BITS = ("int4", "mxfp4", *TABLED)
FORMS = ("fp8", "e5m2", "int8", *FOUR_BITS)
FLOATS = {"fp8": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}  # codes that are 8-bit floats
TABLE_SIZE = 16  # entries of a table
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_ZERO_BITS = 15  # the bits of a scale that hold the zero


class CodedForm(NamedTuple):
    """The number format of the weights of a matrix."""

    codes: str  # one of FORMS
    group: int = 0  # columns that share a scale; 0: all
    has_minima: bool = False
    scale_rows: int = 1  # rows that share a scale: 1, or 128 (FP8 in blocks)

    @property
    def bits(self) -> int:
        """Bits per code."""
        return 4 if self.codes in FOUR_BITS else 8

    @property
    def spans(self) -> int:
        """Groups of a row whose scales a cell holds; 0: scales are stored outside the cells."""
        if not self.group or self.scale_rows > 1:
            return 0
        return max(1, CELL_COLUMNS // self.group)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a cell."""
        return BAND * CELL_COLUMNS * self.bits // 8

    @property
    def cell_bytes(self) -> int:
        """Bytes of a cell, codes and scales together."""
        return self.code_bytes + self.spans * BAND * 4 * (1 + self.has_minima)

    def check(self) -> None:
        """Raise ValueError if this form has no layout."""
        codes, group, has_minima, scale_rows = self
        if codes not in FORMS or scale_rows not in (1, 128):
            raise ValueError(f"codes must be one of {FORMS} and scale_rows 1 or 128, got {self}")
        if group and group not in (32, 64) and group % CELL_COLUMNS:
            raise ValueError(f"group must be 0, 32, 64 or a multiple of 128, got {self}")
        if (codes not in ("int8", "int4") and has_minima) or (codes in FOUR_BITS and scale_rows > 1):
            raise ValueError(f"only integers have minima, and 4 bits a scale for each row, got {self}")
        if scale_rows > 1 and (has_minima or group % CELL_COLUMNS):
            raise ValueError(f"rows that share scales have groups of whole 128s and no minima, got {self}")


@dataclass(frozen=True, slots=True)
class CodedWeights:
    """One matrix [N, K] in the layout above."""

    form: CodedForm
    num_rows: int
    size: int
    cells: torch.Tensor  # uint8, [bands, columns / 128, bytes of a cell]
    scales: torch.Tensor  # float32, [bands, 32] of rows or [bands, G] of bands; empty where cells have them
    minima: torch.Tensor  # float32, [bands, 32], or empty
    tables: torch.Tensor  # float32, [bands, 32, 16] of lut4, [1, 1, 16] of nf4 and fp4, or empty
    outliers: SparseRows | None = None  # corrections that are added to single elements

    @classmethod
    def empty(
        cls, num_rows: int, size: int, form: str, group: int = 0, has_minima: bool = False,
        scale_rows: int = 1, num_outliers: int = 0, device: torch.device | str = "cpu",
    ) -> CodedWeights:  # fmt: skip
        """Make a matrix of zeros, to be filled row by row; on the meta device, it takes no memory."""
        group = group if group < size else 0
        made = CodedForm(form, group, has_minima, scale_rows if group else 1)
        made.check()
        bands, num_cells = -(-num_rows // BAND), -(-size // CELL_COLUMNS)
        tables = (bands, BAND) if form == "lut4" else (1, 1) if form in TABLED else (bands, 0)
        width = 0 if made.spans else -(-size // group) if group else BAND
        return cls(
            made,
            num_rows,
            size,
            torch.zeros((bands, num_cells, made.cell_bytes), dtype=torch.uint8, device=device),
            torch.zeros((bands, width), dtype=torch.float32, device=device),
            torch.zeros((bands, width if has_minima else 0), dtype=torch.float32, device=device),
            torch.zeros((*tables, TABLE_SIZE), dtype=torch.float32, device=device),
            SparseRows.empty(num_rows, num_outliers, device) if num_outliers else None,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.num_rows, self.size

    def __len__(self) -> int:
        return self.num_rows

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The stored tensors, by name."""
        names, sparse = ("cells", "scales", "minima", "tables"), ("begins", "ends", "columns", "values")
        found = {name: getattr(self, name) for name in names}
        outliers = {} if self.outliers is None else {name: getattr(self.outliers, name) for name in sparse}
        return found | {f"outlier_{name}": tensor for name, tensor in outliers.items()}

    def with_tensors(self, tensors: dict[str, torch.Tensor]) -> CodedWeights:
        """The matrix over other tensors; with an extra leading axis, the matrices of all experts."""
        assert self.outliers is None, "the matrices of experts have none"
        cells, scales, minima, tables = (tensors[name] for name in ("cells", "scales", "minima", "tables"))
        return replace(self, cells=cells, scales=scales, minima=minima, tables=tables)

    def fill(
        self, first_row: int, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None = None,
        zeros: torch.Tensor | int = 0, tables: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Store rows in the layout; calls may come in any order.

        `codes` [R, K] are 8-bit floats, int8, or uint8 from 0 to 15; `scales`, `minima` and `zeros` (int4
        only; 8 for a symmetric file) are [R, G], `tables` [R, 16] for lut4, [1, 16] for nf4 and fp4. If
        128 rows share a scale, `first_row` must be a multiple of 128.
        """
        form, last, device = self.form, first_row + len(codes), self.cells.device
        assert codes.shape[1] == self.size and last <= self.num_rows, (codes.shape, first_row, self.num_rows)
        assert (minima is not None) == form.has_minima, (minima is None, form)
        assert form.codes == "int4" or (isinstance(zeros, int) and zeros == 0), "only int4 has zeros"
        assert (tables is not None) == (form.codes in TABLED), (tables is None, form)
        bands = slice(first_row // BAND, -(-last // BAND))
        rows = slice(first_row - bands.start * BAND, last - bands.start * BAND)
        is_whole = rows.start == 0 and (last % BAND == 0 or last == self.num_rows)

        bytes_RK = codes.to(device).view(torch.uint8)
        packed = self.cells[bands, :, : form.code_bytes]
        if is_whole:
            shape = (bands.stop - bands.start) * BAND, self.cells.shape[1] * CELL_COLUMNS
            whole = bytes_RK if bytes_RK.shape == shape else bytes_RK.new_zeros(shape)
        else:
            whole = unpack(packed, form.codes)
        if whole is not bytes_RK:
            whole[rows, : self.size] = bytes_RK
        packed.copy_(pack(whole, form.codes))
        words = scales.to(device, torch.float32)
        if form.codes == "int4":
            zeros = zeros.to(device, torch.int32) if isinstance(zeros, torch.Tensor) else zeros
            words = (((words.view(torch.int32) + 8) & ~_ZERO_BITS) | zeros).view(torch.float32)
        self._fill_scales(0, bands, rows, words)
        if minima is not None:
            self._fill_scales(1, bands, rows, minima.to(device, torch.float32))
        if form.codes != "lut4" and tables is not None:
            self._fill_table(tables.to(device, torch.float32))
        elif tables is not None:
            self.tables[bands].view(-1, TABLE_SIZE)[rows] = tables.to(device, torch.float32)

    def _fill_table(self, table_1X: torch.Tensor) -> None:
        if bool(self.tables.any()) and not torch.equal(self.tables[0], table_1X):
            raise CheckpointError(
                f"the parts of a matrix have different tables of {self.form.codes}: {self.tables.tolist()} "
                f"and {table_1X.tolist()}; load the file with quantization=none"
            )
        self.tables[0] = table_1X

    def _fill_scales(self, which: int, bands: slice, rows: slice, values_RG: torch.Tensor) -> None:
        form = self.form
        if form.scale_rows > 1:
            assert bands.start % 4 == rows.start == 0, (
                "rows that share scales are filled from the first of 128"
            )
            self.scales[bands] = values_RG[::BAND]
        elif not form.spans:
            (self.minima if which else self.scales)[bands].view(-1)[rows] = values_RG[:, 0]
        else:
            in_cells = self._in_cells(which)[bands]  # [bands, cells, spans, 32]
            by_row = in_cells.permute(0, 3, 1, 2).flatten(2).flatten(0, 1).clone()  # [rows, cells * spans]
            repeated = values_RG.repeat_interleave(max(1, form.group // CELL_COLUMNS), dim=1)
            count = min(repeated.shape[1], by_row.shape[1])
            by_row[rows, :count] = repeated[:, :count]
            shape = (-1, BAND, *in_cells.shape[1:3])
            in_cells.copy_(by_row.view(shape).permute(0, 2, 3, 1))

    def _in_cells(self, which: int) -> torch.Tensor:
        """The scales, or minima, inside the cells: [bands, cells, spans, 32]."""
        num_bytes = self.form.spans * BAND * 4
        first = self.form.code_bytes + which * num_bytes
        floats = self.cells.view(torch.float32)[:, :, first // 4 : (first + num_bytes) // 4]
        return floats.view(*floats.shape[:2], self.form.spans, BAND)

    def dequantized(self) -> torch.Tensor:
        """W as float32, [N, K]: the specification of the weights that kernels multiply with."""
        form = self.form
        codes = unpack(self.cells[:, :, : form.code_bytes], form.codes)[:, : self.size]
        numbers = codes.float()
        if form.codes == "mxfp4":
            numbers = torch.tensor(E2M1, device=codes.device)[codes.long()]
        elif form.codes in TABLED:
            tables = self.tables.flatten(0, 1)
            numbers = tables.expand(max(len(codes), len(tables)), -1).gather(1, codes.long())
        elif form.codes != "int4":
            numbers = codes.contiguous().view(FLOATS.get(form.codes, torch.int8)).float()
        scales = self._by_element(0)
        if form.codes == "int4":
            words = scales.contiguous().view(torch.int32)
            numbers -= (words & _ZERO_BITS).float()
            scales = (words & ~_ZERO_BITS).view(torch.float32)
        numbers *= scales
        if form.has_minima:
            numbers += self._by_element(1)
        numbers = numbers[: self.num_rows]
        return numbers if self.outliers is None else self.outliers.add_to_matrix(numbers)

    def _by_element(self, which: int) -> torch.Tensor:
        """The scale or minimum of each element, [rows of all bands, K]; [.., 1] if a row has one group."""
        form = self.form
        if not form.spans:
            parts = self.minima if which else self.scales
            if form.scale_rows == 1:
                return parts.reshape(-1, 1)
            return parts.repeat_interleave(BAND, 0).repeat_interleave(form.group, 1)[:, : self.size]
        by_row = self._in_cells(which).permute(0, 3, 1, 2).flatten(2).flatten(0, 1)
        return by_row.repeat_interleave(CELL_COLUMNS // form.spans, dim=1)[:, : self.size]


def pack(codes_RK: torch.Tensor, form: str) -> torch.Tensor:
    """Pack codes of whole bands and cells, one per byte, into the layout above: [bands, cells, bytes]."""
    num_columns = codes_RK.shape[1]
    # band, block, row + 8, g | 64 columns, half, 16 columns, column + 8, t, column + 1
    axes = codes_RK.reshape(-1, 2, 2, 8, num_columns // 64, 2, 2, 2, 4, 2)
    shape = (len(axes), num_columns // CELL_COLUMNS, -1)
    if form in FOUR_BITS:
        order = (9, 0, 4, 1, 3, 8, 5, 6, 2, 7) if form in TABLED else (2, 0, 4, 1, 3, 8, 5, 6, 9, 7)
        both = axes.permute(order).reshape(2, *shape)
        return both[0] | both[1] << 4
    in_order = axes.permute(0, 4, 1, 5, 3, 8, 6, 7, 9, 2).reshape(*shape)
    if form != "fp8":
        return in_order
    pairs = in_order.int()
    first, second = pairs[:, :, ::2], pairs[:, :, 1::2]
    halves = (first & 0x80) << 8 | (first & 0x7F) << 4 | (second & 0x80) << 4 | (second & 0x70) << 8
    return (halves | (second & 0x0F)).short().view(torch.uint8)


def unpack(packed: torch.Tensor, form: str) -> torch.Tensor:
    """The inverse of `pack`: codes as bytes, [rows of the bands, padded columns]."""
    bands = len(packed)
    if form in FOUR_BITS:
        axes = torch.stack((packed & 15, packed >> 4)).reshape(2, bands, -1, 2, 8, 4, 2, 2, 2, 2)
        where = (1, 3, 8, 4, 2, 6, 7, 9, 5, 0) if form in TABLED else (1, 3, 0, 4, 2, 6, 7, 9, 5, 8)
        order = axes.permute(where)
    else:
        if form == "fp8":
            halves = packed.contiguous().view(torch.int16).int()
            first = halves >> 8 & 0x80 | halves >> 4 & 0x7F
            second = halves >> 4 & 0x80 | halves >> 8 & 0x70 | halves & 0x0F
            packed = torch.stack((first, second), -1).to(torch.uint8)
        axes = packed.reshape(bands, -1, 2, 2, 8, 4, 2, 2, 2, 2)
        order = axes.permute(0, 2, 9, 4, 1, 3, 6, 7, 5, 8)
    return order.reshape(bands * BAND, -1)
