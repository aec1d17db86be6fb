"""The two Triton kernels behind `attention_decode.py`: one writes the work list, one works it off.

At small batches the decode kernel is a chain of waits, one memory access after the other:

    item of work ─► block table ─► keys and queries ─► values ─► part ─► ticket ─► parts ─► out

What stands left of the keys was written at the start of the step. The first item and its blocks are therefore
read while the kernel before still runs (programmatic dependent launch, see `dispatch.py`), and those of the
item after it while this one is computed. The keys and values of all positions but the newest are older still:
of few rows, the first of them are brought to L2 meanwhile. Parts that fit the registers are read all at once.

Shapes:  S rows, N query heads, G kv heads, M = N/G query heads per kv head, H head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infer.kernels.dispatch import jit, tl, triton
from infer.kernels.linear_kernels import _prefetch_rows


def _jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit`, but compiled once whatever these integers are, be they 1 or multiples of 16."""
    return jit if triton is None else triton.jit(do_not_specialize=list(names))


@_jit_for_any("num_rows", "split_len", "window")
def plan_kernel(
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
def _load_sums(sums_ptr, at, exists, h, H: tl.constexpr):
    """The unnormalised sums of some splits: [splits, M, H]."""
    in_sums = exists[:, :, None] & (h < H)[None, None, :]
    return tl.load(
        sums_ptr + at[:, :, None] * H + h[None, None, :], mask=in_sums, other=0.0, cache_modifier=".cg"
    )


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
    if MAX_SPLITS <= MERGE_SPLITS:  # asked for with the maxima, not after them
        sums = _load_sums(sums_ptr, at, exists, h, H)
    maximum = tl.max(maxima, axis=0)
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)  # heads that are padding
    denominator = tl.sum(denominators * tl.exp2(maxima - maximum[None, :]), axis=0)

    if MAX_SPLITS <= MERGE_SPLITS:
        total = tl.sum(sums * tl.exp2(maxima - maximum[None, :])[:, :, None], axis=0)
    else:
        total = tl.zeros((MERGE_M, BLOCK_H), tl.float32)
        for first in range(0, num_splits, MERGE_SPLITS):
            split_c = first + tl.arange(0, MERGE_SPLITS)
            at_c = split_c[:, None] * N + m[None, :]
            exists_c = (split_c < num_splits)[:, None] & (m < M)[None, :]
            maxima_c = tl.load(maxima_ptr + at_c, mask=exists_c, other=float("-inf"), cache_modifier=".cg")
            sums_c = _load_sums(sums_ptr, at_c, exists_c, h, H)
            total += tl.sum(sums_c * tl.exp2(maxima_c - maximum[None, :])[:, :, None], axis=0)

    out = total / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
    in_heads = (m < M)[:, None] & (h < H)[None, :]
    tl.store(out_ptr + m[:, None] * H + h[None, :], out.to(out_ptr.dtype.element_ty), mask=in_heads)


@jit
def _read_item(items_ptr, index, exists, ITEM_INTS: tl.constexpr):
    """The six numbers of a work item; all zero where there is none: an item without positions."""
    item_ptr = items_ptr + index * ITEM_INTS
    s = tl.load(item_ptr, mask=exists, other=0).to(tl.int64)
    row = tl.load(item_ptr + 1, mask=exists, other=0).to(tl.int64)
    first = tl.load(item_ptr + 2, mask=exists, other=0)
    end = tl.load(item_ptr + 3, mask=exists, other=0)
    split = tl.load(item_ptr + 4, mask=exists, other=0)
    num_splits = tl.load(item_ptr + 5, mask=exists, other=0)
    return s, row, first, end, split, num_splits


@jit
def _prefetch_item(
    keys_ptr,
    values_ptr,
    table_ptr,
    first,
    end,
    g,
    G: tl.constexpr,
    H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PREFETCH_N: tl.constexpr,
    LINE: tl.constexpr,
):
    """Ask for the first keys and values of an item to come to L2, where a later write finds them.

    Past its end the last position is asked for again, for an item without any the first slot of the store.
    """
    position = tl.maximum(tl.minimum(first + tl.arange(0, PREFETCH_N), end - 1), 0)
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=position < end, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + tl.where(position < end, position % BLOCK_SIZE, 0)
    lines = tl.minimum(tl.arange(0, BLOCK_H // LINE) * LINE, H - 1)
    at = (slot * (G * H) + g * H)[:, None] + lines[None, :]
    _prefetch_rows(keys_ptr + at)
    _prefetch_rows(values_ptr + at)


@jit
def decode_kernel(
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
    PREFETCH_N: tl.constexpr,  # positions of the first item
    LINE: tl.constexpr,  # elements of a cache line
    PDL: tl.constexpr,
):
    N: tl.constexpr = G * M
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    h = tl.arange(0, BLOCK_H)
    in_heads = (m < M)[:, None] & (h < H)[None, :]

    # Neighbouring programs take the kv heads of one split: their keys lie side by side in memory.
    num_programs = tl.num_programs(0)
    own = tl.program_id(0)
    num_work = tl.load(num_items_ptr) * G
    s, row, first, end, split, num_splits = _read_item(items_ptr, own // G, True, ITEM_INTS)
    end = tl.where(own < num_work, end, 0)  # past the list there is memory, but no item
    table_ptr = tables_ptr + row * table_stride
    block = tl.load(table_ptr + (first + n) // BLOCK_SIZE, mask=first + n < end, other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH_N > 0:
            _prefetch_item(
                keys_ptr, values_ptr, table_ptr, first, end, own % G,
                G, H, BLOCK_SIZE, BLOCK_H, PREFETCH_N, LINE,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()

    for work in range(own, num_work, num_programs):
        g = work % G
        q_at = s * q_row_stride + (g * M + m)[:, None] * q_head_stride + h[None, :]
        q = tl.load(q_ptr + q_at, mask=in_heads, other=0.0)
        after = work + num_programs
        next_s, next_row, next_first, next_end, next_split, next_num_splits = _read_item(
            items_ptr, after // G, after < num_work, ITEM_INTS
        )
        maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        denominator = tl.zeros((BLOCK_M,), tl.float32)
        total = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)

        # The blocks of the next tile are looked up one tile ahead: keys need not wait for the table.
        for start in range(first, end, BLOCK_N):  # the first position of a tile is always a real one
            position = start + n
            in_split = position < end
            slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE  # int64: P * G * H passes 2^31
            at = (slot * (G * H) + g * H)[:, None] + h[None, :]
            in_tile = in_split[:, None] & (h < H)[None, :]
            ahead = position + BLOCK_N
            block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)

            k = tl.load(keys_ptr + at, mask=in_tile, other=0.0)
            v = tl.load(values_ptr + at, mask=in_tile, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e
            scores = tl.where(in_split[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            rescale = tl.exp2(maximum - new_maximum)
            weights = tl.exp2(scores - new_maximum[:, None])
            denominator = denominator * rescale + tl.sum(weights, axis=1)
            total = tl.dot(weights.to(v.dtype), v, total * rescale[:, None], input_precision="ieee")
            maximum = new_maximum

        table_ptr = tables_ptr + next_row * table_stride
        next_position = next_first + n
        block = tl.load(table_ptr + next_position // BLOCK_SIZE, mask=next_position < next_end, other=0)

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
        s, split, num_splits = next_s, next_split, next_num_splits
        first, end = next_first, next_end
