"""What attention that starts from the fused projection promises, wherever it runs.

Written once and tested twice, as `kernel_contract.py` explains. Two traps are set: the store is NaN wherever
no row has a position *and* where the newest ones go, so that a kernel that reads a key before it was written
shows it; and the projection stands in a frame of NaN.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from infer.cache.kv_store import KVStore
from infer.execution.gpu.step import DeviceStep
from infer.kernels.attention.decode import (
    attend_decode_reference,
    attend_projected,
    attend_projected_reference,
)
from infer.kernels.attention.decode_work import DecodeWork
from infer.kernels.attention.paged import PagedKV
from infer.kernels.attention.prefill import PrefillChunk, PrefillChunks, build_prefill_chunks, tokens_per_tile
from infer.kernels.elementwise.heads import HeadTransform, norm_rope_write, norm_rope_write_reference
from infer.kernels.elementwise.kv_codes import KVScales, read_slots
from infer.kernels.runtime.profiles import device_profile, using_profile
from infer.layers.attention import AttentionLayer
from tests.kernels.attention_contract import (
    TOLERANCE,
    Heads,
    OnDevice,
    Paged,
    assert_close,
    codes,
    make_paged,
)
from tests.kernels.kernel_contract import FramedTensor, nan_in_fresh_memory

EPS = 1e-6


def make_transform(
    heads: Heads, *, dtype: torch.dtype, device: str, has_norm: bool, offset: float, num_positions: int
) -> HeadTransform:
    """Weights of a norm and angles of a rotation as no model has them."""
    angles = torch.rand(num_positions, heads.head_dim // 2, device=device) * 6.3
    q_weight, k_weight = torch.randn(2, heads.head_dim, device=device).to(dtype)
    return HeadTransform(
        norm_weights=(q_weight, k_weight) if has_norm else None,
        cos_PR=angles.cos(),
        sin_PR=angles.sin(),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        eps=EPS,
        offset=offset,
    )


def newest_slots(paged: Paged, rows_S: torch.Tensor, lens_S: torch.Tensor) -> torch.Tensor:
    """Where the keys and values of the rows' last positions are; rows without positions are left out."""
    rows, newest = rows_S[lens_S > 0].long(), lens_S[lens_S > 0].long() - 1
    return (
        paged.tables[rows, newest // paged.block_size].long() * paged.block_size + newest % paged.block_size
    )


def check_codes(
    paged: Paged, stores: list[torch.Tensor], scales: KVScales, newest: torch.Tensor, tolerance: float
) -> None:
    """The cache is that of the reference, up to codes that a rounding moves to their neighbours."""
    is_int8 = paged.keys.dtype is torch.int8
    assert paged.scales is not None
    for kept, side, want, want_side in zip(
        (paged.keys, paged.values), paged.scales, stores, scales, strict=True
    ):
        ours, theirs = (
            read_slots(*pair, newest, torch.float32) for pair in ((kept, side), (want, want_side))
        )
        step = theirs.abs().amax(dim=-1, keepdim=True) / 127 if is_int8 else theirs.abs() / 8
        assert ((ours - theirs).abs() <= 1.01 * step + tolerance).all()
        assert ((ours - theirs).abs() > 0.1 * step + tolerance).float().mean() < 0.05
        torch.testing.assert_close(side, want_side, rtol=tolerance, atol=0, equal_nan=True)
        others = torch.ones(len(kept), dtype=torch.bool, device=kept.device)
        others[newest] = False
        assert torch.equal(kept.view(torch.uint8)[others], want.view(torch.uint8)[others])


def attend_written(
    qkv: torch.Tensor, transform: HeadTransform, paged: Paged, rows_S: torch.Tensor, lens_S: torch.Tensor,
    *, scale: float, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """What rows attend to in the cache as it is now: the newest position included, as it was written."""
    q, _, _ = norm_rope_write_reference(qkv, transform, (lens_S.long() - 1).clamp(min=0))
    return attend_decode_reference(q, paged.kv(scale, window), rows_S, lens_S)


class ProjectedContract(OnDevice):
    """Norm, rotation, the write to the cache and attention of one token per row, in one kernel."""

    def check(
        self,
        lens: list[int],
        heads: Heads,
        *,
        block_size: int = 16,
        split_len: int | None = 32,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        has_norm: bool = True,
        offset: float = 0.0,
        num_layers: int = 1,
        kept_as: torch.dtype | None = None,
        is_bent: bool = False,
    ) -> None:
        """Output and cache are those of the reference, on scratch that is NaN and on what a layer left."""
        device, num_rows = self.device, len(lens)
        rows = torch.randperm(num_rows).to(device, torch.int32)  # not the order of the tables
        lens_S = torch.tensor(lens, dtype=torch.int32, device=device)[rows.long()]
        rows = torch.where(lens_S > 0, rows, -1)  # what padding looks like in a step
        work = DecodeWork(
            max_rows=num_rows + 2,
            max_len=max(*lens, 1),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            device=device,
            split_len=split_len,
        )
        for scratch in (work.sums, work.maxima, work.denominators):
            scratch.fill_(torch.nan)
        work.plan(rows, lens_S, window=window)
        for _ in range(num_layers):
            transform = make_transform(
                heads,
                dtype=dtype,
                device=device,
                has_norm=has_norm,
                offset=offset,
                num_positions=max(*lens, 1),
            )
            paged = make_paged(lens, heads, block_size=block_size, dtype=dtype, device=device)
            newest = newest_slots(paged, rows, lens_S)
            paged.keys[newest] = paged.values[newest] = torch.nan
            if kept_as is not None:
                paged.keep_as(kept_as)
            if is_bent:
                paged.bend(heads.num_heads)
            stores = [store.clone() for store in (paged.keys, paged.values)]
            scales = None if paged.scales is None else KVScales(*(side.clone() for side in paged.scales))
            num_heads = heads.num_heads + 2 * heads.num_kv_heads
            qkv = FramedTensor((num_rows, num_heads * heads.head_dim), dtype, device)
            with nan_in_fresh_memory():
                actual = attend_projected(qkv.view, transform, paged.kv(0.3, window), rows, lens_S, work)
            kv = PagedKV(stores[0], stores[1], paged.tables, block_size, 0.3, window, scales)
            kv = kv._replace(softcap=paged.softcap, sinks_N=paged.sinks)
            expected = attend_projected_reference(qkv.view, transform, kv, rows, lens_S)
            if paged.scales is not None and scales is not None:
                written = attend_written(qkv.view, transform, paged, rows, lens_S, scale=0.3, window=window)
                assert_close(actual, written)
                check_codes(paged, stores, scales, newest, TOLERANCE[dtype])
                continue
            assert_close(actual, expected)
            assert_close(paged.keys[newest], stores[0][newest])
            assert torch.equal(paged.values[newest], stores[1][newest])
            for actual_store, expected_store in zip((paged.keys, paged.values), stores, strict=True):
                actual_store[newest] = expected_store[newest] = 0.0
                torch.testing.assert_close(actual_store, expected_store, rtol=0, atol=0, equal_nan=True)
        assert not work.tickets.any()

    @codes
    def test_projected_over_codes_of_8_bits(self, kept_as: torch.dtype) -> None:
        self.check([1, 17, 33, 0], Heads(4, 2, 80), kept_as=kept_as)
        self.check([1, 41, 60], Heads(7, 1, 128), kept_as=kept_as, window=40, has_norm=False)
        for dtype in self.half_precision:
            self.check([5, 33], Heads(8, 1, 64), kept_as=kept_as, dtype=dtype)

    @pytest.mark.parametrize(
        "heads",
        [
            Heads(2, 2, 64),
            Heads(4, 2, 80),
            Heads(4, 1, 96),
            Heads(14, 2, 16),
            Heads(16, 1, 32),
            Heads(2, 1, 256),
        ],
        ids=str,
    )
    def test_projected_at_lengths_around_a_block_and_a_split(self, heads: Heads) -> None:
        self.check([1, 2, 16, 17, 32, 33, 34, 70], heads)

    @pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "plain"])
    def test_projected_in_half_precision(self, has_norm: bool) -> None:
        for dtype in self.half_precision:
            self.check([5, 33, 70], Heads(6, 2, 64), dtype=dtype, has_norm=has_norm)

    def test_projected_with_a_soft_cap_and_sinks(self) -> None:
        self.check([1, 2, 33, 70, 0], Heads(4, 2, 32), is_bent=True)
        self.check([1, 41, 100], Heads(8, 1, 64), window=40, is_bent=True, has_norm=False)

    def test_projected_with_a_norm_centred_on_zero(self) -> None:
        self.check([1, 40], Heads(4, 1, 32), offset=1.0)

    def test_projected_without_a_norm(self) -> None:
        self.check([1, 40, 0], Heads(4, 2, 32), has_norm=False)

    def test_projected_writes_zeros_for_padding_and_touches_nothing(self) -> None:
        self.check([0, 40, 0, 3, 0], Heads(4, 2, 32), num_layers=2)
        self.check([0], Heads(4, 2, 32))

    @pytest.mark.parametrize("window", [1, 40])
    def test_projected_within_a_window(self, window: int) -> None:
        self.check([1, 2, 41, 0, 97, 100], Heads(4, 2, 32), window=window)

    def test_projected_with_larger_blocks_and_many_splits(self) -> None:
        self.check([150, 2, 65], Heads(2, 1, 16), block_size=64, split_len=16)

    def test_projected_with_splits_of_several_tiles(self) -> None:
        self.check([257, 130, 65, 64], Heads(2, 1, 16), split_len=256)

    def test_projected_with_the_splits_it_would_choose(self) -> None:
        self.check([130, 64, 65], Heads(2, 2, 16), split_len=None)

    def test_projected_of_so_many_heads_that_no_tile_is_read_ahead(self) -> None:
        own = device_profile(torch.device(self.device))
        with using_profile(replace(own, attention=replace(own.attention, projected_heads=0, few_heads=0))):
            self.check([1, 33, 0, 70], Heads(4, 2, 32), num_layers=2)
            self.check([1, 41, 100], Heads(4, 1, 32), window=40)

    def test_with_splits_of_one_length_a_projected_row_does_not_depend_on_its_neighbours(self) -> None:
        heads, lens, device = Heads(4, 2, 32), [37, 100, 80, 0], self.device
        paged = make_paged(lens, heads, block_size=16, dtype=torch.float32, device=device)
        transform = make_transform(
            heads, dtype=torch.float32, device=device, has_norm=True, offset=0.0, num_positions=200
        )
        qkv = torch.randn(4, 8 * 32, device=device)
        rows = torch.arange(4, dtype=torch.int32, device=device)
        work = DecodeWork(
            max_rows=4, max_len=200, num_heads=4, num_kv_heads=2, head_dim=32, device=device, split_len=32
        )

        def attend(lens: list[int]) -> torch.Tensor:
            lens_S = torch.tensor(lens, dtype=torch.int32, device=device)
            work.plan(rows, lens_S)
            return attend_projected(qkv, transform, paged.kv(0.3), rows, lens_S, work)

        together = attend(lens)
        for row in range(3):
            alone = attend([length if index == row else 0 for index, length in enumerate(lens)])
            assert torch.equal(alone[row], together[row])

    @pytest.mark.parametrize("window", [None, 20])
    def test_a_step_of_rows_alone_takes_the_projection(self, window: int | None) -> None:
        heads, lens, device = Heads(4, 2, 32), [37, 0, 3], self.device
        paged = make_paged(lens, heads, block_size=16, dtype=torch.float32, device=device)
        transform = make_transform(
            heads, dtype=torch.float32, device=device, has_norm=True, offset=1.0, num_positions=64
        )
        lens_S = torch.tensor(lens, dtype=torch.int32, device=device)
        rows_S = torch.tensor([0, -1, 2], dtype=torch.int32, device=device)
        slots = torch.full((3,), -1, device=device)
        slots[lens_S > 0] = newest_slots(paged, rows_S, lens_S)
        work = DecodeWork(
            max_rows=3, max_len=64, num_heads=4, num_kv_heads=2, head_dim=32, device=device, split_len=16
        )
        qkv = torch.randn(3, 8 * 32, device=device)

        def make_step(
            backend: str = "triton", chunks: PrefillChunks | None = None
        ) -> tuple[DeviceStep, SimpleNamespace]:
            keys, values = [None, paged.keys.clone()], [None, paged.values.clone()]
            store = SimpleNamespace(
                keys=keys, values=values, tables=[0, 0], scales=[None, None], fixed=[None, None]
            )
            store.slots = partial(KVStore.slots, cast(KVStore, store))
            step = DeviceStep(
                cast(KVStore, store), paged.tables[None], work, block_size=16,
                positions_T=(lens_S.long() - 1).clamp(min=0), slots_KT=slots[None], rows_S=rows_S,
                lens_S=lens_S, chunks=chunks, windows=(window,), backend=backend,
            )  # fmt: skip
            return step, store

        step, expected_store = make_step()
        q, k, v = norm_rope_write(qkv, transform, step.positions, step.slots(1))
        expected = step.attend(AttentionLayer(1, 0.3, window), q, k, v)
        for backend in ("triton", "flash"):
            step, store = make_step(backend)
            actual = step.attend_projected(AttentionLayer(1, 0.3, window), qkv, transform)
            assert actual is not None
            assert_close(actual, expected)
            assert_close(store.keys[1][slots[::2]], expected_store.keys[1][slots[::2]])
            assert torch.equal(store.values[1][slots[::2]], expected_store.values[1][slots[::2]])

        tiles = build_prefill_chunks([PrefillChunk(3, 1, 2, 0)], tokens_per_tile=tokens_per_tile(4, 2))
        chunks = PrefillChunks.from_arrays(torch.from_numpy(tiles).to(device), [PrefillChunk(3, 1, 2, 0)])
        for step, store in (make_step("invariant"), make_step(chunks=chunks)):
            assert step.attend_projected(AttentionLayer(1, 0.3, window), qkv, transform) is None
            torch.testing.assert_close(store.values[1], paged.values, rtol=0, atol=0, equal_nan=True)
