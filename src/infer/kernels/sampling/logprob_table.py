"""The logprobs of chosen tokens and of the likeliest alternatives, as one table of integers.

    logprob of the chosen token | its rank | ids of the k likeliest | their logprobs

Its entries have 32 bits, with floats stored as their bits, so a table is copied to the host as one tensor.

PyTorch needs about 20 launches for this, each over one row of 150,000 logits, and few of them use more than
one SM: they take longer than sampling, and the next step must wait for the SMs that they occupy. Here there
are two launches. The *survey* reads the logits once, a tile per program, and stores a summary of each tile:

    peak, mass       max(x) and sum(exp(x - peak)), from which the normaliser of the row is computed
    num_above        the number of logits larger than the chosen token's
    values, ids      its largest logits

The *merge* has one program per row and combines the summaries. It may run in a separate stream, in parallel
to the next step: it no longer needs the logits, which that step overwrites.

Both select the W largest of many numbers without sorting them. With a small change, the bits of a float are
an integer that grows with it. The bits of the W-th largest are found from the highest to the lowest, each by
counting the numbers that are at least the prefix so far; bfloat16 needs 16 bits. Among equal numbers the
first are taken, so among equal logits the smallest ids are reported.

Shapes:  S rows of logits, V vocabulary, K rows with logprobs, W logits stored per tile.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from infer.kernels.runtime.dispatch import jit, jit_for_any, next_power_of_two, tl, use_triton
from infer.kernels.runtime.launch import launch_triton

_TILE = 2048  # logits per program: few, because all of them are counted again for each bit
_KEPT = 32  # logits stored per tile: enough for clients, but not for the widest beam searches


def logprob_table_reference(logits_SV: torch.Tensor, chosen_S: torch.Tensor, width: int) -> torch.Tensor:
    """The specification of `logprob_table`, for all rows."""
    logprobs_SV = torch.log_softmax(logits_SV, dim=-1, dtype=torch.float32)
    own_S1 = logprobs_SV.gather(1, chosen_S.clamp(min=0).unsqueeze(1))
    rank_S1 = (logprobs_SV > own_S1).sum(dim=-1, keepdim=True) + 1
    values_SK, ids_SK = torch.topk(logprobs_SV, width, dim=-1)
    columns = own_S1.view(torch.int32), rank_S1.int(), ids_SK.int(), values_SK.view(torch.int32)
    return torch.cat(columns, dim=1)


@jit
def _order_of(x, BITS: tl.constexpr):
    """Map floats that differ in their first BITS bits to integers in the same order; 0 is below all."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)  # maps -0 to +0
    return (bits ^ tl.where((bits >> 31) == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)) >> (32 - BITS)


@jit
def _places_of_largest(order, W: tl.constexpr, BITS: tl.constexpr):
    """Indices 0 to W - 1 for the W largest, in the order of their places, and -1 for the others."""
    limit = tl.zeros((), tl.uint32)
    for i in tl.static_range(BITS):
        higher = limit | (1 << (BITS - 1 - i))
        limit = tl.where(tl.sum((order >= higher).to(tl.int32), axis=0) >= W, higher, limit)
    num_left = W - tl.sum((order > limit).to(tl.int32), axis=0)
    is_equal = order == limit
    is_first = is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= num_left)
    is_taken = (order > limit) | is_first
    return tl.where(is_taken, tl.cumsum(is_taken.to(tl.int32), axis=0) - 1, -1)


@jit
def _survey_kernel(
    logits_ptr, places_ptr, chosen_ptr, own_ptr, peaks_ptr, masses_ptr, above_ptr, values_ptr, ids_ptr,
    stride, V, TILE: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Store the summary of one tile of one row."""
    k, tile, num_tiles = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    place = tl.load(places_ptr + k).to(tl.int64)
    row_ptr = logits_ptr + place * stride
    own = tl.load(row_ptr + tl.maximum(tl.load(chosen_ptr + place), 0)).to(tl.float32)
    if tile == 0:
        tl.store(own_ptr + k, own)
    ids = tile * TILE + tl.arange(0, TILE)
    in_row = ids < V
    x = tl.load(row_ptr + ids, mask=in_row, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)  # the whole tile may be forbidden
    part = k * num_tiles + tile
    tl.store(peaks_ptr + part, peak)
    tl.store(masses_ptr + part, tl.sum(tl.exp(x - shift), axis=0))
    tl.store(above_ptr + part, tl.sum((x > own).to(tl.int32), axis=0))
    to = _places_of_largest(tl.where(in_row, _order_of(x, BITS), 0), W, BITS)
    tl.store(values_ptr + part * W + to, x, mask=to >= 0)
    tl.store(ids_ptr + part * W + to, ids, mask=to >= 0)


@jit_for_any("num_tiles", "width")
def _merge_kernel(
    own_ptr, peaks_ptr, masses_ptr, above_ptr, values_ptr, ids_ptr, table_ptr, num_tiles, width,
    BLOCK_TILES: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Write one row of the table from the summaries of its tiles."""
    k = tl.program_id(0)
    tiles = tl.arange(0, BLOCK_TILES)
    in_row = tiles < num_tiles
    parts = k * num_tiles + tiles
    peaks = tl.load(peaks_ptr + parts, mask=in_row, other=float("-inf"))
    masses = tl.load(masses_ptr + parts, mask=in_row, other=0.0)
    peak = tl.max(peaks, axis=0)
    normaliser = peak + tl.log(tl.sum(masses * tl.exp(peaks - peak), axis=0))
    rank = 1 + tl.sum(tl.load(above_ptr + parts, mask=in_row, other=0), axis=0)

    kept = tl.arange(0, BLOCK_TILES * W)
    is_kept = kept < num_tiles * W
    values_ptr += k.to(tl.int64) * num_tiles * W
    ids_ptr += k.to(tl.int64) * num_tiles * W
    x = tl.load(values_ptr + kept, mask=is_kept, other=0.0)
    ids = tl.load(ids_ptr + kept, mask=is_kept, other=0)
    to = _places_of_largest(tl.where(is_kept, _order_of(x, BITS), 0), W, BITS)
    tl.debug_barrier()  # everything has been read, so the largest can be moved to the front
    tl.store(values_ptr + to, x, mask=to >= 0)
    tl.store(ids_ptr + to, ids, mask=to >= 0)
    tl.debug_barrier()
    columns = tl.arange(0, W)
    top_x, top_ids = tl.load(values_ptr + columns), tl.load(ids_ptr + columns)
    order = _order_of(top_x, BITS)
    is_before = (order[None, :] > order[:, None]) | (
        (order[None, :] == order[:, None]) & (columns[None, :] < columns[:, None])
    )
    column = tl.sum(is_before.to(tl.int32), axis=1)

    row_ptr = table_ptr + k * (2 + 2 * width)
    tl.store(row_ptr, (tl.load(own_ptr + k) - normaliser).to(tl.int32, bitcast=True))
    tl.store(row_ptr + 1, rank)
    tl.store(row_ptr + 2 + column, top_ids, mask=column < width)
    bits = (top_x - normaliser).to(tl.int32, bitcast=True)
    tl.store(row_ptr + 2 + width + column, bits, mask=column < width)


def logprob_table(
    logits_SV: torch.Tensor, chosen_S: torch.Tensor, width: int, places_K: torch.Tensor | None = None,
    aside: torch.cuda.Stream | None = None,
) -> torch.Tensor:  # fmt: skip
    """Make the table of the rows at `places_K` (or all), with up to `width` alternatives each; int32 [K, *].

    A negative id counts as 0. With a stream `aside`, part of the work runs there, as may reads of the table.
    """
    width = min(width, logits_SV.shape[1])
    if not use_triton(logits_SV) or width > _KEPT:
        if places_K is not None:
            logits_SV, chosen_S = logits_SV[places_K], chosen_S[places_K]
        table = logprob_table_reference(logits_SV, chosen_S, width)
        _hand_over((table,), aside)
        return table
    assert logits_SV.stride(1) == 1, "the logits of a row must be contiguous"
    device = logits_SV.device
    if places_K is None:
        places_K = torch.arange(len(logits_SV), device=device)
    num_rows, num_tiles = len(places_K), -(-logits_SV.shape[1] // _TILE)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=device)

    parts = (
        empty(),  # own: the logit of the chosen token
        empty(num_tiles),  # peaks
        empty(num_tiles),  # masses
        empty(num_tiles, dtype=torch.int32),  # num_above
        empty(num_tiles, _KEPT),  # values
        empty(num_tiles, _KEPT, dtype=torch.int32),  # ids
    )
    table = empty(2 + 2 * width, dtype=torch.int32)
    if not num_rows:
        return table
    bits = 16 if logits_SV.dtype is torch.bfloat16 else 32
    launch_triton(
        _survey_kernel, (num_tiles, num_rows), (logits_SV, places_K, chosen_S, *parts),
        (logits_SV.stride(0), logits_SV.shape[1]), TILE=_TILE, W=_KEPT, BITS=bits, num_warps=4,
    )  # fmt: skip
    _hand_over((*parts, table), aside)
    with nullcontext() if aside is None else torch.cuda.stream(aside):
        launch_triton(
            _merge_kernel, (num_rows,), (*parts, table), (), (num_tiles, width),
            BLOCK_TILES=next_power_of_two(num_tiles), W=_KEPT, BITS=bits, num_warps=8,
        )  # fmt: skip
    return table


def _hand_over(tensors: tuple[torch.Tensor, ...], aside: torch.cuda.Stream | None) -> None:
    """Hand tensors over to a stream, which waits for them; their memory is not reused before it is done."""
    if aside is not None:
        aside.wait_stream(torch.cuda.current_stream(tensors[0].device))
        for tensor in tensors:
            tensor.record_stream(aside)
