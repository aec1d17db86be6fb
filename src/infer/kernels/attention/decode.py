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

Where a row is cut depends on S, the number of rows the graph was captured for, on its own length, and on how
many positions all rows have together: as many items are wanted as fill the machine twice, not more, because
each of them begins with a wait. A row of length 0 is padding: nothing of it is read and zeros are written.

The list and the tables are read before the kernel that made the queries has ended (`dispatch.py` has the
rules). So the first launch after `plan` is an ordinary one, and tables must not change between the two.

`attend_projected` is the same one launch earlier, for a step in which every token is a row that decodes: it
is given the fused projection, norms and rotates its heads, and puts the new keys and values into the cache.
With many rows the registers this takes cost more than the launch (`PROJECTED_HEADS`).

The query heads that share a kv head are the rows of one matrix product, padded to the tensor cores' 16.

Shapes:  S rows, N query heads, G kv heads, M = N/G query heads per kv head, H head size, P slots, R rows of
         the block tables, B blocks per row, W work items.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from infer.kernels.attention.decode_kernels import decode_kernel
from infer.kernels.attention.decode_plan import plan_kernel
from infer.kernels.attention.reference import attend_naive
from infer.kernels.elementwise.heads import CacheSlots, HeadTransform, norm_rope_write_reference
from infer.kernels.runtime.dispatch import launch_options, next_power_of_two, num_sms, use_triton

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
# With many rows a program is one warp, which never waits for another one, and more of them share a
# multiprocessor: 128 rows with 400 positions and heads of 64 are read in 29.7 us instead of 39.3.
_ONE_WARP = DecodeConfig(block_n=32, num_warps=1, num_stages=3, programs_per_sm=16)
_FEW_HEADS, _PROGRAMS_FOR_FEW = 512, (2, 3)  # up to so many S * G each program gets an item or two: no turns
_HANDFUL = 32  # from so many S * G on there may be items for a third program of each multiprocessor
PROJECTED_HEADS = 256  # up to so many S * G the projected form is faster: most programs have one item
_PROJECTED_REGISTERS = 192  # of a thread of it, with heads of 128 bytes: room for the kernel after it

# (S * G up to, shortest split): only short splits let few rows fill the machine, but each item waits for its
# table and first keys. So splits get twice, four times ... as long while there are more items than wanted.
_SPLIT_LENS = ((32, 64), (64, 128), (128, 512), (math.inf, 1024))
_MOST_ITEMS = 256  # for all kv heads: two for nearly each multiprocessor of a large GPU
_PREFETCHED = 128  # positions of a program's first item; of few heads alone: all of them must fit L2
_LEAST_ITEMS = 128  # for all kv heads, of a row alone: one for nearly each multiprocessor
_ITEM_INTS = (
    8  # row of the batch, row of the tables, first position, last + 1, split, splits, row's length, -
)


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


def attend_projected_reference(
    qkv_SX: torch.Tensor, transform: HeadTransform, keys_PGH: torch.Tensor, values_PGH: torch.Tensor,
    tables_RB: torch.Tensor, rows_S: torch.Tensor, lens_S: torch.Tensor,
    *, block_size: int, scale: float, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """The specification of the form that is given the fused projection: norm, rotate, write, then attend."""
    newest_S = (lens_S.long() - 1).clamp(min=0)
    blocks_S = tables_RB[rows_S.long().clamp(min=0), newest_S // block_size].long()
    slots_S = torch.where(lens_S > 0, blocks_S * block_size + newest_S % block_size, -1)
    cache = CacheSlots(keys_PGH, values_PGH, slots_S)
    q_SNH, _, _ = norm_rope_write_reference(qkv_SX, transform, newest_S, cache)
    return attend_decode_reference(
        q_SNH, keys_PGH, values_PGH, tables_RB, rows_S, lens_S,
        block_size=block_size, scale=scale, window=window,
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
        self.is_fresh = True  # planned, and not read since
        self.num_sms = num_sms(self.tickets.device)

    def split_len(self, num_rows: int) -> int:
        """Positions in the shortest splits of a batch of this many rows."""
        if self._split_len is not None:
            return self._split_len
        return next(length for limit, length in _SPLIT_LENS if num_rows * self.num_kv_heads <= limit)

    def max_splits(self, num_rows: int) -> int:
        """The most splits a row is cut into: enough to fill the machine with this many rows alone."""
        wanted = next_power_of_two(_LEAST_ITEMS // (num_rows * self.num_kv_heads) or 1)
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
        num_doublings = (num_rows * self.max_len // split_len).bit_length()
        wanted = max(_MOST_ITEMS // self.num_kv_heads, 1) if self._split_len is None else 0
        self.is_fresh = True
        plan_kernel[(1,)](
            rows_S, lens_S, items_W8, num_items, num_rows, split_len, window or 2**30,
            ITEMS_WANTED=wanted, MAX_SPLITS=max_splits, NUM_DOUBLINGS=num_doublings, ITEM_INTS=_ITEM_INTS,
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
    assert q_SNH.stride(2) == 1, f"the head dimension must be contiguous, got strides {q_SNH.stride()}"
    if out is None:
        out = torch.empty((S, N, H), dtype=q_SNH.dtype, device=q_SNH.device)
    _launch(
        q_SNH, (q_SNH.stride(0), q_SNH.stride(1)), keys_PGH, values_PGH, tables_RB, work, None,
        block_size=block_size, scale=scale, window=window, out=out, config=config,
    )  # fmt: skip
    return out


def attend_projected(
    qkv_SX: torch.Tensor,
    transform: HeadTransform,
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
) -> torch.Tensor:
    """Norm and rotate the heads of each row's newest token, put its key and value into the cache, attend.

    The newest token stands at position `lens_S[s] - 1`. `work.plan` must have seen these rows, lengths and
    window.
    """
    if not use_triton(qkv_SX):
        return attend_projected_reference(
            qkv_SX, transform, keys_PGH, values_PGH, tables_RB, rows_S, lens_S,
            block_size=block_size, scale=scale, window=window,
        )  # fmt: skip
    S, N, G = qkv_SX.shape[0], transform.num_heads, transform.num_kv_heads
    H = qkv_SX.shape[1] // (N + 2 * G)
    cos_PR, sin_PR = transform.cos_PR, transform.sin_PR
    assert qkv_SX.stride(1) == 1, "the elements of a token must be contiguous"
    assert cos_PR.shape == sin_PR.shape and 2 * cos_PR.shape[1] == H, f"tables {cos_PR.shape}, heads of {H}"
    assert cos_PR.is_contiguous() and sin_PR.is_contiguous(), "the tables must be contiguous"
    assert keys_PGH.shape[1:] == (G, H), f"keys are {tuple(keys_PGH.shape)}"
    assert keys_PGH.dtype == qkv_SX.dtype, f"keys are {keys_PGH.dtype}, the projection {qkv_SX.dtype}"
    out_SNH = torch.empty((S, N, H), dtype=qkv_SX.dtype, device=qkv_SX.device)
    _launch(
        qkv_SX, (qkv_SX.stride(0), H), keys_PGH, values_PGH, tables_RB, work, transform,
        block_size=block_size, scale=scale, window=window, out=out_SNH,
    )  # fmt: skip
    return out_SNH


def _launch(
    q: torch.Tensor,  # [S, N, H], or with a transform the projection [S, X]
    q_strides: tuple[int, int],  # between rows and between heads
    keys_PGH: torch.Tensor,
    values_PGH: torch.Tensor,
    tables_RB: torch.Tensor,
    work: DecodeWork,
    transform: HeadTransform | None,
    *,
    block_size: int,
    scale: float,
    window: int | None,
    out: torch.Tensor,
    config: DecodeConfig | None = None,
) -> None:
    S, N, H = out.shape
    if S == 0:
        return
    assert keys_PGH.is_contiguous() and values_PGH.is_contiguous(), "the store must be contiguous"
    G, element_size = keys_PGH.shape[1], keys_PGH.element_size()
    block_h, merge_m = max(next_power_of_two(H), 16), next_power_of_two(N // G)
    are_few = S * G <= _FEW_HEADS
    if config is None:
        config = _CONFIGS[min(max(block_h * element_size, 128), 1024)]
        if are_few:
            config = replace(config, programs_per_sm=_PROGRAMS_FOR_FEW[S * G >= _HANDFUL])
        elif element_size == 2 and block_h <= 128 and merge_m <= 16:
            config = _ONE_WARP
    max_splits = work.max_splits(S)
    merge_splits = max(2048 * config.num_warps // (merge_m * block_h), 1)  # 64 registers
    items_W8, num_items = work.work_list(window)
    options = launch_options(q.device)
    if work.is_fresh:  # the list is read before `gdc_wait`: its author must not be the kernel before
        options.pop("launch_pdl", None)
        work.is_fresh = False
    is_projected = transform is not None
    if options["PDL"] and is_projected and config.num_warps == 4 and block_h * element_size == 128:
        options["maxnreg"] = _PROJECTED_REGISTERS
    if transform is None:
        transform = HeadTransform(None, q, q, N, G, 0.0)  # not looked at, like the weights of no norm
    q_weight_H, k_weight_H = transform.norm_weights or (q, q)
    decode_kernel[(min(work.num_sms * config.programs_per_sm, S * max_splits * G),)](
        q, keys_PGH, values_PGH, tables_RB, out, items_W8, num_items,
        work.sums, work.maxima, work.denominators, work.tickets,
        *q_strides, tables_RB.stride(0), scale * LOG2E,
        q_weight_H, k_weight_H, transform.cos_PR, transform.sin_PR, transform.eps, transform.offset,
        G=G, M=N // G, H=H, BLOCK_SIZE=block_size, MAX_SPLITS=max_splits,
        MERGE_SPLITS=min(max_splits, merge_splits), MERGE_M=merge_m,
        BLOCK_M=max(merge_m, 16), BLOCK_N=config.block_n, BLOCK_H=block_h, ITEM_INTS=_ITEM_INTS,
        PREFETCH_N=_PREFETCHED if are_few else 0, LINE=min(128 // element_size, block_h),
        PROJECTED=is_projected, HAS_NORM=transform.norm_weights is not None,
        num_warps=config.num_warps, num_stages=config.num_stages, **options,
    )  # fmt: skip
