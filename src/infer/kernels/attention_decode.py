"""Attention of one new token per row over the paged cache: the kernel that decoding spends its time in.

    out[s] = softmax(scale * q[s] k^T) v        over the `lens_S[s]` positions that row s may see

The keys and values of position p of a row live in slot  table[p // block_size] * block_size + p % block_size.
Each of them is read once per step, so the target is the bandwidth of memory. Three things stand in the way:

A batch is uneven. One long row must not keep one multiprocessor busy while the others wait, so a row is
cut along its positions into *splits*, and a (row, split) is one item of work for each kv head:

    row 0, 700 positions   |== 256 ==|== 256 ==|= 188 =|        items of split length first, remainders last,
    row 1,  90 positions   |90|                                 so that the programs finish together

Lengths are known to the device alone: the graph that launches this was captured long before them. So the
grid is as large as the machine, whatever the lengths; `DecodeWork.plan` writes the list of items, once per
step and for all layers, and each program strides over that list until its end, which it reads from memory.

Splits must be put together again. A row of one split is written at once. Otherwise each program leaves its
unnormalised sum, maximum and denominator in scratch memory and takes a ticket; whoever draws the last ticket
adds all parts, always in the order of the splits, whoever came last, so the result is the same bit by bit.
It also puts the ticket counter back to zero for the next layer.

Where a row is cut depends on its own length and on S, the number of rows the graph was captured for, never
on the other rows. A row of length 0 is padding: nothing of it is read and zeros are written.

The query heads that share a kv head are the rows of one matrix product, padded to the tensor cores' 16.

Shapes:  S rows, N query heads, G kv heads, M = N/G query heads per kv head, H head size, P slots, R rows of
         the block tables, B blocks per row, W work items.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from infer.kernels.attention import attend_naive
from infer.kernels.dispatch import jit, next_power_of_two, tl, triton, use_triton

LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the kernel is compiled and launched."""

    block_n: int  # positions per tile
    num_warps: int
    num_stages: int
    programs_per_sm: int


# By the bytes of one head's key. With tiles of 16 KiB and three stages, two of which are being loaded, a
# program holds 64 KiB and three share a multiprocessor: while one is between items, two keep memory busy.
# More wait for their turn: the multiprocessor that is done first takes them.
_CONFIGS = {
    128: DecodeConfig(block_n=64, num_warps=4, num_stages=3, programs_per_sm=6),
    256: DecodeConfig(block_n=64, num_warps=4, num_stages=3, programs_per_sm=6),
    512: DecodeConfig(block_n=32, num_warps=4, num_stages=3, programs_per_sm=6),
    1024: DecodeConfig(block_n=16, num_warps=4, num_stages=3, programs_per_sm=6),
}
_FEW_HEADS, _PROGRAMS_FOR_FEW = 512, 2  # up to so many S * G each program gets an item or two: no turns

# (S * G up to, shortest split): only short splits let few rows fill the machine, but each item waits for its
# table and first keys. Rows too long for `max_splits` of these get splits twice, four times ... as long.
_SPLIT_LENS = ((16, 64), (32, 128), (64, 256), (128, 512), (math.inf, 1024))
_ITEMS_WANTED = 128  # per step and at least: one for nearly each multiprocessor of a large GPU
_INTERPRETED_SMS = 3  # few, so that a program takes several items
_ITEM_INTS = 8  # row of the batch, row of the tables, first position, last position + 1, split, splits, -, -


def attend_decode_reference(
    q_SNH: torch.Tensor, keys_PGH: torch.Tensor, values_PGH: torch.Tensor, tables_RB: torch.Tensor,
    rows_S: torch.Tensor, lens_S: torch.Tensor, *, block_size: int, scale: float, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """The specification: gather the slots of one row after the other and attend to them."""
    out_SNH = torch.zeros_like(q_SNH)
    for index, (row, length) in enumerate(zip(rows_S.tolist(), lens_S.tolist(), strict=True)):
        if length == 0:
            continue
        first = 0 if window is None else max(length - window, 0)
        positions_L = torch.arange(first, length, device=q_SNH.device)
        slots_L = tables_RB[row, positions_L // block_size].long() * block_size + positions_L % block_size
        out_SNH[index] = attend_naive(
            q_SNH[index : index + 1], keys_PGH[slots_L], values_PGH[slots_L], scale=scale, window=None
        )[0]
    return out_SNH


def _jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit`, but compiled once whatever these integers are, be they 1 or multiples of 16."""
    return jit if triton is None else triton.jit(do_not_specialize=list(names))


@_jit_for_any("num_rows", "split_len", "window")
def _plan_kernel(
    rows_ptr,
    lens_ptr,
    items_ptr,
    num_items_ptr,
    num_rows,
    split_len,
    window,
    MAX_SPLITS: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    ITEM_INTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    s = tl.arange(0, BLOCK_S)
    in_batch = s < num_rows
    row = tl.load(rows_ptr + s, mask=in_batch, other=0)
    end = tl.load(lens_ptr + s, mask=in_batch, other=0)
    first = tl.maximum(end - window, 0)

    length = tl.zeros((BLOCK_S,), tl.int32) + split_len
    for _ in tl.static_range(NUM_DOUBLINGS):
        too_many = (end + length - 1) // length - first // length > MAX_SPLITS
        length = tl.where(too_many, length * 2, length)
    first_split = first // length
    num_splits = tl.maximum((end + length - 1) // length - first_split, 1)  # padding: one empty item
    num_splits = tl.where(in_batch, num_splits, 0)
    tl.store(num_items_ptr, tl.sum(num_splits, axis=0))

    is_row = num_splits > 0
    num_whole = tl.where(is_row, num_splits - 1, 0)
    first_whole = tl.cumsum(num_whole, axis=0) - num_whole
    last_item = tl.sum(num_whole, axis=0) + tl.cumsum(is_row.to(tl.int32), axis=0) - 1
    for split in range(tl.max(num_splits, axis=0)):
        item = tl.where(split == num_splits - 1, last_item, first_whole + split)
        to = items_ptr + item * ITEM_INTS
        exists = split < num_splits
        start = (first_split + split) * length
        tl.store(to, s, mask=exists)
        tl.store(to + 1, row, mask=exists)
        tl.store(to + 2, tl.maximum(start, first), mask=exists)
        tl.store(to + 3, tl.minimum(start + length, end), mask=exists)
        tl.store(to + 4, tl.zeros((BLOCK_S,), tl.int32) + split, mask=exists)
        tl.store(to + 5, num_splits, mask=exists)


@jit
def _merge_splits(
    sums_ptr,  # of this row and kv head: [MAX_SPLITS, M, H] with N * H between splits
    maxima_ptr,
    denominators_ptr,
    out_ptr,
    num_splits,
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    MERGE_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    # .cg: what other multiprocessors wrote is in L2; our own L1 must not be asked
    m = tl.arange(0, MERGE_M)
    h = tl.arange(0, BLOCK_H)
    split = tl.arange(0, MAX_SPLITS)
    at = split[:, None] * N + m[None, :]
    exists = (split < num_splits)[:, None] & (m < M)[None, :]
    maxima = tl.load(maxima_ptr + at, mask=exists, other=float("-inf"), cache_modifier=".cg")
    denominators = tl.load(denominators_ptr + at, mask=exists, other=0.0, cache_modifier=".cg")
    maximum = tl.max(maxima, axis=0)
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)  # heads that are padding
    denominator = tl.sum(denominators * tl.exp2(maxima - maximum[None, :]), axis=0)

    total = tl.zeros((MERGE_M, BLOCK_H), tl.float32)
    for first in range(0, num_splits, MERGE_SPLITS):
        split_c = first + tl.arange(0, MERGE_SPLITS)
        at_c = split_c[:, None] * N + m[None, :]
        exists_c = (split_c < num_splits)[:, None] & (m < M)[None, :]
        maxima_c = tl.load(maxima_ptr + at_c, mask=exists_c, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(
            sums_ptr + at_c[:, :, None] * H + h[None, None, :],
            mask=exists_c[:, :, None] & (h < H)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        total += tl.sum(sums * tl.exp2(maxima_c - maximum[None, :])[:, :, None], axis=0)

    out = total / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
    in_heads = (m < M)[:, None] & (h < H)[None, :]
    tl.store(out_ptr + m[:, None] * H + h[None, :], out.to(out_ptr.dtype.element_ty), mask=in_heads)


@jit
def _decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    out_ptr,
    items_ptr,
    num_items_ptr,
    sums_ptr,
    maxima_ptr,
    denominators_ptr,
    tickets_ptr,
    q_row_stride,
    q_head_stride,
    table_stride,
    scale_log2e,
    G: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    MERGE_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ITEM_INTS: tl.constexpr,
):
    N: tl.constexpr = G * M
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    h = tl.arange(0, BLOCK_H)
    in_heads = (m < M)[:, None] & (h < H)[None, :]

    # Neighbouring programs take the kv heads of one split: their keys lie side by side in memory.
    num_work = tl.load(num_items_ptr) * G
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        item_ptr = items_ptr + work // G * ITEM_INTS
        g = work % G
        s = tl.load(item_ptr).to(tl.int64)
        table_ptr = tables_ptr + tl.load(item_ptr + 1).to(tl.int64) * table_stride
        first = tl.load(item_ptr + 2)
        end = tl.load(item_ptr + 3)
        split = tl.load(item_ptr + 4)
        num_splits = tl.load(item_ptr + 5)

        q_at = s * q_row_stride + (g * M + m)[:, None] * q_head_stride + h[None, :]
        q = tl.load(q_ptr + q_at, mask=in_heads, other=0.0)
        maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        denominator = tl.zeros((BLOCK_M,), tl.float32)
        total = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)

        # The blocks of the next tile are looked up one tile ahead: keys need not wait for the table.
        block = tl.load(table_ptr + (first + n) // BLOCK_SIZE, mask=first + n < end, other=0)
        for start in range(first, end, BLOCK_N):  # the first position of a tile is always a real one
            position = start + n
            in_split = position < end
            slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE  # int64: P * G * H passes 2^31
            at = (slot * (G * H) + g * H)[:, None] + h[None, :]
            in_tile = in_split[:, None] & (h < H)[None, :]
            ahead = position + BLOCK_N
            block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)

            k = tl.load(keys_ptr + at, mask=in_tile, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e
            scores = tl.where(in_split[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            rescale = tl.exp2(maximum - new_maximum)
            weights = tl.exp2(scores - new_maximum[:, None])
            denominator = denominator * rescale + tl.sum(weights, axis=1)
            v = tl.load(values_ptr + at, mask=in_tile, other=0.0)
            total = tl.dot(weights.to(v.dtype), v, total * rescale[:, None], input_precision="ieee")
            maximum = new_maximum

        head = s * N + g * M
        if num_splits == 1:
            out = total / tl.where(denominator == 0.0, 1.0, denominator)[:, None]  # 0: padding
            to = out_ptr + head * H + m[:, None] * H + h[None, :]
            tl.store(to, out.to(out_ptr.dtype.element_ty), mask=in_heads)
        else:
            row_head = s * MAX_SPLITS * N + g * M
            part = row_head + split * N
            tl.store(sums_ptr + part * H + m[:, None] * H + h[None, :], total, mask=in_heads)
            tl.store(maxima_ptr + part + m, maximum, mask=m < M)
            tl.store(denominators_ptr + part + m, denominator, mask=m < M)
            tl.debug_barrier()  # every thread has stored before one of them takes the ticket
            ticket_ptr = tickets_ptr + s * G + g
            if tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                tl.store(ticket_ptr, 0)
                _merge_splits(
                    sums_ptr + row_head * H, maxima_ptr + row_head, denominators_ptr + row_head,
                    out_ptr + head * H, num_splits, N, M, H, MAX_SPLITS, MERGE_SPLITS, MERGE_M, BLOCK_H,
                )  # fmt: skip


class DecodeWork:
    """The work list and scratch memory of up to `max_rows` rows; shared by all layers and graphs of a stream.

    `split_len` fixes the length of a split; without it, it is chosen by the number of rows.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_len: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        split_len: int | None = None,
    ) -> None:
        self.max_rows, self.max_len, self.num_kv_heads = max_rows, max_len, num_kv_heads
        self._split_len = split_len
        self._lists: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}
        self._max_items = max(rows * self.max_splits(rows) for rows in range(1, max_rows + 1))
        heads = self._max_items * num_heads
        self.sums = torch.empty(heads * head_dim, dtype=torch.float32, device=device)
        self.maxima = torch.empty(heads, dtype=torch.float32, device=device)
        self.denominators = torch.empty(heads, dtype=torch.float32, device=device)
        self.tickets = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)
        self.num_sms = _INTERPRETED_SMS
        if self.tickets.is_cuda:
            self.num_sms = torch.cuda.get_device_properties(self.tickets.device).multi_processor_count

    def split_len(self, num_rows: int) -> int:
        """Positions in the shortest splits of a batch of this many rows."""
        if self._split_len is not None:
            return self._split_len
        return next(length for limit, length in _SPLIT_LENS if num_rows * self.num_kv_heads <= limit)

    def max_splits(self, num_rows: int) -> int:
        """The most splits a row is cut into: enough to fill the machine with this many rows alone."""
        wanted = next_power_of_two(_ITEMS_WANTED // (num_rows * self.num_kv_heads) or 1)
        possible = next_power_of_two(-(-self.max_len // self.split_len(num_rows)) + 1)  # + 1: a window's edge
        return min(max(wanted, 16), 128, possible)

    def work_list(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The items of the last plan for this window [W, 8], and how many there are [1]."""
        if window not in self._lists:
            items_W8 = torch.zeros(
                (self._max_items, _ITEM_INTS), dtype=torch.int32, device=self.tickets.device
            )
            self._lists[window] = (items_W8, torch.zeros(1, dtype=torch.int32, device=self.tickets.device))
        return self._lists[window]

    def plan(self, rows_S: torch.Tensor, lens_S: torch.Tensor, *, window: int | None = None) -> None:
        """Turn the lengths, which the device alone knows, into the work list of one step and window."""
        num_rows = rows_S.shape[0]
        assert num_rows <= self.max_rows, f"{num_rows} rows, room for {self.max_rows}"
        if num_rows == 0 or not use_triton(lens_S):
            return
        items_W8, num_items = self.work_list(window)
        split_len, max_splits = self.split_len(num_rows), self.max_splits(num_rows)
        num_doublings = (self.max_len // (split_len * max_splits)).bit_length()
        _plan_kernel[(1,)](
            rows_S, lens_S, items_W8, num_items, num_rows, split_len, window or 2**30,
            MAX_SPLITS=max_splits, NUM_DOUBLINGS=num_doublings, ITEM_INTS=_ITEM_INTS,
            BLOCK_S=max(next_power_of_two(num_rows), 16), num_warps=4,
        )  # fmt: skip


def attend_decode(
    q_SNH: torch.Tensor,
    keys_PGH: torch.Tensor,
    values_PGH: torch.Tensor,
    tables_RB: torch.Tensor,
    rows_S: torch.Tensor,
    lens_S: torch.Tensor,
    work: DecodeWork,
    *,
    block_size: int,
    scale: float,
    window: int | None,
    out: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Attend with each row's newest query; `work.plan` must have seen these rows, lengths and window."""
    if not use_triton(q_SNH):
        result = attend_decode_reference(
            q_SNH, keys_PGH, values_PGH, tables_RB, rows_S, lens_S,
            block_size=block_size, scale=scale, window=window,
        )  # fmt: skip
        return result if out is None else out.copy_(result)
    S, N, H = q_SNH.shape
    G = keys_PGH.shape[1]
    assert q_SNH.stride(2) == 1, f"the head dimension must be contiguous, got strides {q_SNH.stride()}"
    assert keys_PGH.is_contiguous() and values_PGH.is_contiguous(), "the store must be contiguous"
    assert block_size & (block_size - 1) == 0, f"block_size must be a power of two, got {block_size}"
    if out is None:
        out = torch.empty((S, N, H), dtype=q_SNH.dtype, device=q_SNH.device)
    if S == 0:
        return out
    block_h, merge_m = max(next_power_of_two(H), 16), next_power_of_two(N // G)
    if config is None:
        config = _CONFIGS[min(max(block_h * keys_PGH.element_size(), 128), 1024)]
        config = replace(config, programs_per_sm=_PROGRAMS_FOR_FEW) if S * G <= _FEW_HEADS else config
    max_splits = work.max_splits(S)
    items_W8, num_items = work.work_list(window)
    _decode_kernel[(min(work.num_sms * config.programs_per_sm, S * max_splits * G),)](
        q_SNH, keys_PGH, values_PGH, tables_RB, out, items_W8, num_items,
        work.sums, work.maxima, work.denominators, work.tickets,
        q_SNH.stride(0), q_SNH.stride(1), tables_RB.stride(0), scale * LOG2E,
        G=G, M=N // G, H=H, BLOCK_SIZE=block_size, MAX_SPLITS=max_splits,
        MERGE_SPLITS=min(max_splits, max(8192 // (merge_m * block_h), 1)), MERGE_M=merge_m,  # 64 registers
        BLOCK_M=max(merge_m, 16), BLOCK_N=config.block_n, BLOCK_H=block_h, ITEM_INTS=_ITEM_INTS,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
