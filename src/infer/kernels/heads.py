"""From a fused projection to attention's inputs: norm the heads, rotate them, fill the cache. One launch.

    qkv_TX ──┬── q heads ── rms_norm ── rope ──────────────► q_TNH     fresh and contiguous
             ├── k heads ── rms_norm ── rope ──┬─ cache ───► keys_PGH[slot]
             │                                 └─ none ────► k_TGH     fresh and contiguous
             └── v heads ──────────────────────┬─ cache ───► values_PGH[slot]
                                               └─ none ────► v_TGH     a view of qkv_TX

The norm is that of kernels/rms_norm.py (models without a QK-norm give no weights), the rotation that of
kernels/rope.py. A normed head is rounded to the type of the input before it is turned, exactly as if the
two had been called one after the other.

A slot of -1 marks a padding token: its query is computed like any other, its key and value are written
nowhere. With a cache, the keys and values *returned* are views of the input, neither normed nor rotated:
nobody should need them, for the cache has the real ones.

Memory-bound: reads X elements per token and writes as many. The partner of an element in the rotation is
read a second time instead of being moved between threads; it comes from the first-level cache.

Of few tokens, weights, positions and angles are read before the projection has ended (`dispatch.py` has the
rules): positions must be older than that. Of many, the registers they would occupy cost more than they gain.

Shapes:  T tokens, N query heads, G kv heads, H head size, R = H / 2, X = (N + 2 G) H, P positions in the
tables or slots in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from infer.kernels.dispatch import jit, launch_options, next_power_of_two, tl, use_triton
from infer.kernels.rms_norm import rms_norm, rms_norm_reference
from infer.kernels.rope import rope, rope_reference

_MAX_AHEAD = 256  # tokens: above, the registers that hold what was read early cost more than a launch

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q_TNH, k_TGH, v_TGH
Cache = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # keys_PGH, values_PGH, slots_T
NormWeights = tuple[torch.Tensor, torch.Tensor]  # of the queries and of the keys, [H] each


class HeadTransform(NamedTuple):
    """What a layer does to the heads of its projection, the same for every token of every step."""

    norm_weights: NormWeights | None
    cos_PR: torch.Tensor
    sin_PR: torch.Tensor
    num_heads: int
    num_kv_heads: int
    eps: float
    offset: float = 0.0


def norm_rope_write_reference(
    qkv_TX: torch.Tensor,
    norm_weights: NormWeights | None,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    offset: float = 0.0,
    cache: Cache | None = None,
) -> Heads:
    """The specification: what the kernel must equal."""
    q_TNH, k_TGH, v_TGH = split_heads(qkv_TX, num_heads, num_kv_heads)
    q, k = q_TNH, k_TGH
    if norm_weights is not None:
        q = rms_norm_reference(q, norm_weights[0], eps, offset)
        k = rms_norm_reference(k, norm_weights[1], eps, offset)
    q, k = rope_reference(q, k, cos_PR, sin_PR, positions_T)
    if cache is None:
        return q.contiguous(), k.contiguous(), v_TGH
    keys_PGH, values_PGH, slots_T = cache
    is_real_T = slots_T >= 0
    keys_PGH[slots_T[is_real_T].long()] = k[is_real_T]
    values_PGH[slots_T[is_real_T].long()] = v_TGH[is_real_T]
    return q.contiguous(), k_TGH, v_TGH


@jit
def _write_slots_kernel(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    GH,
    H,
    BLOCK: tl.constexpr,  # next power of two >= G * H
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    index = tl.arange(0, BLOCK)
    head, element = index // H, index % H
    mask = (index < GH) & (slot >= 0)
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + element, mask=mask, other=0.0)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + element, mask=mask, other=0.0)
    tl.store(keys_ptr + slot * GH + index, k, mask=mask)
    tl.store(values_ptr + slot * GH + index, v, mask=mask)


def write_slots(
    k_TGH: torch.Tensor,
    v_TGH: torch.Tensor,
    keys_PGH: torch.Tensor,
    values_PGH: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """Put keys and values where the slots say; -1: nowhere."""
    if use_triton(k_TGH):
        T, G, H = k_TGH.shape
        assert k_TGH.stride(2) == v_TGH.stride(2) == 1, "the elements of a head must be contiguous"
        assert keys_PGH.is_contiguous() and values_PGH.is_contiguous(), "the cache must be contiguous"
        _write_slots_kernel[(T,)](
            k_TGH, v_TGH, keys_PGH, values_PGH, slots_T, k_TGH.stride(0), k_TGH.stride(1),
            v_TGH.stride(0), v_TGH.stride(1), G * H, H, BLOCK=next_power_of_two(G * H),
        )  # fmt: skip
        return
    is_real_T = slots_T >= 0
    slots = slots_T[is_real_T].long()
    keys_PGH[slots] = k_TGH[is_real_T]
    values_PGH[slots] = v_TGH[is_real_T]


def split_heads(qkv_TX: torch.Tensor, num_heads: int, num_kv_heads: int) -> Heads:
    """Views of the query, key and value heads in the fused projection's result."""
    heads = qkv_TX.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    q_TNH, k_TGH, v_TGH = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q_TNH, k_TGH, v_TGH


@jit
def _weights(q_weight_ptr, k_weight_ptr, cols, is_q, in_head):
    """Of the norm of each head's kind."""
    q_weight = tl.load(q_weight_ptr + cols, mask=in_head, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + cols, mask=in_head, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])


@jit
def partner_of(cols, R):
    """Where the other half of each element's pair stands in its head."""
    return tl.where(cols < R, cols + R, cols - R)


@jit
def angles_of(cos_ptr, sin_ptr, position, cols, R, in_head):
    """The cosine and the sine that belong to each element of a head at this position."""
    angle = position.to(tl.int64) * R + tl.where(cols < R, cols, cols - R)
    cos = tl.load(cos_ptr + angle, mask=in_head, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=in_head, other=0.0)
    return cos, sin


@jit
def inverse_rms(x, H, eps):
    """One number per head; elements outside the head are 0."""
    return tl.rsqrt(tl.sum(x * x, axis=1) / H + eps)[:, None]


@jit
def scaled(x, inv_rms, gain, dtype: tl.constexpr):
    """The norm's result, rounded as a norm of its own would round it."""
    return (x * inv_rms * gain).to(dtype).to(tl.float32)


@jit
def turned(x, partner, cos, sin, cols, R):
    """Each element of a head after the rotation of its pair."""
    return tl.where((cols < R)[None, :], x * cos - partner * sin, x * cos + partner * sin)


@jit
def _norm_rope_write_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    q_out_ptr,
    k_out_ptr,  # [T, G, H], or the cache [P, G, H]
    values_ptr,
    qkv_token_stride,
    N,
    G,
    H,
    eps,
    offset,
    HAS_NORM: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,  # next power of two >= H
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)  # int64: T * X may pass 2^31
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # queries, then keys, then values
    cols = tl.arange(0, BLOCK_H)
    in_head = cols < H
    is_q = heads < N
    is_k = (heads >= N) & (heads < N + G)
    R = H // 2
    partner_cols = partner_of(cols, R)

    if PDL:  # positions must be older than the projection: see dispatch.py
        if HAS_NORM:
            weight = _weights(q_weight_ptr, k_weight_ptr, cols, is_q, in_head)
            partner_weight = _weights(q_weight_ptr, k_weight_ptr, partner_cols, is_q, in_head)
        cos, sin = angles_of(
            cos_ptr, sin_ptr, tl.load(positions_ptr + token), cols[None, :], R, in_head[None, :]
        )
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    if HAS_CACHE and PDL:
        slot = tl.load(slots_ptr + token).to(tl.int64)
    row = qkv_ptr + token * qkv_token_stride + heads[:, None] * H
    in_tile = (heads < N + 2 * G)[:, None] & in_head[None, :]
    x_raw = tl.load(row + cols[None, :], mask=in_tile, other=0.0)
    is_turned = (is_q | is_k)[:, None] & in_head[None, :]
    x = x_raw.to(tl.float32)
    partner = tl.load(row + partner_cols[None, :], mask=is_turned, other=0.0).to(tl.float32)
    if HAS_NORM:
        inv_rms = inverse_rms(x, H, eps)
        if not PDL:
            weight = _weights(q_weight_ptr, k_weight_ptr, cols, is_q, in_head)
            partner_weight = _weights(q_weight_ptr, k_weight_ptr, partner_cols, is_q, in_head)
        x = scaled(x, inv_rms, weight + offset, x_raw.dtype)
        partner = scaled(partner, inv_rms, partner_weight + offset, x_raw.dtype)

    if not PDL:
        cos, sin = angles_of(
            cos_ptr, sin_ptr, tl.load(positions_ptr + token), cols[None, :], R, in_head[None, :]
        )
    rotated = turned(x, partner, cos, sin, cols, R).to(q_out_ptr.dtype.element_ty)

    q_rows = (token * N + heads)[:, None] * H
    tl.store(q_out_ptr + q_rows + cols[None, :], rotated, mask=is_q[:, None] & in_head[None, :])
    places = token + tl.zeros_like(heads)
    if HAS_CACHE:
        if not PDL:
            slot = tl.load(slots_ptr + token).to(tl.int64)
        places = slot + tl.zeros_like(heads)
        values_rows = (places * G + heads - N - G)[:, None] * H
        is_v = (heads >= N + G) & (heads < N + 2 * G) & (places >= 0)
        tl.store(values_ptr + values_rows + cols[None, :], x_raw, mask=is_v[:, None] & in_head[None, :])
    k_rows = (places * G + heads - N)[:, None] * H
    is_k = is_k & (places >= 0)
    tl.store(k_out_ptr + k_rows + cols[None, :], rotated, mask=is_k[:, None] & in_head[None, :])


def norm_rope_write(
    qkv_TX: torch.Tensor,
    norm_weights: NormWeights | None,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    offset: float = 0.0,
    cache: Cache | None = None,
) -> Heads:
    """Queries, keys and values ready for attention; with a cache, keys and values go to their slots."""
    if not use_triton(qkv_TX):
        q_TNH, k_TGH, v_TGH = split_heads(qkv_TX, num_heads, num_kv_heads)
        if norm_weights is not None:
            q_TNH = rms_norm(q_TNH, norm_weights[0], eps=eps, offset=offset)
            k_TGH = rms_norm(k_TGH, norm_weights[1], eps=eps, offset=offset)
        q_TNH, k_TGH = rope(q_TNH, k_TGH, cos_PR, sin_PR, positions_T)
        if cache is not None:
            write_slots(k_TGH, v_TGH, *cache)
        return q_TNH.contiguous(), k_TGH.contiguous(), v_TGH
    T, N, G = qkv_TX.shape[0], num_heads, num_kv_heads
    H = qkv_TX.shape[1] // (N + 2 * G)
    _, k_TGH, v_TGH = split_heads(qkv_TX, N, G)
    assert qkv_TX.stride(1) == 1, "the elements of a token must be contiguous"
    assert cos_PR.shape == sin_PR.shape and 2 * cos_PR.shape[1] == H, f"tables {cos_PR.shape}, heads of {H}"
    assert cos_PR.is_contiguous() and sin_PR.is_contiguous(), "the tables must be contiguous"
    assert positions_T.is_contiguous(), "positions must be contiguous"
    q_out = torch.empty((T, N, H), dtype=qkv_TX.dtype, device=qkv_TX.device)
    if cache is not None:
        k_out, v_out, slots_T = cache
        for name, part in (("keys", k_out), ("values", v_out)):
            assert part.is_contiguous() and part.shape[1:] == (G, H), f"{name} are {tuple(part.shape)}"
            assert part.dtype == qkv_TX.dtype, f"{name} are {part.dtype}, the projection {qkv_TX.dtype}"
        assert slots_T.is_contiguous(), "slots must be contiguous"
    else:
        k_out = torch.empty((T, G, H), dtype=qkv_TX.dtype, device=qkv_TX.device)
        v_out, slots_T = q_out, positions_T  # not looked at, like the weights of no norm
    q_weight_H, k_weight_H = norm_weights or (qkv_TX, qkv_TX)
    block_h = next_power_of_two(H)
    num_turned = N + G if cache is None else N + 2 * G
    block_heads = max(1, 1024 // block_h)  # the tile of kernels/rms_norm.py: the same sums in the same order
    grid = (T, -(-num_turned // block_heads))
    _norm_rope_write_kernel[grid](
        qkv_TX, q_weight_H, k_weight_H, cos_PR, sin_PR, positions_T, slots_T, q_out, k_out, v_out,
        qkv_TX.stride(0), N, G, H, eps, offset,
        HAS_NORM=norm_weights is not None, HAS_CACHE=cache is not None,
        BLOCK_HEADS=block_heads, BLOCK_H=block_h,
        **(launch_options(qkv_TX.device) if T <= _MAX_AHEAD else {"PDL": False}),
    )  # fmt: skip
    return (q_out, k_out, v_TGH) if cache is None else (q_out, k_TGH, v_TGH)
