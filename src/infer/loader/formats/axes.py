"""The axes of a stored tensor and their units, so that a file can be sliced without being unpacked.

A matrix W is [rows, columns] (out, in), and each leaf of its format has axes that run along one of the two,
with one or more rows or columns per entry. GPTQ in 4 bits, with groups of 128 columns:

    leaf       axis 0                         axis 1
    qweight    columns, 8 in a word           rows
    qzeros     columns, 128 share a zero      rows, 8 in a word
    scales     columns, 128 share a scale     rows
    g_idx      columns

Columns 512 to 1023 are words 64 to 127 of qweight and groups 4 to 7 of qzeros and scales. A cut inside a
word, a group or a block is refused, because neither side could read its half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from infer.errors import ConfigError

Ranges = tuple[range, ...]  # ascending ranges; a fused matrix has one for each part


class Axis(NamedTuple):
    """One axis of a stored tensor."""

    along: str = ""  # "rows" or "columns" of the matrix; "": every slice needs all entries
    step: int = 1  # rows or columns that share `entries` entries
    entries: int = 1
    unit: str = ""  # name of a step for errors: word, group, block

    def cut(self, ranges: Ranges, size: int) -> Ranges:
        """Return the entries that hold these rows or columns, out of `size`."""
        for at in (edge for each in ranges for edge in (each.start, each.stop)):
            if at % self.step and at != size:
                what, side = f"a {self.unit} of {self.step} {self.along}", self.along.removesuffix("s")
                raise ConfigError(f"{what} straddles the cut at {side} {at}")
        return tuple(
            range(each.start // self.step * self.entries, -(-each.stop * self.entries // self.step))
            for each in ranges
        )


WHOLE, ROWS, COLUMNS = Axis(), Axis("rows"), Axis("columns")
Axes = Mapping[str, tuple[Axis, ...]]  # leaf -> its axes


def plain_axes(num_axes: int) -> tuple[Axis, ...]:
    """Return the axes of plain numbers: a bias or norm, a matrix, or a stack of matrices."""
    return (WHOLE,) * (num_axes - 2) + (ROWS, COLUMNS)[:num_axes]


def words(along: str, bits: int) -> Axis:
    """Return the axis of codes that are packed end to end in words of 32 bits."""
    common = math.gcd(bits, 32)
    return Axis(along, 32 // common, bits // common, "word")


def groups(along: str, step: int, size: int, unit: str = "group") -> Axis:
    """Return the axis with an entry per `step` rows or columns of `size`; `WHOLE` if there is one group."""
    return Axis(along, step, unit=unit) if 0 < step < size else WHOLE
