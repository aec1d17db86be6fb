"""A KV cache of 8 bits on a GPU: both kernels in CUDA C++ at real sizes, and engines with every toggle."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import LLM, SamplingParams
from infer.kernels.attention.decode import attend_decode_reference
from infer.kernels.attention.decode_cuda import attend_decode_cuda, attend_projected_cuda
from infer.kernels.attention.decode_work import DecodeWork
from infer.loader.find.source import resolve_model
from infer.loader.load import load_model
from scripts.make_checkpoint import make_checkpoint
from tests.gpu.attention import relative_error
from tests.gpu.graphs import FEW_SIZES
from tests.integration.test_kv_scales import (
    K_SCALES,
    NAMES,
    V_SCALES,
    assert_follows,
    calibrated,
    generate,
    load,
    scalars,
)
from tests.kernels.attention_contract import Heads, codes, make_paged
from tests.kernels.projected_contract import attend_written, make_transform, newest_slots

pytestmark = pytest.mark.gpu

HEADS = [Heads(32, 8, 128), Heads(32, 8, 64), Heads(7, 1, 128), Heads(8, 1, 64), Heads(8, 8, 64)]
LENS = [8192, 4096, 1, 800, 0, 257, 16, 5000, 33]


@codes
@pytest.mark.parametrize(
    ("heads", "window", "dtype"),
    [
        (heads, *((None, torch.bfloat16), (1000, torch.float16))[number % 2])
        for number, heads in enumerate(HEADS)
    ],
    ids=str,
)
def test_cuda_at_real_sizes(
    heads: Heads, window: int | None, dtype: torch.dtype, kept_as: torch.dtype
) -> None:
    torch.manual_seed(0)
    paged = make_paged(LENS, heads, block_size=16, dtype=dtype, device="cuda")
    paged.keep_as(kept_as)
    rows = torch.randperm(len(LENS)).to("cuda", torch.int32)
    lens_S = torch.tensor(LENS, dtype=torch.int32, device="cuda")[rows.long()]
    work = DecodeWork(max_rows=len(LENS), max_len=max(LENS), device="cuda", **dataclasses.asdict(heads))
    work.plan(rows, lens_S, window=window)
    q = torch.randn(len(LENS), heads.num_heads, heads.head_dim, device="cuda").to(dtype)
    kv = paged.kv(heads.head_dim**-0.5, window)
    outs = [attend_decode_cuda(q, kv, work) for _ in range(20)]
    exact = attend_decode_reference(q.float(), kv, rows, lens_S)
    for index, length in enumerate(lens_S.tolist()):
        assert relative_error(outs[0][index], exact[index]) < 1e-2 if length else not outs[0][index].any()
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert not work.tickets.any()


@codes
@pytest.mark.parametrize(
    ("heads", "has_norm"), [(heads, number % 2 == 0) for number, heads in enumerate(HEADS)], ids=str
)
def test_cuda_from_the_projection(heads: Heads, has_norm: bool, kept_as: torch.dtype) -> None:
    torch.manual_seed(0)
    dtype, rows = torch.bfloat16, torch.arange(len(LENS), dtype=torch.int32, device="cuda")
    lens_S = torch.tensor(LENS, dtype=torch.int32, device="cuda")
    transform = make_transform(
        heads, dtype=dtype, device="cuda", has_norm=has_norm, offset=0.0, num_positions=max(LENS)
    )
    paged = make_paged(LENS, heads, block_size=16, dtype=dtype, device="cuda")
    newest = newest_slots(paged, rows, lens_S)
    paged.keys[newest] = paged.values[newest] = torch.nan
    paged.keep_as(kept_as)
    work = DecodeWork(max_rows=len(LENS), max_len=max(LENS), device="cuda", **dataclasses.asdict(heads))
    work.plan(rows, lens_S)
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    qkv = torch.randn(len(LENS), width, device="cuda").to(dtype)
    how: dict[str, Any] = {"scale": heads.head_dim**-0.5, "window": None}
    actual = attend_projected_cuda(qkv, transform, paged.kv(**how), work)
    written = attend_written(qkv, transform, paged, rows, lens_S, **how)
    for index, length in enumerate(LENS):
        assert relative_error(actual[index], written[index].float()) < 2e-2 if length else True


TOGGLES: list[dict[str, Any]] = [
    {"use_cuda_graphs": False},
    {"attention_backend": "triton"},
    {"kv_cache_backend": "contiguous"},
    {"block_size": 4, "num_blocks": 24, "preemption": "swap", "swap_blocks": 40},
    {"prefill_chunk_size": 5, "use_prefix_caching": False, "max_batch_size": 3},
    {"deterministic": True},
]


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype", "toggles"),
    [
        ("qwen3", "fp8", TOGGLES),
        ("qwen3", "int8", TOGGLES[::2]),
        ("gemma3", "int8", TOGGLES[1::2]),
        ("gpt2", "fp8", TOGGLES[:2]),
    ],
)
def test_no_toggle_changes_a_token(
    family: str, kv_cache_dtype: str, toggles: list[dict[str, Any]], tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path)
    prompts = [[(7 * i + j) % 200 + 10 for j in range(3 + 5 * i)] for i in range(5)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def tokens_of(**knobs: Any) -> list[list[int]]:
        how = {"dtype": "float32", "kv_cache_dtype": kv_cache_dtype, **FEW_SIZES} | knobs
        with LLM(str(tmp_path), **how) as llm:
            return [answer.token_ids for answer in llm.generate(prompts, greedy)]

    expected = tokens_of(device="cpu", quantization="none")
    for knobs in ({}, *toggles):
        assert tokens_of(device="cuda", **knobs) == expected, knobs


@pytest.mark.parametrize("use_cuda_graphs", [True, False])
def test_an_engine_keeps_the_scales_of_a_calibrated_checkpoint(tmp_path: Path, use_cuda_graphs: bool) -> None:
    """Tokens follow plain PyTorch with one scale for a layer; the same ones with graphs and without."""
    path = calibrated(tmp_path / "m", scalars(NAMES["self_attn"]))
    loaded = load_model(resolve_model(str(path)), dtype="float32", device="cuda")
    outputs = generate(loaded, use_cuda_graphs=use_cuda_graphs)
    scales = torch.tensor([K_SCALES, V_SCALES]).T[..., None].expand(2, 2, 2)
    assert_follows(load(path), outputs, scales)
