"""Unpack the block formats of GGUF into float32.

Weights that lie next to each other are alike, so a *block* of them shares one scale d (and often one
minimum m), stored as float16, and each weight is a small integer q:

    Q4_0   32 weights   d                       w = d * (q - 8)       q: 4 bits
    Q4_1   32           d, m                    w = d * q + m
    Q5_0   32           d, one high bit each    w = d * (q - 16)      q: 5 bits
    Q5_1   32           d, m, high bits         w = d * q + m
    Q8_0   32           d                       w = d * q             q: int8
    Q4_K   256 = 8x32   d, dmin, 8 x (s, t)     w = (d * s) * q - (dmin * t)      s, t: 6 bits each
    Q5_K   256 = 8x32   the same, high bits     q: 5 bits
    Q6_K   256 = 16x16  d, 16 x s (int8)        w = (d * s) * (q - 32)            q: 6 bits

Each function below maps the bytes of B blocks, [B, bytes], to their weights, [B, weights]. The
arithmetic is float32 in the order written above, and multiplication and addition stay two operations
(a fused one rounds differently), so the result equals the format's reference bit for bit.

Shapes:  B blocks; the other dimensions are written out as numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from infer.errors import CheckpointError
from infer.loader.gguf import BLOCK, GGMLType

_CHUNK_WEIGHTS = 1 << 20  # 4 MiB of float32: a chunk stays in the CPU's cache between the passes over it


def dequantize_into(out: torch.Tensor, packed: torch.Tensor, kind: GGMLType) -> None:
    """Unpack rows of bytes into the rows of `out`, converting to its dtype on its device.

    Goes a few rows at a time, so nothing the size of the tensor is ever allocated.
    """
    assert out.shape[0] == packed.shape[0], (out.shape, packed.shape)
    step = max(1, _CHUNK_WEIGHTS // max(1, out[0].numel()))
    for start in range(0, out.shape[0], step):
        rows = packed[start : start + step].to(out.device)
        out[start : start + step].copy_(dequantize(rows, kind).view(-1, *out.shape[1:]))


def dequantize(packed: torch.Tensor, kind: GGMLType) -> torch.Tensor:
    """Unpack rows of bytes, [rows, bytes], into float32, [rows, weights]."""
    unpack = _UNPACK.get(kind)
    if unpack is None:
        raise CheckpointError(
            f"tensors of type {kind.name} are not supported; supported types: {', '.join(SUPPORTED)}"
        )
    num_rows = packed.shape[0]
    return unpack(packed.reshape(-1, BLOCK[kind][1])).view(num_rows, -1)


def integer_groups(packed: torch.Tensor, kind: GGMLType) -> tuple[torch.Tensor, torch.Tensor, int] | None:
    """Rows of bytes as integers, scales and bits, where a block is one scale for 32 of them; else None.

    These formats are what kernels/cpu multiplies with, so nothing needs to be unpacked and rounded again.
    """
    if kind not in (GGMLType.Q4_0, GGMLType.Q5_0, GGMLType.Q8_0):
        return None
    num_rows = packed.shape[0]
    blocks = packed.reshape(-1, BLOCK[kind][1])
    scales = blocks[:, :2].contiguous().view(torch.float16).view(num_rows, -1)
    if kind == GGMLType.Q8_0:
        return blocks[:, 2:].contiguous().view(torch.int8).view(num_rows, -1), scales, 8
    if kind == GGMLType.Q4_0:
        q_B32, middle, bits = _nibbles(blocks[:, 2:], 16, torch.uint8), 8, 4
    else:
        q_B32, middle, bits = _nibbles(blocks[:, 6:], 16, torch.uint8) | _high_bits(blocks[:, 2:6]), 16, 8
    return q_B32.view(torch.int8).sub_(middle).view(num_rows, -1), scales, bits


def _f32(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float32)


def _f16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float16).float()


def _bf16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _nibbles(packed_B: torch.Tensor, group: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Split bytes into 4-bit numbers: of every `group` bytes, all low halves, then all high halves."""
    grouped = packed_B.reshape(packed_B.shape[0], -1, group)
    q = torch.empty(*grouped.shape[:2], 2, group, dtype=dtype, device=packed_B.device)
    q[:, :, 0] = grouped & 15
    q[:, :, 1] = grouped >> 4
    return q.flatten(1)


def _high_bits(packed_B4: torch.Tensor) -> torch.Tensor:
    """The 32 bits of each block's 4 bytes, lowest first, moved to the place of a fifth bit."""
    masks_8 = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=packed_B4.device)
    return ((packed_B4[:, :, None] & masks_8) != 0).flatten(1).to(torch.uint8) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:], 16).sub_(8).mul_(_f16(blocks[:, :2]))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:], 16).mul_(_f16(blocks[:, :2])).add_(_f16(blocks[:, 2:4]))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    q_B32 = _nibbles(blocks[:, 6:], 16, torch.uint8) | _high_bits(blocks[:, 2:6])
    return q_B32.float().sub_(16).mul_(_f16(blocks[:, :2]))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    q_B32 = _nibbles(blocks[:, 8:], 16, torch.uint8) | _high_bits(blocks[:, 4:8])
    return q_B32.float().mul_(_f16(blocks[:, :2])).add_(_f16(blocks[:, 2:4]))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_f16(blocks[:, :2]))


def _scales_and_minima(packed_B12: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack the 8 scales and 8 minima of a Q4_K or Q5_K block, 6 bits each, from 12 bytes.

    bytes 0..3    scales 0..3  in the low 6 bits,   high 2 bits of scales 4..7
    bytes 4..7    minima 0..3  in the low 6 bits,   high 2 bits of minima 4..7
    bytes 8..11   low 4 bits of scales 4..7         low 4 bits of minima 4..7 (upper half)
    """
    scale_B4, minimum_B4, rest_B4 = packed_B12[:, :4], packed_B12[:, 4:8], packed_B12[:, 8:]
    scales_B8 = torch.cat((scale_B4 & 63, (rest_B4 & 15) | ((scale_B4 >> 6) << 4)), dim=1)
    minima_B8 = torch.cat((minimum_B4 & 63, (rest_B4 >> 4) | ((minimum_B4 >> 6) << 4)), dim=1)
    return scales_B8.float(), minima_B8.float()


def _eight_groups(blocks: torch.Tensor, q_B256: torch.Tensor) -> torch.Tensor:
    """(d * s) * q - (dmin * t) over eight groups of 32: the second half of Q4_K and Q5_K."""
    scales_B8, minima_B8 = _scales_and_minima(blocks[:, 4:16])
    scales_B8 *= _f16(blocks[:, :2])
    minima_B8 *= _f16(blocks[:, 2:4])
    w_B8x32 = q_B256.float().view(-1, 8, 32).mul_(scales_B8[:, :, None])
    return w_B8x32.sub_(minima_B8[:, :, None]).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _eight_groups(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    # 32 bytes of high bits: bit g of byte i belongs to weight i of group g
    high_B32 = blocks[:, 16:48]
    high_B256 = torch.stack([(high_B32 >> group) & 1 for group in range(8)], dim=1).flatten(1) << 4
    return _eight_groups(blocks, _nibbles(blocks[:, 48:], 32, torch.uint8) | high_B256)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    # 2 halves of 128 weights, each: 64 bytes of low halves, 32 bytes of 2 high bits for 4 runs of 32
    low_B256 = _nibbles(blocks[:, :128], 64, torch.uint8)
    high_B2x32 = blocks[:, 128:192].reshape(-1, 2, 32)
    high_B256 = torch.stack([(high_B2x32 >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1) << 4
    scales_B16 = blocks[:, 192:208].view(torch.int8).float() * _f16(blocks[:, 208:])
    w_B16x16 = (low_B256 | high_B256).float().sub_(32).view(-1, 16, 16)
    return w_B16x16.mul_(scales_B16[:, :, None]).flatten(1)


_UNPACK: dict[GGMLType, Callable[[torch.Tensor], torch.Tensor]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}
SUPPORTED = tuple(kind.name for kind in _UNPACK)
