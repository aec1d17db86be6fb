"""What attention of chunks promises where programs share the keys of a tile, wherever it runs.

Written once and tested twice, as `kernel_contract.py` explains. Two traps are set here: the store is NaN in
every slot that holds no position of a row, and so is the scratch memory in which programs leave their parts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from infer.kernels.attention import prefill as attention_prefill
from infer.kernels.attention.prefill import (
    PrefillChunk,
    PrefillChunks,
    _plan_splits,
    attend_prefill,
    attend_prefill_reference,
    build_prefill_chunks,
    tokens_per_tile,
)
from infer.kernels.runtime.dispatch import jit, tl
from tests.kernels.attention_contract import TOLERANCE, Heads, OnDevice, Paged, make_paged

Spans = list[tuple[int, int]]  # (start, num) of a chunk of each row


@jit
def _plan_kernel(  # type: ignore[no-untyped-def]
    tiles_ptr,
    splits_ptr,
    num_tiles,
    window,
    max_items,
    SPLIT_LEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    splits = _plan_splits(tiles_ptr, num_tiles, window, max_items, SPLIT_LEN, BLOCK_N, BLOCK_W)
    tl.store(splits_ptr + tl.arange(0, BLOCK_W), splits)


class SplitsContract(OnDevice):
    """Chunks over long contexts."""

    @pytest.fixture(autouse=True)
    def poison(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """NaN in scratch memory, and a note of each time some is asked for."""
        self.num_split_calls = 0
        make = attention_prefill._new_parts

        def poisoned(*sizes: Any) -> tuple[torch.Tensor, ...]:
            self.num_split_calls += 1
            return tuple(part.fill_(torch.nan) for part in make(*sizes))

        monkeypatch.setattr(attention_prefill, "_new_parts", poisoned)

    def inputs(
        self, spans: Spans, heads: Heads, dtype: torch.dtype, num_spare_tiles: int = 0
    ) -> tuple[torch.Tensor, Paged, PrefillChunks]:
        """Queries, a store and the chunks, with tokens of no chunk between them."""
        paged = make_paged(
            [start + num for start, num in spans], heads, block_size=16, dtype=dtype, device=self.device
        )
        chunks, first = [], 1
        for row, (start, num) in enumerate(spans):
            chunks.append(PrefillChunk(first, num, row, start))
            first += num + 1
        build = partial(
            build_prefill_chunks, chunks, tokens_per_tile=tokens_per_tile(heads.num_heads, heads.num_kv_heads)
        )
        tiles = torch.from_numpy(build(max_tiles=len(build()) + num_spare_tiles)).to(self.device)
        q = torch.randn(first, heads.num_heads, heads.head_dim, device=self.device).to(dtype)
        return q, paged, PrefillChunks.from_arrays(tiles, chunks)

    def check(
        self,
        spans: Spans,
        heads: Heads,
        *,
        num_splits: int | None,
        window: int | None = None,
        dtype: torch.dtype = torch.float16,
        is_known: bool = True,
    ) -> None:
        """The kernel equals its reference and leaves the tokens between the chunks alone."""
        q, paged, batch = self.inputs(spans, heads, dtype, num_spare_tiles=1)
        given = batch if is_known else PrefillChunks.from_arrays(batch.tiles_W4)
        actual = attend_prefill(
            q, paged.kv(0.3, window), given, out=torch.full_like(q, torch.nan), num_splits=num_splits
        )
        expected = attend_prefill_reference(
            q, paged.kv(0.3, window), batch, out=torch.full_like(q, torch.nan)
        )
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)

    @pytest.mark.parametrize(
        ("num_splits", "heads", "spans"),
        [
            (2, Heads(2, 2, 64), [(0, 1), (300, 20)]),
            (4, Heads(4, 2, 128), [(150, 2), (0, 40)]),
            (8, Heads(4, 1, 80), [(3000, 3), (0, 33), (700, 2)]),
            (16, Heads(8, 1, 64), [(500, 9)]),
            (3, Heads(7, 1, 16), [(90, 19), (20, 1)]),
        ],
        ids=str,
    )
    def test_uneven_chunks_in_splits(self, num_splits: int, heads: Heads, spans: Spans) -> None:
        self.check(spans, heads, num_splits=num_splits)
        assert self.num_split_calls == 1

    @pytest.mark.parametrize("window", [1, 100, 300])
    def test_a_window_that_begins_anywhere_in_a_split(self, window: int) -> None:
        self.check([(0, 9), (290, 40)], Heads(4, 1, 64), num_splits=2, window=window)

    @pytest.mark.parametrize("start", [0, 63, 129])
    def test_a_diagonal_that_crosses_several_splits(self, start: int) -> None:
        self.check([(start, 130)], Heads(1, 1, 64), num_splits=2)

    def test_the_rows_of_a_tile_may_be_shared_too(self) -> None:
        self.check([(70, 9)], Heads(4, 1, 32), num_splits=2, window=50, dtype=torch.float32)
        assert self.num_split_calls == 1

    @pytest.mark.parametrize("is_known", [True, False])
    def test_few_long_tiles_are_split_unasked(self, is_known: bool) -> None:
        self.check([(2100, 5)], Heads(2, 1, 64), num_splits=None, is_known=is_known)
        assert self.num_split_calls == 1

    def test_the_same_bits_come_twice(self) -> None:
        q, paged, batch = self.inputs([(200, 5)], Heads(2, 1, 64), torch.float16)
        first, second = (
            attend_prefill(q, paged.kv(0.3), batch, out=torch.zeros_like(q), num_splits=4)
            for _ in range(2)
        )  # fmt: skip
        assert self.num_split_calls == 2 and torch.equal(first, second)

    def test_a_list_of_more_tiles_than_a_warp_has_threads(self) -> None:
        """The split tiles stand among empty ones, the last of them behind 40."""
        q, paged, batch = self.inputs([(200, 3), (90, 2)], Heads(2, 1, 64), torch.float16)
        sparse_W4 = torch.zeros((42, 4), dtype=torch.int32, device=self.device)
        sparse_W4[[7, 41]] = batch.tiles_W4
        tiles = (batch.tiles_W4, sparse_W4)
        whole, split = (
            attend_prefill(
                q,
                paged.kv(0.3),
                PrefillChunks.from_arrays(tiles_W4),
                out=torch.zeros_like(q),
                num_splits=num_splits,
            )
            for tiles_W4, num_splits in zip(tiles, (1, 2), strict=True)
        )
        assert self.num_split_calls == 1 and whole.any()
        torch.testing.assert_close(split, whole, rtol=2e-3, atol=2e-3)

    def test_short_contexts_that_the_host_knows_are_not_split(self) -> None:
        self.check([(504, 8)], Heads(2, 1, 64), num_splits=None)
        assert self.num_split_calls == 0

    def test_short_contexts_that_the_device_alone_knows_are_right(self) -> None:
        self.check([(0, 20), (60, 3)], Heads(2, 1, 16), num_splits=None, is_known=False)

    def test_an_empty_list_that_a_graph_was_captured_with(self) -> None:
        q, paged, _ = self.inputs([(40, 3)], Heads(2, 1, 16), torch.float16)
        empty = PrefillChunks.from_arrays(torch.zeros((5, 4), dtype=torch.int32, device=self.device))
        out = attend_prefill(q, paged.kv(0.3), empty, out=torch.full_like(q, 7.0))
        assert self.num_split_calls == 1 and (out == 7.0).all()

    def test_an_invariant_tile_is_never_split(self) -> None:
        q, paged, batch = self.inputs([(1500, 5)], Heads(2, 1, 16), torch.float16)
        for num_splits in (None, 4):
            attend_prefill(q, paged.kv(0.3), batch, invariant=True, num_splits=num_splits)
        assert self.num_split_calls == 0

    def plan(self, spans: Spans, max_items: int, split_len: int, window: int = 2**30) -> list[int]:
        """The splits of each tile; (0, 0) is an empty one. Tiles of keys are 32 long."""
        tiles = torch.tensor(
            [[0, num, 0, start] for start, num in spans], dtype=torch.int32, device=self.device
        )
        splits = torch.full((128,), -1, dtype=torch.int32, device=self.device)
        _plan_kernel[(1,)](
            tiles, splits, len(spans), window, max_items, SPLIT_LEN=split_len, BLOCK_N=32, BLOCK_W=128
        )
        assert not splits[len(spans) :].any()
        return splits[: len(spans)].tolist()

    def test_the_plan_by_example(self) -> None:
        assert self.plan([(840, 60), (500, 60), (0, 0)], 5, 32) == [3, 2, 0]
        assert self.plan([(8000, 64), (8064, 64)], 33, 512) == [16, 16]
        assert self.plan([(8000, 64), (8064, 64)], 33, 512, window=500) == [2, 2]
        assert self.plan([(8000, 64), (8064, 64)], 33, 512, window=400) == [1, 1]
        assert self.plan([(448, 64), (0, 0), (0, 7)], 33, 512) == [1, 0, 1]
        assert self.plan([(8000, 64)] * 4, 4, 512) == [1] * 4  # a program for each, none to spare
        assert self.plan([(8000, 64)] * 4, 3, 512) == [1] * 4
        assert self.plan([(0, 0)] * 3, 5, 512) == [0] * 3

    def test_a_plan_finds_room_and_is_nearly_as_good_as_any(self) -> None:
        generator = torch.Generator().manual_seed(1)

        def draw(limit: int) -> int:
            return int(torch.randint(limit, (), generator=generator))

        for _ in range(12):
            spans = [(draw(2) * draw(20_000), draw(3) and 1 + draw(64)) for _ in range(1 + draw(30))]
            lengths = [-(-(start + num) // 32) if num else 0 for start, num in spans]
            num_tiles = sum(length > 0 for length in lengths)
            max_items = num_tiles + 1 + draw(200)
            splits = self.plan(spans, max_items, 64)
            assert sum(splits) <= max_items
            assert all((count > 0) == (length > 0) for count, length in zip(splits, lengths, strict=True))
            if not num_tiles:
                continue
            longest = max(-(-length // count) for length, count in zip(lengths, splits, strict=True) if count)
            best = next(
                longest
                for longest in range(2, max(lengths) + 3)
                if sum(-(-length // longest) for length in lengths) <= max_items
            )
            total, step = sum(lengths), 1 / 15  # sixteen lengths are tried between the two bounds
            assert longest <= best + step * (total / (max_items - num_tiles) - total / max_items) + 2
