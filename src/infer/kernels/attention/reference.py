"""Causal attention of one sequence: each query attends to the keys up to its own position.

    out = softmax(scale * q k^T) v          over the positions the query may see

The Q queries are the last Q of the sequence's K positions, so a whole prompt (Q = K), a chunk of a prompt
(1 < Q < K) and a decode step (Q = 1) are the same call. With a window w, the query at position p sees
p - w + 1 .. p:

    K = 6, Q = 3, window 3        position   0 1 2 3 4 5
                                  query 3      x x x
                                  query 4        x x x
                                  query 5          x x x

A *soft cap* c bounds the scores: s becomes c tanh(s / c) before the softmax (Gemma 2). A *sink* is one more
score of each query head, without a value: it takes its share of the softmax and adds nothing (gpt-oss). A
layer with either must not use a kernel that does not support it.

The drafts of a tree (execution/trees.py) do not see all positions before them: `sees_QK` replaces the rule
above.

Grouped queries: query heads n * N/G .. (n + 1) * N/G - 1 share kv head n. Softmax is float32.

    attend_naive   one query at a time over the slice it may see: slow, and obviously right
    attend_sdpa    the same numbers by PyTorch's fused attention, which supports neither caps nor sinks;
                   with either, by plain matrix products, some queries at a time

Positions that no query of the call may see are never read, so the content of a cache slot outside the
window (even NaN in freshly allocated memory) cannot reach the result. `attend_naive` guarantees this for
every single query; `attend_sdpa` multiplies masked values by zero *within* a chunk, where a NaN would
mean that the sequence itself is already broken.

Shapes:  Q queries, K positions, N query heads, G kv heads, H head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

LOG2E = math.log2(math.e)  # kernels compute softmax with powers of two


_QUERIES_AT_ONCE = 128  # queries per product, which bounds memory: PyTorch materializes all scores


def attend_naive(
    q_QNH: torch.Tensor,
    k_KGH: torch.Tensor,
    v_KGH: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_N: torch.Tensor | None = None,
    sees_QK: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification: attention of the last Q of K positions, one query at a time; returns [Q, N, H]."""
    num_queries = q_QNH.shape[0]
    num_positions, num_kv_heads, _ = k_KGH.shape
    q_QGMH = q_QNH.float().unflatten(1, (num_kv_heads, -1))
    k_GHK, v_GKH = k_KGH.float().permute(1, 2, 0), v_KGH.float().transpose(0, 1)
    out_QGMH = torch.empty_like(q_QGMH)  # M query heads share each kv head

    for query in range(num_queries):
        position = num_positions - num_queries + query
        seen: slice | torch.Tensor
        seen = slice(0 if window is None else max(position - window + 1, 0), position + 1)
        if sees_QK is not None:
            seen = sees_QK[query]
        weights_GMS = _softmax(scale * (q_QGMH[query] @ k_GHK[..., seen]), softcap, sinks_N)
        out_QGMH[query] = weights_GMS @ v_GKH[:, seen]

    return out_QGMH.flatten(1, 2).to(q_QNH.dtype)


def _softmax(scores: torch.Tensor, softcap: float | None, sinks_N: torch.Tensor | None) -> torch.Tensor:
    """The softmax weights of float32 scores [G, M, ..., S], with caps and sinks."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sinks_N is None:
        return torch.softmax(scores, dim=-1)
    sinks = sinks_N.float().view(*scores.shape[:2], *[1] * (scores.dim() - 2)).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]


def _attend_products(
    q_QNH: torch.Tensor,
    k_KGH: torch.Tensor,
    v_KGH: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_N: torch.Tensor | None,
    sees_QK: torch.Tensor | None,
) -> torch.Tensor:
    """`attend_naive` for some queries at a time, with all their scores in memory."""
    num_queries, num_positions, num_kv_heads = len(q_QNH), len(k_KGH), k_KGH.shape[1]
    out_QNH = torch.empty_like(q_QNH, memory_format=torch.contiguous_format)
    for first in range(0, num_queries, _QUERIES_AT_ONCE):
        some = slice(first, min(first + _QUERIES_AT_ONCE, num_queries))
        end = num_positions - num_queries + some.stop
        start = 0 if window is None else max(end - (some.stop - first) - window + 1, 0)
        q_QGMH = q_QNH[some].float().unflatten(1, (num_kv_heads, -1))
        scores_GMQS = scale * torch.einsum("qgmh,sgh->gmqs", q_QGMH, k_KGH[start:end].float())
        if sees_QK is None:
            mask_QS = _may_see(some.stop - first, end - start, window, q_QNH.device)
        else:
            mask_QS = sees_QK[some, start:end]
        if softcap is not None:
            scores_GMQS = softcap * torch.tanh(scores_GMQS / softcap)
        weights_GMQS = _softmax(scores_GMQS.masked_fill(~mask_QS, -torch.inf), None, sinks_N)
        out_QGMH = torch.einsum("gmqs,sgh->qgmh", weights_GMQS, v_KGH[start:end].float())
        out_QNH[some] = out_QGMH.flatten(1, 2).to(q_QNH.dtype)
    return out_QNH


def attend_sdpa(
    q_QNH: torch.Tensor,
    k_KGH: torch.Tensor,
    v_KGH: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_N: torch.Tensor | None = None,
    sees_QK: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last Q of K positions by PyTorch's SDPA, with a mask only if needed."""
    if softcap is not None or sinks_N is not None:
        return _attend_products(
            q_QNH, k_KGH, v_KGH, scale=scale, window=window, softcap=softcap, sinks_N=sinks_N, sees_QK=sees_QK
        )
    num_queries, num_heads, head_dim = q_QNH.shape
    if window is not None and num_queries - 1 + window < k_KGH.shape[0]:  # no query sees the first positions
        k_KGH, v_KGH = k_KGH[1 - num_queries - window :], v_KGH[1 - num_queries - window :]
    num_positions, num_kv_heads, _ = k_KGH.shape
    k_1GKH, v_1GKH = k_KGH.transpose(0, 1).unsqueeze(0), v_KGH.transpose(0, 1).unsqueeze(0)

    if num_queries == 1:
        # The heads that share a kv head become the queries of one head: K and V are read once per group.
        q_1GMH = q_QNH.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return F.scaled_dot_product_attention(q_1GMH, k_1GKH, v_1GKH, scale=scale).reshape(q_QNH.shape)

    window_cuts = window is not None and window < num_positions
    is_plain_causal = num_queries == num_positions and not window_cuts and sees_QK is None
    if sees_QK is None and not is_plain_causal:
        sees_QK = _may_see(num_queries, num_positions, window, q_QNH.device)
    out_1NQH = F.scaled_dot_product_attention(
        q_QNH.transpose(0, 1).unsqueeze(0),
        k_1GKH,
        v_1GKH,
        attn_mask=sees_QK,
        is_causal=is_plain_causal,
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
    )
    return out_1NQH.squeeze(0).transpose(0, 1)


def _may_see(num_queries: int, num_positions: int, window: int | None, device: torch.device) -> torch.Tensor:
    """A mask [Q, K], true where a query sees a key: itself and earlier ones, as far as the window reaches."""
    everything = torch.ones(num_queries, num_positions, dtype=torch.bool, device=device)
    last_seen = num_positions - num_queries  # position that the first query sees last
    mask_QK = everything.tril(last_seen)
    return mask_QK if window is None else mask_QK.triu(last_seen - window + 1)
