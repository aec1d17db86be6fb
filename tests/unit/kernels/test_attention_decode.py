"""Attention of decoding rows: the reference, and how rows are cut into splits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from infer.cache.kv_store import KVStore
from infer.execution.gpu.step import DeviceStep
from infer.kernels.attention.decode import attend_decode, attend_projected
from infer.kernels.attention.decode_work import DecodeWork
from infer.kernels.attention.reference import attend_naive
from infer.kernels.elementwise.heads import norm_rope_write
from infer.layers.attention import AttentionLayer
from tests.kernels.attention_contract import Heads, make_paged
from tests.kernels.projected_contract import make_transform

HEADS = Heads(6, 2, 8)


@pytest.mark.parametrize("window", [None, 5])
def test_a_row_attends_to_the_blocks_of_its_table(window: int | None) -> None:
    torch.manual_seed(0)
    paged = make_paged([3, 21], HEADS, block_size=4, dtype=torch.float32, device="cpu")
    rows, lens = torch.tensor([1, 0, 0], dtype=torch.int32), torch.tensor([21, 0, 3], dtype=torch.int32)
    q = torch.randn(3, 6, 8)
    work = DecodeWork(max_rows=3, max_len=32, num_heads=6, num_kv_heads=2, head_dim=8, device="cpu")
    work.plan(rows, lens, window=window)
    out = torch.full_like(q, torch.nan)
    got = attend_decode(q, paged.kv(0.3, window), rows, lens, work, out=out)
    assert got is out
    assert torch.equal(got[1], torch.zeros(6, 8))
    for index, row, length in ((0, 1, 21), (2, 0, 3)):
        slots = [int(paged.tables[row, p // 4]) * 4 + p % 4 for p in range(length)]
        expected = attend_naive(
            q[index : index + 1], paged.keys[slots], paged.values[slots], scale=0.3, window=window
        )
        torch.testing.assert_close(got[index : index + 1], expected)


@pytest.mark.parametrize("window", [None, 5])
def test_a_projection_is_written_to_the_cache_and_attends_to_itself_too(window: int | None) -> None:
    torch.manual_seed(0)
    paged = make_paged([3, 21], HEADS, block_size=4, dtype=torch.float32, device="cpu")
    rows, lens = torch.tensor([1, -1, 0], dtype=torch.int32), torch.tensor([21, 0, 3], dtype=torch.int32)
    transform = make_transform(
        HEADS, dtype=torch.float32, device="cpu", has_norm=True, offset=1.0, num_positions=32
    )
    qkv = torch.randn(3, 10 * 8)
    work = DecodeWork(max_rows=3, max_len=32, num_heads=6, num_kv_heads=2, head_dim=8, device="cpu")
    work.plan(rows, lens, window=window)
    positions = torch.tensor([20, 0, 2])
    q, k, v = norm_rope_write(qkv, transform, positions)
    before = paged.keys.clone()
    got = attend_projected(qkv, transform, paged.kv(0.3, window), rows, lens, work)
    assert torch.equal(got[1], torch.zeros(6, 8))
    for index, row, length in ((0, 1, 21), (2, 0, 3)):
        slots = [int(paged.tables[row, p // 4]) * 4 + p % 4 for p in range(length)]
        torch.testing.assert_close(paged.keys[slots[-1]], k[index])
        assert torch.equal(paged.values[slots[-1]], v[index])
        assert torch.equal(paged.keys[slots[:-1]], before[slots[:-1]])
        expected = attend_naive(
            q[index : index + 1], paged.keys[slots], paged.values[slots], scale=0.3, window=window
        )
        torch.testing.assert_close(got[index : index + 1], expected)


def test_a_step_without_triton_leaves_the_projection_to_the_model() -> None:
    paged = make_paged([3], HEADS, block_size=4, dtype=torch.float32, device="cpu")
    rows, lens = torch.tensor([0], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    work = DecodeWork(max_rows=1, max_len=32, num_heads=6, num_kv_heads=2, head_dim=8, device="cpu")
    step = DeviceStep(
        cast(KVStore, SimpleNamespace(keys=[paged.keys], values=[paged.values], scales=[None])),
        paged.tables[None], work,
        block_size=4, positions_T=torch.tensor([2]), slots_KT=torch.tensor([[0]]), rows_S=rows, lens_S=lens,
    )  # fmt: skip
    transform = make_transform(
        HEADS, dtype=torch.float32, device="cpu", has_norm=True, offset=0.0, num_positions=8
    )
    assert step.attend_projected(AttentionLayer(0, 0.3), torch.randn(1, 10 * 8), transform) is None


def test_few_rows_are_cut_into_enough_items_to_fill_a_large_gpu() -> None:
    work = DecodeWork(max_rows=256, max_len=32768, num_heads=32, num_kv_heads=8, head_dim=4, device="cpu")
    for length in (4096, 32768):
        split_len = work.split_len(1)
        while -(-length // split_len) > work.max_splits(1):
            split_len *= 2
        assert -(-length // split_len) * 8 >= 128
    assert work.max_splits(256) * 256 <= 4096  # what bounds the scratch memory
