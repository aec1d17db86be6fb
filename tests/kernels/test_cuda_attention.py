"""The CUDA kernel without a GPU: the text that a GPU would compile, its threads taking turns on a CPU."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.config.profiles.find import KNOWN_GPUS
from infer.errors import ConfigError
from infer.kernels.attention import decode_cuda
from infer.kernels.attention.decode import attend_decode_reference
from infer.kernels.attention.decode_cuda import CachedHeads, attend_decode_cuda
from tests.kernels.attention_contract import Heads, Paged, assert_close, codes, make_paged
from tests.kernels.emulated_cuda import EmulatedLaunch, make_work, plan_on_host

LAUNCHES: list[EmulatedLaunch] = []


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(kernel: Any, defines: Any, device: int, pdl: bool) -> EmulatedLaunch:
        LAUNCHES.append(EmulatedLaunch(defines))
        return LAUNCHES[-1]

    torch.manual_seed(0)
    LAUNCHES.clear()
    monkeypatch.setattr(decode_cuda, "prepare_launch", prepare)
    monkeypatch.setattr(decode_cuda, "index_of", lambda device: 0)


KERNEL_OF_ONE_LOAD = """
__shared__ float one;
__shared__ __align__(ALIGNMENT) float two[2];
extern "C" void one_load(float* out) {
    one = two[0] = two[1] = 1.0f;
    *out = reinterpret_cast<const float2*>(two)->x;
}
"""


@pytest.mark.parametrize("alignment", [4, 8])
def test_the_emulator_refuses_what_a_gpu_would(alignment: int, tmp_path: Path) -> None:
    """Without a word about it an array is aligned as its elements are, and stands behind another."""
    source = tmp_path / "one_load.cu"
    source.write_text(KERNEL_OF_ONE_LOAD)
    defines = (("ALIGNMENT", alignment), ("IS_BFLOAT16", 1), ("WARPS", 1))
    launch, out = EmulatedLaunch(defines, source, [ctypes.c_void_p]), torch.zeros(1)
    if alignment == 4:
        with pytest.raises(AssertionError, match=r"one_load\.cu:6: misaligned"):
            launch(1, out.data_ptr())
    else:
        launch(1, out.data_ptr())
        assert out.item() == 1.0


def check(
    lens: list[int],
    heads: Heads,
    *,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    split_len: int = 1024,
    window: int | None = None,
    kept_as: torch.dtype | None = None,
) -> None:
    paged = make_paged(lens, heads, block_size=block_size, dtype=dtype, device="cpu")
    if kept_as is not None:
        paged.keep_as(kept_as)
    rows = torch.randperm(len(lens)).int()  # not the order of the tables
    lens_S = torch.tensor(lens, dtype=torch.int32)[rows.long()]
    for row, length in zip(
        rows.tolist(), lens_S.tolist(), strict=True
    ):  # what is before a window is not read
        paged.forget(row, length - (window or length))
    rows = torch.where(lens_S == 0, -1, rows)  # as the engine's padding has it
    wide = torch.full((len(lens), heads.num_heads + 3, heads.head_dim), torch.nan, dtype=dtype)
    q = wide[:, 2:-1].copy_(torch.randn(len(lens), heads.num_heads, heads.head_dim))
    work = make_work(heads, max_rows=len(lens) + 2, max_len=max(lens), split_len=split_len)
    plan_on_host(work, rows, lens_S, window=window)
    expected = attend_decode_reference(q, paged.kv(0.3, window), rows, lens_S)
    for _ in range(2):  # the second time over the scratch memory and tickets that the first has left
        out = torch.full((len(lens), heads.num_heads, heads.head_dim), torch.nan, dtype=dtype)
        actual = attend_decode_cuda(q, paged.kv(0.3, window), work, out=out)
        assert actual is out
        assert_close(actual, expected)
        assert not work.tickets.any()


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (Heads(4, 2, 128), torch.bfloat16),
        (Heads(8, 2, 64), torch.float16),
        (Heads(7, 1, 128), torch.float16),  # a column without a head
        (Heads(8, 1, 64), torch.bfloat16),
        (Heads(3, 3, 64), torch.bfloat16),  # a head to itself
    ],
    ids=str,
)
def test_equals_the_reference_at_lengths_around_a_tile_and_a_block_of_warps(
    heads: Heads, dtype: torch.dtype
) -> None:
    check([1, 15, 17, 31, 33, 70, 150], heads, dtype=dtype)


@codes
def test_codes_of_8_bits(kept_as: torch.dtype) -> None:
    check([1, 15, 17, 100, 0], Heads(8, 2, 128), kept_as=kept_as)
    check([1, 41, 0, 150], Heads(7, 1, 64), kept_as=kept_as, window=40, split_len=48, dtype=torch.float16)


@codes
def test_weights_far_below_the_largest_are_not_lost(kept_as: torch.dtype) -> None:
    """A position that takes nearly all, beside many with values a hundred times as large."""
    heads, num = Heads(2, 1, 64), 2048
    keys = torch.zeros(num, 1, 64)
    keys[:, 0, 0] = torch.where(
        torch.arange(num) == 7, 0.0, -12.0
    )  # of the others 6e-6 of the largest weight
    values = torch.randn(num, 1, 64) + 3.0
    values[7] *= 1e-2
    q = torch.zeros(1, 2, 64)
    q[..., 0] = 1.0
    table = torch.arange(num // 16, dtype=torch.int32)[None]
    row, length = torch.zeros(1, dtype=torch.int32), torch.full((1,), num, dtype=torch.int32)
    paged = Paged(keys.half(), values.half(), table, 16)
    paged.keep_as(kept_as)
    work = make_work(heads, max_rows=1, max_len=num, split_len=512)
    plan_on_host(work, row, length)
    actual = attend_decode_cuda(q.half(), paged.kv(1.0), work)
    assert_close(actual, attend_decode_reference(q.half(), paged.kv(1.0), row, length))


@codes
@pytest.mark.parametrize("largest", [65280.0, 65536.0, 1e6, 1e30])
def test_queries_beyond_float16(kept_as: torch.dtype, largest: float) -> None:
    """The first of two units of a block has a query that float16 cannot hold, the second has none."""
    heads, num = Heads(4, 2, 64), 40
    keys, values = torch.randn(2, 48, 2, 64).bfloat16()
    keys[:, 0] *= 1 / largest
    q = torch.randn(1, 4, 64).clamp(-1, 1).bfloat16()
    q[0, 0, 5] = 1.0
    q[0, :2] *= largest
    table = torch.arange(3, dtype=torch.int32)[None]
    row, length = torch.zeros(1, dtype=torch.int32), torch.full((1,), num, dtype=torch.int32)
    paged = Paged(keys, values, table, 16)
    paged.keep_as(kept_as)
    work = make_work(heads, max_rows=1, max_len=num, split_len=512)
    plan_on_host(work, row, length)
    actual = attend_decode_cuda(q, paged.kv(0.3), work)
    assert_close(actual, attend_decode_reference(q, paged.kv(0.3), row, length))


@pytest.mark.parametrize("split_len", [16, 100, 1024])
def test_padding_is_zeros_and_its_row_is_not_looked_at(split_len: int) -> None:
    check([0, 150, 0, 3], Heads(8, 2, 64), split_len=split_len)


@pytest.mark.parametrize("window", [1, 40])
@pytest.mark.parametrize("split_len", [48, 1024])
def test_a_window_reads_nothing_before_it(window: int, split_len: int) -> None:
    check([1, 41, 0, 200], Heads(8, 2, 64), window=window, split_len=split_len)


def test_larger_blocks() -> None:
    check([150, 2, 49], Heads(8, 2, 64), block_size=48, split_len=32)


@pytest.mark.parametrize("split_len", [256, 1024])
def test_scores_far_from_zero_are_not_lost(split_len: int) -> None:
    """The maximum moves from tile to tile, and no exponential may overflow."""
    heads = Heads(2, 1, 64)
    keys = torch.zeros(512, 1, 64)
    keys[:, 0, 0] = torch.linspace(-4000, 4000, 512)[torch.randperm(512)]
    q = torch.zeros(1, 2, 64)
    q[0, :, 0] = torch.tensor([1.0, -1.0])
    table = torch.arange(32, dtype=torch.int32)[None]
    row, length = torch.zeros(1, dtype=torch.int32), torch.full((1,), 512, dtype=torch.int32)
    kv = Paged(keys.half(), torch.randn(512, 1, 64).half(), table, 16).kv(1.0)
    work = make_work(heads, max_rows=1, max_len=512, split_len=split_len)
    plan_on_host(work, row, length)
    actual = attend_decode_cuda(q.half(), kv, work)
    assert_close(actual, attend_decode_reference(q.half(), kv, row, length))


def test_not_a_number_is_not_hidden() -> None:
    heads = Heads(2, 1, 64)
    paged = make_paged([5], heads, block_size=16, dtype=torch.float16, device="cpu")
    q = torch.randn(1, 2, 64).half()
    q[0, 1, 3] = torch.nan
    work = make_work(heads, max_rows=1, max_len=5, split_len=64)
    plan_on_host(work, torch.zeros(1, dtype=torch.int32), torch.full((1,), 5, dtype=torch.int32))
    out = attend_decode_cuda(q, paged.kv(1.0), work)
    assert out[0, 1].isnan().all() and not out[0, 0].isnan().any()


def test_the_grid_depends_on_the_rows_and_not_on_their_lengths() -> None:
    heads = Heads(8, 2, 64)
    for lens in ([3, 0], [90, 70]):
        check([*lens, 0, 0, 0], heads, split_len=64)
    check([3], heads, split_len=64)
    grids = [launch.grids for launch in LAUNCHES]
    assert grids == [[16]] * 4 + [[4]] * 2, "the machine four times over, or all units there can be"


def test_the_plan_of_these_tests_is_that_of_the_engine() -> None:
    work = make_work(Heads(1, 1, 64), max_rows=4, max_len=128, split_len=32)
    rows, lens = (torch.tensor(x, dtype=torch.int32) for x in ([5, 7, 2, 0], [100, 0, 32, 33]))
    plan_on_host(work, rows, lens)
    items, num_items = work.work_list(None)
    assert items[: int(num_items), :6].tolist() == [
        [0, 5, 0, 32, 0, 4], [0, 5, 32, 64, 1, 4], [0, 5, 64, 96, 2, 4], [3, 0, 0, 32, 0, 2],
        [0, 5, 96, 100, 3, 4], [1, 7, 0, 0, 0, 1], [2, 2, 0, 32, 0, 1], [3, 0, 32, 33, 1, 2],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "16-bit numbers, and the model's are float32"),
        ({"head_dim": 80}, "heads of 64 or 128, and this model's have 80"),
        ({"num_heads": 18}, "at most 8 query heads per kv head, and this model has 9"),
        ({"block_size": 8}, "block_size to be a multiple of 16, and it is 8"),
        ({"gpu": (7, 5)}, "an NVIDIA GPU of compute capability 8.0 or later, and this one has 7.5"),
    ],
)
def test_a_model_it_cannot_serve_is_refused_with_a_way_out(change: dict[str, Any], reason: str) -> None:
    model: dict[str, Any] = {"dtype": torch.bfloat16, "gpu": (8, 0), "block_size": 16}
    model |= {"num_heads": 16, "num_kv_heads": 2, "head_dim": 64}

    def check_model(*, gpu: tuple[int, int], **heads: Any) -> None:
        CachedHeads(**heads).check(replace(KNOWN_GPUS["h200"], capability=gpu))

    check_model(**model)
    message = f"attention_backend=cuda needs {reason}; use attention_backend=triton"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_model(**model | change)
