"""Rotary position embedding: turn each pair of a head's elements by an angle that grows with position.

    y1 = x1 * cos - x2 * sin          x1: first half of the head,  cos, sin: row `position` of the tables
    y2 = x2 * cos + x1 * sin          x2: second half

Element i of the first half is paired with element i of the second (the "half-split" layout of
Hugging Face checkpoints; GGUF files of Llama are permuted to it at load time). The dot product of two
rotated vectors depends only on how far apart their positions are.

The tables are float32 and hold one row per position; the arithmetic is float32, the result has the
type of the input. Positions must be below P: the GPU kernel cannot check them without waiting.

Memory-bound: queries and keys are read once and written once, in one launch.

Shapes:  T tokens, N query heads, G kv heads, H head size, R = H / 2 pairs, P positions in the tables.
"""

from __future__ import annotations

import torch

from infer.kernels.cpu import operations
from infer.kernels.cpu.program import recorder
from infer.kernels.runtime.dispatch import jit, next_power_of_two, tl, use_c, use_triton


def rope_reference(
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification: what the kernel must equal, and what runs on the CPU."""
    cos = cos_PR[positions_T].unsqueeze(1)
    sin = sin_PR[positions_T].unsqueeze(1)
    heads = torch.cat((q_TNH, k_TGH), dim=1)  # both turn alike; at decode one pass is quicker than two
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    q, k = rotated.to(heads.dtype).split((q_TNH.shape[1], k_TGH.shape[1]), dim=1)
    return q, k


@jit
def _rotate(x_ptrs, y_ptrs, mask, cos, sin, R):
    first = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptrs + R, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptrs, (first * cos - second * sin).to(y_ptrs.dtype.element_ty), mask=mask)
    tl.store(y_ptrs + R, (second * cos + first * sin).to(y_ptrs.dtype.element_ty), mask=mask)


@jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    q_out_ptr,
    k_out_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    N,
    G,
    R,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr,  # next power of two >= R
):
    token = tl.program_id(0).to(tl.int64)  # int64: T * N * H may pass 2^31
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # 0..N-1 queries, N..N+G-1 keys
    pairs = tl.arange(0, BLOCK_R)
    in_head = pairs < R

    row = tl.load(positions_ptr + token).to(tl.int64) * R
    cos = tl.load(cos_ptr + row + pairs, mask=in_head, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row + pairs, mask=in_head, other=0.0)[None, :]

    _rotate(
        q_ptr + token * q_token_stride + heads[:, None] * q_head_stride + pairs[None, :],
        q_out_ptr + (token * N + heads)[:, None] * (2 * R) + pairs[None, :],
        (heads < N)[:, None] & in_head[None, :],
        cos, sin, R,
    )  # fmt: skip
    kv_heads = heads - N
    _rotate(
        k_ptr + token * k_token_stride + kv_heads[:, None] * k_head_stride + pairs[None, :],
        k_out_ptr + (token * G + kv_heads)[:, None] * (2 * R) + pairs[None, :],
        ((kv_heads >= 0) & (kv_heads < G))[:, None] & in_head[None, :],
        cos, sin, R,
    )  # fmt: skip


def rope(
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys to their positions; both may be strided views, heads contiguous."""
    if not use_triton(q_TNH):
        c = use_c(q_TNH) and use_c(k_TGH)
        if c and q_TNH.stride(1) == k_TGH.stride(1) == q_TNH.shape[2] and positions_T.dtype is torch.int64:
            if recorder() is None and len(positions_T) and int(positions_T.max()) >= len(cos_PR):
                raise IndexError(f"position {int(positions_T.max())} is beyond tables of {len(cos_PR)} rows")
            return operations.rope(c, q_TNH, k_TGH, cos_PR, sin_PR, positions_T)
        return rope_reference(q_TNH, k_TGH, cos_PR, sin_PR, positions_T)
    T, N, H = q_TNH.shape
    G, R = k_TGH.shape[1], H // 2
    assert q_TNH.stride(2) == k_TGH.stride(2) == 1, "the elements of a head must be contiguous"
    assert cos_PR.shape == sin_PR.shape and cos_PR.shape[1] == R, f"tables of {cos_PR.shape} for heads of {H}"
    assert cos_PR.is_contiguous() and sin_PR.is_contiguous(), "the tables must be contiguous"
    assert positions_T.is_contiguous(), "positions must be contiguous"
    q_out = torch.empty((T, N, H), dtype=q_TNH.dtype, device=q_TNH.device)
    k_out = torch.empty((T, G, H), dtype=k_TGH.dtype, device=k_TGH.device)
    block_r = next_power_of_two(R)
    block_heads = min(next_power_of_two(N + G), max(1, 1024 // block_r))  # 8 pairs per thread of 4 warps
    grid = (T, -(-(N + G) // block_heads))
    _rope_kernel[grid](
        q_TNH, k_TGH, cos_PR, sin_PR, positions_T, q_out, k_out,
        q_TNH.stride(0), q_TNH.stride(1), k_TGH.stride(0), k_TGH.stride(1), N, G, R,
        BLOCK_HEADS=block_heads, BLOCK_R=block_r,
    )  # fmt: skip
    return q_out, k_out
