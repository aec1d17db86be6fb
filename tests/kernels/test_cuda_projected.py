"""The CUDA kernel that takes the projection, without a GPU: its threads taking turns on a CPU.

The kernel before it makes the projection, so NaN is in its place until all threads of a block have waited,
and again when the next block begins. Older keys and values are asked for ahead; the newest it writes itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer.kernels.attention import decode_cuda
from infer.kernels.attention.decode import attend_projected_reference
from infer.kernels.attention.decode_cuda import PROJECTED, attend_projected_cuda
from infer.kernels.attention.paged import PagedKV
from infer.kernels.elementwise.kv_codes import KVScales
from tests.kernels.attention_contract import TOLERANCE, Heads, assert_close, codes, make_paged
from tests.kernels.emulated_cuda import EmulatedLaunch, make_work, plan_on_host
from tests.kernels.kernel_contract import FramedTensor
from tests.kernels.projected_contract import attend_written, check_codes, make_transform, newest_slots

WRITTEN: list[torch.Tensor] = []  # by the kernel before
LAUNCHES: list[EmulatedLaunch] = []
SOURCES: list[Path] = []  # the last one is compiled in the place of the kernel's own


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(kernel: Any, defines: Any, device: int, pdl: bool) -> EmulatedLaunch:
        source = SOURCES[-1] if SOURCES else kernel.source
        LAUNCHES.append(EmulatedLaunch(defines, source, kernel.types, WRITTEN))
        return LAUNCHES[-1]

    torch.manual_seed(0)
    LAUNCHES.clear()
    SOURCES.clear()
    monkeypatch.setattr(decode_cuda, "prepare_launch", prepare)
    monkeypatch.setattr(decode_cuda, "index_of", lambda device: 0)
    monkeypatch.setattr(decode_cuda, "launch_options", lambda device: {"PDL": True})


def check(
    lens: list[int],
    heads: Heads,
    *,
    dtype: torch.dtype = torch.float16,
    block_size: int = 16,
    split_len: int = 1024,
    window: int | None = None,
    has_norm: bool = True,
    offset: float = 0.0,
    num_sms: int = 1,
    kept_as: torch.dtype | None = None,
) -> None:
    rows = torch.randperm(len(lens)).int()
    lens_S = torch.tensor(lens, dtype=torch.int32)[rows.long()]
    rows = torch.where(lens_S > 0, rows, -1)
    work = make_work(heads, max_rows=len(lens) + 2, max_len=max(lens), split_len=split_len, num_sms=num_sms)
    plan_on_host(work, rows, lens_S, window=window)
    for _ in range(2):
        transform = make_transform(
            heads, dtype=dtype, device="cpu", has_norm=has_norm, offset=offset, num_positions=max(lens)
        )
        paged = make_paged(lens, heads, block_size=block_size, dtype=dtype, device="cpu")
        newest = newest_slots(paged, rows, lens_S)
        paged.keys[newest] = paged.values[newest] = torch.nan
        if kept_as is not None:
            paged.keep_as(kept_as)
        stores = [store.clone() for store in (paged.keys, paged.values)]
        scales = None if paged.scales is None else KVScales(*(side.clone() for side in paged.scales))
        num_heads = heads.num_heads + 2 * heads.num_kv_heads
        qkv = FramedTensor((len(lens), num_heads * heads.head_dim), dtype, "cpu").view
        if qkv.stride(0) % 8 or qkv.data_ptr() % 16:
            wide = torch.full((len(lens), qkv.shape[1] + 16), torch.nan, dtype=dtype)
            qkv = wide[:, 8:-8].copy_(qkv)
        WRITTEN[:] = qkv.unbind()
        actual = attend_projected_cuda(qkv, transform, paged.kv(0.1, window), work)
        kv = PagedKV(stores[0], stores[1], paged.tables, block_size, 0.1, window, scales)
        expected = attend_projected_reference(qkv, transform, kv, rows, lens_S)
        if scales is not None:
            written = attend_written(qkv, transform, paged, rows, lens_S, scale=0.1, window=window)
            assert_close(actual, written)
            check_codes(paged, stores, scales, newest, TOLERANCE[dtype])
            assert not work.tickets.any()
            continue
        assert_close(actual, expected)
        assert_close(paged.keys[newest], stores[0][newest])
        assert torch.equal(paged.values[newest], stores[1][newest])
        for actual_store, expected_store in zip((paged.keys, paged.values), stores, strict=True):
            actual_store[newest] = expected_store[newest] = 0.0
            torch.testing.assert_close(actual_store, expected_store, rtol=0, atol=0, equal_nan=True)
        assert not work.tickets.any()


@pytest.mark.parametrize(
    "heads", [Heads(4, 2, 128), Heads(8, 2, 64), Heads(8, 1, 128), Heads(7, 1, 64), Heads(3, 3, 64)], ids=str
)
@pytest.mark.parametrize("split_len", [32, 1024])
def test_at_lengths_around_a_tile_a_block_and_a_split(heads: Heads, split_len: int) -> None:
    check([1, 2, 16, 17, 32, 33, 70, 0, 150], heads, split_len=split_len)


@codes
def test_codes_of_8_bits(kept_as: torch.dtype) -> None:
    check([1, 16, 17, 70, 0], Heads(8, 2, 128), kept_as=kept_as, split_len=32)
    check([1, 41, 97], Heads(8, 1, 64), kept_as=kept_as, window=40, has_norm=False, dtype=torch.bfloat16)


@codes
@pytest.mark.parametrize("heads", [Heads(4, 2, 128), Heads(8, 1, 64)], ids=str)
def test_codes_of_tiny_heads_and_of_not_a_number(kept_as: torch.dtype, heads: Heads) -> None:
    N, G, H = heads.num_heads, heads.num_kv_heads, heads.head_dim
    lens = torch.tensor([5, 17, 33], dtype=torch.int32)
    rows = torch.arange(3, dtype=torch.int32)
    work = make_work(heads, max_rows=3, max_len=33, split_len=1024)
    plan_on_host(work, rows, lens)
    paged = make_paged(lens.tolist(), heads, block_size=16, dtype=torch.bfloat16, device="cpu")
    newest = newest_slots(paged, rows, lens)
    paged.keep_as(kept_as)
    transform = make_transform(
        heads, dtype=torch.bfloat16, device="cpu", has_norm=False, offset=0.0, num_positions=33
    )
    qkv = torch.randn(3, N + 2 * G, H).bfloat16()
    qkv[1, N:] *= 1e-37
    qkv[2, N:, H - 3] = torch.nan
    WRITTEN[:] = qkv.unbind()
    actual = attend_projected_cuda(qkv.flatten(1), transform, paged.kv(0.1), work)
    assert paged.scales is not None
    for kept, side in zip((paged.keys, paged.values), paged.scales, strict=True):
        scales = side[newest // 16, :, newest % 16]
        assert (scales[0] > 0).all() and (scales[1] == 0).all() and scales[2].isnan().all()
        assert not kept[newest[1]].float().any()
    assert actual[:2].isfinite().all() and actual[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("has_norm", "offset"), [(False, 0.0), (True, 1.0)])
def test_norms(dtype: torch.dtype, has_norm: bool, offset: float) -> None:
    check([5, 33, 70], Heads(8, 2, 64), dtype=dtype, has_norm=has_norm, offset=offset)


@pytest.mark.parametrize("window", [1, 40])
def test_windows(window: int) -> None:
    check([1, 2, 41, 0, 97, 200], Heads(8, 2, 64), window=window, split_len=48)


def test_larger_blocks_and_more_units_than_blocks() -> None:
    check([150, 2, 65, 0, 12], Heads(8, 2, 64), block_size=48, split_len=16)


def test_many_splits() -> None:
    check([300], Heads(4, 2, 128), split_len=16)


@pytest.mark.parametrize("split_len", [16, 64, 1024])
def test_every_block_begins_before_the_projection_is_there(split_len: int) -> None:
    check([1, 15, 16, 17, 0, 65, 200], Heads(8, 2, 64), split_len=split_len, num_sms=64)


@pytest.mark.parametrize(("length", "num_tiles"), [(1, 1), (17, 2), (64, 4), (200, 4)])
def test_all_warps_ask_ahead_for_a_tile_even_the_newest(length: int, num_tiles: int) -> None:
    """A lane loads its part of a tile in 4 + 4 pieces, of each kv head's tile."""
    check([length], Heads(8, 2, 64))
    assert [launch.num_early_loads for launch in LAUNCHES] == [num_tiles * 2 * 32 * 8] * 2


WAIT, AFTER_THE_LOADS = "gdc_wait();", "transform(query, gains[is_key], eps, t);"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({WAIT: ""}, "a thread leaves that has not waited"),
        ({WAIT: "if (warp > 0) gdc_wait();"}, "some threads of a block wait, and others do not"),
        ({WAIT: "", AFTER_THE_LOADS: f"{WAIT} {AFTER_THE_LOADS}"}, "Tensor-likes are not close"),
    ],
    ids=["none", "some", "late"],
)
def test_a_kernel_that_reads_the_projection_too_early_is_caught(
    changes: dict[str, str], rule: str, tmp_path: Path
) -> None:
    for path in PROJECTED.source.parent.glob("*.cu*"):
        (tmp_path / path.name).write_text(path.read_text())
    text = PROJECTED.source.read_text()
    for line, instead in changes.items():
        assert text.count(line) == 1
        text = text.replace(line, instead)
    changed = tmp_path / PROJECTED.source.name
    changed.write_text(text)
    SOURCES.append(changed)
    with pytest.raises(AssertionError, match=rule):
        check([33], Heads(8, 2, 64))
