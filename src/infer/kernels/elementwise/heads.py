"""From a fused projection to attention's inputs: norm the heads, rotate them, fill the cache. One launch.

    qkv_TX ──┬── q heads ── rms_norm ── rope ──────────────► q_TNH     fresh and contiguous
             ├── k heads ── rms_norm ── rope ──┬─ cache ───► keys_PGH[slot]
             │                                 └─ none ────► k_TGH     fresh and contiguous
             └── v heads ──────────────────────┬─ cache ───► values_PGH[slot]
                                               └─ none ────► v_TGH     a view of qkv_TX

The norm is defined in rms_norm.py (models without a QK-norm pass no weights), the rotation in rope.py. A
normed head is rounded to the type of the input before it is rotated, as if the two were separate calls.

A slot of -1 marks a padding token: its query is computed like any other, its key and value are not stored.
With a cache, the *returned* keys and values are views of the input, neither normed nor rotated, because the
cache has the real ones; attention that does not read the cache requests both (`CacheSlots.keeps`).

Memory-bound: reads X elements per token and writes as many. A program takes a few heads of a kind, in halves:
an element of the first half and its partner in the rotation are at the same place of two tiles, so weights
and angles are read once for both.

With few tokens, weights, positions and angles are read before the projection has ended (`dispatch.py` has the
rules), so positions must be older than the projection. With many tokens, the extra registers cost more than
this gains.

Shapes:  T tokens, N query heads, G kv heads, H head size, R = H / 2, X = (N + 2 G) H, P positions in the
tables or slots in the cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from infer.kernels.elementwise.kv_codes import KVScales, encode, fixed_scale, scale_of, write_codes_reference
from infer.kernels.elementwise.rms_norm import rms_norm, rms_norm_reference
from infer.kernels.elementwise.rope import rope, rope_reference
from infer.kernels.runtime.dispatch import jit, launch_options, next_power_of_two, tl, use_triton
from infer.kernels.runtime.launch import launch_triton
from infer.kernels.runtime.profiles import device_profile

_BLOCK_HEADS = 8  # heads per program

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q_TNH, k_TGH, v_TGH
NormWeights = tuple[torch.Tensor, torch.Tensor]  # gains of the queries and of the keys, [H] each


class CacheSlots(NamedTuple):
    """The place in one layer's cache for the keys and values of a step's tokens."""

    keys_PGH: torch.Tensor
    values_PGH: torch.Tensor
    slots_T: torch.Tensor  # -1: a padding token, which is not stored
    keeps: bool = False  # True: attention also needs the keys and values themselves
    scales: KVScales | None = None  # scales of the codes, if keys and values have 8 bits (kv_codes.py)
    fixed: torch.Tensor | None = None  # float32 [2, G]: scales of keys and values, shared by all tokens


class HeadTransform(NamedTuple):
    """The norm and rotation of the heads of a layer, the same for every token of every step."""

    norm_weights: NormWeights | None
    cos_PR: torch.Tensor
    sin_PR: torch.Tensor
    num_heads: int
    num_kv_heads: int
    eps: float
    offset: float = 0.0

    def check(self, qkv_TX: torch.Tensor, H: int) -> None:
        """Reject projections with heads of H that kernels cannot read, and tables that do not fit them."""
        cos_PR, sin_PR = self.cos_PR, self.sin_PR
        assert qkv_TX.stride(1) == 1, "the elements of a token must be contiguous"
        assert cos_PR.shape == sin_PR.shape and 2 * cos_PR.shape[1] == H, f"{cos_PR.shape}, heads of {H}"
        assert cos_PR.is_contiguous() and sin_PR.is_contiguous(), "the tables must be contiguous"


def norm_rope_write_reference(
    qkv_TX: torch.Tensor, transform: HeadTransform, positions_T: torch.Tensor, cache: CacheSlots | None = None
) -> Heads:
    """The specification of `norm_rope_write`, in PyTorch."""
    q, k, v_TGH = split_heads(qkv_TX, transform.num_heads, transform.num_kv_heads)
    if transform.norm_weights is not None:
        q_weight_H, k_weight_H = transform.norm_weights
        q = rms_norm_reference(q, q_weight_H, transform.eps, transform.offset)
        k = rms_norm_reference(k, k_weight_H, transform.eps, transform.offset)
    q, k = rope_reference(q, k, transform.cos_PR, transform.sin_PR, positions_T)
    if cache is not None:
        write_slots_reference(k, v_TGH, cache)
    return q.contiguous(), k.contiguous(), v_TGH


def write_slots_reference(k_TGH: torch.Tensor, v_TGH: torch.Tensor, cache: CacheSlots) -> None:
    """The specification of `write_slots`, in PyTorch."""
    is_real_T = cache.slots_T >= 0
    slots = cache.slots_T[is_real_T].long()
    if cache.scales is None:
        cache.keys_PGH[slots] = k_TGH[is_real_T]
        cache.values_PGH[slots] = v_TGH[is_real_T]
    else:
        fixed = (None, None) if cache.fixed is None else cache.fixed
        write_codes_reference(k_TGH[is_real_T], cache.keys_PGH, cache.scales.keys, slots, fixed[0])
        write_codes_reference(v_TGH[is_real_T], cache.values_PGH, cache.scales.values, slots, fixed[1])


@jit
def _write_slots_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, fixed_ptr, slots_ptr,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, G, H,
    CODE_BLOCK: tl.constexpr,  # tokens of a block whose keys and values are codes; 0: they are not
    FP8: tl.constexpr, FIXED: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    head, h = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_H)
    is_written = (head < G) & (slot >= 0)
    mask = is_written[:, None] & (h < H)[None, :]
    k_at = token * k_token_stride + head[:, None] * k_head_stride + h[None, :]
    v_at = token * v_token_stride + head[:, None] * v_head_stride + h[None, :]
    k = tl.load(k_ptr + k_at, mask=mask, other=0.0)
    v = tl.load(v_ptr + v_at, mask=mask, other=0.0)
    if CODE_BLOCK > 0:
        if FIXED:
            k_scale, k_inverse = fixed_scale(k, fixed_ptr, head, G)
            v_scale, v_inverse = fixed_scale(v, fixed_ptr + G, head, G)
        else:
            k_scale, k_inverse = scale_of(k, FP8)
            v_scale, v_inverse = scale_of(v, FP8)
        k, v = encode(k, k_inverse[:, None], FP8), encode(v, v_inverse[:, None], FP8)
        scale_at = (slot // CODE_BLOCK * G + head) * CODE_BLOCK + slot % CODE_BLOCK
        tl.store(key_scales_ptr + scale_at, k_scale, mask=is_written)
        tl.store(value_scales_ptr + scale_at, v_scale, mask=is_written)
    at = (slot * G + head)[:, None] * H + h[None, :]
    tl.store(keys_ptr + at, k, mask=mask)
    tl.store(values_ptr + at, v, mask=mask)


def write_slots(k_TGH: torch.Tensor, v_TGH: torch.Tensor, cache: CacheSlots) -> None:
    """Write keys and values to their slots of the cache."""
    if not use_triton(k_TGH):
        write_slots_reference(k_TGH, v_TGH, cache)
        return
    keys_PGH, values_PGH, slots_T, _, scales, fixed = cache
    T, G, H = k_TGH.shape
    assert k_TGH.stride(2) == v_TGH.stride(2) == 1, "the elements of a head must be contiguous"
    assert keys_PGH.is_contiguous() and values_PGH.is_contiguous(), "the cache must be contiguous"
    _write_slots_kernel[(T,)](
        k_TGH, v_TGH, keys_PGH, values_PGH, *(scales or (keys_PGH, values_PGH)),
        keys_PGH if fixed is None else fixed, slots_T, k_TGH.stride(0), k_TGH.stride(1), v_TGH.stride(0),
        v_TGH.stride(1), G, H, **_code_options(cache),
        BLOCK_G=next_power_of_two(G), BLOCK_H=next_power_of_two(H),
    )  # fmt: skip


def _code_options(cache: CacheSlots | None) -> dict[str, Any]:
    """The compile-time options of a kernel that writes to this cache."""
    scales = None if cache is None else cache.scales
    if cache is None or scales is None:
        return {"CODE_BLOCK": 0, "FP8": False, "FIXED": False}
    is_fp8 = cache.keys_PGH.dtype is torch.float8_e4m3fn
    assert is_fp8 or cache.fixed is None, "fixed scales are of e4m3"
    return {"CODE_BLOCK": scales.keys.shape[2], "FP8": is_fp8, "FIXED": cache.fixed is not None}


def split_heads(qkv_TX: torch.Tensor, num_heads: int, num_kv_heads: int) -> Heads:
    """Views of the query, key and value heads in the fused projection's result."""
    num_tokens, size = qkv_TX.shape
    total = num_heads + 2 * num_kv_heads
    heads = qkv_TX.view(num_tokens, total, size // total)
    q_TNH, k_TGH, v_TGH = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 1)
    return q_TNH, k_TGH, v_TGH


@jit
def scaled(x, inv_rms, gain, dtype: tl.constexpr):
    """The norm's result, rounded as in a separate norm."""
    return (x * inv_rms * gain).to(dtype).to(tl.float32)


@jit
def _angles_and_gains(
    cos_ptr, sin_ptr, positions_ptr, weight_ptr, token, r, R, offset, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Load the angles and gains for the two halves of a head, all of it older than the projection."""
    in_half = r < R
    angle = tl.load(positions_ptr + token).to(tl.int64) * R + r
    cos = tl.load(cos_ptr + angle, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=in_half, other=0.0)[None, :]
    first_gain, second_gain = cos, sin  # not read
    if HAS_NORM:
        first_gain = tl.load(weight_ptr + r, mask=in_half, other=0.0).to(tl.float32)[None, :] + offset
        second_gain = tl.load(weight_ptr + R + r, mask=in_half, other=0.0).to(tl.float32)[None, :] + offset
    return cos, sin, first_gain, second_gain


@jit
def _fill_slots(
    first, second, kept_ptr, scales_ptr, fixed_ptr, cached, slots, heads, in_cache, G, R,
    CODE_BLOCK: tl.constexpr, FP8: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Write the two halves of some heads to the cache."""
    if CODE_BLOCK > 0:
        first, second = first.to(tl.float32), second.to(tl.float32)
        larger = tl.maximum(tl.abs(first), tl.abs(second), propagate_nan=tl.PropagateNan.ALL)
        if FIXED:
            scale, inverse = fixed_scale(larger, fixed_ptr, heads, G)
        else:
            scale, inverse = scale_of(larger, FP8)
        first, second = encode(first, inverse[:, None], FP8), encode(second, inverse[:, None], FP8)
        at = (slots // CODE_BLOCK * G + heads) * CODE_BLOCK + slots % CODE_BLOCK
        tl.store(scales_ptr + at, scale, mask=(slots >= 0) & (heads < G))
    tl.store(kept_ptr + cached, first, mask=in_cache)
    tl.store(kept_ptr + cached + R, second, mask=in_cache)


@jit
def _norm_rope_write_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_out_ptr, keys_ptr,
    values_ptr, key_scales_ptr, value_scales_ptr, fixed_ptr, k_out_ptr, v_out_ptr, qkv_token_stride, N, G, H,
    eps, offset, HAS_NORM: tl.constexpr, HAS_CACHE: tl.constexpr, KEEPS: tl.constexpr,
    CODE_BLOCK: tl.constexpr,  # tokens of a block whose keys and values are codes; 0: they are not
    FP8: tl.constexpr, FIXED: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr,  # next power of two >= R
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # int64: T * X may pass 2^31
    R = H // 2
    r = tl.arange(0, BLOCK_R)
    # The heads of a program are of one kind: queries first, then keys, then values.
    num_q, num_k = tl.cdiv(N, BLOCK_HEADS), tl.cdiv(G, BLOCK_HEADS)
    is_q = tl.program_id(1) < num_q
    is_v = tl.program_id(1) >= num_q + num_k
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    heads -= tl.where(is_q, 0, tl.where(is_v, num_q + num_k, num_q)) * BLOCK_HEADS  # indices within the kind
    first_of_kind = tl.where(is_q, 0, tl.where(is_v, N + G, N))
    in_half = (heads < tl.where(is_q, N, G))[:, None] & (r < R)[None, :]
    weight_ptr = q_weight_ptr
    if not is_q:
        weight_ptr = k_weight_ptr

    if PDL:  # positions must be older than the projection: see dispatch.py
        cos, sin, first_gain, second_gain = _angles_and_gains(
            cos_ptr, sin_ptr, positions_ptr, weight_ptr, token, r, R, offset, HAS_NORM
        )
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    row = qkv_ptr + token * qkv_token_stride + (first_of_kind + heads)[:, None] * H + r[None, :]
    first_raw = tl.load(row, mask=in_half, other=0.0)
    second_raw = tl.load(row + R, mask=in_half, other=0.0)
    places = token + tl.zeros_like(heads)
    if HAS_CACHE:
        places = tl.load(slots_ptr + token).to(tl.int64) + tl.zeros_like(heads)
    in_cache = in_half & (places >= 0)[:, None]
    cached = (places * G + heads)[:, None] * H + r[None, :]
    kept = (token * G + heads)[:, None] * H + r[None, :]
    if is_v:
        _fill_slots(
            first_raw, second_raw, values_ptr, value_scales_ptr, fixed_ptr + G, cached, places, heads,
            in_cache, G, R, CODE_BLOCK, FP8, FIXED,
        )  # fmt: skip
        if KEEPS:
            tl.store(v_out_ptr + kept, first_raw, mask=in_half)
            tl.store(v_out_ptr + kept + R, second_raw, mask=in_half)
    else:
        if not PDL:
            cos, sin, first_gain, second_gain = _angles_and_gains(
                cos_ptr, sin_ptr, positions_ptr, weight_ptr, token, r, R, offset, HAS_NORM
            )
        first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
        if HAS_NORM:
            inv_rms = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / H + eps)[:, None]
            first = scaled(first, inv_rms, first_gain, first_raw.dtype)
            second = scaled(second, inv_rms, second_gain, first_raw.dtype)
        turned_first = (first * cos - second * sin).to(first_raw.dtype)
        turned_second = (second * cos + first * sin).to(first_raw.dtype)
        if is_q:
            q_at = (token * N + heads)[:, None] * H + r[None, :]
            tl.store(q_out_ptr + q_at, turned_first, mask=in_half)
            tl.store(q_out_ptr + q_at + R, turned_second, mask=in_half)
        else:
            if HAS_CACHE:
                _fill_slots(
                    turned_first, turned_second, keys_ptr, key_scales_ptr, fixed_ptr, cached, places, heads,
                    in_cache, G, R, CODE_BLOCK, FP8, FIXED,
                )  # fmt: skip
            if KEEPS:
                tl.store(k_out_ptr + kept, turned_first, mask=in_half)
                tl.store(k_out_ptr + kept + R, turned_second, mask=in_half)


def norm_rope_write(
    qkv_TX: torch.Tensor, transform: HeadTransform, positions_T: torch.Tensor, cache: CacheSlots | None = None
) -> Heads:
    """Compute queries, keys and values for attention; with a cache, write keys and values to their slots."""
    norm_weights, cos_PR, sin_PR, N, G, eps, offset = transform
    if not use_triton(qkv_TX):
        q_TNH, k_TGH, v_TGH = split_heads(qkv_TX, N, G)
        if norm_weights is not None:
            q_TNH = rms_norm(q_TNH, norm_weights[0], eps=eps, offset=offset)
            k_TGH = rms_norm(k_TGH, norm_weights[1], eps=eps, offset=offset)
        q_TNH, k_TGH = rope(q_TNH, k_TGH, cos_PR, sin_PR, positions_T)
        if cache is not None:
            write_slots(k_TGH, v_TGH, cache)
        return q_TNH.contiguous(), k_TGH.contiguous(), v_TGH
    T, H = qkv_TX.shape[0], qkv_TX.shape[1] // (N + 2 * G)
    transform.check(qkv_TX, H)
    assert positions_T.is_contiguous(), "positions must be contiguous"
    q_out = torch.empty((T, N, H), dtype=qkv_TX.dtype, device=qkv_TX.device)
    # placeholders, which are not read without a cache or a norm
    keys, values, slots_T, keeps, scales, fixed = cache or CacheSlots(q_out, q_out, positions_T)
    if cache is not None:
        for name, part in (("keys", keys), ("values", values)):
            assert part.is_contiguous() and part.shape[1:] == (G, H), f"{name} are {tuple(part.shape)}"
            assert part.dtype == qkv_TX.dtype or scales is not None, f"{name} are {part.dtype}"
        assert slots_T.is_contiguous(), "slots must be contiguous"
    if keeps:
        k_TGH = v_TGH = torch.empty((T, G, H), dtype=qkv_TX.dtype, device=qkv_TX.device)
    else:
        _, k_TGH, v_TGH = split_heads(qkv_TX, N, G)
    if cache is None or keeps:
        k_TGH = torch.empty((T, G, H), dtype=qkv_TX.dtype, device=qkv_TX.device)
    q_weight_H, k_weight_H = norm_weights or (qkv_TX, qkv_TX)
    num_programs = [-(-count // _BLOCK_HEADS) for count in ((N, G) if cache is None else (N, G, G))]
    starts_early = device_profile(qkv_TX.device).attention.rotate_ahead >= T
    launch_triton(
        _norm_rope_write_kernel,
        (T, sum(num_programs)),
        (
            qkv_TX, q_weight_H, k_weight_H, cos_PR, sin_PR, positions_T, slots_T,
            q_out, keys, values, *(scales or (keys, values)), keys if fixed is None else fixed, k_TGH, v_TGH,
        ),
        (qkv_TX.stride(0), N, G, H, eps, offset),
        HAS_NORM=norm_weights is not None, HAS_CACHE=cache is not None,
        KEEPS=cache is None or keeps, BLOCK_HEADS=_BLOCK_HEADS, BLOCK_R=next_power_of_two(H // 2),
        **_code_options(cache),
        **(launch_options(qkv_TX.device) if starts_early else {"PDL": False}),
    )  # fmt: skip
    return q_out, k_TGH, v_TGH
