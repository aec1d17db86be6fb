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

from infer.kernels.dispatch import jit, tl
from infer.kernels.heads import angles_of, inverse_rms, partner_of, scaled, turned
from infer.kernels.linear_kernels import _prefetch_rows


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
def _read_item(items_ptr, index, exists, ITEM_INTS: tl.constexpr, PROJECTED: tl.constexpr):
    """The seven numbers of a work item; all zero where there is none: an item without positions."""
    item_ptr = items_ptr + index * ITEM_INTS
    s = tl.load(item_ptr, mask=exists, other=0).to(tl.int64)
    row = tl.load(item_ptr + 1, mask=exists, other=0).to(tl.int64)
    first = tl.load(item_ptr + 2, mask=exists, other=0)
    end = tl.load(item_ptr + 3, mask=exists, other=0)
    split = tl.load(item_ptr + 4, mask=exists, other=0)
    num_splits = tl.load(item_ptr + 5, mask=exists, other=0)
    length = tl.load(item_ptr + 6, mask=exists, other=0)
    if PROJECTED:
        end = tl.minimum(end, length - 1)  # the newest position is not in the cache yet
    return s, row, first, end, split, num_splits, length


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
def _prefetch_transform(
    q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, length, h, H: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Ask for what an item needs beside the projection itself: small, but it may be in no cache."""
    R: tl.constexpr = H // 2
    angle = tl.maximum(length - 1, 0).to(tl.int64) * R + tl.minimum(h, R - 1)
    _prefetch_rows(cos_ptr + angle)
    _prefetch_rows(sin_ptr + angle)
    if HAS_NORM:
        _prefetch_rows(q_weight_ptr + tl.minimum(h, H - 1))
        _prefetch_rows(k_weight_ptr + tl.minimum(h, H - 1))


@jit
def _load_pairs(head_ptrs, in_heads, h, R: tl.constexpr):
    """The elements of some heads and, in the same places, their partners in the rotation."""
    x = tl.load(head_ptrs + h[None, :], mask=in_heads, other=0.0)
    partner = tl.load(head_ptrs + partner_of(h, R)[None, :], mask=in_heads, other=0.0)
    return x, partner


@jit
def _transform(
    x_raw, partner_raw, gain, partner_gain, cos, sin, h, eps, offset, H: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Norm and rotate heads as `heads.py` does it."""
    x, partner = x_raw.to(tl.float32), partner_raw.to(tl.float32)
    if HAS_NORM:
        inv_rms = inverse_rms(x, H, eps)
        x = scaled(x, inv_rms, gain.to(tl.float32) + offset, x_raw.dtype)
        partner = scaled(partner, inv_rms, partner_gain.to(tl.float32) + offset, x_raw.dtype)
    return turned(x, partner, cos, sin, h, H // 2).to(x_raw.dtype)


@jit
def _load_tile(
    keys_ptr,
    values_ptr,
    block,
    position,
    end,
    g,
    h,
    G: tl.constexpr,
    H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The keys and values of one kv head at some positions: [BLOCK_N, BLOCK_H] each."""
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE  # int64: P * G * H passes 2^31
    at = (slot * (G * H) + g * H)[:, None] + h[None, :]
    in_tile = (position < end)[:, None] & (h < H)[None, :]
    k = tl.load(keys_ptr + at, mask=in_tile, other=0.0)
    v = tl.load(values_ptr + at, mask=in_tile, other=0.0)
    return k, v


@jit
def _attend_tile(q, k, v, in_split, maximum, denominator, total, scale_log2e):
    """Add a tile to the running softmax."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e
    scores = tl.where(in_split[None, :], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    rescale = tl.exp2(maximum - new_maximum)
    weights = tl.exp2(scores - new_maximum[:, None])
    denominator = denominator * rescale + tl.sum(weights, axis=1)
    total = tl.dot(weights.to(v.dtype), v, total * rescale[:, None], input_precision="ieee")
    return new_maximum, denominator, total


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
    AHEAD: tl.constexpr,  # the first tile of an item is read before the item; only if PROJECTED
    PDL: tl.constexpr,
):
    N: tl.constexpr = G * M
    R: tl.constexpr = H // 2
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    h = tl.arange(0, BLOCK_H)
    in_heads = (m < M)[:, None] & (h < H)[None, :]

    # Neighbouring programs take the kv heads of one split: their keys lie side by side in memory.
    num_programs = tl.num_programs(0)
    own = tl.program_id(0)
    num_work = tl.load(num_items_ptr) * G
    s, row, first, end, split, num_splits, length = _read_item(
        items_ptr, own // G, True, ITEM_INTS, PROJECTED
    )
    end = tl.where(own < num_work, end, 0)  # past the list there is memory, but no item
    length = tl.where(own < num_work, length, 0)
    table_ptr = tables_ptr + row * table_stride
    block = tl.load(table_ptr + (first + n) // BLOCK_SIZE, mask=first + n < end, other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if AHEAD:
        k, v = _load_tile(keys_ptr, values_ptr, block, first + n, end, own % G, h, G, H, BLOCK_SIZE)
        ahead = first + BLOCK_N + n
        block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
    if PDL:
        if PROJECTED:
            _prefetch_transform(q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, length, h, H, HAS_NORM)
        if PREFETCH_N > 0:
            _prefetch_item(
                keys_ptr, values_ptr, table_ptr, first + BLOCK_N if AHEAD else first, end, own % G,
                G, H, BLOCK_SIZE, BLOCK_H, PREFETCH_N, LINE,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()

    for work in range(own, num_work, num_programs):
        g = work % G
        if PROJECTED:
            # The newest key and value are in no cache yet: the softmax starts with them. The threads of each
            # query head have a copy of the key to themselves, so that nothing is exchanged; and all loads
            # stand before all arithmetic, so that there is one wait and not several.
            newest = tl.maximum(length - 1, 0)
            has_newest = (split == num_splits - 1) & (length > 0)
            in_newest = (m < tl.where(has_newest, M, 0))[:, None] & (h < H)[None, :]
            same = tl.zeros((BLOCK_M,), tl.int32)[:, None]
            token_ptr = q_ptr + s * q_row_stride
            q_raw, q_partner = _load_pairs(token_ptr + (g * M + m)[:, None] * H, in_heads, h, R)
            k_raw, k_partner = _load_pairs(token_ptr + (N + g) * H + same, in_newest, h, R)
            v_new = tl.load(token_ptr + (N + G + g) * H + same + h[None, :], mask=in_newest, other=0.0)
            q_gain, q_partner_gain, k_gain, k_partner_gain = q_raw, q_raw, k_raw, k_raw
            if HAS_NORM:
                q_gain, q_partner_gain = _load_pairs(q_weight_ptr + same, in_heads, h, R)
                k_gain, k_partner_gain = _load_pairs(k_weight_ptr + same, in_newest, h, R)
            cos, sin = angles_of(cos_ptr, sin_ptr, newest, same + h[None, :], R, in_heads)
            new_block = tl.load(table_ptr + newest // BLOCK_SIZE, mask=has_newest, other=0).to(tl.int64)

            q = _transform(q_raw, q_partner, q_gain, q_partner_gain, cos, sin, h, eps, offset, H, HAS_NORM)
            k_new = _transform(
                k_raw, k_partner, k_gain, k_partner_gain, cos, sin, h, eps, offset, H, HAS_NORM
            )
            slot = new_block * BLOCK_SIZE + newest % BLOCK_SIZE
            place = (slot * G + g) * H + same + h[None, :]
            tl.store(keys_ptr + place, k_new, mask=in_newest & (m == 0)[:, None])
            tl.store(values_ptr + place, v_new, mask=in_newest & (m == 0)[:, None])
            score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1) * scale_log2e
            # padding has no positions at all: 0 and not -inf, for -inf - -inf is not a number
            maximum = tl.where(has_newest, score, tl.where(length > 0, float("-inf"), 0.0))
            denominator = tl.zeros((BLOCK_M,), tl.float32) + has_newest.to(tl.float32)
            total = v_new.to(tl.float32)
        else:
            q_at = s * q_row_stride + (g * M + m)[:, None] * q_head_stride + h[None, :]
            q = tl.load(q_ptr + q_at, mask=in_heads, other=0.0)
            maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            denominator = tl.zeros((BLOCK_M,), tl.float32)
            total = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
        after = work + num_programs
        next_s, next_row, next_first, next_end, next_split, next_num_splits, next_length = _read_item(
            items_ptr, after // G, after < num_work, ITEM_INTS, PROJECTED
        )
        first_left = first
        if AHEAD:
            maximum, denominator, total = _attend_tile(
                q, k, v, first + n < end, maximum, denominator, total, scale_log2e
            )
            first_left = first + BLOCK_N

        # The blocks of the next tile are looked up one tile ahead: keys need not wait for the table.
        for start in range(first_left, end, BLOCK_N):  # the first position of a tile is always a real one
            position = start + n
            current = block
            ahead = position + BLOCK_N
            block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
            k_tile, v_tile = _load_tile(keys_ptr, values_ptr, current, position, end, g, h, G, H, BLOCK_SIZE)
            maximum, denominator, total = _attend_tile(
                q, k_tile, v_tile, position < end, maximum, denominator, total, scale_log2e
            )

        table_ptr = tables_ptr + next_row * table_stride
        next_position = next_first + n
        block = tl.load(table_ptr + next_position // BLOCK_SIZE, mask=next_position < next_end, other=0)
        if AHEAD:
            k, v = _load_tile(
                keys_ptr, values_ptr, block, next_position, next_end, after % G, h, G, H, BLOCK_SIZE
            )
            ahead = next_position + BLOCK_N
            block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < next_end, other=0)

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
        first, end, length = next_first, next_end, next_length
