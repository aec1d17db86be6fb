"""Add the low-rank products of LoRA adapters to a product, each row with its own adapter.

    y[t] += B[s] (A[s] x[t])          s: slot of row t; slot 0 has no adapter, and nothing is added

The adapters of one matrix are stacked, one *slot* each. A matrix of several parts (q, k, v) has an A for each
part: their rows lie one after the other, R for each, and columns n of y belong to one part.

    A   [slots, P R, K]      rank padded to R with zeros
    B   [slots, N, R]        times the adapter's scale; column r of a row goes with rank r of its part

Two kernels, *shrink* (h = A x, in splits of K that expand adds up) and *expand* (y += B h). A program has a
tile of consecutive rows and one slot, and ends at once if no row of the tile has it: rows need no sorting,
and the grid depends on the number of rows alone, so that a CUDA graph can hold it. A row has one slot, so no
two programs write the same number. `ranks` says how much of R a slot uses; 0: the matrix is not adapted.

Shapes:  T rows, K columns of x, N of y, S slots, P parts, R ranks kept for each.
"""

from __future__ import annotations

from functools import cached_property

import torch

from infer.kernels.runtime.dispatch import INTERPRETED, jit_for_any, tl, use_triton
from infer.kernels.runtime.launch import launch_triton

RANK_BLOCK = 16  # ranks of one product of tiles: the least that tensor cores take
MANY_ROWS = 512  # rows from which on tiles are large: prompts
COLUMNS = 128  # columns of y that a program of the second kernel computes
SPLITS = 8  # splits of K: few rows alone would leave most of a GPU idle


class RowSlots:
    """The adapter slot of each row of a step, on the device and, for the reference, as groups of rows."""

    def __init__(self, slots_T: torch.Tensor) -> None:
        self.slots_T = slots_T

    @cached_property
    def groups(self) -> list[tuple[int, torch.Tensor]]:
        """Each slot that a row has, but for 0, and the places of its rows."""
        found = [slot for slot in self.slots_T.unique().tolist() if slot]
        return [(slot, (self.slots_T == slot).nonzero()[:, 0]) for slot in found]

    def select(self, indices: torch.Tensor) -> RowSlots:
        """The slots of some rows."""
        return RowSlots(self.slots_T.index_select(0, indices))


class LowRankStack:
    """The adapters of one matrix, stacked by slot; slot s is at index s - 1."""

    def __init__(
        self,
        parts: list[int],
        size: int,
        *,
        num_slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`parts`: the rows of each part of the matrix; `size`: its columns; `rank`: the largest."""
        assert rank % RANK_BLOCK == 0, rank
        self.parts, self.rank = parts, rank
        self.a = torch.empty((num_slots, len(parts) * rank, size), dtype=dtype, device=device).zero_()
        self.b = torch.empty((num_slots, sum(parts), rank), dtype=dtype, device=device).zero_()
        self.ranks = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._used = [0] * num_slots  # the same, for the host
        tiles = [
            (part, first, end)
            for part, end in enumerate(torch.tensor(parts).cumsum(0).tolist())
            for first in range(end - parts[part], end, COLUMNS)
        ]
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=device)

    def clear(self, slot: int) -> None:
        """Let a slot adapt nothing."""
        self.a[slot - 1].zero_()
        self.b[slot - 1].zero_()
        self.ranks[slot - 1] = self._used[slot - 1] = 0

    def fill(self, slot: int, part: int, a_RK: torch.Tensor, b_NR: torch.Tensor) -> None:
        """Put the matrices of one part, of any rank up to the largest, into a slot that was cleared."""
        rank, start = a_RK.shape[0], sum(self.parts[:part])
        self.a[slot - 1, part * self.rank : part * self.rank + rank].copy_(a_RK)
        self.b[slot - 1, start : start + self.parts[part], :rank].copy_(b_NR)
        self._used[slot - 1] = max(self._used[slot - 1], rank)
        self.ranks[slot - 1] = self._used[slot - 1]

    def is_used(self, slot: int) -> bool:
        """True if the adapter in this slot has weights for this matrix."""
        return self._used[slot - 1] > 0


def add_low_rank_reference(
    y_TN: torch.Tensor, x_TK: torch.Tensor, rows: RowSlots, stack: LowRankStack
) -> torch.Tensor:
    """The specification of `add_low_rank`: group by group, part by part."""
    for slot, places in rows.groups:
        if not stack.is_used(slot):
            continue
        h_MX = x_TK[places] @ stack.a[slot - 1].T
        parts = zip(h_MX.split(stack.rank, dim=1), torch.split(stack.b[slot - 1], stack.parts), strict=True)
        y_TN.index_add_(0, places, torch.cat([h_MR @ b_NR.T for h_MR, b_NR in parts], dim=1))
    return y_TN


@jit_for_any("T")
def _shrink_kernel(
    x_ptr, slots_ptr, a_ptr, ranks_ptr, h_ptr, T, x_stride, K, KEPT, PARTS: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    WIDEN: tl.constexpr,  # Triton's interpreter cannot multiply matrices of bfloat16
):  # fmt: skip
    slot, block = tl.program_id(2), tl.program_id(1)  # a block of the ranks of all parts
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    row = tile * ROWS + tl.arange(0, ROWS)
    is_row = tl.load(slots_ptr + row, mask=row < T, other=0) == slot + 1
    first = (block * RANKS) % KEPT  # rank in its part
    if (tl.max(is_row.to(tl.int32), axis=0) > 0) & (first < tl.load(ranks_ptr + slot)):
        rank = block * RANKS + tl.arange(0, RANKS)
        x_row = x_ptr + row[:, None].to(tl.int64) * x_stride
        a_row = a_ptr + (slot.to(tl.int64) * PARTS * KEPT + rank[None, :]) * K
        total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
        for start in range(split * BLOCK_K, K, SPLITS * BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_row + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0)
            a = tl.load(a_row + k[:, None], mask=(k < K)[:, None], other=0.0)
            if WIDEN:
                x, a = x.to(tl.float32), a.to(tl.float32)
            total = tl.dot(x, a, total, input_precision="ieee")
        h_row = h_ptr + (split * T + row[:, None].to(tl.int64)) * PARTS * KEPT
        tl.store(h_row + rank[None, :], total, mask=is_row[:, None])


@jit_for_any("T")
def _expand_kernel(
    y_ptr, h_ptr, slots_ptr, b_ptr, ranks_ptr, tiles_ptr, T, y_stride, N, KEPT, PARTS: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    slot, tile = tl.program_id(2), tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = tl.load(slots_ptr + row, mask=row < T, other=0) == slot + 1
    rank_end = tl.load(ranks_ptr + slot)
    if (tl.max(is_row.to(tl.int32), axis=0) > 0) & (rank_end > 0):
        part = tl.load(tiles_ptr + 3 * tile)
        column = tl.load(tiles_ptr + 3 * tile + 1) + tl.arange(0, COLUMNS)
        is_column = column < tl.load(tiles_ptr + 3 * tile + 2)
        b_row = b_ptr + (slot.to(tl.int64) * N + column[None, :]) * KEPT
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for first in range(0, rank_end, RANKS):
            rank = first + tl.arange(0, RANKS)
            h = tl.zeros((ROWS, RANKS), dtype=tl.float32)
            for split in range(SPLITS):
                h_row = h_ptr + (split * T + row[:, None].to(tl.int64)) * PARTS * KEPT + part * KEPT
                h += tl.load(h_row + rank[None, :], mask=is_row[:, None], other=0.0)
            b = tl.load(b_row + rank[:, None], mask=is_column[None, :], other=0.0)
            h = h.to(b.dtype)
            if WIDEN:
                h, b = h.to(tl.float32), b.to(tl.float32)
            total = tl.dot(h, b, total, input_precision="ieee")
        y_at = y_ptr + row[:, None].to(tl.int64) * y_stride + column[None, :]
        is_written = is_row[:, None] & is_column[None, :]
        y = tl.load(y_at, mask=is_written, other=0.0)
        tl.store(y_at, y.to(tl.float32) + total, mask=is_written)


def add_low_rank(y_TN: torch.Tensor, x_TK: torch.Tensor, rows: RowSlots, stack: LowRankStack) -> torch.Tensor:
    """Add the output of each row's adapter to the row's product, in place."""
    T, K = x_TK.shape
    assert len(rows.slots_T) == T == len(y_TN), f"{T} rows, and slots of {len(rows.slots_T)}"
    if not use_triton(x_TK):
        return add_low_rank_reference(y_TN, x_TK, rows, stack)
    assert y_TN.stride(1) == x_TK.stride(1) == 1, "the columns of x and y must be contiguous"
    num_slots, num_ranks, _ = stack.a.shape
    is_large = T >= MANY_ROWS
    tile_rows, num_splits = (64, 1) if is_large else (16, SPLITS)
    num_tiles = -(-T // tile_rows)
    h = torch.empty((num_splits, T, num_ranks), dtype=torch.float32, device=x_TK.device)
    shape = {
        "PARTS": len(stack.parts),
        "ROWS": tile_rows,
        "RANKS": RANK_BLOCK,
        "SPLITS": num_splits,
        "WIDEN": INTERPRETED,
    }
    launch_triton(
        _shrink_kernel, (num_tiles * num_splits, num_ranks // RANK_BLOCK, num_slots),
        (x_TK, rows.slots_T, stack.a, stack.ranks, h), (x_TK.stride(0), K, stack.rank), (T,),
        **shape, BLOCK_K=64 if is_large else 128, num_warps=4,
    )  # fmt: skip
    launch_triton(
        _expand_kernel, (num_tiles, len(stack.tiles), num_slots),
        (y_TN, h, rows.slots_T, stack.b, stack.ranks, stack.tiles),
        (y_TN.stride(0), y_TN.shape[1], stack.rank), (T,), **shape, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return y_TN
