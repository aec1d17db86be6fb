"""Round weights to few bits while they are loaded, or convert a file's codes to the same form.

    fp8     w = scale * code             code: a float of 8 bits (e4m3), one scale per row
    int8    w = scale * code             code: -127 .. 127, one scale per row
    int4    w = scale * (code - zero)    code and zero: 0 .. 15, groups of 128 columns (or 64 or 32, whichever
                                         divides the columns)

A file's groups, blocks and zeros are other values of a `CodedForm` (kernels/linear/coded.py), and its codes
are not changed. loader/weight_plan.py decides which form a matrix gets. All arithmetic is float32, a few rows
at a time, on the device that stores the weights.

Sixteen steps between the smallest and the largest weight of a group waste some of them on outliers. So int4
also tries narrower ranges, fits a scale to each by least squares, and keeps the range with the least error.
A minimum in place of the zero would reduce the error by 1 %, but needs a second product, with ones: files
have minima, rounding does not make them.

Shapes:  R rows, K columns, G groups of a row.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional as F

from infer.kernels.linear.coded import E2M1, FLOATS, TABLE_SIZE, TABLED, CodedForm
from infer.quant.coded import CodedRows

BLOCK_ROWS = 128  # rows of a block of FP8: the only rows that share a scale in memory
TINY = 1e-12  # smallest scale: it must not be 0, even if all weights are
NF4 = (  # bitsandbytes' table
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
_RANGES = (1.0, 0.92, 0.84, 0.76)  # shares of a group's range that int4 tries
_E2M1_OF = torch.zeros(25, dtype=torch.uint8)  # the code of each 4-bit float, by twice its value plus 12
_E2M1_OF[torch.tensor([int(2 * value) + 12 for value in (*E2M1[8:], *E2M1[:8])])] = torch.tensor(
    [*range(8, 16), *range(8)], dtype=torch.uint8
)


class CodedPart(NamedTuple):
    """Some rows of a matrix in a form, as `CodedWeights.fill` takes them."""

    codes: torch.Tensor  # [R, K]: a float of 8 bits, int8, or uint8 up to 15
    scales: torch.Tensor  # float32, [R, G]
    minima: torch.Tensor | None = None  # float32, [R, G]; None if the form has no minima
    zeros: torch.Tensor | int = 0  # [R, G] of int4, or one zero for all its groups; other forms: 0
    tables: torch.Tensor | None = None  # float32, [R, 16] of lut4, [1, 16] of nf4 and fp4; other forms: None


def round_rows(rows: torch.Tensor, form: CodedForm) -> CodedPart:
    """Round rows of numbers to a form."""
    numbers, size = rows.float(), rows.shape[1]
    step = form.group or size
    groups = F.pad(numbers, (0, -size % step)).view(len(rows), -1, step)
    if form.codes == "int4":
        part = _round_to_zeros(groups, size)
        return part._replace(minima=torch.zeros_like(part.scales)) if form.has_minima else part
    if form.codes == "mxfp4":
        return _round_to_floats(groups, size)
    if form.codes in TABLED:
        return _round_to_table(groups, size, form.codes)
    float8 = FLOATS.get(form.codes)
    largest = 127.0 if float8 is None else torch.finfo(float8).max
    scales = groups.abs().amax(2).clamp(min=TINY) / largest
    codes = (groups / scales[:, :, None]).clamp_(-largest, largest).flatten(1)[:, :size]
    codes = codes.round_().to(torch.int8) if float8 is None else codes.to(float8)
    return CodedPart(codes, scales, torch.zeros_like(scales) if form.has_minima else None)


def _round_to_zeros(groups: torch.Tensor, size: int) -> CodedPart:
    """Round groups [R, G, k] to 16 steps, one of which is 0, in the range with the least error."""
    least, most = groups.amin(2, keepdim=True).clamp_(max=0), groups.amax(2, keepdim=True).clamp_(min=0)
    middle, width = (least + most) / 2, (most - least).clamp(min=TINY)
    best: list[torch.Tensor] = []
    for share in _RANGES:
        steps = width * (share / 15)
        wanted = 7.5 - middle / steps
        for zero in (wanted.floor().clamp_(0, 15), wanted.ceil().clamp_(0, 15)):
            codes = (groups / steps).add_(zero).round_().clamp_(0, 15)
            centred = codes - zero
            spread = centred.square().sum(2, keepdim=True)
            fitted = (centred * groups).sum(2, keepdim=True) / spread.clamp(min=TINY)
            scale = torch.where(fitted > 0, fitted, steps)
            error = centred.mul_(scale).sub_(groups).square_().sum(2, keepdim=True)
            best = _better(best, [codes, scale, zero, error])
    codes, scale, zero, _ = best
    return CodedPart(codes.to(torch.uint8).flatten(1)[:, :size], scale[:, :, 0], zeros=zero[:, :, 0].int())


def _round_to_floats(groups: torch.Tensor, size: int) -> CodedPart:
    """Round groups [R, G, k] to 4-bit floats: the largest of a group keeps its power of two."""
    scales = torch.exp2(groups.abs().amax(2).clamp(min=TINY).log2().floor() - 2)
    numbers = (groups / scales[:, :, None]).flatten(1)[:, :size]
    halfway = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1[:8])], device=groups.device)
    codes = torch.bucketize(numbers.abs(), halfway) + 8 * (numbers < 0)
    return CodedPart(codes.to(torch.uint8), scales)


def _round_to_table(groups: torch.Tensor, size: int, codes: str) -> CodedPart:
    """Round groups [R, G, k] to entries of bitsandbytes' table; files may have other tables."""
    scales, table = groups.abs().amax(2).clamp(min=TINY), torch.tensor(NF4, device=groups.device)
    places = torch.bucketize(groups / scales[:, :, None], (table[1:] + table[:-1]) / 2)
    tables = table.expand(len(groups) if codes == "lut4" else 1, -1)
    return CodedPart(places.to(torch.uint8).flatten(1)[:, :size], scales, tables=tables)


def _better(old: list[torch.Tensor], new: list[torch.Tensor]) -> list[torch.Tensor]:
    """Choose the tensors with the smaller error, group by group; each list's last tensor is the error."""
    return [torch.where(new[-1] < old[-1], *pair) for pair in zip(new, old, strict=True)] if old else new


def fit_rows(rows: CodedRows, form: CodedForm) -> CodedPart | None:
    """Convert a file's codes to a form without rounding; None: they do not fit."""
    size, groups, codes = rows.codes.shape[1], rows.groups, rows.codes
    step = form.group or size
    if not isinstance(groups, int) or not groups or (groups < size and groups % step):
        return None
    num_groups, repeats = -(-size // step), -(-min(groups, size) // step)

    def by_group(parts: torch.Tensor) -> torch.Tensor:
        return parts.repeat_interleave(repeats, dim=1)[:, :num_groups]

    scales, minima, zeros = by_group(rows.scales), rows.minima, rows.zeros
    if form.codes == "mxfp4":  # the file's reader returns twice the floats, with half the scales
        is_twice = codes.dtype is torch.int8 and not isinstance(zeros, torch.Tensor) and zeros == 0
        return CodedPart(_E2M1_OF[codes.long().cpu() + 12].to(codes.device), 2 * scales) if is_twice else None
    if minima is not None and not form.has_minima:
        return None
    if form.codes in TABLED or rows.table is not None:
        if form.codes not in TABLED or rows.table is None:
            return None
        table = F.pad(rows.table, (0, TABLE_SIZE - rows.table.shape[1]))
        return CodedPart(codes, scales, tables=table.expand(len(codes) if form.codes == "lut4" else 1, -1))
    if form.codes in FLOATS:
        is_plain = isinstance(zeros, int) and zeros == 0
        return CodedPart(codes, scales) if codes.dtype is FLOATS[form.codes] and is_plain else None
    if form.codes == "int4":
        if codes.dtype is not torch.uint8 or rows.bits > 4:
            return None
        zeros = by_group(zeros) if isinstance(zeros, torch.Tensor) else zeros
    elif codes.is_floating_point():
        return None
    else:
        signed, shift = _signed(rows, form)
        if signed is None:
            return None
        codes, zeros = signed, 0
        if shift is not None:
            minima = rows.scales * shift if minima is None else minima + rows.scales * shift
    if form.has_minima:
        return CodedPart(
            codes, scales, torch.zeros_like(scales) if minima is None else by_group(minima), zeros
        )
    return CodedPart(codes, scales, zeros=zeros)


def _signed(rows: CodedRows, form: CodedForm) -> tuple[torch.Tensor | None, torch.Tensor | int | None]:
    """Return the codes as int8, and the steps still to be added to each group; None: they do not fit."""
    codes, zeros = rows.codes, rows.zeros
    if form.has_minima:
        middle = 128 if codes.dtype is torch.uint8 and rows.bits == 8 else 0
        return (codes.short() - middle).to(torch.int8), middle - zeros
    if isinstance(zeros, int) and (rows.bits < 8 or codes.dtype is torch.int8 and not zeros):  # they fit
        return codes.view(torch.int8) - zeros, None
    shifted = codes.short() - (rows.by_column(zeros) if isinstance(zeros, torch.Tensor) else zeros)
    if shifted.numel() and (int(shifted.min()) < -128 or int(shifted.max()) > 127):
        return None, None
    return shifted.to(torch.int8), None
