"""The linears of few tokens: references on the CPU, and the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.kernels.linear_sweep import TABLE_FILE, apply_table
from infer.config.profiles import hopper_h200
from infer.config.profiles.generic import GENERIC
from infer.config.profiles.hopper_h200 import H200
from infer.config.profiles.profile import DeviceProfile, TileTable
from infer.errors import ConfigError
from infer.kernels.linear.invariant import linear_invariant
from infer.kernels.linear.small import linear, norm_linear
from infer.kernels.linear.triton_configs import (
    GEMV_MAX_M,
    MAX_SMALL_M,
    GemvConfig,
    SkinnyConfig,
    bucket,
    by_bucket,
    default_gemv_config,
    default_skinny_config,
    fit_stages,
    gemv_config,
    invariant_config,
    skinny_config,
)
from infer.kernels.runtime.profiles import gpu_of, using_profile

SHAPES = [(1024, 2048), (6144, 4096), (12288, 4096), (151936, 1024), (70, 150), (1, 1)]


def test_on_the_cpu_the_fused_forms_are_the_plain_ones_one_after_the_other() -> None:
    torch.manual_seed(0)
    x, residual, gain, bias = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.randn(6)
    w = torch.randn(6, 8)
    normed = F.rms_norm(x + residual, (8,), gain + 1, 1e-5)
    y, total = norm_linear(x, residual, gain, 1e-5, 1.0, w, bias)
    torch.testing.assert_close(y, normed @ w.T + bias)
    assert torch.equal(total, x + residual)
    y, total = norm_linear(x, residual, gain, 1e-5, 1.0, w, activation="silu")
    torch.testing.assert_close(y, F.silu(normed @ w[:3].T) * (normed @ w[3:].T))
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(linear(x, w, activation="silu"), F.silu(x @ w[:3].T) * (x @ w[3:].T))
    torch.testing.assert_close(linear(x, w, bias), x @ w.T + bias)


def test_without_a_residual_the_new_residual_is_the_input() -> None:
    x, gain, w = torch.randn(2, 8), torch.ones(8), torch.randn(6, 8)
    y, total = norm_linear(x, None, gain, 1e-5, 0.0, w)
    assert torch.equal(total, x)
    torch.testing.assert_close(y, F.rms_norm(x, (8,), gain, 1e-5) @ w.T)


def test_an_unknown_activation_is_refused_before_anything_is_computed() -> None:
    with pytest.raises(ConfigError, match="'swish'"):
        linear(torch.zeros(1, 8), torch.zeros(6, 8), activation="swish")


def test_buckets_are_few_and_cover_every_batch() -> None:
    buckets = [bucket(num_tokens) for num_tokens in range(1, MAX_SMALL_M + 1)]
    assert all(size >= num_tokens for num_tokens, size in enumerate(buckets, start=1))
    assert sorted(set(buckets)) == [1, 2, 4, 16, 32, 64, 128]
    assert bucket(GEMV_MAX_M + 1) == 16  # Hopper's matrix instruction from the first batch on


@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize("gated", [False, True])
def test_the_rules_give_tiles_that_triton_accepts(N: int, K: int, gated: bool) -> None:
    gemv = default_gemv_config(N, K, gated)
    assert gemv.block_n >= 1 and gemv.block_k == 256 * gemv.num_warps
    skinny = default_skinny_config(N, K, gated)
    assert skinny.block_n % 64 == 0 and skinny.block_k >= 64
    assert skinny.split_k * 256 <= max(K, 256)
    assert skinny.split_k == 1 or -(-N // skinny.block_n) < 1024  # counters suffice


def test_stages_fit_the_shared_memory() -> None:
    wide = SkinnyConfig(128, 128, split_k=1, num_warps=8, num_stages=6)
    assert fit_stages(wide, 16, gated=False).num_stages == 5
    assert fit_stages(wide, 128, gated=True).num_stages == 2


def test_the_table_holds_tiles_that_the_kernels_know() -> None:
    for gemv in filter(None, by_bucket(GemvConfig, H200.linear.gemv).values()):
        assert gemv.block_k >= 256 * gemv.num_warps  # all warps along K, whatever block_n is
    for (N, _, gated, block_m), skinny in by_bucket(SkinnyConfig, H200.linear.skinny).items():
        if skinny is not None:
            assert skinny.is_wide or skinny.block_n in (16, 32)
            assert fit_stages(skinny, block_m, gated).num_stages >= 2
            assert skinny.split_k == 1 or -(-N // skinny.block_n) < 1024  # counters suffice


def test_a_measured_shape_uses_the_table_and_another_the_rule() -> None:
    gemv: TileTable = {(7, 9, False): {2: (8, 512, 2)}, (7, 9, True): {2: None}}
    tuned = replace(H200.linear, gemv=gemv, skinny={(7, 9, False): {16: None}})
    with using_profile(replace(H200, linear=tuned)):
        gpu = gpu_of(torch.device("cpu"))
        assert gemv_config(7, 9, False, 2, gpu) == GemvConfig(8, 512, 2)
        assert gemv_config(7, 9, True, 2, gpu) is None
        assert gemv_config(7, 9, False, 4, gpu) == default_gemv_config(7, 9, False)
        assert gemv_config(8192, 1024, False, 2, gpu) == default_gemv_config(8192, 1024, False)
        assert gemv_config(8192, 1024, False, 4, gpu) is None  # tensor cores
        assert skinny_config(7, 9, False, 16, gpu) is None
        assert skinny_config(7, 9, False, 64, gpu) is not None
        assert skinny_config(7, 9, False, 128, gpu) is None  # the library


def test_the_sweep_rewrites_the_table_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "hopper_h200.py"
    before = TABLE_FILE.read_text()
    file.write_text(before)
    gemv, skinny = GemvConfig(8, 512, 2, 2), SkinnyConfig(64, 128, 4, 4, 3)
    for _ in range(2):  # the second time finds the first one's work
        apply_table({(7, 9, False, 1): gemv}, {(7, 9, True, 16): skinny, (7, 9, True, 32): None}, file)
    after = file.read_text()
    assert after.partition("# table: begin")[0] == before.partition("# table: begin")[0]
    names: dict[str, Any] = dict(vars(hopper_h200))
    exec(after.partition("# table: begin")[2], names)
    made, old = names["H200"].linear, H200.linear
    assert by_bucket(GemvConfig, made.gemv) == by_bucket(GemvConfig, old.gemv) | {(7, 9, False, 1): gemv}
    expected = by_bucket(SkinnyConfig, old.skinny) | {(7, 9, True, 16): skinny, (7, 9, True, 32): None}
    assert by_bucket(SkinnyConfig, made.skinny) == expected


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(70, 150), (960, 576), (1, 1), (49, 1536)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_cpu_an_invariant_row_has_the_same_bits_wherever_it_stands(
    num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(67, num_inputs).to(dtype)
    w, bias = torch.randn(num_outputs, num_inputs).to(dtype), torch.randn(num_outputs).to(dtype)
    whole = linear_invariant(x, w, bias)
    torch.testing.assert_close(whole, F.linear(x, w, bias))
    for first, last in ((0, 1), (1, 2), (15, 17), (66, 67), (3, 20), (5, 67)):
        assert torch.equal(linear_invariant(x[first:last], w, bias), whole[first:last]), (first, last)
    assert torch.equal(linear_invariant(x.view(1, 67, -1), w, bias), whole.view(1, 67, -1))
    assert linear_invariant(x[:0], w, bias).shape == (0, num_outputs)


def test_a_narrow_tile_is_widened_where_rows_must_be_invariant() -> None:
    tuned = replace(H200.linear, skinny={(7, 9, False): {16: (16, 256, 2, 2, 4)}})
    with using_profile(replace(H200, linear=tuned)):
        narrow = skinny_config(7, 9, False, 16, gpu_of(torch.device("cpu")))
        config = invariant_config(7, 9, 16, gpu_of(torch.device("cpu")))
    assert narrow is not None and not narrow.is_wide
    assert (config.block_k, config.split_k, config.is_wide) == (256, 2, True) and config.block_n == 64


@pytest.mark.parametrize("profile", [H200, GENERIC], ids=lambda profile: profile.name)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_an_invariant_configuration_adds_in_one_order(N: int, K: int, profile: DeviceProfile) -> None:
    with using_profile(profile):
        configs = [invariant_config(N, K, size, gpu_of(torch.device("cuda"))) for size in (16, 32, 64, 128)]
    assert len({(config.block_k, config.split_k, config.is_wide) for config in configs}) == 1
    assert all(config.is_wide for config in configs)
