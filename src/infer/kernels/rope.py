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


def rope_reference(
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification: what the kernel must equal, and what runs on the CPU."""
    cos_T1R = cos_PR[positions_T].unsqueeze(1)
    sin_T1R = sin_PR[positions_T].unsqueeze(1)
    heads = torch.cat((q_TNH, k_TGH), dim=1)  # queries and keys turn alike: one pass over both
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R), dim=-1)
    q, k = rotated.to(heads.dtype).split((q_TNH.shape[1], k_TGH.shape[1]), dim=1)
    return q, k


def rope(
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys to their positions; both may be strided views, heads contiguous."""
    return rope_reference(q_TNH, k_TGH, cos_PR, sin_PR, positions_T)
