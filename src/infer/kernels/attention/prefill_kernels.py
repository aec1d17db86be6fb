"""The Triton kernels behind `prefill.py`: one attends, one puts together what was split.

One program takes one tile of queries and walks over all keys that the tile sees. Many tiles fill the machine;
few do not: 128 tokens behind a prompt of 8,000 that was found in the cache are 16 programs for the 132
multiprocessors of an H200, and each walks alone. Then the keys of a tile are cut into *splits*, as many as
there is room for, and a (tile, split) is one item of work for each kv head:

    room for 5 items     tile 0, 900 keys    |=== 300 ===|=== 300 ===|=== 300 ===|     item 0, 1, 2
                         tile 1, 560 keys    |=== 280 ===|=== 280 ===|                 item 3, 4
                         tile 2, empty                                                 none

How long tiles are, and how many of them are empty, is known to the device alone: the graph that launches this
was captured before. So every program plans the whole list for itself, from the few tiles there are, and finds
its own item in it. The longest split decides when all are done, hence the plan: the shortest length with
which all items find room. It lies between two bounds, for  keys / length  items would do if nothing were
rounded up, and rounding adds less than one item per tile:

    all keys / room   <=   length   <=   all keys / (room - tiles)

Sixteen lengths between the two are tried at once. A tile is cut evenly, at whole tiles of keys, so that the
three ranges of keys (see `prefill.py`) begin and end where they would without splits.

An item of a split tile leaves its unnormalised sum, maximum and denominator in scratch memory; a second
launch adds them in the order of the splits. Not the program that comes last, as in decoding: the parts of a
tile are 64 KiB each, and one multiprocessor would have a megabyte of them to read. The second launch
spreads the rows of all tiles over the machine, and has started by the time the first one ends (PDL, see
`dispatch.py`). No counters, and the bits do not depend on who was faster.

Shapes:  W tiles, G kv heads, M query heads per kv head, H head size.
"""

from __future__ import annotations

from infer.kernels.runtime.dispatch import jit, jit_for_any, tl


@jit
def _plan_splits(
    tiles_ptr, num_tiles, window, max_items, SPLIT_LEN, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Into how many splits each tile is cut; an empty tile has none. Lengths are counted in tiles of keys."""
    w = tl.arange(0, BLOCK_W)
    num = tl.load(tiles_ptr + w * 4 + 1, mask=w < num_tiles, other=0)
    start = tl.load(tiles_ptr + w * 4 + 3, mask=w < num_tiles, other=0)
    keys = tl.where(num > 0, num + tl.minimum(start, window - 1), 0)
    length = (keys + BLOCK_N - 1) // BLOCK_N
    total = tl.sum(length, axis=0)
    num_spare = max_items - tl.sum((num > 0).to(tl.int32), axis=0)

    shortest = tl.maximum((total + max_items - 1) // max_items, SPLIT_LEN // BLOCK_N)
    longest = tl.where(num_spare > 0, (total + num_spare - 1) // tl.maximum(num_spare, 1), total)
    longest = tl.maximum(longest, shortest)
    tried = shortest + (longest - shortest) * tl.arange(0, 16) // 15
    num_items = tl.sum((length[:, None] + tried[None, :] - 1) // tried[None, :], axis=0)
    split_len = tl.min(tl.where(num_items <= max_items, tried, longest), axis=0)
    return (length + split_len - 1) // split_len


@jit
def _attend_keys(
    q,
    total,
    maximum,
    denominator,
    token_position,
    lo,
    hi,
    keys_ptr,  # of kv head g
    values_ptr,
    table_ptr,  # of this row
    window,
    scale_log2e,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    h = tl.arange(0, BLOCK_H)
    n = tl.arange(0, BLOCK_N)
    # The blocks of the next tile are looked up one tile ahead: keys need not wait for the table.
    block = tl.load(table_ptr + (lo + n) // BLOCK_SIZE, mask=lo + n < hi, other=0)
    for start in range(lo, hi, BLOCK_N):
        position = start + n
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE  # int64: P * G * H passes 2^31
        at = (slot * SLOT_STRIDE)[:, None] + h[None, :]
        ahead = position + BLOCK_N
        block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < hi, other=0)
        if MASKED:
            in_tile = (position < hi)[:, None] & (h < H)[None, :]
            k = tl.load(keys_ptr + at, mask=in_tile, other=0.0)
        elif H == BLOCK_H:
            k = tl.load(keys_ptr + at)
        else:
            k = tl.load(keys_ptr + at, mask=(h < H)[None, :], other=0.0)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = position[None, :] <= token_position[:, None]
            if WINDOWED:
                seen = seen & (position[None, :] > token_position[:, None] - window)
            scores = tl.where(seen & (position < hi)[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * scale_log2e)
        # a token behind a window may have seen nothing so far, and exp2(-inf - -inf) is not a number
        subtracted = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores * scale_log2e - subtracted[:, None])
        rescale = tl.exp2(maximum - subtracted)
        denominator = denominator * rescale + tl.sum(weights, axis=1)
        total = total * rescale[:, None]

        if MASKED:
            v = tl.load(values_ptr + at, mask=(position < hi)[:, None] & (h < H)[None, :], other=0.0)
        elif H == BLOCK_H:
            v = tl.load(values_ptr + at)
        else:
            v = tl.load(values_ptr + at, mask=(h < H)[None, :], other=0.0)
        total = tl.dot(weights.to(v.dtype), v, total, input_precision="ieee")
        maximum = new_maximum
    return total, maximum, denominator


@jit_for_any("num_tiles", "max_items")
def prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    tiles_ptr,
    out_ptr,
    sums_ptr,  # [programs, BLOCK_M, H] of the parts, and the same without H; read where SPLIT
    maxima_ptr,
    denominators_ptr,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    table_stride,
    window,
    scale_log2e,
    num_tiles,
    max_items,
    SPLIT: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    WINDOWED: tl.constexpr,
    INVARIANT: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    item = tl.program_id(0) // (G * NUM_PARTS)
    g = tl.program_id(0) // NUM_PARTS % G
    first_row = tl.program_id(0) % NUM_PARTS * BLOCK_M
    if SPLIT:
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        w = tl.arange(0, BLOCK_W)
        splits = _plan_splits(tiles_ptr, num_tiles, window, max_items, SPLIT_LEN, BLOCK_N, BLOCK_W)
        tile = tl.sum((tl.cumsum(splits, axis=0) <= item).to(tl.int32), axis=0)
        num_splits = tl.sum(tl.where(w == tile, splits, 0), axis=0)
        split = item - tl.sum(tl.where(w < tile, splits, 0), axis=0)
        num = tl.load(tiles_ptr + tile * 4 + 1, mask=num_splits > 0, other=0)  # 0: more programs than items
        tile_ptr = tiles_ptr + tile * 4
    else:
        tile_ptr = tiles_ptr + item * 4
        num = tl.load(tile_ptr + 1)
    if first_row < num * M:
        first = tl.load(tile_ptr).to(tl.int64)
        table_ptr = tables_ptr + tl.load(tile_ptr + 2).to(tl.int64) * table_stride
        start = tl.load(tile_ptr + 3)
        end = start + num
        keys_ptr += g * H
        values_ptr += g * H

        r = first_row + tl.arange(0, BLOCK_M)
        h = tl.arange(0, BLOCK_H)
        token = r // M
        head = g * M + r % M
        in_rows = (token < num)[:, None] & (h < H)[None, :]
        q_at = (first + token)[:, None] * q_token_stride + head[:, None] * q_head_stride + h[None, :]
        q = tl.load(q_ptr + q_at, mask=in_rows, other=0.0)
        position = start + token

        total = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
        maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        denominator = tl.zeros((BLOCK_M,), tl.float32)
        lowest = 0
        edge_end = 0
        if WINDOWED:
            lowest = tl.maximum(start - window + 1, 0)
            edge_end = lowest + (tl.maximum(end - window - lowest, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        split_end = end
        if SPLIT:
            num_blocks = (end - lowest + BLOCK_N - 1) // BLOCK_N
            split_end = tl.minimum(lowest + num_blocks * (split + 1) // num_splits * BLOCK_N, end)
            lowest += num_blocks * split // num_splits * BLOCK_N
        if INVARIANT:
            seen_by_all = 0
            if WINDOWED:
                seen_by_all = lowest // BLOCK_N * BLOCK_N
        elif WINDOWED:
            total, maximum, denominator = _attend_keys(
                q, total, maximum, denominator, position, lowest, tl.minimum(edge_end, split_end),
                keys_ptr, values_ptr, table_ptr, window, scale_log2e,
                True, True, G * H, H, BLOCK_SIZE, BLOCK_N, BLOCK_H,
            )  # fmt: skip
        if not INVARIANT:
            seen_by_all = edge_end + tl.maximum(start + 1 - edge_end, 0) // BLOCK_N * BLOCK_N
            seen_end = seen_by_all
            if SPLIT:
                edge_end = tl.maximum(edge_end, lowest)
                seen_end = tl.minimum(seen_by_all, split_end)
                seen_by_all = tl.maximum(seen_by_all, lowest)
            total, maximum, denominator = _attend_keys(
                q, total, maximum, denominator, position, edge_end, seen_end,
                keys_ptr, values_ptr, table_ptr, window, scale_log2e,
                False, WINDOWED, G * H, H, BLOCK_SIZE, BLOCK_N, BLOCK_H,
            )  # fmt: skip
        total, maximum, denominator = _attend_keys(
            q, total, maximum, denominator, position, seen_by_all, split_end,
            keys_ptr, values_ptr, table_ptr, window, scale_log2e,
            True, WINDOWED, G * H, H, BLOCK_SIZE, BLOCK_N, BLOCK_H,
        )  # fmt: skip

        is_whole = True
        if SPLIT:
            is_whole = num_splits == 1
        if is_whole:
            out = total / tl.where(denominator == 0.0, 1.0, denominator)[:, None]  # 0: a row without a token
            to = (first + token)[:, None] * out_token_stride + head[:, None] * H + h[None, :]
            tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=in_rows)
        else:
            part = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(sums_ptr + part.to(tl.int64)[:, None] * H + h[None, :], total, mask=in_rows)
            tl.store(maxima_ptr + part, maximum, mask=token < num)
            tl.store(denominators_ptr + part, denominator, mask=token < num)


@jit_for_any("num_tiles", "max_items")
def merge_kernel(
    tiles_ptr,
    sums_ptr,
    maxima_ptr,
    denominators_ptr,
    out_ptr,
    out_token_stride,
    window,
    num_tiles,
    max_items,
    SPLIT_LEN: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a part
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr,  # the most splits of a tile
    BLOCK_R: tl.constexpr,  # rows that are merged at once
    AT_ONCE: tl.constexpr,  # parts that are asked for before the first has come
    PDL: tl.constexpr,
):
    w = tl.arange(0, BLOCK_W)
    h = tl.arange(0, BLOCK_H)
    splits = _plan_splits(tiles_ptr, num_tiles, window, max_items, SPLIT_LEN, BLOCK_N, BLOCK_W)
    rank = tl.cumsum((splits > 1).to(tl.int32), axis=0)  # of a tile among those that are split, from 1
    slices: tl.constexpr = G * NUM_PARTS * BLOCK_M // BLOCK_R  # of the rows of a tile, for all kv heads
    num_slices = tl.max(rank, axis=0) * slices
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    for index in range(tl.program_id(0), num_slices, tl.num_programs(0)):
        tile = tl.sum((rank <= index // slices).to(tl.int32), axis=0)
        first_item = tl.sum(tl.where(w < tile, splits, 0), axis=0)
        num_splits = tl.sum(tl.where(w == tile, splits, 0), axis=0)
        first = tl.load(tiles_ptr + tile * 4).to(tl.int64)
        num = tl.load(tiles_ptr + tile * 4 + 1)
        g = index % G
        first_row = index % slices // G * BLOCK_R
        r = first_row + tl.arange(0, BLOCK_R)
        token = r // M
        if first_row < num * M:
            # .cg: this program may have started before the parts were written; L1 must not be asked
            split = tl.arange(0, BLOCK_S)
            exists = (split < num_splits)[:, None] & (token < num)[None, :]
            program = ((first_item + split) * G + g) * NUM_PARTS
            part = (program[:, None] + (r // BLOCK_M)[None, :]) * BLOCK_M + (r % BLOCK_M)[None, :]
            maxima = tl.load(maxima_ptr + part, mask=exists, other=float("-inf"), cache_modifier=".cg")
            denominators = tl.load(denominators_ptr + part, mask=exists, other=0.0, cache_modifier=".cg")
            maximum = tl.max(maxima, axis=0)
            # a token sees nothing of the splits before its window, nor of those after itself
            maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
            denominator = tl.sum(denominators * tl.exp2(maxima - maximum[None, :]), axis=0)

            total = tl.zeros((BLOCK_R, BLOCK_H), tl.float32)
            own = (
                g * NUM_PARTS + r // BLOCK_M
            ) * BLOCK_M + r % BLOCK_M  # of the rows, in the parts of a split
            for first_split in range(0, num_splits, AT_ONCE):
                for offset in tl.static_range(AT_ONCE):  # several parts are under way at a time
                    in_part = token < tl.where(first_split + offset < num_splits, num, 0)
                    at = (first_item + first_split + offset) * (G * NUM_PARTS * BLOCK_M) + own
                    own_maximum = tl.load(
                        maxima_ptr + at, mask=in_part, other=float("-inf"), cache_modifier=".cg"
                    )
                    sums = tl.load(
                        sums_ptr + at.to(tl.int64)[:, None] * H + h[None, :],
                        mask=in_part[:, None] & (h < H)[None, :], other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
                    total += sums * tl.exp2(own_maximum - maximum)[:, None]

            out = total / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
            to = (first + token)[:, None] * out_token_stride + (g * M + r % M)[:, None] * H + h[None, :]
            in_rows = (token < num)[:, None] & (h < H)[None, :]
            tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=in_rows)
