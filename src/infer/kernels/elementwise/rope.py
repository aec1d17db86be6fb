"""Rotary position embedding: rotate each pair of a head's elements by an angle that grows with position.

    y1 = x1 * cos - x2 * sin          x1: first half of the head,  cos, sin: row `position` of the tables
    y2 = x2 * cos + x1 * sin          x2: second half

Element i of the first half is paired with element i of the second (the "half-split" layout of
Hugging Face checkpoints; GGUF files of Llama are permuted to it at load time). The dot product of two
rotated vectors depends only on the distance between their positions.

The tables are float32 and hold one row per position; the arithmetic is float32, the result has the
type of the input. Positions must be below P.

This is the rotation on a CPU: C for float32, PyTorch otherwise. On a GPU, `norm_rope_write` (heads.py)
rotates in the launch that norms the heads and fills the cache.

Shapes:  T tokens, N query heads, G kv heads, H head size, R = H / 2 pairs, P positions in the tables.
"""

from __future__ import annotations

import torch

from infer.kernels.cpu import operations
from infer.kernels.cpu.program import recorder
from infer.kernels.runtime.dispatch import use_c


def rope_reference(
    q_TNH: torch.Tensor, k_TGH: torch.Tensor, cos_PR: torch.Tensor, sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The specification of the C kernel and the kernel of heads.py."""
    cos = cos_PR[positions_T].unsqueeze(1)
    sin = sin_PR[positions_T].unsqueeze(1)
    heads = torch.cat((q_TNH, k_TGH), dim=1)  # one pass for both is faster when decoding
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    q, k = rotated.to(heads.dtype).split((q_TNH.shape[1], k_TGH.shape[1]), dim=1)
    return q, k


def rope(
    q_TNH: torch.Tensor, k_TGH: torch.Tensor, cos_PR: torch.Tensor, sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Rotate queries and keys to their positions; both may be strided views, heads contiguous."""
    c = use_c(q_TNH) and use_c(k_TGH)
    if c and q_TNH.stride(1) == k_TGH.stride(1) == q_TNH.shape[2] and positions_T.dtype is torch.int64:
        if recorder() is None and len(positions_T) and int(positions_T.max()) >= len(cos_PR):
            raise IndexError(f"position {int(positions_T.max())} is beyond tables of {len(cos_PR)} rows")
        return operations.rope(c, q_TNH, k_TGH, cos_PR, sin_PR, positions_T)
    return rope_reference(q_TNH, k_TGH, cos_PR, sin_PR, positions_T)
