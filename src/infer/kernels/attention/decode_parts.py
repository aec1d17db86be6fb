"""The pieces that the decode kernel puts together (`attention/decode_kernels.py`).

    read_item ─► load_tile ─► start_projected ─► attend_tile, attend_tiles ─► finish_item ─► merge

Three things are carried along: the largest score so far, the sum of 2^(score - largest), and the values
weighted alike. Whatever comes later, be it a tile of positions or what another program has left in scratch
memory, is added by rescaling. The newest position, which has not reached the cache yet, comes first of all:
its weight is 2^0.

Shapes:  N query heads, G kv heads, M = N/G query heads per kv head, H head size, R = H / 2.
"""

from __future__ import annotations

from infer.kernels.elementwise.heads import scaled
from infer.kernels.linear.triton_kernels import _prefetch_rows
from infer.kernels.runtime.dispatch import jit, tl


@jit
def read_item(items_ptr, index, exists, ITEM_INTS: tl.constexpr, PROJECTED: tl.constexpr):
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
def prefetch_item(
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
def newest_block(table_ptr, length, BLOCK_SIZE: tl.constexpr):
    """The block of a row's last position."""
    return tl.load(table_ptr + tl.maximum(length - 1, 0) // BLOCK_SIZE, mask=length > 0, other=0)


@jit
def _partner_of(cols, R):
    """Where the other half of each element's pair stands in its head."""
    return tl.where(cols < R, cols + R, cols - R)


@jit
def _angles_of(cos_ptr, sin_ptr, position, cols, R, in_head):
    """The cosine and the sine that belong to each element of a head at this position."""
    angle = position.to(tl.int64) * R + tl.where(cols < R, cols, cols - R)
    cos = tl.load(cos_ptr + angle, mask=in_head, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=in_head, other=0.0)
    return cos, sin


@jit
def _inverse_rms(x, H, eps):
    """One number per head; elements outside the head are 0."""
    return tl.rsqrt(tl.sum(x * x, axis=1) / H + eps)[:, None]


@jit
def _turned(x, partner, cos, sin, cols, R):
    """Each element of a head after the rotation of its pair."""
    return tl.where((cols < R)[None, :], x * cos - partner * sin, x * cos + partner * sin)


@jit
def _load_pairs(head_ptrs, in_heads, h, R: tl.constexpr):
    """The elements of some heads and, in the same places, their partners in the rotation."""
    x = tl.load(head_ptrs + h[None, :], mask=in_heads, other=0.0)
    partner = tl.load(head_ptrs + _partner_of(h, R)[None, :], mask=in_heads, other=0.0)
    return x, partner


@jit
def load_transform(
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    length,
    m,
    h,
    M: tl.constexpr,
    H: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """What turns the heads of a row's newest token: angles, and the gains of queries and keys with partners.

    In the shape of M heads, though all are alike: each thread loads what it needs, and nothing is exchanged.
    """
    in_heads = (m < M)[:, None] & (h < tl.where(length > 0, H, 0))[None, :]
    same = (m * 0)[:, None]
    cos, sin = _angles_of(cos_ptr, sin_ptr, tl.maximum(length - 1, 0), same + h[None, :], H // 2, in_heads)
    q_gain, q_partner_gain, k_gain, k_partner_gain = cos, cos, cos, cos
    if HAS_NORM:
        q_gain, q_partner_gain = _load_pairs(q_weight_ptr + same, in_heads, h, H // 2)
        k_gain, k_partner_gain = _load_pairs(k_weight_ptr + same, in_heads, h, H // 2)
    return cos, sin, q_gain, q_partner_gain, k_gain, k_partner_gain


@jit
def _transform(
    x_raw, partner_raw, gain, partner_gain, cos, sin, h, eps, offset, H: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Norm and rotate heads as `heads.py` does it."""
    x, partner = x_raw.to(tl.float32), partner_raw.to(tl.float32)
    if HAS_NORM:
        inv_rms = _inverse_rms(x, H, eps)
        x = scaled(x, inv_rms, gain.to(tl.float32) + offset, x_raw.dtype)
        partner = scaled(partner, inv_rms, partner_gain.to(tl.float32) + offset, x_raw.dtype)
    return _turned(x, partner, cos, sin, h, H // 2).to(x_raw.dtype)


@jit
def start_projected(
    token_ptr,  # the row's projection
    keys_ptr,
    values_ptr,
    new_block,
    g,
    is_last,  # of the row's splits
    length,
    cos,
    sin,
    q_gain,
    q_partner_gain,
    k_gain,
    k_partner_gain,
    m,
    h,
    eps,
    offset,
    scale_log2e,
    G: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """The queries of an item, and a softmax that has seen the newest position if the item includes it.

    The newest key and value are in no cache yet: they are put there, and nobody reads them back. The threads
    of each query head have a copy of the key to themselves; that is cheaper than handing it around.
    """
    N: tl.constexpr = G * M
    in_heads = (m < M)[:, None] & (h < H)[None, :]
    has_newest = is_last & (length > 0)
    in_newest = (m < tl.where(has_newest, M, 0))[:, None] & (h < H)[None, :]
    same = (m * 0)[:, None]
    q_raw, q_partner = _load_pairs(token_ptr + (g * M + m)[:, None] * H, in_heads, h, H // 2)
    k_raw, k_partner = _load_pairs(token_ptr + (N + g) * H + same, in_newest, h, H // 2)
    v = tl.load(token_ptr + (N + G + g) * H + same + h[None, :], mask=in_newest, other=0.0)
    q = _transform(q_raw, q_partner, q_gain, q_partner_gain, cos, sin, h, eps, offset, H, HAS_NORM)
    k = _transform(k_raw, k_partner, k_gain, k_partner_gain, cos, sin, h, eps, offset, H, HAS_NORM)

    newest = tl.maximum(length - 1, 0)
    slot = new_block.to(tl.int64) * BLOCK_SIZE + newest % BLOCK_SIZE
    to = (slot * G + g) * H + same + h[None, :]
    tl.store(keys_ptr + to, k, mask=in_newest & (m == 0)[:, None])
    tl.store(values_ptr + to, v, mask=in_newest & (m == 0)[:, None])

    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale_log2e
    # padding has no positions at all: 0 and not -inf, for -inf - -inf is not a number
    maximum = tl.where(has_newest, score, tl.where(length > 0, float("-inf"), 0.0))
    denominator = tl.zeros_like(score) + has_newest.to(tl.float32)
    return q, maximum, denominator, v.to(tl.float32)


@jit
def load_tile(
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
def attend_tile(q, k, v, in_split, maximum, denominator, total, scale_log2e):
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
def attend_tiles(
    q,
    keys_ptr,
    values_ptr,
    table_ptr,
    block,  # of the first tile
    first,
    end,
    g,
    h,
    maximum,
    denominator,
    total,
    scale_log2e,
    G: tl.constexpr,
    H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the positions from `first` to `end` to the running softmax."""
    # The blocks of the next tile are looked up one tile ahead: keys need not wait for the table.
    for start in range(first, end, BLOCK_N):  # the first position of a tile is always a real one
        position = start + tl.arange(0, BLOCK_N)
        own_block = block
        ahead = position + BLOCK_N
        block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        k, v = load_tile(keys_ptr, values_ptr, own_block, position, end, g, h, G, H, BLOCK_SIZE)
        maximum, denominator, total = attend_tile(
            q, k, v, position < end, maximum, denominator, total, scale_log2e
        )
    return maximum, denominator, total


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
def finish_item(
    out_ptr,
    sums_ptr,
    maxima_ptr,
    denominators_ptr,
    tickets_ptr,
    s,
    g,
    split,
    num_splits,
    maximum,
    denominator,
    total,
    m,
    h,
    G: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    MERGE_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write the output of a row of one split; of several, leave a part, and merge them if it is the last."""
    N: tl.constexpr = G * M
    in_heads = (m < M)[:, None] & (h < H)[None, :]
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
