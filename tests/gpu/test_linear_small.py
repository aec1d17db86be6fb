"""The linears of few tokens on a real GPU: their contract, and the shapes of real models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from infer.kernels.linear import small as linear_small
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.linear.small import (
    MAX_SQUARES,
    block_of_parts,
    launch_add,
    launch_of_sum,
    linear,
    linear_add,
    linear_of_sum,
    norm_linear,
)
from infer.kernels.linear.triton_configs import SkinnyConfig, bucket, fit_stages
from infer.kernels.runtime import dispatch
from infer.kernels.runtime.profiles import device_profile, using_profile
from tests.gpu.graphs import capture, check_that_starting_early_leaves_no_trace, random
from tests.kernels.added_contract import AddedContract
from tests.kernels.linear_contract import LinearContract, assert_near, gate

EPS = 1e-6
SHAPES = [(4096, 1024), (1024, 3072), (2048, 8192), (4096, 12288)]  # N, K; others are cut as one of these
GATED_SHAPES = [(3072, 1024), (8192, 2048)]  # F, K
PAIRS = [(2048, 1024, 3072, True), (3072, 1024, 4096, False), (4096, 4096, 12288, True)]  # K, D, N, gated
TILES = [SkinnyConfig(64, 256, 4, 4, 3), SkinnyConfig(16, 256, 1, 2, 4), SkinnyConfig(32, 128, 2, 4, 4)]
TOKENS = [1, 2, 3, 4, 5, 8, 16, 17, 64, 100, 128]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
class TestCompiledLinears(LinearContract):
    device = "cuda"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
class TestCompiledPairs(AddedContract):
    device = "cuda"


class Pair:
    """A matrix that writes into the residual stream and the one that reads it next."""

    def __init__(self, K: int, D: int, N: int, gated: bool) -> None:
        self.first, self.second = random(D, K, scale=0.02), random(2 * N if gated else N, D, scale=0.02)
        self.gain, self.gated = random(D), gated

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, tile: SkinnyConfig
    ) -> tuple[ResidualSum, torch.Tensor]:
        tile = fit_stages(tile, max(bucket(len(x)), 16), self.gated)
        added = launch_add(tile, ResidualInput(residual, self.gain, 0.0), x, self.first)
        activation = "silu" if self.gated else ""
        return added, launch_of_sum(tile, added, self.second, eps=EPS, activation=activation)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
class TestRealPairs:
    @pytest.mark.parametrize(
        ("K", "D", "N", "gated", "tile"),
        [(*pair, TILES[place]) for place, pair in enumerate(PAIRS)] + [(*PAIRS[0], TILES[1])],
    )
    def test_a_pair(self, K: int, D: int, N: int, gated: bool, tile: SkinnyConfig) -> None:
        pair = Pair(K, D, N, gated)
        whole: tuple[ResidualSum, torch.Tensor] | None = None
        x, residual = random(64, K), random(64, D)
        for num_tokens in (64, 33, 16, 8, 3):
            if block_of_parts(-(-D // tile.block_n)) * bucket(num_tokens) > MAX_SQUARES:
                continue
            added, y = pair(x[:num_tokens], residual[:num_tokens], tile)
            total = x[:num_tokens].double() @ pair.first.double().T + residual[:num_tokens].double()
            assert_near(added.sum_MN, total)
            normed = F.rms_norm(added.sum_MN.double(), (D,), pair.gain.double(), EPS)
            expected = normed @ pair.second.double().T
            assert_near(y, gate(expected, "silu") if gated else expected)
            whole = whole or (added, y)
            assert torch.equal(added.sum_MN, whole[0].sum_MN[:num_tokens])
            assert torch.equal(y, whole[1][:num_tokens])  # whatever stands beside a row

    def test_a_step_of_pairs_that_start_early_waits_for_its_input(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Layers without attention, in a graph: each kernel reads what the one before has written."""
        tile = SkinnyConfig(64, 128, split_k=2, num_warps=4, num_stages=3)
        monkeypatch.setattr(linear_small, "skinny_config", lambda *_: tile)
        D, K, F_out = 1024, 2048, 3072
        layers = [
            (random(D, K, scale=0.02), random(2 * F_out, D, scale=0.02), random(D, F_out, scale=0.02),
             random(4096, D, scale=0.02), random(D)) for _ in range(8)
        ]  # fmt: skip

        def step(x: torch.Tensor) -> tuple[torch.Tensor]:
            residual, y = torch.zeros_like(x), x.repeat(1, 4)
            for out, gate_up, down, qkv, gain in layers:
                added = linear_add(ResidualInput(residual, gain, 0.0), y[:, :K], out)
                gated = linear_of_sum(added, EPS, gate_up, activation="silu")
                added = linear_add(ResidualInput(added.sum_MN, gain, 0.0), gated, down)
                y, residual = linear_of_sum(added, EPS, qkv), added.sum_MN
            return (y + residual.repeat(1, 4),)

        for num_tokens in (5, 16, 32):
            x = random(num_tokens, D)
            check_that_starting_early_leaves_no_trace(partial(step, x), x, monkeypatch, num_replays=20)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
class TestRealShapes:
    @pytest.mark.parametrize(("N", "K"), SHAPES)
    def test_linear(self, N: int, K: int) -> None:
        w, bias = random(N, K, scale=0.02), random(N)
        for num_tokens in TOKENS:
            x = random(num_tokens, K)
            assert_near(linear(x, w, bias), F.linear(x.double(), w.double(), bias.double()))

    @pytest.mark.parametrize(("num_outputs", "K"), GATED_SHAPES)
    def test_norm_gated_linear(self, num_outputs: int, K: int) -> None:
        w, gain = random(2 * num_outputs, K, scale=0.02), random(K)
        for num_tokens in TOKENS:
            x, residual = random(num_tokens, K), random(num_tokens, K)
            y, total = norm_linear(x, residual, gain, EPS, 0.0, w, activation="silu")
            assert torch.equal(total, x + residual)
            normed = F.rms_norm(total.double(), (K,), gain.double(), EPS)
            assert_near(y, gate(normed @ w.double().T, "silu"))

    @pytest.mark.parametrize(("N", "K"), SHAPES[:3])
    def test_the_same_input_gives_the_same_bits_again(self, N: int, K: int) -> None:
        w = random(N, K, scale=0.02)
        for num_tokens in (1, 8, 64):
            x = random(num_tokens, K)
            first = linear(x, w)
            assert all(torch.equal(linear(x, w), first) for _ in range(50))

    @pytest.mark.parametrize("fold_max_m", [1, 4])
    @pytest.mark.parametrize("kind", ["linear", "norm_linear", "gated_linear"])
    def test_a_row_has_the_same_bits_in_every_batch_of_its_kernel(self, fold_max_m: int, kind: str) -> None:
        own = device_profile(torch.device("cuda"))
        K, F_out = 1024, 3072
        w, gain = random(2 * F_out, K, scale=0.02), random(K)
        x = random(128, K)
        run: Callable[[torch.Tensor], torch.Tensor] = {
            "linear": lambda rows: linear(rows, w),
            "norm_linear": lambda rows: norm_linear(rows, rows, gain, EPS, 0.0, w)[0],
            "gated_linear": lambda rows: linear(rows, w, activation="silu"),
        }[kind]
        whole: dict[tuple[type, bool], torch.Tensor] = {}
        with using_profile(replace(own, linear=replace(own.linear, fold_norm_tokens=fold_max_m))):
            for size in (128, 100, 64, 33, 17, 16, 8, 5, 4, 3, 2, 1):
                plan = linear_small._plan(x[:size], w, gated=kind == "gated_linear")
                if plan is not None:  # folded or not is another way to compute a row
                    rows = whole.setdefault((type(plan), size <= fold_max_m), run(x[:size]))
                    assert torch.equal(run(x[:size]), rows[:size]), size
        assert len({kernel for kernel, _ in whole}) == 2

    def test_a_kernel_that_starts_early_waits_for_its_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A chain in which kernels that launch ahead and kernels that do not follow each other."""
        weights = [random(2048, 2048, scale=0.02) for _ in range(12)]
        gain = torch.ones(2048, device="cuda", dtype=torch.bfloat16)

        def chain(x: torch.Tensor) -> torch.Tensor:
            residual = torch.zeros_like(x)
            for number, w in enumerate(weights):
                x, residual = norm_linear(x, residual, gain, EPS, 0.0, w)
                x = linear(x * 2 if number % 3 == 0 else x, w)
            return x

        for num_tokens in (1, 2, 4, 32):
            x = random(num_tokens, 2048)
            monkeypatch.setattr(dispatch, "PDL", False)
            chain(x)
            monkeypatch.setattr(dispatch, "PDL", True)
            graph, y = capture(partial(chain, x))
            for _ in range(20):
                x.copy_(random(num_tokens, 2048))
                graph.replay()
                ahead = chain(x)
                monkeypatch.setattr(dispatch, "PDL", False)
                expected = chain(x)
                monkeypatch.setattr(dispatch, "PDL", True)
                assert torch.equal(y, expected) and torch.equal(ahead, expected)

    def test_a_graph_replays_on_new_numbers(self) -> None:
        w, gain = random(1024, 2048, scale=0.02), random(2048)
        for num_tokens in (1, 4, 7, 32):
            x, residual = random(num_tokens, 2048), random(num_tokens, 2048)
            graph, (y, total) = capture(partial(norm_linear, x, residual, gain, EPS, 0.0, w))
            for _ in range(3):
                x.copy_(random(num_tokens, 2048))
                graph.replay()
                expected, expected_total = norm_linear(x, residual, gain, EPS, 0.0, w)
                assert torch.equal(y, expected) and torch.equal(total, expected_total)

    def test_a_new_batch_size_compiles_nothing(self) -> None:
        from infer.kernels.linear.triton_kernels import gemv_kernel, skinny_kernel

        def num_compiled() -> int:
            return sum(
                len(cache[0])
                for kernel in (gemv_kernel, skinny_kernel)
                for cache in kernel.device_caches.values()
            )

        w = random(1024, 2048, scale=0.02)
        for num_tokens in (1, 2, 4, 5, 32, 64, 128):
            linear(random(num_tokens, 2048), w)
        before = num_compiled()
        for num_tokens in range(1, 129):
            linear(random(num_tokens, 2048), w)
        assert num_compiled() == before
