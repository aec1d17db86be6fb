"""The Triton kernel behind `decode.py`, in two forms; `attention/decode_parts.py` has its pieces.

At small batches decoding is a chain of waits, one memory access after the other:

    item of work ─► block table ─► keys and queries ─► values ─► part ─► ticket ─► parts ─► out

What stands left of the keys was written at the start of the step. The first item and its blocks are therefore
read while the kernel before still runs (programmatic dependent launch, see `dispatch.py`), and those of the
item after it while this one is computed. The keys and values of all positions but the newest are older still:
of few rows, the first of them are brought to L2 meanwhile. Parts that fit the registers are read all at once.

PROJECTED is the form for steps in which every token is a row that decodes. It is given the fused projection
and does what `heads.py` does, too: each program norms and rotates the query heads of its item, and the one
with the row's last split the new key. That key and its value go to the cache and into the softmax, but
nobody reads them back, so all that is read from the cache is older than the step. The
first tile of keys and values is therefore not brought to L2 but all the way, before the wait. What is left
behind it:

    queries, key and value of the newest token ─► part ─► ticket ─► parts ─► out

Shapes:  S rows, N query heads, G kv heads, M = N/G query heads per kv head, H head size.
"""

from __future__ import annotations

from infer.kernels.attention.decode_parts import (
    attend_tile,
    attend_tiles,
    finish_item,
    load_tile,
    load_transform,
    newest_block,
    prefetch_item,
    read_item,
    start_projected,
)
from infer.kernels.runtime.dispatch import jit, tl


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
    q_weight_ptr,  # from here to `offset`: for PROJECTED alone
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    offset,
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
    PROJECTED: tl.constexpr,  # the queries are those of a fused projection, and its keys and values are new
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    h = tl.arange(0, BLOCK_H)

    # Neighbouring programs take the kv heads of one split: their keys lie side by side in memory.
    num_programs = tl.num_programs(0)
    own = tl.program_id(0)
    num_work = tl.load(num_items_ptr) * G
    s, row, first, end, split, num_splits, length = read_item(items_ptr, own // G, True, ITEM_INTS, PROJECTED)
    end = tl.where(own < num_work, end, 0)  # past the list there is memory, but no item
    length = tl.where(own < num_work, length, 0)
    table_ptr = tables_ptr + row * table_stride
    block = tl.load(table_ptr + (first + n) // BLOCK_SIZE, mask=first + n < end, other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PROJECTED:
        new_block = newest_block(table_ptr, length, BLOCK_SIZE)
        k, v = load_tile(keys_ptr, values_ptr, block, first + n, end, own % G, h, G, H, BLOCK_SIZE)
        cos, sin, q_gain, q_partner_gain, k_gain, k_partner_gain = load_transform(
            q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, length, m, h, M, H, HAS_NORM
        )
        ahead = first + BLOCK_N + n
        block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
    if PDL:
        if PREFETCH_N > 0:
            prefetch_item(
                keys_ptr, values_ptr, table_ptr, first + BLOCK_N if PROJECTED else first, end, own % G,
                G, H, BLOCK_SIZE, BLOCK_H, PREFETCH_N, LINE,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()

    begin = own
    if PROJECTED:  # the first item stands by itself: few programs have another, and no register waits for it
        if own < num_work:
            g = own % G
            q, maximum, denominator, total = start_projected(
                q_ptr + s * q_row_stride, keys_ptr, values_ptr, new_block, g, split == num_splits - 1, length,
                cos, sin, q_gain, q_partner_gain, k_gain, k_partner_gain,
                m, h, eps, offset, scale_log2e, G, M, H, BLOCK_SIZE, HAS_NORM,
            )  # fmt: skip
            maximum, denominator, total = attend_tile(
                q, k, v, first + n < end, maximum, denominator, total, scale_log2e
            )
            if first + BLOCK_N < end:
                maximum, denominator, total = attend_tiles(
                    q, keys_ptr, values_ptr, table_ptr, block, first + BLOCK_N, end, g, h,
                    maximum, denominator, total, scale_log2e, G, H, BLOCK_SIZE, BLOCK_N,
                )  # fmt: skip
            finish_item(
                out_ptr, sums_ptr, maxima_ptr, denominators_ptr, tickets_ptr, s, g, split, num_splits,
                maximum, denominator, total, m, h, G, M, H, MAX_SPLITS, MERGE_SPLITS, MERGE_M, BLOCK_H,
            )  # fmt: skip
        begin = own + num_programs
        s, row, first, end, split, num_splits, length = read_item(
            items_ptr, begin // G, begin < num_work, ITEM_INTS, PROJECTED
        )
        table_ptr = tables_ptr + row * table_stride
        block = tl.load(table_ptr + (first + n) // BLOCK_SIZE, mask=first + n < end, other=0)
        new_block = newest_block(table_ptr, length, BLOCK_SIZE)

    for work in range(begin, num_work, num_programs):
        g = work % G
        if PROJECTED:
            cos, sin, q_gain, q_partner_gain, k_gain, k_partner_gain = load_transform(
                q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, length, m, h, M, H, HAS_NORM
            )
            q, maximum, denominator, total = start_projected(
                q_ptr + s * q_row_stride, keys_ptr, values_ptr, new_block, g, split == num_splits - 1, length,
                cos, sin, q_gain, q_partner_gain, k_gain, k_partner_gain,
                m, h, eps, offset, scale_log2e, G, M, H, BLOCK_SIZE, HAS_NORM,
            )  # fmt: skip
        else:
            q_at = s * q_row_stride + (g * M + m)[:, None] * q_head_stride + h[None, :]
            q = tl.load(q_ptr + q_at, mask=(m < M)[:, None] & (h < H)[None, :], other=0.0)
            maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            denominator = tl.zeros((BLOCK_M,), tl.float32)
            total = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
        after = work + num_programs
        next_s, next_row, next_first, next_end, next_split, next_num_splits, next_length = read_item(
            items_ptr, after // G, after < num_work, ITEM_INTS, PROJECTED
        )
        maximum, denominator, total = attend_tiles(
            q, keys_ptr, values_ptr, table_ptr, block, first, end, g, h,
            maximum, denominator, total, scale_log2e, G, H, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
        table_ptr = tables_ptr + next_row * table_stride
        next_position = next_first + n
        block = tl.load(table_ptr + next_position // BLOCK_SIZE, mask=next_position < next_end, other=0)
        if PROJECTED:
            new_block = newest_block(table_ptr, next_length, BLOCK_SIZE)
        finish_item(
            out_ptr, sums_ptr, maxima_ptr, denominators_ptr, tickets_ptr, s, g, split, num_splits,
            maximum, denominator, total, m, h, G, M, H, MAX_SPLITS, MERGE_SPLITS, MERGE_M, BLOCK_H,
        )  # fmt: skip
        s, split, num_splits = next_s, next_split, next_num_splits
        first, end, length = next_first, next_end, next_length
