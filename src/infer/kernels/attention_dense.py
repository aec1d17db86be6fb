"""Attention of fresh prompts as dense batches, for a library without block tables or ragged lengths.

cuDNN's fused attention builds a plan for each shape it meets, which takes milliseconds, and then keeps it. So
that there are few shapes, prompts are padded to a multiple of 512 tokens and prompts of equal padded length
are computed together, in batches of 1, 2, 4, ...:

    prompts of 700, 1024, 300, 900, 1000 tokens     ->     4 x 1024,  1 x 512

Padding stands behind the tokens of a prompt, and causal attention looks back, so no token sees any. It is
made of copies of the prompt's last token: what is masked is still multiplied, and zero times NaN is NaN. What
the padding itself attends to is thrown away. Prompts that need no padding and lie end to end are not copied.

Shapes:  T tokens, N query heads, G kv heads, H head size, B prompts of a batch, S padded length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from infer.kernels.attention_prefill import Chunk, PrefillChunks

PAD_LEN = 512
_HEAD_DIMS = (64, 128)


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that are computed together: where their tokens are, and which of it is padding."""

    num: int
    length: int
    first: int  # token of the step
    is_view: bool  # tokens `first` ... of the step are the batch as it stands; the rest is empty then
    tokens_BS: torch.Tensor  # of the step, flat; for padding the prompt's last
    places: torch.Tensor  # in the flat batch, of all that is not padding
    tokens: torch.Tensor  # of the step, for each of these places


def can_attend_dense(dtype: torch.dtype, head_dim: int, chunks: PrefillChunks, window: int | None) -> bool:
    """Whether `attend_fresh_dense` is for these chunks."""
    are_fresh = bool(chunks.chunks) and all(chunk.start == 0 for chunk in chunks.chunks)
    return are_fresh and window is None and dtype.itemsize == 2 and head_dim in _HEAD_DIMS


def attend_fresh_dense(
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    v_TGH: torch.Tensor,
    chunks: PrefillChunks,
    *,
    scale: float,
    out: torch.Tensor,
    backend: SDPBackend = SDPBackend.CUDNN_ATTENTION,
) -> torch.Tensor:
    """Attend with the tokens of fresh chunks; the other tokens of `out` are left as they are."""
    assert can_attend_dense(q_TNH.dtype, q_TNH.shape[2], chunks, None), f"{q_TNH.dtype}, {chunks.chunks}"
    with sdpa_kernel(backend):
        for batch in _batches(chunks.chunks, q_TNH.device):
            q, k, v = (_pack(x, batch).transpose(1, 2) for x in (q_TNH, k_TGH, v_TGH))
            result = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            result_TNH = result.transpose(1, 2).flatten(0, 1)
            if batch.is_view:
                out[batch.first : batch.first + batch.num * batch.length] = result_TNH
            else:
                out.index_copy_(0, batch.tokens, result_TNH[batch.places])
    return out


def _pack(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[T, heads, H] -> [B, S, heads, H]."""
    end = batch.first + batch.num * batch.length
    packed = x[batch.first : end] if batch.is_view else x[batch.tokens_BS]
    return packed.view(batch.num, batch.length, *x.shape[1:])


@lru_cache(maxsize=2)
def _batches(chunks: tuple[Chunk, ...], device: torch.device) -> tuple[Batch, ...]:
    """The batches of a step; the same for all layers, hence the cache."""
    groups: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        groups.setdefault(-(-chunk.num // PAD_LEN) * PAD_LEN, []).append(chunk)
    batches = []
    for length, group in groups.items():
        while group:
            num = 1 << len(group).bit_length() - 1
            batches.append(_batch(group[:num], length, device))
            group = group[num:]
    return tuple(batches)


def _batch(chunks: list[Chunk], length: int, device: torch.device) -> Batch:
    first = chunks[0].first
    if all(chunk[:2] == (first + index * length, length) for index, chunk in enumerate(chunks)):
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return Batch(len(chunks), length, first, True, empty, empty, empty)
    firsts_B1, nums_B1 = (np.array(column)[:, None] for column in list(zip(*chunks, strict=True))[:2])
    offsets_S = np.arange(length)
    tokens_BS = firsts_B1 + np.minimum(offsets_S, nums_B1 - 1)
    places = np.flatnonzero(offsets_S < nums_B1)
    tokens, at, to = (
        torch.from_numpy(x).to(device, non_blocking=True)
        for x in (tokens_BS.ravel(), places, tokens_BS.ravel()[places])
    )
    return Batch(len(chunks), length, first, False, tokens, at, to)
