"""The work list of a decode step: every row cut into splits, written by the device for the device.

`decode.py` says why. One program does it all, for the numbers are few. It finds the length of a
split: the shortest there may be, doubled until the positions of all rows make no more items than are wanted,
and for a row that is still cut into too many, doubled further. Then it counts the splits of each row, gives
every item its place with two running sums, and writes the items of all rows split by split.

Shapes:  S rows of the step.
"""

from __future__ import annotations

from infer.kernels.runtime.dispatch import jit_for_any, tl


@jit_for_any("num_rows", "split_len", "window")
def plan_kernel(
    rows_ptr,
    lens_ptr,
    items_ptr,
    num_items_ptr,
    num_rows,
    split_len,
    window,
    ITEMS_WANTED: tl.constexpr,  # for each kv head; 0: as many as there are
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
    if ITEMS_WANTED > 0:
        positions = tl.sum(tl.where(in_batch, end - first, 0).to(tl.int64), axis=0)
        for _ in tl.static_range(NUM_DOUBLINGS):
            length = tl.where(positions > length.to(tl.int64) * ITEMS_WANTED, length * 2, length)
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
        tl.store(to + 6, end, mask=exists)
