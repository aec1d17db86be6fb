"""The paged cache as attention reads it, and decode attention over it in PyTorch.

The keys and values of position p of a row live in slot  table[p // block_size] * block_size + p % block_size.
The kernels of this folder receive one layer of the cache as a `PagedKV`. In PyTorch, one query per sequence:

    out_s = softmax(scale * q_s K[slots_s]^T) V[slots_s]

The slots of a row list its sequence's positions in order; rows are padded to the longest by repeating a
slot that has been written, and `is_seen` masks the padding. On the CPU this is a gather and one
batched call of PyTorch's fused attention: the query heads that share a kv head become the queries of
one head, so keys and values are read once per group.

Memory-bound: reads 2 * L * G * H elements per row. The gather writes and reads them once more, so rows
of very different lengths should be passed in separate calls (execution/layout.py groups them).

Shapes:  S sequences, L positions (padded), N query heads, G kv heads, M = N / G, H head size, P slots, R rows
         of the block tables, B blocks per row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from infer.kernels.attention.reference import attend_naive
from infer.kernels.elementwise.kv_codes import KVScales, read_both


class PagedKV(NamedTuple):
    """Keys and values of one layer in the paged cache, and the parameters of its attention."""

    keys_PGH: torch.Tensor
    values_PGH: torch.Tensor
    tables_RB: torch.Tensor  # int32 blocks of each row
    block_size: int
    scale: float  # factor for the products of queries and keys
    window: int | None = None  # positions that a token sees, its own included; None: all
    scales: KVScales | None = None  # scales of the codes, if keys and values have 8 bits (kv_codes.py)
    softcap: float | None = None  # cap of the scores (reference.py); None: no cap
    sinks_N: torch.Tensor | None = None  # one extra score per query head, which has no position

    def read(self, row: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the keys and values of a row from position `first` to `end`, [L, G, H] each."""
        positions_L = torch.arange(first, end, device=self.keys_PGH.device)
        blocks_L = self.tables_RB[row, positions_L // self.block_size].long()
        slots_L = blocks_L * self.block_size + positions_L % self.block_size
        return read_both(self.keys_PGH, self.values_PGH, self.scales, slots_L)


def attend_paged_reference(
    q_SNH: torch.Tensor, keys_PGH: torch.Tensor, values_PGH: torch.Tensor, slots_SL: torch.Tensor,
    is_seen_SL: torch.Tensor | None, *, scale: float, scales: KVScales | None = None,
    softcap: float | None = None, sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The specification: each sequence alone over the slots that it sees."""
    rows = []
    for row, q_NH in enumerate(q_SNH):
        slots_L = slots_SL[row] if is_seen_SL is None else slots_SL[row][is_seen_SL[row]]
        keys_LGH, values_LGH = read_both(keys_PGH, values_PGH, scales, slots_L, q_SNH.dtype)
        rows.append(
            attend_naive(
                q_NH[None], keys_LGH, values_LGH, scale=scale, window=None, softcap=softcap, sinks_N=sinks_N
            )
        )
    return torch.cat(rows)


def attend_paged(
    q_SNH: torch.Tensor, keys_PGH: torch.Tensor, values_PGH: torch.Tensor, slots_SL: torch.Tensor,
    is_seen_SL: torch.Tensor | None, *, scale: float, scales: KVScales | None = None,
    softcap: float | None = None, sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend all rows together; `is_seen_SL` None means that no row is padded. Returns [S, N, H]."""
    if softcap is not None or sinks_N is not None:  # PyTorch's fused attention supports neither
        return attend_paged_reference(
            q_SNH, keys_PGH, values_PGH, slots_SL, is_seen_SL, scale=scale, scales=scales, softcap=softcap,
            sinks_N=sinks_N,
        )  # fmt: skip
    num_rows, num_heads, head_dim = q_SNH.shape
    num_kv_heads = keys_PGH.shape[1]
    q_SGMH = q_SNH.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    k_SLGH, v_SLGH = read_both(keys_PGH, values_PGH, scales, slots_SL, q_SNH.dtype)
    out_SGMH = F.scaled_dot_product_attention(
        q_SGMH,
        k_SLGH.transpose(1, 2),
        v_SLGH.transpose(1, 2),
        attn_mask=None if is_seen_SL is None else is_seen_SL[:, None, None, :],
        scale=scale,
    )
    return out_SGMH.reshape(num_rows, num_heads, head_dim)
