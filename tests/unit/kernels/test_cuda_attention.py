"""The CUDA kernel without a GPU: the text that a GPU would compile, its threads taking turns on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from infer.errors import ConfigError
from infer.kernels.attention_decode import attend_decode_reference
from infer.kernels.cuda.paged_attention import attend_decode_cuda, defines_of, splits_for
from tests.unit.kernels.attention_contract import Heads, assert_close, make_paged
from tests.unit.kernels.emulated_cuda import emulated_kernels


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def check(
    lens: list[int],
    heads: Heads,
    *,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    num_splits: int = 1,
    window: int | None = None,
) -> None:
    paged = make_paged(lens, heads, block_size=block_size, dtype=dtype, device="cpu")
    rows = torch.randperm(len(lens)).int()  # not the order of the tables
    lens_S = torch.tensor(lens, dtype=torch.int32)[rows.long()]
    rows = torch.where(lens_S == 0, -1, rows)  # as the engine's padding has it
    wide = torch.full((len(lens), heads.num_heads + 3, heads.head_dim), torch.nan, dtype=dtype)
    q = wide[:, 2:-1].copy_(torch.randn(len(lens), heads.num_heads, heads.head_dim))
    arguments = (q, paged.keys, paged.values, paged.tables, rows, lens_S)
    defines = defines_of(dtype, block_size=block_size, **dataclasses.asdict(heads))
    out = torch.full((len(lens), heads.num_heads, heads.head_dim), torch.nan, dtype=dtype)
    actual = attend_decode_cuda(
        *arguments, block_size=block_size, scale=0.3, window=window, out=out,
        kernels=emulated_kernels(defines), num_splits=num_splits,
    )  # fmt: skip
    assert actual is out
    expected = attend_decode_reference(*arguments, block_size=block_size, scale=0.3, window=window)
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (Heads(4, 2, 128), torch.bfloat16),
        (Heads(2, 2, 64), torch.float16),
        (Heads(4, 2, 80), torch.bfloat16),  # 10 of a team's 16 lanes have work
        (Heads(7, 1, 16), torch.float32),  # many small teams
        (Heads(1, 1, 256), torch.float32),  # two pieces for each lane
        (Heads(20, 2, 32), torch.bfloat16),  # two blocks share a kv head
    ],
    ids=str,
)
def test_equals_the_reference_at_lengths_around_a_block_and_a_tile(heads: Heads, dtype: torch.dtype) -> None:
    check([1, 17, 31, 33, 70], heads, dtype=dtype)


@pytest.mark.parametrize("num_splits", [1, 3, 64])
def test_padding_is_zeros_and_its_row_is_not_looked_at(num_splits: int) -> None:
    check([0, 150, 0, 3], Heads(4, 2, 64), num_splits=num_splits)


@pytest.mark.parametrize("window", [1, 40])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_window_reads_nothing_before_it(window: int, num_splits: int) -> None:
    check([1, 41, 0, 200], Heads(4, 2, 64), window=window, num_splits=num_splits)


def test_larger_blocks() -> None:
    check([150, 2], Heads(4, 2, 64), block_size=64, num_splits=2)


def test_scores_far_from_zero_are_not_lost() -> None:
    """The maximum moves from tile to tile, and no exponential may overflow."""
    heads = Heads(1, 1, 16)
    keys = torch.zeros(512, 1, 16)
    keys[:, 0, 0] = torch.linspace(-4000, 4000, 512)[torch.randperm(512)]
    values = torch.randn(512, 1, 16)
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1.0
    table = torch.arange(32, dtype=torch.int32)[None]
    row, length = torch.zeros(1, dtype=torch.int32), torch.full((1,), 512, dtype=torch.int32)
    arguments = (q, keys, values, table, row, length)
    defines = defines_of(torch.float32, block_size=16, **dataclasses.asdict(heads))
    for num_splits in (1, 2):
        actual = attend_decode_cuda(
            *arguments, block_size=16, scale=1.0, window=None,
            kernels=emulated_kernels(defines), num_splits=num_splits,
        )  # fmt: skip
        assert_close(actual, attend_decode_reference(*arguments, block_size=16, scale=1.0, window=None))


def test_not_a_number_is_not_hidden() -> None:
    heads = Heads(2, 1, 16)
    paged = make_paged([5], heads, block_size=16, dtype=torch.float32, device="cpu")
    q = torch.randn(1, 2, 16)
    q[0, 1, 3] = torch.nan
    row, length = torch.zeros(1, dtype=torch.int32), torch.full((1,), 5, dtype=torch.int32)
    defines = defines_of(torch.float32, block_size=16, **dataclasses.asdict(heads))
    out = attend_decode_cuda(
        q, paged.keys, paged.values, paged.tables, row, length, block_size=16, scale=1.0, window=None,
        kernels=emulated_kernels(defines), num_splits=1,
    )  # fmt: skip
    assert out[0, 1].isnan().all() and not out[0, 0].isnan().any()


def test_the_grid_depends_on_the_rows_and_not_on_their_lengths() -> None:
    heads = Heads(4, 2, 64)
    kernels = emulated_kernels(defines_of(torch.bfloat16, block_size=16, **dataclasses.asdict(heads)))
    kernels.launched.clear()
    check([3, 0], heads, num_splits=2)
    check([90, 70], heads, num_splits=2)
    assert kernels.launched == [("paged_attention", (2, 2, 2)), ("merge_splits", (4, 2, 1))] * 2


def test_few_rows_are_split_to_fill_the_gpu_and_many_are_not() -> None:
    assert [splits_for(blocks, 132) for blocks in (1, 8, 32, 264, 265, 2048)] == [32, 32, 16, 2, 1, 1]


def test_a_model_it_cannot_serve_is_refused_with_a_way_out() -> None:
    heads = {"num_heads": 4, "num_kv_heads": 2, "block_size": 16}
    with pytest.raises(ConfigError, match="not torch.float64; use attention_backend=triton"):
        defines_of(torch.float64, head_dim=64, **heads)
    for head_dim in (20, 512):
        with pytest.raises(ConfigError, match=f"have {head_dim} of 2 bytes; use attention_backend=triton"):
            defines_of(torch.float16, head_dim=head_dim, **heads)
