"""The work list of a decode step: every row cut into splits, planned on the device.

Decode attention reads each key once, so its roofline is the bandwidth of memory. Two problems are in the way.

First, rows differ in length. One long row must not keep one SM busy while the others wait, so a row is cut
along its positions into *splits* (split-K), and a (row, split) is one item of work for each kv head:

    row 0, 700 positions   |== 256 ==|== 256 ==|= 188 =|        items of split length first, remainders last,
    row 1,  90 positions   |90|                                 so that the programs finish together

Second, only the device knows the lengths: the graph that launches attention was captured long before. So the
grid fills the GPU whatever the lengths are; `DecodeWork.plan` writes the list of items once per step, for all
layers, and each program strides over that list until its end, which it reads from memory.

The cuts of a row depend on S (the number of rows the graph was captured for), on its own length, and on the
total positions of all rows: there should be enough items to keep the GPU full to the end, but not more,
because each of them begins with a wait. A row of length 0 is padding: one item without positions, which
writes zeros.

A single program plans everything, because there are few numbers. It finds the length of a split: the shortest
allowed, doubled until the positions of all rows make no more items than wanted, and doubled further for a row
that still has too many splits. Then it counts the splits of each row, assigns every item its place with two
running sums, and writes the items of all rows split by split.

Shapes:  S rows of the step, W work items.
"""

from __future__ import annotations

import torch

from infer.config.profiles.profile import AttentionProfile
from infer.kernels.attention.choice import DECODE_WAYS, DecodeLaunch, DecodeProblem
from infer.kernels.runtime.choice import choose
from infer.kernels.runtime.dispatch import jit_for_any, next_power_of_two, num_sms, tl, use_triton
from infer.kernels.runtime.profiles import device_profile

ITEM_INTS = 8  # row of the batch, row of the tables, first position, last + 1, split, splits, length, -


@jit_for_any("num_rows", "split_len", "window")
def _plan_kernel(
    rows_ptr, lens_ptr, items_ptr, num_items_ptr, num_rows, split_len, window,
    ITEMS_WANTED: tl.constexpr,  # items per kv head; 0: no limit
    MAX_SPLITS: tl.constexpr, NUM_DOUBLINGS: tl.constexpr, ITEM_INTS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
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


class DecodeWork:
    """The work list and scratch memory of up to `max_rows` rows, shared by all layers and graphs of a stream.

    `split_len` fixes the length of a split; by default, it depends on the number of rows. `backend` is the
    resolved `decode_attention_backend`, which decides the kernels that read the list. `profile` has the sizes
    of splits and the limits of each kernel (default: the device's profile).
    """

    def __init__(
        self, *, max_rows: int, max_len: int, num_heads: int, num_kv_heads: int, head_dim: int,
        device: torch.device | str, split_len: int | None = None, backend: str = "triton",
        profile: AttentionProfile | None = None,
    ) -> None:  # fmt: skip
        self.profile = profile or device_profile(torch.device(device)).attention
        self.max_rows, self.max_len, self.num_kv_heads = max_rows, max_len, num_kv_heads
        self.head_dim, self.backend = head_dim, backend
        self._chosen: dict[tuple[int, bool, bool], DecodeLaunch] = {}
        self._split_len = split_len
        self._lists: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}
        self._max_items = max(rows * self.max_splits(rows) for rows in range(1, max_rows + 1))
        heads = self._max_items * num_heads
        self.sums = torch.empty(heads * head_dim, dtype=torch.float32, device=device)
        self.maxima = torch.empty(heads, dtype=torch.float32, device=device)
        self.denominators = torch.empty(heads, dtype=torch.float32, device=device)
        self.tickets = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)
        self.is_fresh = True  # planned, but not read yet
        self.num_sms = num_sms(self.tickets.device)

    def choose(self, num_rows: int, *, has_codes: bool, decodes_only: bool) -> DecodeLaunch:
        """The kernel for decoding rows; see `DecodeProblem`."""
        key = num_rows, has_codes, decodes_only
        if key not in self._chosen:
            self._chosen[key] = choose(
                DECODE_WAYS,
                DecodeProblem(
                    num_rows,
                    self.num_kv_heads,
                    self.head_dim,
                    self.backend,
                    self.profile,
                    has_codes,
                    decodes_only,
                ),
            )
        return self._chosen[key]

    def split_len(self, num_rows: int) -> int:
        """Positions in the shortest splits of a batch of this many rows."""
        if self._split_len is not None:
            return self._split_len
        return self._by_heads(self.profile.split_lens, num_rows)

    def _by_heads(self, numbers: tuple[tuple[float, int], ...], num_rows: int) -> int:
        """The number of the first entry whose limit is at least the kv heads of these rows."""
        return next(number for limit, number in numbers if num_rows * self.num_kv_heads <= limit)

    def max_splits(self, num_rows: int) -> int:
        """The most splits of a row, enough for this many rows to fill the GPU."""
        wanted = next_power_of_two(self.profile.least_items // (num_rows * self.num_kv_heads) or 1)
        possible = next_power_of_two(-(-self.max_len // self.split_len(num_rows)) + 1)  # + 1: a window's edge
        return min(max(wanted, 16), 128, possible)

    def work_list(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The items [W, 8] of the last plan for this window, and their number [1]."""
        if window not in self._lists:
            items_W8 = torch.zeros(
                (self._max_items, ITEM_INTS), dtype=torch.int32, device=self.tickets.device
            )
            self._lists[window] = (items_W8, torch.zeros(1, dtype=torch.int32, device=self.tickets.device))
        return self._lists[window]

    def plan(self, rows_S: torch.Tensor, lens_S: torch.Tensor, *, window: int | None = None) -> None:
        """Turn the lengths, which only the device knows, into the work list of one step and window."""
        num_rows = rows_S.shape[0]
        assert num_rows <= self.max_rows, f"{num_rows} rows, room for {self.max_rows}"
        if num_rows == 0 or not use_triton(lens_S):
            return
        items_W8, num_items = self.work_list(window)
        split_len, max_splits = self.split_len(num_rows), self.max_splits(num_rows)
        num_doublings = (num_rows * self.max_len // split_len).bit_length()
        wanted = 0
        if self._split_len is None:
            wanted = max(self._by_heads(self.profile.most_items, num_rows) // self.num_kv_heads, 1)
        self.is_fresh = True
        _plan_kernel[(1,)](
            rows_S, lens_S, items_W8, num_items, num_rows, split_len, window or 2**30,
            ITEMS_WANTED=wanted, MAX_SPLITS=max_splits, NUM_DOUBLINGS=num_doublings, ITEM_INTS=ITEM_INTS,
            BLOCK_S=max(next_power_of_two(num_rows), 16), num_warps=4,
        )  # fmt: skip
