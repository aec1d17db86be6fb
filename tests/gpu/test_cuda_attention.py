"""The CUDA C++ decode kernel on a real GPU: real sizes, every number of heads, graphs, and both compilers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from infer.kernels.attention import decode_cuda
from infer.kernels.attention.decode import attend_decode_reference
from infer.kernels.attention.decode_cuda import DECODE, attend_decode_cuda
from infer.kernels.attention.decode_work import DecodeWork
from infer.kernels.attention.paged import PagedKV
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime.dispatch import launch_options
from tests.gpu.attention import check_that_a_graph_follows_the_lengths, relative_error
from tests.kernels.attention_contract import Heads, make_paged

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]

MODELS = [Heads(16, 8, 128), Heads(32, 8, 64), Heads(28, 4, 128), Heads(8, 8, 64), Heads(16, 2, 128)]
every_model = pytest.mark.parametrize("heads", MODELS, ids=str)  # each is compiled for, whatever else it does


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def check(
    lens: list[int],
    heads: Heads,
    *,
    block_size: int = 16,
    split_len: int | None = None,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    repeats: int = 2,
) -> None:
    paged = make_paged(lens, heads, block_size=block_size, dtype=dtype, device="cuda")
    rows = torch.randperm(len(lens)).to("cuda", torch.int32)
    lens_S = torch.tensor(lens, dtype=torch.int32, device="cuda")[rows.long()]
    work = DecodeWork(
        max_rows=len(lens) + 2, max_len=max(*lens, 1), device="cuda", split_len=split_len,
        **dataclasses.asdict(heads),
    )  # fmt: skip
    for scratch in (work.sums, work.maxima, work.denominators):
        scratch.fill_(torch.nan)
    work.plan(rows, lens_S, window=window)
    wide = torch.randn(len(lens), heads.num_heads + 2, heads.head_dim, device="cuda").to(dtype)
    q = wide[:, : heads.num_heads]  # the queries of a fused projection are strided
    kv = paged.kv(heads.head_dim**-0.5, window)
    outs = [attend_decode_cuda(q, kv, work) for _ in range(repeats)]
    wide_kv = kv._replace(keys_PGH=paged.keys.float(), values_PGH=paged.values.float())
    exact = attend_decode_reference(q.float(), wide_kv, rows, lens_S)
    for index, length in enumerate(lens_S.tolist()):
        if length:
            assert relative_error(outs[0][index], exact[index]) < 1e-2, f"length {length}"
        else:
            assert not outs[0][index].any()
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert not work.tickets.any()


@every_model
def test_at_lengths_around_a_tile_a_block_and_a_split(heads: Heads) -> None:
    for split_len in (32, 1024):
        check([1, 15, 16, 17, 32, 33, 70, 0, 31], heads, split_len=split_len)


@pytest.mark.parametrize("group", range(1, 9))
def test_with_any_number_of_query_heads_per_kv_head(group: int) -> None:
    check([5, 70, 300], Heads(2 * group, 2, 64 << group % 2), split_len=64)


@pytest.mark.parametrize(
    ("heads", "window", "block_size"),
    [(MODELS[0], 1, 16), (MODELS[1], 40, 32), (MODELS[0], 1000, 48)],
    ids=str,
)
def test_within_a_window(heads: Heads, window: int, block_size: int) -> None:
    check([700, 3, 0, 1500, 41], heads, window=window, block_size=block_size, split_len=256)


@pytest.mark.parametrize("heads", MODELS[:2], ids=str)
def test_in_float16(heads: Heads) -> None:
    check([5, 70, 300], heads, dtype=torch.float16)


@every_model
def test_at_real_sizes_two_hundred_times_bit_by_bit(heads: Heads) -> None:
    for window in (None, 1024):
        check([32768, 4096, 1, 800, 0, 257, 16, 5000], heads, window=window, repeats=200)
        check([400, 1000, 0, 77] * 64, heads, window=window, repeats=200)


@pytest.mark.parametrize("heads", MODELS[:2], ids=str)
def test_a_replayed_graph_follows_the_lengths(heads: Heads) -> None:
    def attend(
        q: torch.Tensor, kv: PagedKV, rows_S: torch.Tensor, lens_S: torch.Tensor, work: DecodeWork
    ) -> torch.Tensor:
        return attend_decode_cuda(q, kv, work)

    check_that_a_graph_follows_the_lengths(attend, heads)


def test_the_compiler_makes_kernels_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, pdl = Heads(4, 2, 64), launch_options(torch.device("cuda"))["PDL"]
    cached = decode_cuda.CachedHeads(torch.float16, **dataclasses.asdict(heads), block_size=16)
    defines = cached.defines(DECODE, pdl=pdl)
    major, minor = torch.cuda.get_device_capability()
    cubin = build.compile_with_nvrtc(DECODE.source, build.options(f"sm_{major}{minor}", dict(defines)))
    kernels = build.LoadedKernels(cubin)
    monkeypatch.setattr(decode_cuda, "load_kernels", lambda *key: kernels)
    decode_cuda.prepare_launch.cache_clear()
    try:
        check([90, 7], heads, dtype=torch.float16)
    finally:
        decode_cuda.prepare_launch.cache_clear()


def test_a_kept_cubin_is_loaded_and_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled: list[Path] = []

    compile_with = build.compile_with_nvrtc

    def count(source: Path, flags: Sequence[str]) -> bytes:
        compiled.append(source)
        return compile_with(source, flags)

    monkeypatch.setattr(build, "compile_with_nvrtc", count)
    for _ in range(2):
        build.load_kernels.cache_clear()
        decode_cuda.prepare_launch.cache_clear()
        check([90, 7], Heads(6, 2, 64))
    assert compiled == [DECODE.source]
