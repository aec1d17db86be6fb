"""Rows of small integers as a file has them: what a published format hands to the scheme that keeps them.

A code means  w = (code - zero) * scale, with one zero and one scale for each group of columns of a row, or
w = code * scale + minimum (GGUF).
Groups are neighbours, or each column names its own (act-order). A float of 8 bits is a code as well. The
arithmetic is float32: a code times a scale of 16 bits is exact in it, so rounding the result to the scale's
dtype gives what each format's library gives.

Shapes:  R rows, K columns, G groups of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from infer.quant.projection import QuantizedRows

_GROUP = 32  # of the integers that kernels/cpu multiplies with


class CodedRows(NamedTuple):
    """Rows of a quantized matrix as their file has them."""

    codes: torch.Tensor  # [R, K]; uint8 of `bits` bits, int8, or a float of 8 bits
    bits: int  # of a code
    scales: torch.Tensor  # float32, [R, G]
    zeros: torch.Tensor | int  # int16, [R, G], or the same for all
    groups: torch.Tensor | int  # of each column, [K]; or the number of neighbours that share one
    minima: torch.Tensor | None = None  # float32, [R, G]: added to each number; GGUF has them, not zeros

    def numbers(self) -> torch.Tensor:
        """What the codes stand for, in float32."""
        numbers = self.codes.float()
        if isinstance(self.zeros, torch.Tensor):
            numbers -= self.by_column(self.zeros).float()
        elif self.zeros:
            numbers -= self.zeros
        if isinstance(self.groups, int) and numbers.shape[1] % self.groups == 0:  # need not be repeated
            grouped = numbers.contiguous().view(*self.scales.shape, self.groups).mul_(self.scales[:, :, None])
            grouped = grouped if self.minima is None else grouped.add_(self.minima[:, :, None])
            return grouped.view(numbers.shape)
        numbers.mul_(self.by_column(self.scales))
        return numbers if self.minima is None else numbers.add_(self.by_column(self.minima))

    def integers(self, bits: int) -> QuantizedRows | None:
        """The codes as a CPU's kernels keep them; None: no 32 neighbours share a scale, or they do not fit.

        Scales and minima become float16. A scale of 16 bits loses nothing; a minimum, the product of a zero
        and a scale, one part in 2000 at most. Where one is too large or too small there is no such form.
        """
        size = self.codes.shape[1]
        if self.codes.is_floating_point() or not is_grouped(self.groups, size):
            return None
        zeros = self.zeros
        if bits == 4:
            if self.bits > 4:
                return None
            minima = self.scales * -zeros if self.minima is None else self.minima
            codes, parts = self.codes.view(torch.int8), [self.scales, minima]
        elif self.minima is not None:
            return None
        elif isinstance(zeros, int) and (self.bits < 8 or self.codes.dtype is torch.int8 and not zeros):
            codes, parts = self.codes.view(torch.int8) - zeros, [self.scales]
        else:
            shifted = self.codes.short()
            shifted = shifted - (self.by_column(zeros) if isinstance(zeros, torch.Tensor) else zeros)
            if shifted.numel() and (int(shifted.min()) < -128 or int(shifted.max()) > 127):
                return None
            codes, parts = shifted.to(torch.int8), [self.scales]
        halves = as_halves(parts)
        if halves is None:
            return None
        assert isinstance(self.groups, int)
        repeats, num_groups = -(-min(self.groups, size) // _GROUP), -(-size // _GROUP)
        scales, *rest = (
            half.repeat_interleave(repeats, dim=1)[:, :num_groups].contiguous() for half in halves
        )
        return QuantizedRows(codes.contiguous(), scales, rest[0] if rest else None)

    def by_column(self, parts: torch.Tensor) -> torch.Tensor:
        """The part of each column's group, [R, K]."""
        size = self.codes.shape[1]
        if isinstance(self.groups, torch.Tensor):
            return parts[:, self.groups]
        if self.groups >= size:
            return parts  # one for the row: broadcast
        return parts.repeat_interleave(self.groups, dim=1)[:, :size]


def is_grouped(groups: torch.Tensor | int, size: int) -> bool:
    """Whether 32 neighbours always share a scale; `groups` is 0 where columns name their groups."""
    return isinstance(groups, int) and groups > 0 and (groups % _GROUP == 0 or groups >= size)


def as_halves(parts: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Scales and minima as float16; None where one is too large, too small or not a number in it."""
    halves = [part.half() for part in parts]
    for rounded, exact in zip(halves, parts, strict=True):
        if not bool(((rounded.float() - exact).abs() <= exact.abs() / 1024).all()):
            return None
    return halves
