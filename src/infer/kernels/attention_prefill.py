"""Attention of chunks of prompts over the paged cache.

A *chunk* is a run of consecutive tokens of one row, anywhere in the step's T tokens. Its keys and values are
in the cache already, beside those of the positions before it, so a fresh prompt (start 0), the next chunk of
a long one and a prompt whose beginning was found in the prefix cache are the same thing:

    Chunk(first=5, num=3, row=2, start=40)      tokens 5, 6, 7 of the step are positions 40, 41, 42 of row 2
                                                and see 0..40, 0..41, 0..42

Compute-bound: two matrix products of 128 rows. A row of that product is one token *and* one query head: the
tile holds 128 / M tokens with the M query heads that share a kv head, rather than 128 tokens of one head.
Both reuse a tile of keys equally often; packed, a tile spans fewer tokens, so less of it is cut off by the
causal diagonal, and a short chunk fills its rows sooner. Of the keys of a tile only some need a mask:

    keys      0 ............ first token's window | seen by all tokens | up to the tile's last token
              never read      masked                no mask              masked

With `invariant`, all keys take the masked way, in tiles that start at multiples of their length. Then a token
has the same bits whatever else its tile, its chunk and the step hold, be it a chunk of its own or part of a
prompt: a tile that a token does not see adds zeros to its sums.

The tiles are listed on the host, which knows the chunks, longest first so that none starts late; a list is
padded to the capacity a graph was captured for with empty tiles, whose programs leave at once.

Shapes:  T tokens, N query heads, G kv heads, M = N/G, H head size, P slots, R rows of the block tables,
         B blocks per row, W tiles, C chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from infer.errors import ConfigError
from infer.kernels.attention import attend_naive
from infer.kernels.dispatch import jit, next_power_of_two, tl, use_triton

LOG2E = math.log2(math.e)
BLOCK_M = 128  # two warp groups of 64 rows: what the matrix instructions of a Hopper GPU are made of


class Chunk(NamedTuple):
    """Consecutive tokens of one row."""

    first: int  # index of its first token in this step
    num: int
    row: int  # of the block tables
    start: int  # position of its first token


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the kernel is compiled."""

    block_n: int  # keys per tile
    num_warps: int
    num_stages: int
    block_m: int = BLOCK_M  # rows of a tile
    num_parts: int = 1  # programs that share the rows of a tile


# By the bytes of one head's key: queries and `num_stages` tiles of keys and values share 227 KiB, and the
# scores and sums of a tile share the registers of 256 threads. Measured on Hopper: tiles so short that two
# programs share a multiprocessor, one multiplying while the other computes exponentials.
_CONFIGS = {
    128: PrefillConfig(block_n=64, num_warps=8, num_stages=3),
    256: PrefillConfig(block_n=32, num_warps=8, num_stages=4),
    512: PrefillConfig(block_n=32, num_warps=8, num_stages=2),
}
# Where four or more query heads share a kv head, finding a row's query takes the registers that the second
# program would need; alone, a program is better off with long tiles.
_GROUPED_CONFIGS = _CONFIGS | {256: PrefillConfig(block_n=128, num_warps=8, num_stages=2)}
# Exact float32 has no tensor cores: a whole tile in one program would be unrolled into the stack.
_FLOAT32_CONFIG = PrefillConfig(block_n=32, num_warps=4, num_stages=2, num_parts=8)


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """The chunks of one step: as tiles on the device, and as the integers the host knows."""

    tiles_W4: torch.Tensor  # int32; first token, tokens, row, position of the first token; no tokens: empty
    chunks: tuple[Chunk, ...]  # for the reference and for PyTorch's kernels; a graph replay does without

    @classmethod
    def from_arrays(cls, tiles_W4: torch.Tensor, chunks: Sequence[Chunk] = ()) -> PrefillChunks:
        """Around a device copy of what `build_prefill_chunks` made."""
        assert tiles_W4.dtype == torch.int32 and tiles_W4.is_contiguous(), "tiles must be contiguous int32"
        return cls(tiles_W4, tuple(chunks))

    @property
    def are_fresh(self) -> bool:
        """Whether every chunk starts its sequence and the chunks lie end to end."""
        ends = [chunk.first + chunk.num for chunk in self.chunks]
        follows = all(end == chunk.first for end, chunk in zip(ends, self.chunks[1:], strict=False))
        return bool(self.chunks) and follows and all(chunk.start == 0 for chunk in self.chunks)


def tokens_per_tile(num_heads: int, num_kv_heads: int, block_m: int = BLOCK_M) -> int:
    """How many tokens, each with the query heads of one kv head, fill the rows of a tile."""
    return max(block_m // (num_heads // num_kv_heads), 1)


def build_prefill_chunks(
    chunks: Sequence[Chunk], *, tokens_per_tile: int, max_tiles: int | None = None
) -> npt.NDArray[np.int32]:
    """The tiles of the chunks [W, 4], those with most keys first, padded with empty ones to `max_tiles`."""
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
    q_TNH: torch.Tensor,
    keys_PGH: torch.Tensor,
    values_PGH: torch.Tensor,
    tables_RB: torch.Tensor,
    chunks: PrefillChunks,
    *,
    block_size: int,
    scale: float,
    window: int | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification: gather the slots of one chunk after the other and attend to them."""
    out = torch.zeros_like(q_TNH) if out is None else out
    for first, num, row, start in chunks.chunks:
        lowest = 0 if window is None else max(start - window + 1, 0)
        positions_L = torch.arange(lowest, start + num, device=q_TNH.device)
        slots_L = tables_RB[row, positions_L // block_size].long() * block_size + positions_L % block_size
        out[first : first + num] = attend_naive(
            q_TNH[first : first + num], keys_PGH[slots_L], values_PGH[slots_L], scale=scale, window=window
        )
    return out


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


@jit
def _prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    tiles_ptr,
    out_ptr,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    table_stride,
    window,
    scale_log2e,
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
):
    tile_ptr = tiles_ptr + tl.program_id(0) // (G * NUM_PARTS) * 4
    g = tl.program_id(0) // NUM_PARTS % G
    num = tl.load(tile_ptr + 1)
    first_row = tl.program_id(0) % NUM_PARTS * BLOCK_M
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
        if INVARIANT:
            seen_by_all = 0
            if WINDOWED:
                seen_by_all = tl.maximum(start - window + 1, 0) // BLOCK_N * BLOCK_N
        elif WINDOWED:
            lowest = tl.maximum(start - window + 1, 0)
            num_edge = (tl.maximum(end - window - lowest, 0) + BLOCK_N - 1) // BLOCK_N
            edge_end = lowest + num_edge * BLOCK_N
            total, maximum, denominator = _attend_keys(
                q, total, maximum, denominator, position, lowest, tl.minimum(edge_end, end),
                keys_ptr, values_ptr, table_ptr, window, scale_log2e,
                True, True, G * H, H, BLOCK_SIZE, BLOCK_N, BLOCK_H,
            )  # fmt: skip
        else:
            edge_end = 0
        if not INVARIANT:
            seen_by_all = edge_end + tl.maximum(start + 1 - edge_end, 0) // BLOCK_N * BLOCK_N
            total, maximum, denominator = _attend_keys(
                q, total, maximum, denominator, position, edge_end, seen_by_all,
                keys_ptr, values_ptr, table_ptr, window, scale_log2e,
                False, WINDOWED, G * H, H, BLOCK_SIZE, BLOCK_N, BLOCK_H,
            )  # fmt: skip
        total, maximum, denominator = _attend_keys(
            q, total, maximum, denominator, position, seen_by_all, end,
            keys_ptr, values_ptr, table_ptr, window, scale_log2e,
            True, WINDOWED, G * H, H, BLOCK_SIZE, BLOCK_N, BLOCK_H,
        )  # fmt: skip

        out = total / tl.where(denominator == 0.0, 1.0, denominator)[:, None]  # 0: a row without a token
        to = (first + token)[:, None] * out_token_stride + head[:, None] * H + h[None, :]
        tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=in_rows)


def attend_prefill(
    q_TNH: torch.Tensor,
    keys_PGH: torch.Tensor,
    values_PGH: torch.Tensor,
    tables_RB: torch.Tensor,
    chunks: PrefillChunks,
    *,
    block_size: int,
    scale: float,
    window: int | None,
    fresh_slots_T: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """Attend with the tokens of the chunks; the other tokens of `out` are left as they are.

    With `fresh_slots_T`, the slots of this step's tokens, PyTorch's FlashAttention computes fresh chunks: it
    knows no block tables, so keys and values are copied together first, which costs as much as reading them.
    """
    if not use_triton(q_TNH):
        return attend_prefill_reference(
            q_TNH, keys_PGH, values_PGH, tables_RB, chunks,
            block_size=block_size, scale=scale, window=window, out=out,
        )  # fmt: skip
    T, N, H = q_TNH.shape
    G = keys_PGH.shape[1]
    if out is None:
        out = torch.empty((T, N, H), dtype=q_TNH.dtype, device=q_TNH.device)
    if fresh_slots_T is not None and q_TNH.dtype != torch.float32 and chunks.are_fresh:
        k_TGH, v_TGH = keys_PGH[fresh_slots_T], values_PGH[fresh_slots_T]
        return attend_fresh(q_TNH, k_TGH, v_TGH, chunks, scale=scale, window=window, out=out, backend="flash")
    assert N // G <= BLOCK_M, f"{N // G} query heads share a kv head, at most {BLOCK_M} can"
    assert q_TNH.stride(2) == 1, f"the head dimension must be contiguous, got strides {q_TNH.stride()}"
    assert out.stride()[1:] == (H, 1), f"the heads of a token must lie end to end, got strides {out.stride()}"
    assert keys_PGH.is_contiguous() and values_PGH.is_contiguous(), "the store must be contiguous"
    assert scale > 0, f"scale must be positive, got {scale}"
    if chunks.tiles_W4.shape[0] == 0:
        return out
    block_h = max(next_power_of_two(H), 16)
    if config is None and q_TNH.dtype == torch.float32:
        config = _FLOAT32_CONFIG
    configs = _GROUPED_CONFIGS if N // G >= 4 else _CONFIGS
    config = config or configs[min(max(block_h * keys_PGH.element_size(), 128), 512)]
    _prefill_kernel[(chunks.tiles_W4.shape[0] * G * config.num_parts,)](
        q_TNH, keys_PGH, values_PGH, tables_RB, chunks.tiles_W4, out,
        q_TNH.stride(0), q_TNH.stride(1), out.stride(0), tables_RB.stride(0), window or 2**30, scale * LOG2E,
        WINDOWED=window is not None, INVARIANT=invariant, G=G, M=N // G, H=H, BLOCK_SIZE=block_size,
        NUM_PARTS=config.num_parts, BLOCK_M=config.block_m // config.num_parts,
        BLOCK_N=config.block_n, BLOCK_H=block_h,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def check_flash(device: torch.device, head_dim: int) -> None:
    """ConfigError unless PyTorch's FlashAttention runs on this GPU with heads of this size."""
    reason = ""
    if not torch.backends.cuda.is_flash_attention_available():
        reason = "this build of PyTorch has none"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        reason = "it needs a GPU of compute capability 8.0 or later"
    elif head_dim % 8 or head_dim > 256:
        reason = f"it needs heads of a multiple of 8 up to 256, and this model's have {head_dim}"
    if reason:
        raise ConfigError(
            f"attention_backend=flash is PyTorch's FlashAttention, and {reason}; use attention_backend=triton"
        )


def attend_fresh(
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    v_TGH: torch.Tensor,
    chunks: PrefillChunks,
    *,
    scale: float,
    window: int | None,
    out: torch.Tensor,
    backend: str,
) -> torch.Tensor:
    """Fresh chunks that lie end to end, through the variable-length kernels that come with PyTorch."""
    assert chunks.are_fresh, "every chunk must start its sequence"
    first = chunks.chunks[0].first
    lens = [chunk.num for chunk in chunks.chunks]
    ends = torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32).to(q_TNH.device, non_blocking=True)
    q, k, v = (x[first : first + sum(lens)] for x in (q_TNH, k_TGH, v_TGH))
    if backend == "flash":
        result = torch.ops.aten._flash_attention_forward(
            q, k, v, ends, ends, max(lens), max(lens), 0.0, True, False, scale=scale,
            window_size_left=None if window is None else window - 1, window_size_right=0,
        )[0]  # fmt: skip
    else:
        assert backend == "cudnn" and window is None, f"{backend} does not know windows"
        result = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, ends, ends, max(lens), max(lens), False, 0.0, True, False, scale=scale
        )[0]
    out[first : first + sum(lens)] = result
    return out
