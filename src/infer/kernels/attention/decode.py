"""Attention of one new token per row over the paged cache, the main cost of decoding long contexts.

    out[s] = softmax(scale * q[s] k^T) v        over the `lens_S[s]` positions that row s may see

The block tables locate keys and values (paged.py). Rows are cut into splits, and a grid that fills the GPU
once strides over the list of splits (decode_work.py). The query heads that share a kv head are the rows of
one matrix product, padded to the 16 rows of the tensor cores.

Splits are merged in the same launch. The output of a row with one split is written directly. Otherwise each
program writes its unnormalised sum, maximum and denominator to scratch memory and takes a ticket. The program
with the last ticket adds all parts in the order of the splits, so the bits do not depend on which program
that is. It also resets the ticket counter for the next layer.

With small batches, decoding is a chain of dependent memory accesses:

    item of work ─► block table ─► keys and queries ─► values ─► part ─► ticket ─► parts ─► out

Everything left of the keys was written at the start of the step, so the prologue reads the first item and its
blocks while the previous kernel still runs (PDL, see dispatch.py), and the loop reads the next item and its
blocks while this one is computed. The keys and values of all positions except the newest are older than the
step: with few rows, the first of them are also prefetched to L2. Parts that fit the registers are read at
once. The first launch after `DecodeWork.plan` does not use PDL, and tables must not change between the two.

`attend_projected` begins one launch earlier, for a step in which every row decodes: it takes the fused
projection and also does the work of heads.py. Each program norms and rotates the query heads of its item; the
program with the row's last split also norms and rotates the new key. That key and its value go to the cache
and into the softmax but are never read back. So all data from the cache is older than the step, and the first
tile of keys and values is loaded before the wait. What remains after the wait:

    queries, key and value of the newest token ─► part ─► ticket ─► parts ─► out

With many rows, the extra registers cost more than the saved launch (`projected_heads` of the device profile).

Both are one Triton kernel, whose functions follow the path of an item:

    read_item ─► load_tile ─► start_projected ─► attend_tile, attend_tiles ─► finish_item ─► merge_splits

An item accumulates the largest score so far, the sum of 2^(score - largest), and the values with the
same weights. Each later tile of positions, or part from scratch memory, is added by rescaling. In a projected
item, the newest position, which is not in the cache yet, comes first: its weight is 2^0.

A window of drafts has one row per token. Drafts of a tree (execution/trees.py) see only some of the
positions before them: `tree_2S` has the position at which the tree of each row begins, and a bit for each
later position that the row sees. The newest position is always visible, and a tree is at most one token
longer than a tile, so every tile has a visible position. The CUDA C++ kernels do not support trees.

Both functions also exist in CUDA C++, for supported heads (decode_cuda.py). `DECODE_WAYS` (choice.py)
chooses by backend and by the kv heads of all rows; `infer doctor --kernels` prints the choice. Triton also
serves other GPUs, types and head sizes, and scores with caps or sinks.

Shapes:  S rows, N query heads, G kv heads, M = N/G query heads per kv head, H head size, P slots, R rows of
         the block tables, B blocks per row, W work items.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from infer.config.profiles.profile import DecodeConfig
from infer.kernels.attention.decode_cuda import attend_decode_cuda, attend_projected_cuda
from infer.kernels.attention.decode_work import ITEM_INTS, DecodeWork
from infer.kernels.attention.paged import PagedKV
from infer.kernels.attention.reference import LOG2E, attend_naive
from infer.kernels.attention.scores import cap_constant, cap_scores, sink_weights
from infer.kernels.elementwise.heads import CacheSlots, HeadTransform, norm_rope_write_reference, scaled
from infer.kernels.elementwise.kv_codes import encode_rows, load_scales, weigh_codes
from infer.kernels.runtime.dispatch import jit, launch_options, next_power_of_two, tl, use_triton
from infer.kernels.runtime.launch import launch_triton
from infer.kernels.runtime.ptx import prefetch_l2


def attend_decode_reference(
    q_SNH: torch.Tensor, kv: PagedKV, rows_S: torch.Tensor, lens_S: torch.Tensor,
    tree_2S: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The specification: gather the slots of one row after the other and attend to them."""
    out_SNH = torch.zeros_like(q_SNH)
    for index, (row, length) in enumerate(zip(rows_S.tolist(), lens_S.tolist(), strict=True)):
        if length == 0:
            continue
        first = 0 if kv.window is None else max(length - kv.window, 0)
        own, (keys_LGH, values_LGH) = q_SNH[index : index + 1], kv.read(row, first, length)
        if tree_2S is not None:
            begin, bits = tree_2S[:, index].tolist()
            seen = [n for n in range(length - first) if n + first < begin or bits >> (n + first - begin) & 1]
            keys_LGH, values_LGH = keys_LGH[seen], values_LGH[seen]
        out_SNH[index] = attend_naive(
            own, keys_LGH, values_LGH, scale=kv.scale, window=None, softcap=kv.softcap, sinks_N=kv.sinks_N
        )[0]
    return out_SNH


def attend_projected_reference(
    qkv_SX: torch.Tensor, transform: HeadTransform, kv: PagedKV, rows_S: torch.Tensor, lens_S: torch.Tensor
) -> torch.Tensor:
    """The specification of `attend_projected`: norm, rotate, write, then attend."""
    newest_S = (lens_S.long() - 1).clamp(min=0)
    blocks_S = kv.tables_RB[rows_S.long().clamp(min=0), newest_S // kv.block_size].long()
    slots_S = torch.where(lens_S > 0, blocks_S * kv.block_size + newest_S % kv.block_size, -1)
    cache = CacheSlots(kv.keys_PGH, kv.values_PGH, slots_S, scales=kv.scales)
    q_SNH, _, _ = norm_rope_write_reference(qkv_SX, transform, newest_S, cache)
    return attend_decode_reference(q_SNH, kv, rows_S, lens_S)


@jit
def _read_item(items_ptr, index, exists, ITEM_INTS: tl.constexpr, PROJECTED: tl.constexpr):
    """The seven numbers of a work item; all zero past the list, which is an item without positions."""
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
    keys_ptr, values_ptr, table_ptr, first, end, g, G: tl.constexpr, H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, PREFETCH_N: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Prefetch the first keys and values of an item into L2, which also sees any later write to them.

    Past its end, the last position is prefetched again; an item without positions prefetches the first slot.
    """
    position = tl.maximum(tl.minimum(first + tl.arange(0, PREFETCH_N), end - 1), 0)
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=position < end, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + tl.where(position < end, position % BLOCK_SIZE, 0)
    lines = tl.minimum(tl.arange(0, BLOCK_H // LINE) * LINE, H - 1)
    at = (slot * (G * H) + g * H)[:, None] + lines[None, :]
    prefetch_l2(keys_ptr + at)
    prefetch_l2(values_ptr + at)


@jit
def _newest_block(table_ptr, length, BLOCK_SIZE: tl.constexpr):
    """The block of a row's last position."""
    return tl.load(table_ptr + tl.maximum(length - 1, 0) // BLOCK_SIZE, mask=length > 0, other=0)


@jit
def _load_pairs(head_ptrs, in_heads, h, R: tl.constexpr):
    """The elements of some heads and, at the same places, their partners in the rotation."""
    x = tl.load(head_ptrs + h[None, :], mask=in_heads, other=0.0)
    partner = tl.load(head_ptrs + tl.where(h < R, h + R, h - R)[None, :], mask=in_heads, other=0.0)
    return x, partner


@jit
def _load_transform(
    q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, length, m, h, M: tl.constexpr, H: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """The angles of a row's newest token, and the gains of queries, of keys and of their partners.

    All have the shape of M heads although the heads are alike: each thread loads its own copy.
    """
    R: tl.constexpr = H // 2
    in_heads = (m < M)[:, None] & (h < tl.where(length > 0, H, 0))[None, :]
    same = (m * 0)[:, None]
    cols = same + h[None, :]
    angle = tl.maximum(length - 1, 0).to(tl.int64) * R + tl.where(cols < R, cols, cols - R)
    cos = tl.load(cos_ptr + angle, mask=in_heads, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=in_heads, other=0.0)
    q_gain, q_partner_gain, k_gain, k_partner_gain = cos, cos, cos, cos
    if HAS_NORM:
        q_gain, q_partner_gain = _load_pairs(q_weight_ptr + same, in_heads, h, R)
        k_gain, k_partner_gain = _load_pairs(k_weight_ptr + same, in_heads, h, R)
    return cos, sin, q_gain, q_partner_gain, k_gain, k_partner_gain


@jit
def _transform(
    x_raw, partner_raw, gain, partner_gain, cos, sin, h, eps, offset, H: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Norm and rotate heads as heads.py does."""
    x, partner = x_raw.to(tl.float32), partner_raw.to(tl.float32)
    if HAS_NORM:
        inv_rms = tl.rsqrt(tl.sum(x * x, axis=1) / H + eps)[:, None]
        x = scaled(x, inv_rms, gain.to(tl.float32) + offset, x_raw.dtype)
        partner = scaled(partner, inv_rms, partner_gain.to(tl.float32) + offset, x_raw.dtype)
    turned = tl.where((h < H // 2)[None, :], x * cos - partner * sin, x * cos + partner * sin)
    return turned.to(x_raw.dtype)


@jit
def _start_projected(
    token_ptr,  # the row's projection
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, new_block, g,
    is_last,  # True for the row's last split
    length, cos, sin, q_gain, q_partner_gain, k_gain, k_partner_gain, m, h, eps, offset, scale_log2e,
    CAP: tl.constexpr, G: tl.constexpr, M: tl.constexpr, H: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """The queries of an item, and a softmax that has seen the newest position if the item includes it.

    The newest key and value are not in the cache yet: they are written there and never read back. The threads
    of each query head have their own copy of the key, which is cheaper than exchanging it.
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
    is_stored = m < tl.where(has_newest, 1, 0)
    in_stored = is_stored[:, None] & (h < H)[None, :]
    if HAS_SCALES:  # the step attends to codes, as later steps will
        k_codes, k_scale = encode_rows(k, keys_ptr.dtype.element_ty == tl.float8e4nv)
        v_codes, v_scale = encode_rows(v, keys_ptr.dtype.element_ty == tl.float8e4nv)
        scale_to = (new_block.to(tl.int64) * G + g) * BLOCK_SIZE + newest % BLOCK_SIZE + m * 0
        tl.store(key_scales_ptr + scale_to, k_scale, mask=is_stored)
        tl.store(value_scales_ptr + scale_to, v_scale, mask=is_stored)
        tl.store(keys_ptr + to, k_codes, mask=in_stored)
        tl.store(values_ptr + to, v_codes, mask=in_stored)
        k, v = k_codes.to(tl.float32) * k_scale[:, None], v_codes.to(tl.float32) * v_scale[:, None]
    else:
        tl.store(keys_ptr + to, k, mask=in_stored)
        tl.store(values_ptr + to, v, mask=in_stored)

    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale_log2e
    if CAP > 0:
        score = cap_scores(score, CAP)
    # padding has no positions: its maximum is 0, because -inf - -inf would be NaN
    maximum = tl.where(has_newest, score, tl.where(length > 0, float("-inf"), 0.0))
    denominator = tl.zeros_like(score) + has_newest.to(tl.float32)
    return q, maximum, denominator, v.to(tl.float32)


@jit
def _load_tile(
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, block, position, end, g, h, G: tl.constexpr,
    H: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """The keys and values of one kv head at some positions, [BLOCK_N, BLOCK_H] each, and their scales."""
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE  # int64: P * G * H passes 2^31
    at = (slot * (G * H) + g * H)[:, None] + h[None, :]
    in_tile = (position < end)[:, None] & (h < H)[None, :]
    k = tl.load(keys_ptr + at, mask=in_tile, other=0.0)
    v = tl.load(values_ptr + at, mask=in_tile, other=0.0)
    k_scale, v_scale = slot, slot  # not read
    if HAS_SCALES:
        k_scale = load_scales(key_scales_ptr, block, position, position < end, g, G, BLOCK_SIZE)
        v_scale = load_scales(value_scales_ptr, block, position, position < end, g, G, BLOCK_SIZE)
    return k, v, k_scale, v_scale


@jit
def _attend_tile(
    q, k, v, k_scale, v_scale, in_split, maximum, denominator, total, scale_log2e, CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Add a tile to the running softmax."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale_log2e
    if HAS_SCALES:
        scores = scores * k_scale[None, :]
    if CAP > 0:
        scores = cap_scores(scores, CAP)
    scores = tl.where(in_split[None, :], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    rescale = tl.exp2(maximum - new_maximum)
    weights = tl.exp2(scores - new_maximum[:, None])
    denominator = denominator * rescale + tl.sum(weights, axis=1)
    if HAS_SCALES:
        total = weigh_codes(weights, v, v_scale, total * rescale[:, None], q.dtype)
    else:
        total = tl.dot(weights.to(v.dtype), v, total * rescale[:, None], input_precision="ieee")
    return new_maximum, denominator, total


@jit
def _attend_tiles(
    q, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr,
    block,  # block of the first tile
    first, end, g, h, maximum, denominator, total, scale_log2e, CAP: tl.constexpr, G: tl.constexpr,
    H: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SCALES: tl.constexpr, BLOCK_N: tl.constexpr,
    tree_begin, tree_bits, HAS_TREE: tl.constexpr,
):  # fmt: skip
    """Add the positions from `first` to `end` to the running softmax."""
    # The blocks of the next tile are looked up one tile early, so keys need not wait for the table.
    for start in range(first, end, BLOCK_N):  # the first position of a tile is always a real one
        position = start + tl.arange(0, BLOCK_N)
        own_block = block
        ahead = position + BLOCK_N
        block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        k, v, k_scale, v_scale = _load_tile(
            keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, own_block, position, end, g, h, G, H,
            BLOCK_SIZE, HAS_SCALES,
        )  # fmt: skip
        is_seen = position < end
        if HAS_TREE:
            place = tl.minimum(tl.maximum(position - tree_begin, 0), 63)
            is_seen = is_seen & ((position < tree_begin) | (((tree_bits >> place) & 1) != 0))
        maximum, denominator, total = _attend_tile(
            q, k, v, k_scale, v_scale, is_seen, maximum, denominator, total, scale_log2e, CAP, HAS_SCALES,
        )  # fmt: skip
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
    sums_ptr,  # sums of this row and kv head: [MAX_SPLITS, M, H] with N * H between splits
    maxima_ptr, denominators_ptr, out_ptr,
    sinks_ptr,  # sinks of this kv head's query heads
    num_splits, HAS_SINKS: tl.constexpr, N: tl.constexpr, M: tl.constexpr, H: tl.constexpr,
    MAX_SPLITS: tl.constexpr, MERGE_SPLITS: tl.constexpr, MERGE_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    # .cg: the writes of other SMs are in L2; this SM's L1 may be stale
    m = tl.arange(0, MERGE_M)
    h = tl.arange(0, BLOCK_H)
    split = tl.arange(0, MAX_SPLITS)
    at = split[:, None] * N + m[None, :]
    exists = (split < num_splits)[:, None] & (m < M)[None, :]
    maxima = tl.load(maxima_ptr + at, mask=exists, other=float("-inf"), cache_modifier=".cg")
    denominators = tl.load(denominators_ptr + at, mask=exists, other=0.0, cache_modifier=".cg")
    if MAX_SPLITS <= MERGE_SPLITS:  # requested together with the maxima, not after them
        sums = _load_sums(sums_ptr, at, exists, h, H)
    maximum = tl.max(maxima, axis=0)
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)  # heads that are padding
    denominator = tl.sum(denominators * tl.exp2(maxima - maximum[None, :]), axis=0)
    if HAS_SINKS:
        denominator += sink_weights(sinks_ptr, m, m < M, maximum)

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
def _finish_item(
    out_ptr, sums_ptr, maxima_ptr, denominators_ptr, tickets_ptr, sinks_ptr, s, g, split, num_splits, maximum,
    denominator, total, m, h, HAS_SINKS: tl.constexpr, G: tl.constexpr, M: tl.constexpr, H: tl.constexpr,
    MAX_SPLITS: tl.constexpr, MERGE_SPLITS: tl.constexpr, MERGE_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Write the output of a row of one split; with more, store a part, and merge all if it is the last."""
    N: tl.constexpr = G * M
    in_heads = (m < M)[:, None] & (h < H)[None, :]
    head = s * N + g * M
    if num_splits == 1:
        if HAS_SINKS:
            denominator += sink_weights(sinks_ptr + g * M, m, m < M, maximum)
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
                out_ptr + head * H, sinks_ptr + g * M, num_splits, HAS_SINKS, N, M, H, MAX_SPLITS,
                MERGE_SPLITS, MERGE_M, BLOCK_H,
            )  # fmt: skip


@jit
def _decode_kernel(
    q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tables_ptr, out_ptr, items_ptr,
    num_items_ptr, sums_ptr, maxima_ptr, denominators_ptr, tickets_ptr, sinks_ptr,
    tree_ptr,  # this and `tree_stride` are read if HAS_TREE
    q_weight_ptr,  # this, the next three, `eps` and `offset` are read if PROJECTED
    k_weight_ptr, cos_ptr, sin_ptr, q_row_stride, q_head_stride, table_stride, tree_stride, scale_log2e, eps,
    offset, G: tl.constexpr, M: tl.constexpr, H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, MAX_SPLITS: tl.constexpr, MERGE_SPLITS: tl.constexpr, MERGE_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, ITEM_INTS: tl.constexpr,
    PREFETCH_N: tl.constexpr,  # positions of the first item
    LINE: tl.constexpr,  # elements of a cache line
    PROJECTED: tl.constexpr,  # queries come from a fused projection, and its keys and values are new
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,  # keys and values are codes (kv_codes.py)
    CAP: tl.constexpr,  # `cap_constant` of the layer
    HAS_SINKS: tl.constexpr,
    HAS_TREE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    h = tl.arange(0, BLOCK_H)

    # Neighbouring programs take the kv heads of one split: their keys are adjacent in memory.
    num_programs = tl.num_programs(0)
    own = tl.program_id(0)
    num_work = tl.load(num_items_ptr) * G
    s, row, first, end, split, num_splits, length = _read_item(
        items_ptr, own // G, True, ITEM_INTS, PROJECTED
    )
    end = tl.where(own < num_work, end, 0)  # memory past the list is allocated, but holds no item
    length = tl.where(own < num_work, length, 0)
    table_ptr = tables_ptr + row * table_stride
    block = tl.load(table_ptr + (first + n) // BLOCK_SIZE, mask=first + n < end, other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PROJECTED:
        new_block = _newest_block(table_ptr, length, BLOCK_SIZE)
        k, v, k_scale, v_scale = _load_tile(
            keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, block, first + n, end, own % G, h, G, H,
            BLOCK_SIZE, HAS_SCALES,
        )  # fmt: skip
        cos, sin, q_gain, q_partner_gain, k_gain, k_partner_gain = _load_transform(
            q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, length, m, h, M, H, HAS_NORM
        )
        ahead = first + BLOCK_N + n
        block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
    if PDL:
        if PREFETCH_N > 0:
            _prefetch_item(
                keys_ptr, values_ptr, table_ptr, first + BLOCK_N if PROJECTED else first, end, own % G,
                G, H, BLOCK_SIZE, BLOCK_H, PREFETCH_N, LINE,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()

    begin = own
    if PROJECTED:  # the first item, outside the loop: few programs have a second, and it saves registers
        if own < num_work:
            g = own % G
            q, maximum, denominator, total = _start_projected(
                q_ptr + s * q_row_stride, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, new_block,
                g, split == num_splits - 1, length,
                cos, sin, q_gain, q_partner_gain, k_gain, k_partner_gain,
                m, h, eps, offset, scale_log2e, CAP, G, M, H, BLOCK_SIZE, HAS_NORM, HAS_SCALES,
            )  # fmt: skip
            maximum, denominator, total = _attend_tile(
                q, k, v, k_scale, v_scale, first + n < end, maximum, denominator, total, scale_log2e, CAP,
                HAS_SCALES,
            )  # fmt: skip
            if first + BLOCK_N < end:
                maximum, denominator, total = _attend_tiles(
                    q, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, block,
                    first + BLOCK_N, end, g, h, maximum, denominator, total, scale_log2e, CAP, G, H,
                    BLOCK_SIZE, HAS_SCALES, BLOCK_N, 0, 0, False,
                )  # fmt: skip
            _finish_item(
                out_ptr, sums_ptr, maxima_ptr, denominators_ptr, tickets_ptr, sinks_ptr, s, g, split,
                num_splits, maximum, denominator, total, m, h, HAS_SINKS, G, M, H, MAX_SPLITS, MERGE_SPLITS,
                MERGE_M, BLOCK_H,
            )  # fmt: skip
        begin = own + num_programs
        s, row, first, end, split, num_splits, length = _read_item(
            items_ptr, begin // G, begin < num_work, ITEM_INTS, PROJECTED
        )
        table_ptr = tables_ptr + row * table_stride
        block = tl.load(table_ptr + (first + n) // BLOCK_SIZE, mask=first + n < end, other=0)
        new_block = _newest_block(table_ptr, length, BLOCK_SIZE)

    for work in range(begin, num_work, num_programs):
        g = work % G
        if PROJECTED:
            cos, sin, q_gain, q_partner_gain, k_gain, k_partner_gain = _load_transform(
                q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, length, m, h, M, H, HAS_NORM
            )
            q, maximum, denominator, total = _start_projected(
                q_ptr + s * q_row_stride, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, new_block,
                g, split == num_splits - 1, length,
                cos, sin, q_gain, q_partner_gain, k_gain, k_partner_gain,
                m, h, eps, offset, scale_log2e, CAP, G, M, H, BLOCK_SIZE, HAS_NORM, HAS_SCALES,
            )  # fmt: skip
        else:
            q_at = s * q_row_stride + (g * M + m)[:, None] * q_head_stride + h[None, :]
            q = tl.load(q_ptr + q_at, mask=(m < M)[:, None] & (h < H)[None, :], other=0.0)
            maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            denominator = tl.zeros((BLOCK_M,), tl.float32)
            total = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
        tree_begin, tree_bits = s, s  # not read
        if HAS_TREE:
            tree_begin, tree_bits = tl.load(tree_ptr + s), tl.load(tree_ptr + tree_stride + s)
        after = work + num_programs
        next_s, next_row, next_first, next_end, next_split, next_num_splits, next_length = _read_item(
            items_ptr, after // G, after < num_work, ITEM_INTS, PROJECTED
        )
        maximum, denominator, total = _attend_tiles(
            q, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, block, first, end, g, h,
            maximum, denominator, total, scale_log2e, CAP, G, H, BLOCK_SIZE, HAS_SCALES, BLOCK_N,
            tree_begin, tree_bits, HAS_TREE,
        )  # fmt: skip
        table_ptr = tables_ptr + next_row * table_stride
        next_position = next_first + n
        block = tl.load(table_ptr + next_position // BLOCK_SIZE, mask=next_position < next_end, other=0)
        if PROJECTED:
            new_block = _newest_block(table_ptr, next_length, BLOCK_SIZE)
        _finish_item(
            out_ptr, sums_ptr, maxima_ptr, denominators_ptr, tickets_ptr, sinks_ptr, s, g, split, num_splits,
            maximum, denominator, total, m, h, HAS_SINKS, G, M, H, MAX_SPLITS, MERGE_SPLITS, MERGE_M, BLOCK_H,
        )  # fmt: skip
        s, split, num_splits = next_s, next_split, next_num_splits
        first, end, length = next_first, next_end, next_length


def attend_decode(
    q_SNH: torch.Tensor, kv: PagedKV, rows_S: torch.Tensor, lens_S: torch.Tensor, work: DecodeWork,
    *, out: torch.Tensor | None = None, config: DecodeConfig | None = None,
    tree_2S: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend with each row's newest query; `work.plan` must have seen these rows, lengths and window."""
    S, N, H = q_SNH.shape
    chosen = work.choose(S, has_codes=kv.scales is not None, decodes_only=False)
    if chosen.by == "cuda" and tree_2S is None:
        assert kv.softcap is None and kv.sinks_N is None, "CUDA C++ supports neither caps nor sinks"
        return attend_decode_cuda(q_SNH, kv, work, out=out)
    if chosen.by == "torch" or not use_triton(q_SNH):
        result = attend_decode_reference(q_SNH, kv, rows_S, lens_S, tree_2S)
        return result if out is None else out.copy_(result)
    assert q_SNH.stride(2) == 1, f"the head dimension must be contiguous, got strides {q_SNH.stride()}"
    if out is None:
        out = torch.empty((S, N, H), dtype=q_SNH.dtype, device=q_SNH.device)
    strides = q_SNH.stride(0), q_SNH.stride(1)
    _launch_decode(q_SNH, strides, kv, work, None, out=out, config=config, tree_2S=tree_2S)
    return out


def attend_projected(
    qkv_SX: torch.Tensor, transform: HeadTransform, kv: PagedKV, rows_S: torch.Tensor, lens_S: torch.Tensor,
    work: DecodeWork,
) -> torch.Tensor:  # fmt: skip
    """Norm and rotate the heads of each row's newest token, write its key and value to the cache, attend.

    The newest token is at position `lens_S[s] - 1`. `work.plan` must have seen these rows, lengths and
    window.
    """
    S, N, G = qkv_SX.shape[0], transform.num_heads, transform.num_kv_heads
    H = qkv_SX.shape[1] // (N + 2 * G)
    if work.choose(S, has_codes=kv.scales is not None, decodes_only=True).by == "cuda":
        assert kv.softcap is None and kv.sinks_N is None, "CUDA C++ supports neither caps nor sinks"
        return attend_projected_cuda(qkv_SX, transform, kv, work)
    if not use_triton(qkv_SX):
        return attend_projected_reference(qkv_SX, transform, kv, rows_S, lens_S)
    transform.check(qkv_SX, H)
    assert kv.keys_PGH.shape[1:] == (G, H), f"keys are {tuple(kv.keys_PGH.shape)}"
    assert kv.keys_PGH.dtype == qkv_SX.dtype or kv.scales is not None, f"keys are {kv.keys_PGH.dtype}"
    out_SNH = torch.empty((S, N, H), dtype=qkv_SX.dtype, device=qkv_SX.device)
    _launch_decode(qkv_SX, (qkv_SX.stride(0), H), kv, work, transform, out=out_SNH)
    return out_SNH


def _launch_decode(
    q: torch.Tensor,  # queries [S, N, H], or the projection [S, X] with a transform
    q_strides: tuple[int, int],  # strides between rows and between heads
    kv: PagedKV, work: DecodeWork, transform: HeadTransform | None, *, out: torch.Tensor,
    config: DecodeConfig | None = None, tree_2S: torch.Tensor | None = None,
) -> None:  # fmt: skip
    keys_PGH, values_PGH, tables_RB, block_size, scale, window, scales, softcap, sinks_N = kv
    S, N, H = out.shape
    if S == 0:
        return
    assert keys_PGH.is_contiguous() and values_PGH.is_contiguous(), "the store must be contiguous"
    G, element_size = keys_PGH.shape[1], keys_PGH.element_size()
    block_h, merge_m = max(next_power_of_two(H), 16), next_power_of_two(N // G)
    tuned = work.profile
    are_few = tuned.few_heads >= S * G
    if config is None:
        config = tuned.decode[min(max(block_h * element_size, 128), 1024)]
        if are_few:
            config = replace(config, programs_per_sm=tuned.programs_for_few[tuned.handful <= S * G])
        elif element_size <= 2 and block_h <= 128 and merge_m <= 16:
            config = tuned.decode_one_warp
    max_splits = work.max_splits(S)
    merge_splits = max(2048 * config.num_warps // (merge_m * block_h), 1)  # 64 registers
    items_W8, num_items = work.work_list(window)
    # the list is read before `gdc_wait`, so the previous kernel must not have written it
    options = launch_options(q.device, starts_early=not work.is_fresh)
    work.is_fresh = False
    is_projected = transform is not None
    if options["PDL"] and is_projected and config.num_warps == 4 and block_h * q.element_size() == 128:
        options["maxnreg"] = tuned.projected_registers
    if transform is None:
        transform = HeadTransform(None, q, q, N, G, 0.0)  # placeholders, not read
    q_weight_H, k_weight_H = transform.norm_weights or (q, q)
    launch_triton(
        _decode_kernel,
        (min(work.num_sms * config.programs_per_sm, S * max_splits * G),),
        (
            q, keys_PGH, values_PGH, *(scales or (q, q)), tables_RB, out, items_W8, num_items, work.sums,
            work.maxima, work.denominators, work.tickets, q if sinks_N is None else sinks_N,
            q if tree_2S is None else tree_2S, q_weight_H, k_weight_H, transform.cos_PR, transform.sin_PR,
        ),
        (
            *q_strides, tables_RB.stride(0), 0 if tree_2S is None else tree_2S.stride(0), scale * LOG2E,
            transform.eps, transform.offset,
        ),
        G=G, M=N // G, H=H, BLOCK_SIZE=block_size, MAX_SPLITS=max_splits,
        MERGE_SPLITS=min(max_splits, merge_splits), MERGE_M=merge_m,
        BLOCK_M=max(merge_m, 16), BLOCK_N=config.block_n, BLOCK_H=block_h, ITEM_INTS=ITEM_INTS,
        PREFETCH_N=tuned.prefetched if are_few else 0, LINE=min(128 // element_size, block_h),
        PROJECTED=is_projected, HAS_NORM=transform.norm_weights is not None,
        HAS_SCALES=scales is not None, CAP=cap_constant(softcap), HAS_SINKS=sinks_N is not None,
        HAS_TREE=tree_2S is not None,
        num_warps=config.num_warps, num_stages=config.num_stages, **options,
    )  # fmt: skip
