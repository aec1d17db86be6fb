"""Weights of 8 or 4 bits on a GPU: codes in the order in which a kernel's lanes read them, and scales.

    fp8     w = scale * code                  a float of 8 bits, e4m3
    int8    w = scale * code  (+ minimum)     -128 .. 127
    int4    w = scale * (code - zero)         0 .. 15, zero as well;  or  scale * code + minimum

One scale, zero and minimum for each `group` neighbours of a row, or for the whole row.

The matrix unit takes W from registers, 16 rows by 16 columns at a time: with g = lane / 4, t = lane % 4 a
lane holds the columns 2t, 2t+1, 2t+8, 2t+9 of the rows g and g+8. All that a lane needs of 64 columns lies
together, so that it is read in pieces of 16 bytes, without bank conflicts, and unpacked in pairs:

    codes     [N / 32 bands][K / 64][2 blocks of 16 rows] and of a block, from the slowest to the fastest:
      8 bits  half of the columns, g, t, 16 columns, column + 8, column + 1, row + 8          1,024 bytes
      4 bits  g, t, 16 columns, column + 1, column + 8; row g in the low nibble, g + 8 above   512 bytes
    scales    [N / 32 bands][groups][32 rows]; where 128 rows share theirs, [N / 32][groups]

A band, 32 rows, is contiguous along K: a kernel brings as many of its columns at once as it likes. Rows are
padded to whole bands, columns to 128, with zeros.

The zero of a 4-bit group is kept in the last four bits of its scale, which therefore has 20 bits: those of
files have 16 and lose nothing; one of float32 is rounded by one part in two million.

Shapes:  M tokens, N rows (outputs), K columns (inputs), R rows of a part, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

BAND, PADDED_COLUMNS = 32, 128
FORMS = ("fp8", "int8", "int4")

_ZERO_BITS = 15  # the bits of a scale that hold the zero


class CodedForm(NamedTuple):
    """How the weights of a matrix are written."""

    codes: str  # fp8, int8 or int4
    group: int = 0  # columns that share a scale; 0: all
    has_minima: bool = False
    scale_rows: int = 1  # rows that share a scale: 1, or 128 (FP8 in blocks)

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.codes == "int4" else 8

    def check(self) -> None:
        """Refuse what has no layout."""
        codes, group, has_minima, scale_rows = self
        if codes not in FORMS or scale_rows not in (1, 128):
            raise ValueError(f"codes must be one of {FORMS} and scale_rows 1 or 128, got {self}")
        if group and group not in (32, 64) and group % PADDED_COLUMNS:
            raise ValueError(f"group must be 0, 32, 64 or a multiple of 128, got {self}")
        if (codes == "fp8" and has_minima) or (codes == "int4" and scale_rows > 1):
            raise ValueError(f"fp8 has no minima, and int4 a scale for each row, got {self}")


@dataclass(frozen=True, slots=True)
class CodedWeights:
    """One matrix [N, K] in the layout above; of experts, one after the other, [E, ...] each."""

    form: CodedForm
    num_rows: int
    size: int
    codes: torch.Tensor  # uint8, [bands, bytes of a band]
    scales: torch.Tensor  # float32, [bands, G, 32] or [bands, G]
    minima: torch.Tensor | None  # the same

    @classmethod
    def empty(
        cls,
        num_rows: int,
        size: int,
        form: str,
        group: int = 0,
        has_minima: bool = False,
        scale_rows: int = 1,
        device: torch.device | str = "cpu",
    ) -> CodedWeights:
        """A matrix of zeros, to be filled row by row; on the meta device without memory."""
        made = CodedForm(form, group if group < size else 0, has_minima, scale_rows)
        made.check()
        bands, columns = -(-num_rows // BAND), padded(size)
        shape = [bands, _num_groups(made, size), *((BAND,) if scale_rows == 1 else ())]
        return cls(
            made,
            num_rows,
            size,
            torch.zeros((bands, BAND * columns * made.bits // 8), dtype=torch.uint8, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device) if has_minima else None,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, as of the matrix that it stands for."""
        return self.num_rows, self.size

    def __len__(self) -> int:
        return self.num_rows

    @property
    def num_bytes(self) -> int:
        """The memory of all three."""
        tensors = [self.codes, self.scales, *([] if self.minima is None else [self.minima])]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def fill(
        self,
        first_row: int,
        codes: torch.Tensor,
        scales: torch.Tensor,
        minima: torch.Tensor | None = None,
        zeros: torch.Tensor | int = 0,
    ) -> None:
        """Put rows into place, in any order of calls.

        `codes` [R, K] is float8_e4m3fn, int8, or uint8 of 0 to 15; `scales`, `minima` and `zeros` (int4 only;
        8 for a symmetric file) are [R, G]. Where 128 rows share a scale, all rows of a band of 32 have one.
        """
        form, last = self.form, first_row + len(codes)
        assert codes.shape[1] == self.size and last <= self.num_rows, (codes.shape, first_row, self.num_rows)
        assert (minima is not None) == form.has_minima, (minima is None, form)
        assert form.codes == "int4" or (isinstance(zeros, int) and zeros == 0), "only int4 has zeros"
        bands = slice(first_row // BAND, -(-last // BAND))
        rows = slice(first_row - bands.start * BAND, last - bands.start * BAND)
        is_whole = rows.start == 0 and (last % BAND == 0 or last == self.num_rows)

        bytes_RK = codes.to(self.codes.device).view(torch.uint8)
        if is_whole:
            count, columns = (bands.stop - bands.start) * BAND, padded(self.size)
            whole = bytes_RK.new_zeros((count, columns)) if (count, columns) != bytes_RK.shape else bytes_RK
        else:
            whole = unpack(self.codes[bands], form.bits)
        if whole is not bytes_RK:
            whole[rows, : self.size] = bytes_RK
        self.codes[bands] = pack(whole, form.bits)
        words = scales.to(self.scales.device, torch.float32)
        if form.codes == "int4":
            if isinstance(zeros, torch.Tensor):
                zeros = zeros.to(words.device, torch.int32)
            words = (((words.view(torch.int32) + 8) & ~_ZERO_BITS) | zeros).view(torch.float32)
        self._fill_scales(self.scales, bands, rows, words)
        if self.minima is not None and minima is not None:
            self._fill_scales(self.minima, bands, rows, minima.to(self.minima.device, torch.float32))

    def _fill_scales(self, to: torch.Tensor, bands: slice, rows: slice, values_RG: torch.Tensor) -> None:
        num_groups = values_RG.shape[1]
        if to.dim() == 2:
            assert rows.start == 0, "rows that share scales are filled from the first row of a band"
            to[bands, :num_groups] = values_RG[::BAND]
            return
        of_bands = to[bands].transpose(1, 2).flatten(0, 1).clone()  # [rows, G]
        of_bands[rows, :num_groups] = values_RG
        to[bands] = of_bands.unflatten(0, (-1, BAND)).transpose(1, 2)

    def dequantized(self) -> torch.Tensor:
        """W as float32, [N, K]: the specification of what the kernels multiply with."""
        codes = unpack(self.codes, self.form.bits)[:, : self.size]
        numbers = codes.float()
        if self.form.codes != "int4":
            code_type = torch.float8_e4m3fn if self.form.codes == "fp8" else torch.int8
            numbers = codes.contiguous().view(code_type).float()
        scales = self.scales
        if self.form.codes == "int4":
            words = scales.view(torch.int32)
            numbers -= self._by_element((words & _ZERO_BITS).float())
            scales = (words & ~_ZERO_BITS).view(torch.float32)
        numbers *= self._by_element(scales)
        if self.minima is not None:
            numbers += self._by_element(self.minima)
        return numbers[: self.num_rows]

    def _by_element(self, parts: torch.Tensor) -> torch.Tensor:
        """What each element's group has, [rows of all bands, K]; one column where a row has one group."""
        if parts.dim() == 2:
            parts = parts[:, :, None].expand(-1, -1, BAND)
        by_row = parts.transpose(1, 2).flatten(0, 1)
        group = self.form.group
        return by_row.repeat_interleave(group, dim=1)[:, : self.size] if group else by_row

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is kept, by name."""
        named = {"codes": self.codes, "scales": self.scales}
        return named if self.minima is None else {**named, "minima": self.minima}

    def with_tensors(self, tensors: dict[str, torch.Tensor]) -> CodedWeights:
        """The same matrix in other memory."""
        return replace(self, **tensors)


def padded(size: int) -> int:
    """Columns that are kept for `size`."""
    return -(-size // PADDED_COLUMNS) * PADDED_COLUMNS


def _num_groups(form: CodedForm, size: int) -> int:
    return -(-padded(size) // form.group) if form.group else 1


def pack(codes_RK: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes of whole bands, one code each, in the layout above."""
    num_columns = codes_RK.shape[1]
    # band, block, row + 8, g | 64 columns, half, 16 columns, column + 8, t, column + 1
    axes = codes_RK.reshape(-1, 2, 2, 8, num_columns // 64, 2, 2, 2, 4, 2)
    if bits == 8:
        return axes.permute(0, 4, 1, 5, 3, 8, 6, 7, 9, 2).reshape(len(axes), -1)
    low, high = axes.permute(2, 0, 4, 1, 3, 8, 5, 6, 9, 7).reshape(2, len(axes), -1)
    return low | high << 4


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack`: codes as bytes, [rows of the bands, padded columns]."""
    if bits == 8:
        axes = packed.reshape(len(packed), -1, 2, 2, 8, 4, 2, 2, 2, 2)
        order = axes.permute(0, 2, 9, 4, 1, 3, 6, 7, 5, 8)
    else:
        axes = torch.stack((packed & 15, packed >> 4)).reshape(2, len(packed), -1, 2, 8, 4, 2, 2, 2, 2)
        order = axes.permute(1, 3, 0, 4, 2, 6, 7, 9, 5, 8)
    return order.reshape(len(packed) * BAND, -1)
