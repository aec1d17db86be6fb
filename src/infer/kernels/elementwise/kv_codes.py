"""Keys and values in 8 bits: a code per element, and one scale per token and kv head.

    x_H ──► scale = largest |x| / largest code        code = x / scale, rounded        x ≈ code * scale

    fp8     e4m3: 3 bits of mantissa, codes up to 448; off by at most 1/16 of an element
    int8    -127 .. 127; off by at most 1/254 of the largest element of the head

A score is linear in its key, and the output in its values. So a kernel multiplies a query by codes and the
score by the key's scale, and a position's weight by the value's scale before it is multiplied by codes: no
element is ever multiplied by a scale. Every code is exact in float16 and bfloat16.

A calibrated checkpoint has one scale per layer, or per head. It replaces the computed scales (`fixed`), and
elements beyond 448 times the scale are clamped. Readers see no difference.

Codes are stored like keys and values of the model's own type, [P, G, H]. The scales of one head and block are
contiguous, [blocks, G, block_size], because a kernel reads the scales of one head at a time.

Shapes:  T tokens, G kv heads, H head size, P slots.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from infer.kernels.runtime.dispatch import jit, tl

# a head without a larger element is stored as zeros: its scale has no inverse in float32
SMALLEST: Final = 1e-30
LARGEST: Final = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # largest code per type


class KVScales(NamedTuple):
    """The scales of the codes of one layer."""

    keys: torch.Tensor  # float32 [blocks, G, block_size]
    values: torch.Tensor


def encode_reference(
    x_TGH: torch.Tensor, dtype: torch.dtype, fixed_G: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification: codes [T, G, H] of this type, and scales [T, G]; fixed scales are only for e4m3."""
    x = x_TGH.float()
    largest_TG = x.abs().amax(dim=-1)
    largest_TG = torch.where(largest_TG < SMALLEST, 0.0, largest_TG)
    inverse_TG = torch.where(largest_TG == 0, 0.0, LARGEST[dtype] / largest_TG)
    if fixed_G is not None:
        scaled = (x * (1 / fixed_G)[:, None]).clamp(-LARGEST[dtype], LARGEST[dtype])
        return scaled.to(dtype), fixed_G + largest_TG * 0
    scaled = x * inverse_TG[..., None]
    codes = scaled.round() if dtype is torch.int8 else scaled
    return codes.to(dtype), largest_TG * (1 / LARGEST[dtype])


def write_codes_reference(
    x_TGH: torch.Tensor, codes_PGH: torch.Tensor, scales: torch.Tensor, slots_T: torch.Tensor,
    fixed_G: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write tokens to their slots: the specification of the writes of heads.py."""
    codes_TGH, scales_TG = encode_reference(x_TGH, codes_PGH.dtype, fixed_G)
    codes_PGH.view(torch.uint8)[slots_T] = codes_TGH.view(torch.uint8)  # PyTorch cannot index float8
    block_size = scales.shape[2]
    scales[slots_T // block_size, :, slots_T % block_size] = scales_TG


def read_slots(
    kept_PGH: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Gather keys or values from their slots, and decode them if they are codes: [*slots, G, H]."""
    if scales is None:
        return kept_PGH[slots]
    block_size = scales.shape[2]
    numbers = kept_PGH.view(torch.uint8)[slots].view(kept_PGH.dtype).to(dtype)  # `dtype` holds every code
    by_head = scales[slots // block_size, :, slots % block_size].unbind(-1)
    for head, scale in zip(numbers.unbind(-2), by_head, strict=True):  # a CPU multiplies copies in float32
        head.mul_(scale[..., None])
    return numbers


def read_both(
    keys_PGH: torch.Tensor, values_PGH: torch.Tensor, scales: KVScales | None, slots: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gather keys and values from their slots; codes are decoded to `dtype`."""
    key_scales, value_scales = scales or (None, None)
    return read_slots(keys_PGH, key_scales, slots, dtype), read_slots(values_PGH, value_scales, slots, dtype)


@jit
def scale_of(x, FP8: tl.constexpr):
    """The scales of some heads [rows, H], and their inverses."""
    top: tl.constexpr = 448.0 if FP8 else 127.0
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF  # NaN is the largest of these integers
    largest = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    largest = tl.where(largest < 1e-30, 0.0, largest)  # SMALLEST
    return largest * (1 / top), top / tl.where(largest == 0.0, 1.0, largest)


@jit
def fixed_scale(x, fixed_ptr, heads, G):
    """The fixed scales of some heads, NaN if an element is not finite, and their inverses."""
    fixed = tl.load(fixed_ptr + heads, mask=heads < G, other=1.0)
    largest, _ = scale_of(x, True)
    return fixed + largest * 0.0, 1.0 / fixed


@jit
def encode(x, inverse, FP8: tl.constexpr):
    """The codes of elements, given the inverse of their scale."""
    scaled = x.to(tl.float32) * inverse
    if FP8:  # rounded by hand: Triton's interpreter rounds differently. Codes are 1/8 of a power of two apart
        # a fixed scale may be too small
        scaled = tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled))
        power = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        rounding = tl.maximum(power, 0.015625) * 1572864.0  # 1.5 * 2^23 times that distance
        codes = ((scaled + rounding) - rounding).to(tl.float8e4nv)
    else:
        codes = ((scaled + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23: to an integer, half to even
    return codes


@jit
def encode_rows(x, FP8: tl.constexpr):
    """The codes of some heads [rows, H], and their scales [rows]."""
    scale, inverse = scale_of(x, FP8)
    return encode(x, inverse[:, None], FP8), scale


@jit
def weigh_codes(weights, v, v_scale, total, dtype: tl.constexpr):
    """Add to `total` the values [positions, H], weighted by `weights` [rows, positions]."""
    if dtype == tl.float16:  # a small weight times a small scale would underflow
        largest = tl.max(v_scale, axis=0)
        relative = v_scale / tl.where(largest == 0.0, 1.0, largest)
        product = tl.dot((weights * relative[None, :]).to(dtype), v.to(dtype), input_precision="ieee")
        return total + product * largest
    return tl.dot((weights * v_scale[None, :]).to(dtype), v.to(dtype), total, input_precision="ieee")


@jit
def load_scales(scales_ptr, block, position, is_seen, g, G: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The scales of one kv head at some positions; 0 for positions that are not seen."""
    at = (block.to(tl.int64) * G + g) * BLOCK_SIZE + position % BLOCK_SIZE
    return tl.load(scales_ptr + at, mask=is_seen, other=0.0)
