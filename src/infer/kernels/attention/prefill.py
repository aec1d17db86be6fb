"""Attention of chunks of prompts over the paged cache.

A *chunk* is a run of consecutive tokens of one row, anywhere in the step's T tokens. Its keys and values
come after earlier positions in the cache, so a fresh prompt (start 0), the next chunk of a long prompt
and a prompt whose beginning is a prefix cache hit are the same case:

    PrefillChunk(first=5, num=3, row=2, start=40)     tokens 5, 6, 7 of the step are positions 40, 41, 42 of
                                                      row 2 and see 0..40, 0..41, 0..42

Compute-bound: two matrix products of 128 rows. A row of these products is one token *and* one query head: the
tile holds 128 / M tokens with the M query heads that share a kv head, rather than 128 tokens of one head.
Both layouts reuse a tile of keys equally often; packed, a tile spans fewer tokens, so the causal diagonal
masks less of it, and a short chunk fills its rows sooner. Only some keys of a tile need a mask:

    keys      0 ............ first token's window | seen by all tokens | up to the tile's last token
              never read      masked                no mask              masked

With `invariant`, all keys take the masked path, in tiles that start at multiples of their length. Then a
token has the same bits whatever else its tile, its chunk and the step hold, whether it is a chunk by itself
or part of a prompt: a tile of keys that a token does not see adds zeros to its sums.

The host knows the chunks and lists the tiles, longest first so that none starts late. It pads the list to the
captured capacity with empty tiles, whose programs exit immediately.

One program takes one tile of queries and loops over all keys that the tile sees. Many tiles fill the GPU, but
few do not: 128 tokens after 8,000 cached ones make only 16 programs for the 132 SMs of an H200. In this case
the keys of a tile are cut into *splits* (split-K; never with `invariant`), as many as there is room for, and
a (tile, split) is one item of work for each kv head:

    room for 5 items     tile 0, 900 keys    |=== 300 ===|=== 300 ===|=== 300 ===|     item 0, 1, 2
                         tile 1, 560 keys    |=== 280 ===|=== 280 ===|                 item 3, 4
                         tile 2, empty                                                 none

Only the device knows the lengths of the tiles and how many are empty, because the graph was captured earlier.
So every program plans the whole short list and finds its own item in it. The longest split determines the
total time, so the plan takes the shortest split length with which all items have room. It lies between two
bounds: without rounding, keys / length items would be enough, and rounding adds less than one item per tile:

    all keys / room   <=   length   <=   all keys / (room - tiles)

Sixteen lengths between the two are evaluated at once. A tile is cut evenly, at whole tiles of keys, so that
the three ranges of keys begin and end where they would without splits.

An item of a split tile writes its unnormalised sum, maximum and denominator to scratch memory, and a second
launch adds them in the order of the splits. In decoding, the last program does this, but here the parts of a
tile have 64 KiB each, and one SM would have to read a megabyte of them. The second launch spreads the rows of
all tiles over the GPU, and has started by the time the first one ends (PDL, see dispatch.py). It needs no
counters, and the bits do not depend on which program was faster.

Shapes:  T tokens, N query heads, G kv heads, M = N/G, H head size, P slots, R rows of the block tables,
         B blocks per row, W tiles, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from infer.config.profiles.profile import AttentionProfile, PrefillConfig
from infer.errors import ConfigError
from infer.kernels.attention.paged import PagedKV
from infer.kernels.attention.reference import LOG2E, attend_naive
from infer.kernels.attention.scores import cap_constant, cap_scores, sink_weights
from infer.kernels.elementwise.kv_codes import load_scales, weigh_codes
from infer.kernels.runtime.dispatch import (
    gpu_capability,
    jit,
    jit_for_any,
    launch_options,
    next_power_of_two,
    num_sms,
    tl,
    use_triton,
)
from infer.kernels.runtime.launch import launch_triton
from infer.kernels.runtime.profiles import device_profile

BLOCK_M = 128  # two warp groups of 64 rows, the size of Hopper's matrix instructions
_WARP_GROUP_ROWS = 64

_FEW_TILES, _MAX_TILES = 32, 128  # most tiles of a list that is split: every program reads all of it
_SM_REGISTERS = 65536


class PrefillChunk(NamedTuple):
    """A run of consecutive tokens of one row, computed in this step."""

    first: int  # index of its first token in this step
    num: int
    row: int  # row of the block tables
    start: int  # position of its first token


# Exact float32 does not use tensor cores: a whole tile in one program would spill to the stack.
_FLOAT32_CONFIG = PrefillConfig(block_n=32, num_warps=4, num_stages=2, num_parts=8)
# Heads of more than 256: fewer rows and keys at a time, because the sums must fit a program's registers.
_WIDE_CONFIG = PrefillConfig(block_n=32, num_warps=4, num_stages=2, num_parts=4)
_WIDE_FLOAT32_CONFIG = PrefillConfig(block_n=16, num_warps=4, num_stages=1, num_parts=8)


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """The chunks of one step, as tiles on the device and as integers on the host."""

    tiles_W4: torch.Tensor  # int32; first token, tokens (0: empty), row, position of the first token
    chunks: tuple[PrefillChunk, ...]  # read by the reference and PyTorch's kernels, not by a graph replay
    are_tokens: bool = False  # True: every tile is one token, so one warp group has enough rows
    whole_C4: torch.Tensor | None = None  # the same for whole chunks, for layers with a recurrent state
    num_drafts: tuple[int, ...] = ()  # number of drafts at the end of each chunk; (): none
    drafts_C4: torch.Tensor | None = None  # the drafts, which `whole_C4` does not include

    @classmethod
    def from_arrays(
        cls, tiles_W4: torch.Tensor, chunks: Sequence[PrefillChunk] = (), whole_C4: torch.Tensor | None = None
    ) -> PrefillChunks:
        """Make chunks from a device copy of the tiles of `build_prefill_chunks`."""
        assert tiles_W4.dtype == torch.int32 and tiles_W4.is_contiguous(), "tiles must be contiguous int32"
        return cls(tiles_W4, tuple(chunks), whole_C4=whole_C4)

    @classmethod
    def from_rows(cls, rows_S: torch.Tensor, lens_S: torch.Tensor) -> PrefillChunks:
        """Make a chunk of one token for each decoding row; only the device knows their lengths."""
        places_S = torch.arange(len(rows_S), dtype=torch.int32, device=rows_S.device)
        lens_S = lens_S.int()
        tiles_S4 = torch.stack((places_S, lens_S.clamp(max=1), rows_S.int(), lens_S - 1), dim=1)
        return cls(tiles_S4, (), are_tokens=True)

    @property
    def are_fresh(self) -> bool:
        """True if every chunk starts its sequence and the chunks are adjacent."""
        ends = [chunk.first + chunk.num for chunk in self.chunks]
        follows = all(end == chunk.first for end, chunk in zip(ends, self.chunks[1:], strict=False))
        return bool(self.chunks) and follows and all(chunk.start == 0 for chunk in self.chunks)


def tokens_per_tile(num_heads: int, num_kv_heads: int, block_m: int = BLOCK_M) -> int:
    """The number of tokens that fill the rows of a tile, each with the query heads of one kv head."""
    return max(block_m // (num_heads // num_kv_heads), 1)


def build_prefill_chunks(
    chunks: Sequence[PrefillChunk], *, tokens_per_tile: int, max_tiles: int | None = None
) -> npt.NDArray[np.int32]:
    """The tiles of the chunks [W, 4], most keys first, padded to `max_tiles` with empty tiles."""
    parts = []
    for first, num, row, start in chunks:
        offsets = np.arange(0, num, tokens_per_tile, dtype=np.int32)
        sizes = np.minimum(num - offsets, tokens_per_tile)
        parts.append(np.stack([first + offsets, sizes, np.full_like(offsets, row), start + offsets], axis=1))
    tiles_W4 = np.concatenate(parts).astype(np.int32) if parts else np.zeros((0, 4), np.int32)
    tiles_W4 = tiles_W4[np.argsort(-(tiles_W4[:, 3] + tiles_W4[:, 1]), kind="stable")]
    if max_tiles is None:
        return tiles_W4
    assert len(tiles_W4) <= max_tiles, f"{len(tiles_W4)} tiles, room for {max_tiles}"
    return np.concatenate([tiles_W4, np.zeros((max_tiles - len(tiles_W4), 4), np.int32)])


def attend_prefill_reference(
    q_TNH: torch.Tensor, kv: PagedKV, chunks: PrefillChunks, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The specification: gather the slots of one chunk after the other and attend to them."""
    out = torch.zeros_like(q_TNH) if out is None else out
    for first, num, row, start in chunks.chunks:
        lowest = 0 if kv.window is None else max(start - kv.window + 1, 0)
        own, (keys_LGH, values_LGH) = q_TNH[first : first + num], kv.read(row, lowest, start + num)
        out[first : first + num] = attend_naive(
            own,
            keys_LGH,
            values_LGH,
            scale=kv.scale,
            window=kv.window,
            softcap=kv.softcap,
            sinks_N=kv.sinks_N,
        )
    return out


@jit
def _plan_splits(
    tiles_ptr, num_tiles, window, max_items, SPLIT_LEN, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The number of splits of each tile, 0 for an empty tile. Lengths are in tiles of keys."""
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
    q, total, maximum, denominator, token_position, lo, hi,
    first,  # first position to read: earlier ones may hold another sequence's data, even NaN
    keys_ptr,  # keys of kv head g
    values_ptr, key_scales_ptr, value_scales_ptr,
    table_ptr,  # block table of this row
    g, window, scale_log2e, CAP: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    HAS_SCALES: tl.constexpr, G: tl.constexpr, H: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    h = tl.arange(0, BLOCK_H)
    n = tl.arange(0, BLOCK_N)
    # The blocks of the next tile are looked up one tile early, so keys need not wait for the table.
    block = tl.load(table_ptr + (lo + n) // BLOCK_SIZE, mask=lo + n < hi, other=0)
    for start in range(lo, hi, BLOCK_N):
        position = start + n
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE  # int64: P * G * H passes 2^31
        at = (slot * (G * H))[:, None] + h[None, :]
        if HAS_SCALES:
            k_scale = load_scales(key_scales_ptr, block, position, position < hi, g, G, BLOCK_SIZE)
            v_scale = load_scales(value_scales_ptr, block, position, position < hi, g, G, BLOCK_SIZE)
            if WINDOWED:
                v_scale = tl.where(position >= first, v_scale, 0.0)
        ahead = position + BLOCK_N
        block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < hi, other=0)
        if MASKED:
            exists = position < hi
            if WINDOWED:
                exists = exists & (position >= first)
            in_tile = exists[:, None] & (h < H)[None, :]
            k = tl.load(keys_ptr + at, mask=in_tile, other=0.0)
        elif H == BLOCK_H:
            k = tl.load(keys_ptr + at)
        else:
            k = tl.load(keys_ptr + at, mask=(h < H)[None, :], other=0.0)

        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if HAS_SCALES:
            scores = scores * k_scale[None, :]
        if CAP > 0:  # scores are in units of the scale, which is applied below
            scores = cap_scores(scores * scale_log2e, CAP) / scale_log2e
        if MASKED:
            seen = position[None, :] <= token_position[:, None]
            if WINDOWED:
                seen = seen & (position[None, :] > token_position[:, None] - window)
            scores = tl.where(seen & (position < hi)[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * scale_log2e)
        # a token whose window begins later has seen nothing so far, and exp2(-inf - -inf) is NaN
        subtracted = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores * scale_log2e - subtracted[:, None])
        rescale = tl.exp2(maximum - subtracted)
        denominator = denominator * rescale + tl.sum(weights, axis=1)
        total = total * rescale[:, None]

        if MASKED:
            v = tl.load(values_ptr + at, mask=in_tile, other=0.0)
        elif H == BLOCK_H:
            v = tl.load(values_ptr + at)
        else:
            v = tl.load(values_ptr + at, mask=(h < H)[None, :], other=0.0)
        if HAS_SCALES:
            total = weigh_codes(weights, v, v_scale, total, q.dtype)
        else:
            total = tl.dot(weights.to(v.dtype), v, total, input_precision="ieee")
        maximum = new_maximum
    return total, maximum, denominator


@jit_for_any("num_tiles", "max_items")
def _prefill_kernel(
    q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tables_ptr, tiles_ptr, out_ptr,
    sums_ptr,  # [programs, BLOCK_M, H] of the parts; maxima and denominators without H; for SPLIT
    maxima_ptr, denominators_ptr, sinks_ptr, q_token_stride, q_head_stride, out_token_stride, table_stride,
    window, scale_log2e, num_tiles, max_items, SPLIT: tl.constexpr, SPLIT_LEN: tl.constexpr,
    WINDOWED: tl.constexpr, INVARIANT: tl.constexpr,
    HAS_SCALES: tl.constexpr,  # keys and values are codes (kv_codes.py)
    CAP: tl.constexpr,  # `cap_constant` of the layer
    HAS_SINKS: tl.constexpr,
    G: tl.constexpr, M: tl.constexpr, H: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
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
                lowest, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, g, window,
                scale_log2e, CAP, True, True, HAS_SCALES, G, H, BLOCK_SIZE, BLOCK_N, BLOCK_H,
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
                lowest, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, g, window,
                scale_log2e, CAP, False, WINDOWED, HAS_SCALES, G, H, BLOCK_SIZE, BLOCK_N, BLOCK_H,
            )  # fmt: skip
        total, maximum, denominator = _attend_keys(
            q, total, maximum, denominator, position, seen_by_all, split_end,
            lowest, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, g, window,
                scale_log2e, CAP, True, WINDOWED, HAS_SCALES, G, H, BLOCK_SIZE, BLOCK_N, BLOCK_H,
        )  # fmt: skip

        is_whole = True
        if SPLIT:
            is_whole = num_splits == 1
        if is_whole:
            if HAS_SINKS:
                denominator += sink_weights(sinks_ptr, head, token < num, maximum)
            out = total / tl.where(denominator == 0.0, 1.0, denominator)[:, None]  # 0: a row without a token
            to = (first + token)[:, None] * out_token_stride + head[:, None] * H + h[None, :]
            tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=in_rows)
        else:
            part = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(sums_ptr + part.to(tl.int64)[:, None] * H + h[None, :], total, mask=in_rows)
            tl.store(maxima_ptr + part, maximum, mask=token < num)
            tl.store(denominators_ptr + part, denominator, mask=token < num)


@jit_for_any("num_tiles", "max_items")
def _merge_kernel(
    tiles_ptr, sums_ptr, maxima_ptr, denominators_ptr, out_ptr, sinks_ptr, out_token_stride, window,
    num_tiles, max_items, HAS_SINKS: tl.constexpr, SPLIT_LEN: tl.constexpr, G: tl.constexpr, M: tl.constexpr,
    H: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a part
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr,  # the most splits of a tile
    BLOCK_R: tl.constexpr,  # rows merged at once
    AT_ONCE: tl.constexpr,  # parts in flight at once
    PDL: tl.constexpr,
):  # fmt: skip
    w = tl.arange(0, BLOCK_W)
    h = tl.arange(0, BLOCK_H)
    splits = _plan_splits(tiles_ptr, num_tiles, window, max_items, SPLIT_LEN, BLOCK_N, BLOCK_W)
    rank = tl.cumsum((splits > 1).to(tl.int32), axis=0)  # number of a tile among the split tiles, from 1
    slices: tl.constexpr = G * NUM_PARTS * BLOCK_M // BLOCK_R  # slices of a tile's rows, for all kv heads
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
            # .cg: this program may have started before the parts were written, so L1 may be stale
            split = tl.arange(0, BLOCK_S)
            exists = (split < num_splits)[:, None] & (token < num)[None, :]
            program = ((first_item + split) * G + g) * NUM_PARTS
            part = (program[:, None] + (r // BLOCK_M)[None, :]) * BLOCK_M + (r % BLOCK_M)[None, :]
            maxima = tl.load(maxima_ptr + part, mask=exists, other=float("-inf"), cache_modifier=".cg")
            denominators = tl.load(denominators_ptr + part, mask=exists, other=0.0, cache_modifier=".cg")
            maximum = tl.max(maxima, axis=0)
            # a token sees nothing of the splits before its window or after itself
            maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
            denominator = tl.sum(denominators * tl.exp2(maxima - maximum[None, :]), axis=0)
            if HAS_SINKS:
                denominator += sink_weights(sinks_ptr, g * M + r % M, token < num, maximum)

            total = tl.zeros((BLOCK_R, BLOCK_H), tl.float32)
            # places of the rows in the parts of a split
            own = (g * NUM_PARTS + r // BLOCK_M) * BLOCK_M + r % BLOCK_M
            for first_split in range(0, num_splits, AT_ONCE):
                for offset in tl.static_range(AT_ONCE):  # unrolled, so several parts are in flight
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


def attend_prefill(
    q_TNH: torch.Tensor, kv: PagedKV, chunks: PrefillChunks, *, fresh_slots_T: torch.Tensor | None = None,
    out: torch.Tensor | None = None, config: PrefillConfig | None = None, invariant: bool = False,
    num_splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend with the tokens of the chunks; the other tokens of `out` stay unchanged.

    `num_splits` is the room for splits, per tile of the list: 1 for none, None for as many as fill the GPU
    with splits long enough to pay off.

    With `fresh_slots_T`, the slots of this step's tokens, PyTorch's FlashAttention computes fresh chunks: it
    does not support block tables, so keys and values are gathered first, which costs as much as reading them.
    """
    if not use_triton(q_TNH):
        return attend_prefill_reference(q_TNH, kv, chunks, out=out)
    keys_PGH, values_PGH, tables_RB, block_size, scale, window, scales, softcap, sinks_N = kv
    is_plain = softcap is None and sinks_N is None
    (T, N, H), G = q_TNH.shape, keys_PGH.shape[1]
    if out is None:
        out = torch.empty((T, N, H), dtype=q_TNH.dtype, device=q_TNH.device)
    if (
        fresh_slots_T is not None
        and is_plain
        and scales is None
        and q_TNH.dtype != torch.float32
        and chunks.are_fresh
    ):
        k_TGH, v_TGH = keys_PGH[fresh_slots_T], values_PGH[fresh_slots_T]
        return attend_fresh(q_TNH, k_TGH, v_TGH, chunks, scale=scale, window=window, out=out)
    assert N // G <= BLOCK_M, f"{N // G} query heads share a kv head, at most {BLOCK_M} can"
    assert q_TNH.stride(2) == 1, f"the head dimension must be contiguous, got strides {q_TNH.stride()}"
    assert out.stride()[1:] == (H, 1), f"the heads of a token must lie end to end, got strides {out.stride()}"
    assert keys_PGH.is_contiguous() and values_PGH.is_contiguous(), "the store must be contiguous"
    assert scale > 0, f"scale must be positive, got {scale}"
    if chunks.tiles_W4.shape[0] == 0:
        return out
    block_h, tuned = max(next_power_of_two(H), 16), device_profile(q_TNH.device).attention
    if config is None:
        config = prefill_config(tuned, q_TNH.dtype, N, G, H)
        if chunks.are_tokens and config.num_parts == 1 and N // G <= _WARP_GROUP_ROWS:
            config = replace(config, block_m=_WARP_GROUP_ROWS, num_warps=4)
    num_tiles = chunks.tiles_W4.shape[0]
    max_items = 0 if invariant else _max_items(chunks, G, config, num_splits, tuned.prefill_split_len)
    num_programs = max(num_tiles, max_items) * G * config.num_parts
    part_rows = config.block_m // config.num_parts
    parts = _new_parts(num_programs * part_rows, H, q_TNH.device) if max_items else (out, out, out)
    options, max_registers = launch_options(q_TNH.device), config.max_registers
    if max_items and config.programs_per_sm > 1:  # finding a split takes registers from other programs
        max_registers = _SM_REGISTERS // (config.programs_per_sm * config.num_warps * 32)
    sizes = {
        "G": G, "M": N // G, "H": H, "NUM_PARTS": config.num_parts, "BLOCK_M": part_rows,
        "BLOCK_N": config.block_n, "BLOCK_H": block_h,
        "BLOCK_W": _MAX_TILES if max_items and num_tiles > _FEW_TILES else _FEW_TILES,
        "SPLIT_LEN": tuned.prefill_split_len if num_splits is None else config.block_n,
    }  # fmt: skip
    launch_triton(
        _prefill_kernel, (num_programs,),
        (q_TNH, keys_PGH, values_PGH, *(scales or (out, out)), tables_RB, chunks.tiles_W4, out, *parts,
         out if sinks_N is None else sinks_N),
        (q_TNH.stride(0), q_TNH.stride(1), out.stride(0), tables_RB.stride(0), window or 2**30, scale * LOG2E,
         num_tiles, max_items),
        **sizes, SPLIT=max_items > 0, WINDOWED=window is not None, INVARIANT=invariant,
        HAS_SCALES=scales is not None, CAP=cap_constant(softcap), HAS_SINKS=sinks_N is not None,
        BLOCK_SIZE=block_size, PDL=options["PDL"], num_warps=config.num_warps, num_stages=config.num_stages,
        maxnreg=max_registers,
    )  # fmt: skip
    if max_items:
        launch_triton(
            _merge_kernel, (tuned.merge_programs * num_sms(q_TNH.device),), 
            (chunks.tiles_W4, *parts, out, out if sinks_N is None else sinks_N),
            (out.stride(0), window or 2**30, num_tiles, max_items), HAS_SINKS=sinks_N is not None, **sizes,
            BLOCK_S=next_power_of_two(max_items), BLOCK_R=tuned.merge_rows, AT_ONCE=tuned.merge_at_once,
            num_warps=4, **options,
        )  # fmt: skip
    return out


def prefill_config(
    profile: AttentionProfile, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> PrefillConfig:
    """The configuration that measured fastest for heads of this kind."""
    if head_dim > 256:
        return _WIDE_FLOAT32_CONFIG if dtype == torch.float32 else _WIDE_CONFIG
    if dtype == torch.float32:
        return _FLOAT32_CONFIG
    configs = profile.prefill_grouped if num_heads // num_kv_heads >= 4 else profile.prefill
    return configs[min(max(next_power_of_two(head_dim) * dtype.itemsize, 128), 512)]


def _max_items(
    chunks: PrefillChunks, num_kv_heads: int, config: PrefillConfig, num_splits: int | None, split_len: int
) -> int:
    """The most (tile, split) items the list may have; 0 if no tile can be split or it would not help.

    A list padded for a graph is longer than its chunks need, and only the device sees how many tiles are not
    empty, so the limit for such lists is higher.
    """
    num_tiles = chunks.tiles_W4.shape[0]
    if num_tiles > _MAX_TILES or num_splits == 1:
        return 0
    if num_splits is not None:
        return num_tiles * num_splits
    room = num_sms(chunks.tiles_W4.device) * config.programs_per_sm // (num_kv_heads * config.num_parts)
    if chunks.chunks:
        longest = max(chunk.start + chunk.num for chunk in chunks.chunks)
        return room if longest > split_len and 2 * num_tiles <= room else 0
    return room if num_tiles <= 2 * room else 0


def _new_parts(num_rows: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Allocate scratch memory for the sums, maxima and denominators of `num_rows` rows of parts."""
    sums = torch.empty((num_rows, head_dim), dtype=torch.float32, device=device)
    return sums, *torch.empty((2, num_rows), dtype=torch.float32, device=device).unbind()


def check_flash(device: torch.device, head_dim: int) -> None:
    """Raise ConfigError unless PyTorch's FlashAttention supports this GPU and head size."""
    reason = ""
    if not torch.backends.cuda.is_flash_attention_available():
        reason = "this build of PyTorch has none"
    elif gpu_capability(device) < (8, 0):
        reason = "it needs a GPU of compute capability 8.0 or later"
    elif head_dim % 8 or head_dim > 256:
        reason = f"it needs heads of a multiple of 8 up to 256, and this model's have {head_dim}"
    if reason:
        raise ConfigError(
            f"attention_backend=flash is PyTorch's FlashAttention, and {reason}; use attention_backend=triton"
        )


def attend_fresh(
    q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor, chunks: PrefillChunks, *, scale: float,
    window: int | None, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Attend with adjacent fresh chunks, by PyTorch's FlashAttention (varlen)."""
    assert chunks.are_fresh, "every chunk must start its sequence"
    first = chunks.chunks[0].first
    lens = [chunk.num for chunk in chunks.chunks]
    ends = torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32).to(q_TNH.device, non_blocking=True)
    q, k, v = (x[first : first + sum(lens)] for x in (q_TNH, k_TGH, v_TGH))
    out[first : first + sum(lens)] = torch.ops.aten._flash_attention_forward(
        q, k, v, ends, ends, max(lens), max(lens), 0.0, True, False, scale=scale,
        window_size_left=None if window is None else window - 1, window_size_right=0,
    )[0]  # fmt: skip
    return out
