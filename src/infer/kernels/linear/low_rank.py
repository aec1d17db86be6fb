"""Add the low-rank products of LoRA adapters to a product, each row with its own adapter.

    y[t] += B[s] (A[s] x[t])          s: slot of row t; slot 0 has no adapter, and nothing is added

The adapters of one matrix are stacked, one *slot* each. A matrix of several parts (q, k, v) has one A per
part: their rows are concatenated, R per part, and each column n of y belongs to one part.

    A   [slots, P R, K]      rank padded to R with zeros
    B   [N, slots R]         times the adapter's scale; column r of a slot goes with rank r of the row's part

There are two kernels, *shrink* (h = A x, in splits of K that expand adds up) and *expand* (y += B h). A
program handles a tile of consecutive rows and one slot, and exits early if no row of the tile has this slot:
rows need no sorting, and the grid depends only on the number of rows, so a CUDA graph can capture it. A row
has one slot, so no two programs write the same number. `ranks`: the part of R that a slot uses; 0: none.

Few rows of bfloat16 on Hopper need only one launch, a faster shrink (shrink.py): the kernel of the matrix
itself computes B h as additional columns (wgmma.py). For this, rows with the same slot are grouped into
*tiles*, once per step.

Shapes:  T rows, K columns of x, N columns of y, S slots, P parts, R ranks reserved per part.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

from infer.kernels.runtime.dispatch import INTERPRETED, jit_for_any, tl, use_triton
from infer.kernels.runtime.launch import launch_triton

RANK_BLOCK = 16  # ranks per tile product, the minimum of the tensor cores
MANY_ROWS = 512  # number of rows from which tiles are large: prompts
COLUMNS = 128  # columns of y per program of the second kernel
SPLITS = 8  # splits of K: few rows alone would leave most of a GPU idle

MAX_TILED = 128  # most rows that are grouped into tiles
TILE_ROWS = 8
CHUNK = 64  # columns of B that a kernel processes at a time
MAX_CHUNKS = 32  # most chunks of a matrix: one bit of a word per chunk
MAX_PARTS = 3
_TABLE_COLUMNS = 16


class RowSlots:
    """The adapter slot of each row of a step, on the device and, for the reference, as groups of rows."""

    def __init__(self, slots_T: torch.Tensor) -> None:
        self.slots_T = slots_T
        self._tiles: RowTiles | None = None

    @cached_property
    def groups(self) -> list[tuple[int, torch.Tensor]]:
        """Each slot in use, except 0, with the places of its rows."""
        found = [slot for slot in self.slots_T.unique().tolist() if slot]
        return [(slot, (self.slots_T == slot).nonzero()[:, 0]) for slot in found]

    def tiles(self, num_slots: int, rank: int) -> RowTiles:
        """Tiles of rows with the same slot, and memory for h, shared by all matrices of a step."""
        if self._tiles is None:
            self._tiles = make_tiles(self.slots_T, num_slots, rank)
        return self._tiles

    def select(self, indices: torch.Tensor) -> RowSlots:
        """The slots of selected rows."""
        return RowSlots(self.slots_T.index_select(0, indices))


class RowTiles(NamedTuple):
    """The rows of a step in tiles with one slot each, and the memory where kernels store h."""

    table: torch.Tensor  # [1 + tiles, 16], as shrink.cu reads it
    h_TC: torch.Tensor  # ranks of all slots, part by part; zero in the slots of other rows
    columns: int  # columns of h per part, a multiple of `CHUNK`

    @property
    def num_tiles(self) -> int:
        """The largest possible number of tiles."""
        return len(self.table) - 1


def make_tiles(slots_T: torch.Tensor, num_slots: int, rank: int) -> RowTiles:
    """Group rows into tiles, in memory of this step."""
    T, device = len(slots_T), slots_T.device
    assert T <= MAX_TILED and num_slots * rank <= CHUNK * MAX_CHUNKS, (T, num_slots, rank)
    num_tiles, columns = min(T, num_slots + T // TILE_ROWS), -(-num_slots * rank // CHUNK) * CHUNK
    table = torch.zeros((1 + num_tiles, _TABLE_COLUMNS), dtype=torch.int32, device=device)
    launch_triton(
        _tiles_kernel, (1,), (slots_T, table), (rank,), (T,),
        ROWS=max(16, 1 << (T - 1).bit_length()), CHUNK=CHUNK, CHUNKS=columns // CHUNK, TILE=TILE_ROWS,
        COLUMNS=_TABLE_COLUMNS, num_warps=4,
    )  # fmt: skip
    h_TC = torch.zeros((T, MAX_PARTS * columns), dtype=torch.bfloat16, device=device)
    return RowTiles(table, h_TC, columns)


@jit_for_any("T")
def _tiles_kernel(
    slots_ptr, table_ptr, T, RANK, ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + row, mask=row < T, other=0).to(tl.int32)
    other = tl.load(slots_ptr + row, mask=row < T, other=0).to(tl.int32)
    is_alike = slot[:, None] == other[None, :]
    is_earlier = row[None, :] < row[:, None]
    place = tl.sum((is_alike & is_earlier).to(tl.int32), axis=1)  # number among the rows with this slot
    place_of_other = tl.sum((is_alike & (row[:, None] < row[None, :])).to(tl.int32), axis=0)
    starts = (other > 0) & (place_of_other % TILE == 0)  # the first row of a tile
    is_first = is_alike & starts[None, :] & (place_of_other[None, :] // TILE == (place // TILE)[:, None])
    first = tl.sum(tl.where(is_first, row[None, :], 0), axis=1)
    # a row's tile: the number of tiles that begin before its first row
    tile = tl.sum((starts[None, :] & (row[None, :] < first[:, None])).to(tl.int32), axis=1)
    at = table_ptr + (1 + tile) * COLUMNS
    tl.store(at + 1 + place % TILE, row + 1, mask=slot > 0)
    tl.store(at, slot, mask=(slot > 0) & (place % TILE == 0))
    active = 0
    for chunk in range(CHUNKS):
        begins, ends = (slot - 1) * RANK, slot * RANK
        has_chunk = (slot > 0) & (begins < (chunk + 1) * CHUNK) & (ends > chunk * CHUNK)
        active |= tl.max(has_chunk.to(tl.int32), axis=0) << chunk
    tl.store(table_ptr, active)


class LowRankStack:
    """The adapters of one matrix, stacked by slot; slot s is at index s - 1."""

    def __init__(
        self, parts: list[int], size: int, *, num_slots: int, rank: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`parts`: the rows of each part of the matrix; `size`: its columns; `rank`: the largest rank."""
        assert rank % RANK_BLOCK == 0, rank
        self.parts, self.rank = parts, rank
        self.a = torch.empty((num_slots, len(parts) * rank, size), dtype=dtype, device=device).zero_()
        self.b = torch.empty((sum(parts), num_slots * rank), dtype=dtype, device=device).zero_()
        self.used = torch.zeros(1, dtype=torch.int32, device=device)  # bits of chunks with weights
        self.ranks = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._used = [0] * num_slots  # a copy of `ranks` for the host
        tiles = [
            (part, first, end)
            for part, end in enumerate(torch.tensor(parts).cumsum(0).tolist())
            for first in range(end - parts[part], end, COLUMNS)
        ]
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=device)

    def clear(self, slot: int) -> None:
        """Reset a slot to no adapter."""
        self.a[slot - 1].zero_()
        self._b_of(slot).zero_()
        self._use(slot, 0)

    def fill(self, slot: int, part: int, a_RK: torch.Tensor, b_NR: torch.Tensor) -> None:
        """Store the matrices of one part, of any rank up to the largest, in a slot that was cleared."""
        rank, start = a_RK.shape[0], sum(self.parts[:part])
        self.a[slot - 1, part * self.rank : part * self.rank + rank].copy_(a_RK)
        self._b_of(slot)[start : start + self.parts[part], :rank].copy_(b_NR)
        self._use(slot, max(self._used[slot - 1], rank))

    def _b_of(self, slot: int) -> torch.Tensor:
        """The columns of B that belong to a slot."""
        return self.b[:, (slot - 1) * self.rank : slot * self.rank]

    def _use(self, slot: int, rank: int) -> None:
        self.ranks[slot - 1] = self._used[slot - 1] = rank
        bits = 0
        for number, used in enumerate(self._used):
            first, end = number * self.rank // CHUNK, ((number + 1) * self.rank - 1) // CHUNK + 1
            bits |= (1 << end) - (1 << first) if used else 0
        if self.has_few_chunks:
            self.used.fill_(bits - (1 << 32) if bits >> 31 else bits)

    @property
    def num_slots(self) -> int:
        """The capacity in adapters."""
        return len(self._used)

    @property
    def has_few_chunks(self) -> bool:
        """True if the columns of B fit the kernels for few rows."""
        return self.num_slots * self.rank <= CHUNK * MAX_CHUNKS and len(self.parts) <= MAX_PARTS

    def b_parts(self, slot: int) -> tuple[torch.Tensor, ...]:
        """B of a slot, part by part."""
        return torch.split(self._b_of(slot), self.parts)

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
        parts = zip(h_MX.split(stack.rank, dim=1), stack.b_parts(slot), strict=True)
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
    y_ptr, h_ptr, slots_ptr, b_ptr, ranks_ptr, tiles_ptr, T, y_stride, b_stride, KEPT, PARTS: tl.constexpr,
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
        b_row = b_ptr + column[None, :].to(tl.int64) * b_stride + slot * KEPT
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
        (y_TN.stride(0), stack.b.stride(0), stack.rank), (T,), **shape, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return y_TN
