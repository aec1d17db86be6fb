"""Unpack the GGUF formats that store points of a grid: 1.6 to 3.4 bits per weight.

With two bits each, weights would have only four values. Instead, these formats treat 8 (or 4) weights as one
point in space, and allow only the few hundred points that are most often close to real weights. A point is
stored as its index, the signs are stored separately, and a group of weights shares a scale:

              points        values of a coordinate        signs            scale of           bits
    IQ1_S     2048 of 3^8   -1 0 1, all shifted by ±1/8   in the point     32 weights         1.56
    IQ1_M     the same      the same, shift per 8         in the point     16                 1.75
    IQ2_XXS    256 of 3^8   8 25 43                       7 bits for 8     32                 2.06
    IQ2_XS     512 of 3^8   8 25 43                       7 bits for 8     16                 2.31
    IQ2_S     1024 of 3^8   8 25 43                       a bit each       16                 2.56
    IQ3_XXS    256 of 8^4   4 12 20 28 36 44 52 62        7 bits for 8     32                 3.06
    IQ3_S      512 of 8^4   1 3 5 7 9 11 13 15            a bit each       32                 3.44

Seven bits encode eight signs because the encoder makes the number of minuses even, which determines the last.

The points of a format are part of its definition: they were chosen once, from real weights. All lists
are in ascending order, with coordinates read as digits (the first is the lowest), so a set is enough:
`_POINTS` holds one bit for each possible point. In the look-up table a point is one integer of 64 (or 32)
bits with its coordinates as bytes, so one look-up returns all of them.

The functions map the bytes of B blocks of 256 weights to small integers and one scale for each group
of 32 (or 16): w = scale * q. The results equal the reference's bit for bit.

Shapes:  B blocks; the other dimensions are written out as numbers.
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from pathlib import Path

import torch

from infer.loader.formats.gguf_bits import fields, half, look_up

_POINTS = Path(__file__).with_name("gguf_points.json")  # bits of each format, compressed, in base 85
_VALUES = {
    "IQ1_S": (-8, 0, 8),  # eight times the format's values, so that the shift by 1/8 becomes 1
    "IQ2_XXS": (8, 25, 43),
    "IQ2_XS": (8, 25, 43),
    "IQ2_S": (8, 25, 43),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
}


@functools.cache
def _grid(name: str, device: torch.device) -> torch.Tensor:
    """Return the points of a format, each as one integer whose bytes are the coordinates."""
    values = torch.tensor(_VALUES[name], dtype=torch.int8)
    base, size = (3, 8) if len(values) == 3 else (8, 4)
    stored = zlib.decompress(base64.b85decode(json.loads(_POINTS.read_text("ascii"))[name]))
    packed = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
    is_point = fields(packed[None], bits=1, run=1)[0]
    points = is_point.nonzero()[:, 0]
    digits = torch.stack([points // base**place % base for place in range(size)], dim=1)
    return values[digits].view(torch.int64 if size == 8 else torch.int32)[:, 0].to(device)


@functools.cache
def _minuses(device: torch.device) -> torch.Tensor:
    """Return a table from 8 sign bits to 8 bytes, -1 for a minus and else 0, as one integer."""
    bits = fields(torch.arange(256).to(torch.uint8)[:, None], 1, 1)
    return (-bits.view(torch.int8)).view(torch.int64)[:, 0].to(device)


def _even(signs: torch.Tensor) -> torch.Tensor:
    """Return eight sign bits, given seven: the eighth makes the number of minuses even."""
    odd = signs ^ signs >> 4
    odd = odd ^ odd >> 2
    return signs | ((odd ^ odd >> 1) & 1) << 7


def _signed(points: torch.Tensor, signs_B32: torch.Tensor) -> torch.Tensor:
    """Apply 32 x 8 signs to the coordinates of a block's points, 256 bytes: -x is (x ^ -1) - -1."""
    minus_B256 = look_up(_minuses(points.device), signs_B32).view(torch.int8)
    return points.view(torch.int8).bitwise_xor_(minus_B256).sub_(minus_B256)


def _words(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Read bytes as little-endian integers of 16 or 32 bits, as int32 (32 bits: the top bit is the sign)."""
    return blocks.clone(memory_format=torch.contiguous_format).view(dtype).int()  # may start at an odd byte


def _shifted(words_B: torch.Tensor, step: int, count: int) -> torch.Tensor:
    """Split each word into numbers of `step` bits, lowest first: [B, n] to [B, n * count]."""
    shifts = torch.arange(0, step * count, step, dtype=torch.int32, device=words_B.device)
    return (words_B[:, :, None] >> shifts & (1 << step) - 1).flatten(1)


def iq1_s(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Layout: d, 32 low bytes of points, 8 words: 4 x 3 high bits, 3 bits of scale, the shift's sign."""
    words_B8 = _words(blocks[:, 34:], torch.int16)
    points_B32 = blocks[:, 2:34].int() | _shifted(words_B8, 3, 4) << 8
    q_B8x32 = look_up(_grid("IQ1_S", blocks.device), points_B32).view(torch.int8).view(-1, 8, 32)
    q_B8x32 += (1 - 2 * (words_B8 >> 15 & 1)).to(torch.int8)[:, :, None]
    scales_B8 = half(blocks[:, :2]) * (2 * (words_B8 >> 12 & 7) + 1) * 0.125
    return q_B8x32.flatten(1), scales_B8


def iq1_m(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Layout: 32 low bytes of points, 32 x (3 high bits, shift's sign), 4 x (4 x 3 bits of scale, 4 of d)."""
    words_B4 = _words(blocks[:, 48:], torch.int16)
    parts_B4 = (words_B4 >> 12 & 15) << torch.arange(0, 16, 4, dtype=torch.int32, device=blocks.device)
    d_B1 = parts_B4.sum(1, keepdim=True).to(torch.int16).view(torch.float16).float()
    high_B32 = fields(blocks[:, 32:48], 4, 1).int()
    points_B32 = blocks[:, :32].int() | (high_B32 & 7) << 8
    q_B32x8 = look_up(_grid("IQ1_S", blocks.device), points_B32).view(torch.int8).view(-1, 32, 8)
    q_B32x8 += (1 - 2 * (high_B32 >> 3)).to(torch.int8)[:, :, None]
    return q_B32x8.flatten(1), d_B1 * (2 * _shifted(words_B4, 3, 4) + 1) * 0.125


def iq2_xxs(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Layout: d, 8 x (4 points, a word: 4 x 7 signs, 4 bits of scale)."""
    points_B8x4 = blocks[:, 2:].reshape(-1, 8, 8)[:, :, :4]
    words_B8 = _words(blocks[:, 2:].reshape(-1, 8, 8)[:, :, 4:], torch.int32)[:, :, 0]
    q_B32 = look_up(_grid("IQ2_XXS", blocks.device), points_B8x4.flatten(1))
    scales_B8 = half(blocks[:, :2]) * ((words_B8 >> 28 & 15) + 0.5) * 0.25
    return _signed(q_B32, _even(_shifted(words_B8, 7, 4))), scales_B8


def iq2_xs(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Layout: d, 32 words: 9 bits of point, 7 signs; 16 x 4 bits of scale."""
    words_B32 = _words(blocks[:, 2:66], torch.int16)
    q_B32 = look_up(_grid("IQ2_XS", blocks.device), words_B32 & 511)
    scales_B16 = half(blocks[:, :2]) * (fields(blocks[:, 66:], 4, 1) + 0.5) * 0.25
    return _signed(q_B32, _even(words_B32 >> 9 & 127)), scales_B16


def iq2_s(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Layout: d, 32 low bytes of points, 32 x 8 signs, 32 x 2 high bits, 16 x 4 bits of scale."""
    points_B32 = blocks[:, 2:34].int() | fields(blocks[:, 66:74], 2, 1).int() << 8
    q_B32 = look_up(_grid("IQ2_S", blocks.device), points_B32)
    scales_B16 = half(blocks[:, :2]) * (fields(blocks[:, 74:], 4, 1) + 0.5) * 0.25
    return _signed(q_B32, blocks[:, 34:66]), scales_B16


def iq3_xxs(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Layout: d, 64 points, 8 words: 4 x 7 signs, 4 bits of scale."""
    words_B8 = _words(blocks[:, 66:], torch.int32)
    q_B64 = look_up(_grid("IQ3_XXS", blocks.device), blocks[:, 2:66])
    scales_B8 = half(blocks[:, :2]) * ((words_B8 >> 28 & 15) + 0.5) * 0.5
    return _signed(q_B64, _even(_shifted(words_B8, 7, 4))), scales_B8


def iq3_s(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Layout: d, 64 low bytes of points, 64 high bits, 32 x 8 signs, 8 x 4 bits of scale."""
    points_B64 = blocks[:, 2:66].int() | fields(blocks[:, 66:74], 1, 1).int() << 8
    q_B64 = look_up(_grid("IQ3_S", blocks.device), points_B64)
    scales_B8 = half(blocks[:, :2]) * (2 * fields(blocks[:, 106:], 4, 1) + 1)
    return _signed(q_B64, blocks[:, 74:106]), scales_B8
