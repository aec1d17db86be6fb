"""Keys and values in 8 bits: a code for every element, and one scale for each token and kv head.

    x_H ──► scale = largest |x| / largest code        code = x / scale, rounded        x ≈ code * scale

    fp8     e4m3: 3 bits of mantissa, codes up to 448; off by at most 1/16 of an element
    int8    -127 .. 127; off by at most 1/254 of the largest element of the head

A score is linear in its key and the output in its values. So a kernel multiplies a query with codes and the
score with the key's scale, and a position's weight with the value's scale before it meets the codes: no
element is ever multiplied by a scale. Every code is exact in float16 and bfloat16.

Codes lie where keys and values of the model's own type would, [P, G, H]. The scales of one head and block lie
side by side, [blocks, G, block_size], for a kernel reads those of one head at a time.

Shapes:  T tokens, G kv heads, H head size, P slots.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from infer.kernels.runtime.dispatch import jit, tl

LARGEST: Final = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # the largest code of each type
ROUNDING: Final = (
    12582912.0  # 1.5 * 2^23: a float32 that it is added to is rounded to an integer, half to even
)


class KVScales(NamedTuple):
    """The scales of the codes of one layer."""

    keys: torch.Tensor  # float32 [blocks, G, block_size]
    values: torch.Tensor


def encode_reference(x_TGH: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification: codes [T, G, H] of this type, and scales [T, G]."""
    x = x_TGH.float()
    largest_TG = x.abs().amax(dim=-1)
    inverse_TG = torch.where(largest_TG == 0, 0.0, LARGEST[dtype] / largest_TG)
    scaled = x * inverse_TG[..., None]
    codes = scaled.round() if dtype is torch.int8 else scaled
    return codes.to(dtype), largest_TG * (1 / LARGEST[dtype])


def write_codes_reference(
    x_TGH: torch.Tensor, codes_PGH: torch.Tensor, scales: torch.Tensor, slots_T: torch.Tensor
) -> None:
    """Put tokens in their slots: the specification of what the kernels of heads.py write."""
    codes_TGH, scales_TG = encode_reference(x_TGH, codes_PGH.dtype)
    codes_PGH.view(torch.uint8)[slots_T] = codes_TGH.view(torch.uint8)  # PyTorch indexes no float8
    block_size = scales.shape[2]
    scales[slots_T // block_size, :, slots_T % block_size] = scales_TG


def read_slots(
    kept_PGH: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Gather keys or values from their slots, decoded where they are codes: [*slots, G, H]."""
    if scales is None:
        return kept_PGH[slots]
    block_size = scales.shape[2]
    codes = kept_PGH.view(torch.uint8)[slots].view(kept_PGH.dtype)
    return (codes.float() * scales[slots // block_size, :, slots % block_size][..., None]).to(dtype)


@jit
def scale_of(largest, FP8: tl.constexpr):
    """The scale of a head whose largest element is this, and its inverse."""
    top: tl.constexpr = 448.0 if FP8 else 127.0
    return largest * (1 / top), tl.where(largest == 0.0, 0.0, top / largest)


@jit
def encode(x, inverse, FP8: tl.constexpr):
    """The codes of elements, given the inverse of their scale."""
    scaled = x.to(tl.float32) * inverse
    if FP8:
        return scaled.to(tl.float8e4nv)
    return ((scaled + 12582912.0) - 12582912.0).to(tl.int8)  # `ROUNDING`
