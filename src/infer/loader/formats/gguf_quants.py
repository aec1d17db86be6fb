"""Unpack the block formats of GGUF into float32.

Neighbouring weights have similar magnitudes, so a *block* of them shares one scale d (and often one
minimum m), stored as float16, and each weight is a small integer q:

    Q4_0   32 weights   d                       w = d * (q - 8)       q: 4 bits
    Q4_1   32           d, m                    w = d * q + m
    Q5_0   32           d, one high bit each    w = d * (q - 16)      q: 5 bits
    Q5_1   32           d, m, high bits         w = d * q + m
    Q8_0   32           d                       w = d * q             q: int8
    Q2_K   256 = 16x16  d, dmin, 16 x (s, t)    w = (d * s) * q - (dmin * t)      q: 2 bits; s, t: 4 bits each
    Q3_K   256 = 16x16  d, 16 x s               w = (d * (s - 32)) * (q - 4)      q: 3 bits; s: 6 bits
    Q4_K   256 = 8x32   d, dmin, 8 x (s, t)     w = (d * s) * q - (dmin * t)      q: 4 bits; s, t: 6 bits each
    Q5_K   256 = 8x32   the same, high bits     q: 5 bits
    Q6_K   256 = 16x16  d, 16 x s (int8)        w = (d * s) * (q - 32)            q: 6 bits
    IQ4_NL 32           d                       w = d * V[q]          V: 16 values, denser around 0
    IQ4_XS 256 = 8x32   d, 8 x s                w = (d * (s - 32)) * V[q]         s: 6 bits
    MXFP4  32           2^e                     w = 2^e * (a 4-bit float)
    TQ1_0  256          d                       w = d * q             q: -1, 0 or 1, five to a byte
    TQ2_0  256          d                       w = d * q             q: -1, 0 or 1, four to a byte

The formats of under 3.5 bits that store points of a grid are in `gguf_grids.py`.

Each function below maps the bytes of B blocks, [B, bytes], to integers of 8 bits, [B, weights], and float32
scales [B, groups], w = scale * q; and also to minima if the format has them, w = scale * q + minimum. The
arithmetic is float32 in the order written above, with separate multiplications and additions (a fused
multiply-add rounds differently), so the result equals the format's reference bit for bit.

Shapes:  B blocks; the other dimensions are written out as numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from infer.errors import CheckpointError
from infer.loader.formats import gguf_grids
from infer.loader.formats.gguf import BLOCK, GGMLType
from infer.loader.formats.gguf_bits import fields, half, look_up
from infer.quant.coded import CodedRows, StoredCodes

_GROUP = 32  # group size of the codes that kernels/cpu multiplies

_T = TypeVar("_T")
_Scaled = tuple[torch.Tensor, torch.Tensor]  # integers, scales
_Shifted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # integers, scales, minima


def dequantize(packed: torch.Tensor, kind: GGMLType) -> torch.Tensor:
    """Unpack rows of bytes, [rows, bytes], into float32, [rows, weights]."""
    rows = coded_rows(packed, kind)
    return rows.numbers() if isinstance(rows, CodedRows) else rows


def coded_rows(packed: torch.Tensor, kind: GGMLType) -> CodedRows | torch.Tensor:
    """Return rows of bytes as the codes that they hold; float32 if the format is plain numbers.

    kernels/cpu multiplies codes in groups of 32, so these need not be unpacked and rounded again.
    """
    num_rows, blocks = packed.shape[0], packed.reshape(-1, BLOCK[kind][1])
    if kind in _DENSE:
        return _DENSE[kind](blocks).view(num_rows, -1)
    if kind.name not in SUPPORTED:
        raise CheckpointError(
            f"tensors of type {kind.name} are not supported; supported types: {', '.join(SUPPORTED)}"
        )
    unpacked: _Scaled | _Shifted = _SCALED[kind](blocks) if kind in _SCALED else _SHIFTED[kind](blocks)
    codes, scales, *minima = unpacked
    zeros = 0
    if kind in FOUR_BITS and kind in _SCALED:  # codes around zero: -8 .. 7 or a smaller range
        codes, zeros = codes.add_(8).view(torch.uint8), 8
    group = codes.shape[1] // scales.shape[1]
    bits = 4 if kind in FOUR_BITS else 5 if codes.dtype is torch.uint8 else 8
    by_row = [part.reshape(num_rows, -1) for part in (scales, *minima)]
    held = next(iter(by_row[1:]), None)
    return CodedRows(codes.reshape(num_rows, -1), bits, by_row[0], zeros, group, held)


def stored_codes(kind: GGMLType, size: int) -> StoredCodes | None:
    """Describe the codes of a block type in rows of `size` columns; None: plain numbers.

    On a GPU 4-bit codes stay 4 bits, all others become 8. Types with groups of 16 (`ROUNDED`) are rounded to
    8 bits in groups of 32, with an error of 0.0045 of the weights' size for Q6_K, and the start line says so.
    A CPU keeps some of them unchanged, in `cpu_bits`.
    """
    if kind in _DENSE or kind.name not in SUPPORTED:
        return None
    bits = 5 if kind in _FIVE_BITS else 6 if kind in _SIX_BITS else 0
    return StoredCodes("int4" if kind in FOUR_BITS else "int8", size, _GROUP, kind in _SHIFTED, cpu_bits=bits)


def _f32(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float32)


def _bf16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _minus(q: torch.Tensor, middle: int) -> torch.Tensor:
    """Centre unsigned numbers on zero."""
    return q.view(torch.int8).sub_(middle)


def _q4_0(blocks: torch.Tensor) -> _Scaled:
    return _minus(fields(blocks[:, 2:], 4, 16), 8), half(blocks[:, :2])


def _q4_1(blocks: torch.Tensor) -> _Shifted:
    return fields(blocks[:, 4:], 4, 16), half(blocks[:, :2]), half(blocks[:, 2:4])


def _q5_0(blocks: torch.Tensor) -> _Scaled:
    q_B32 = fields(blocks[:, 6:], 4, 16) | fields(blocks[:, 2:6], 1, 1) << 4
    return _minus(q_B32, 16), half(blocks[:, :2])


def _q5_1(blocks: torch.Tensor) -> _Shifted:
    q_B32 = fields(blocks[:, 8:], 4, 16) | fields(blocks[:, 4:8], 1, 1) << 4
    return q_B32, half(blocks[:, :2]), half(blocks[:, 2:4])


def _q8_0(blocks: torch.Tensor) -> _Scaled:
    return blocks[:, 2:].contiguous().view(torch.int8), half(blocks[:, :2])


def _with_minima(
    q_B256: torch.Tensor, d_B4: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor
) -> _Shifted:
    """Compute (d * s) * q - (dmin * t) group by group: the second half of Q2_K, Q4_K and Q5_K."""
    return q_B256, scales * half(d_B4[:, :2]), (minima * half(d_B4[:, 2:])).neg_()


def _q2_k(blocks: torch.Tensor) -> _Shifted:
    return _with_minima(
        fields(blocks[:, 16:80], 2, 32), blocks[:, 80:], blocks[:, :16] & 15, blocks[:, :16] >> 4
    )


def _q3_k(blocks: torch.Tensor) -> _Scaled:
    # 32 bytes of high bits: bit g of byte i belongs to weight i of the g-th run of 32
    q_B256 = fields(blocks[:, 32:96], 2, 32) | fields(blocks[:, :32], 1, 32) << 2
    scales_B16 = fields(blocks[:, 96:104], 4, 8) | fields(blocks[:, 104:108], 2, 4) << 4
    return _minus(q_B256, 4), _minus(scales_B16, 32) * half(blocks[:, 108:])


def _scales_and_minima(packed_B12: torch.Tensor) -> _Scaled:
    """Unpack the 8 scales and 8 minima of a Q4_K or Q5_K block, 6 bits each, from 12 bytes.

    bytes 0..3    scales 0..3  in the low 6 bits,   high 2 bits of scales 4..7
    bytes 4..7    minima 0..3  in the low 6 bits,   high 2 bits of minima 4..7
    bytes 8..11   low 4 bits of scales 4..7         low 4 bits of minima 4..7 (upper half)
    """
    scale_B4, minimum_B4, rest_B4 = packed_B12[:, :4], packed_B12[:, 4:8], packed_B12[:, 8:]
    scales_B8 = torch.cat((scale_B4 & 63, (rest_B4 & 15) | ((scale_B4 >> 6) << 4)), dim=1)
    minima_B8 = torch.cat((minimum_B4 & 63, (rest_B4 >> 4) | ((minimum_B4 >> 6) << 4)), dim=1)
    return scales_B8, minima_B8


def _q4_k(blocks: torch.Tensor) -> _Shifted:
    return _with_minima(fields(blocks[:, 16:], 4, 32), blocks[:, :4], *_scales_and_minima(blocks[:, 4:16]))


def _q5_k(blocks: torch.Tensor) -> _Shifted:
    # 32 bytes of high bits: bit g of byte i belongs to weight i of group g
    q_B256 = fields(blocks[:, 48:], 4, 32) | fields(blocks[:, 16:48], 1, 32) << 4
    return _with_minima(q_B256, blocks[:, :4], *_scales_and_minima(blocks[:, 4:16]))


def _q6_k(blocks: torch.Tensor) -> _Scaled:
    # 2 halves of 128 weights, each: 64 bytes of low halves, 32 bytes of 2 high bits for 4 runs of 32
    q_B256 = fields(blocks[:, :128], 4, 64) | fields(blocks[:, 128:192], 2, 32) << 4
    return _minus(q_B256, 32), blocks[:, 192:208].view(torch.int8) * half(blocks[:, 208:])


def _valued(q: torch.Tensor, values: tuple[int, ...]) -> torch.Tensor:
    return look_up(torch.tensor(values, dtype=torch.int8, device=q.device), q)


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values of the codes


def _iq4_nl(blocks: torch.Tensor) -> _Scaled:
    return _valued(fields(blocks[:, 2:], 4, 16), _IQ4), half(blocks[:, :2])


def _iq4_xs(blocks: torch.Tensor) -> _Scaled:
    scales_B8 = fields(blocks[:, 4:8], 4, 1) | fields(blocks[:, 2:4], 2, 1) << 4
    return _valued(fields(blocks[:, 8:], 4, 16), _IQ4), _minus(scales_B8, 32) * half(blocks[:, :2])


def _mxfp4(blocks: torch.Tensor) -> _Scaled:
    # half of 2^(e - 127), because `_FP4` has twice the values; assembled from the bits of a float32
    exponents_B1 = blocks[:, :1].int()
    bits_B1 = torch.where(exponents_B1 < 2, 0x200000 << exponents_B1, (exponents_B1 - 1) << 23)
    return _valued(fields(blocks[:, 1:], 4, 16), _FP4), bits_B1.view(torch.float32)


def _tq1_0(blocks: torch.Tensor) -> _Scaled:
    """Read each byte as a fraction of 256 in base 3: times 3, the overflow is the next digit."""

    def digits(bytes_B: torch.Tensor, count: int) -> list[torch.Tensor]:
        return [bytes_B * 3**place for place in range(count)]

    fractions = digits(blocks[:, :32], 5) + digits(blocks[:, 32:48], 5) + digits(blocks[:, 48:52], 4)
    q_B256 = (torch.cat(fractions, dim=1).int() * 3 >> 8).to(torch.int8).sub_(1)
    return q_B256, half(blocks[:, 52:])


def _tq2_0(blocks: torch.Tensor) -> _Scaled:
    return _minus(fields(blocks[:, :64], 2, 32), 1), half(blocks[:, 64:])


def _by_type(*functions: Callable[[torch.Tensor], _T]) -> dict[GGMLType, Callable[[torch.Tensor], _T]]:
    """Map each function's type, which is its name in upper case, to the function."""
    return {GGMLType[function.__name__.lstrip("_").upper()]: function for function in functions}


_SCALED = _by_type(
    *(_q4_0, _q5_0, _q8_0, _q3_k, _q6_k, _iq4_nl, _iq4_xs, _mxfp4, _tq1_0, _tq2_0),
    *(gguf_grids.iq1_s, gguf_grids.iq1_m, gguf_grids.iq2_xxs, gguf_grids.iq2_xs, gguf_grids.iq2_s),
    *(gguf_grids.iq3_xxs, gguf_grids.iq3_s),
)
_SHORT_GROUPS = {GGMLType.Q3_K, GGMLType.Q6_K, GGMLType.IQ1_M, GGMLType.IQ2_XS, GGMLType.IQ2_S}  # 16 a group
ROUNDED = {kind.name for kind in (*_SHORT_GROUPS, GGMLType.Q2_K)}  # types that are rounded to groups of 32
_SHIFTED = _by_type(_q4_1, _q5_1, _q2_k, _q4_k, _q5_k)
# Types that int4 keeps: integers of 4 bits or less, in groups of 32 and up.
FOUR_BITS = {GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q4_K, GGMLType.TQ1_0, GGMLType.TQ2_0}
_FIVE_BITS = {GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q5_K}  # types with groups of 32
_SIX_BITS = {GGMLType.Q6_K, GGMLType.Q3_K}  # types of up to 6 bits with groups of 16
_DENSE = _by_type(_f32, _bf16) | {GGMLType.F16: half}
SUPPORTED = tuple(kind.name for kind in sorted({*_SCALED, *_SHIFTED, *_DENSE}))
