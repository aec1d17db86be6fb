"""The linear that holds its weights early, on a real GPU: real shapes, graphs, the same bits again."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from infer.kernels.linear import small as linear_small
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.cuda import Matrix
from infer.kernels.linear.pdl import PdlConfig, can_launch
from infer.kernels.linear.residual import ResidualInput
from infer.kernels.linear.small import launch, launch_add, launch_of_sum
from infer.kernels.linear.triton_configs import SkinnyConfig
from infer.kernels.runtime import cuda_build as build
from tests.gpu.graphs import check_that_starting_early_leaves_no_trace, random
from tests.kernels.linear_contract import assert_near, gate

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]

EPS = 1e-6
CONFIGS = [
    PdlConfig(2, 8, depth=2),
    PdlConfig(1, 8, depth=3),
    PdlConfig(2, 4, depth=1),
    PdlConfig(1, 16, depth=4),
]
TOKENS = [1, 3, 7, 8, 9, 16, 31, 32]
SHAPES = [(4096, 1024), (1024, 3072), (6144, 4096), (1000, 1024)]  # N, K
PAIRS = [
    (2048, 1024, 3072, True),
    (3072, 1024, 4096, False),
    (8192, 2048, 3072, False),
    (4096, 4096, 12288, True),
]


@pytest.fixture(autouse=True)
def seed() -> None:
    if torch.cuda.is_available():
        major, _ = torch.cuda.get_device_capability()
        if major < 9:
            pytest.skip("needs Hopper")
    torch.manual_seed(0)


def fitting(M: int, N: int, K: int, *, gated: bool = False, adds: bool = False) -> list[PdlConfig]:
    return [config for config in CONFIGS if can_launch(config, M, N, K, gated=gated, adds=adds)]


@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_linear(N: int, K: int) -> None:
    w, bias = random(N, K, scale=0.02), random(N)
    for num_tokens in TOKENS:
        x = random(num_tokens, 2 * K)[:, :K]
        expected = F.linear(x.double(), w.double(), bias.double())
        for config in fitting(num_tokens, N, K):
            assert_near(launch(config, x, w, bias_N=bias), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_gated_linear(activation: str) -> None:
    w = random(2 * 3072, 1024, scale=0.02)
    for num_tokens in TOKENS:
        x = random(num_tokens, 1024)
        expected = gate(F.linear(x.double(), w.double()), activation)
        for config in fitting(num_tokens, 3072, 1024, gated=True):
            assert_near(launch(config, x, w, activation=activation), expected)


@pytest.mark.parametrize(("K", "D", "N", "gated"), PAIRS)
def test_a_pair(K: int, D: int, N: int, gated: bool) -> None:
    first, second = random(D, K, scale=0.02), random(2 * N if gated else N, D, scale=0.02)
    gain, activation = random(D), "silu" if gated else ""
    for num_tokens in TOKENS:
        x, residual = random(num_tokens, K), random(num_tokens, D)
        total = x.double() @ first.double().T + residual.double()
        for config in fitting(num_tokens, D, K, adds=True):
            added = launch_add(config, ResidualInput(residual, gain, 0.0), x, first)
            assert_near(added.sum_MN, total)
            assert torch.equal(added.scaled_MN, (added.sum_MN.float() * gain.float()).bfloat16())
            squares = added.sum_MN.double().square().sum(1)
            assert torch.allclose(added.squares_PM.sum(0), squares, rtol=1e-6)
            expected = F.rms_norm(added.sum_MN.double(), (D,), gain.double(), EPS) @ second.double().T
            expected = gate(expected, "silu") if gated else expected
            for reader in fitting(num_tokens, N, D, gated=gated):
                assert_near(launch_of_sum(reader, added, second, eps=EPS, activation=activation), expected)


def test_either_kernel_reads_what_the_other_added() -> None:
    first, second, gain = random(1024, 2048, scale=0.02), random(4096, 1024, scale=0.02), random(1024)
    tile = SkinnyConfig(64, 128, 2, 4, 3)
    for num_tokens in (3, 8, 16):
        x, residual = random(num_tokens, 2048), random(num_tokens, 1024)
        stream = ResidualInput(residual, gain, 0.0)
        mine = launch_add(CONFIGS[0], stream, x, first)
        theirs = linear_small.launch_add(tile, stream, x, first)
        assert_near(mine.sum_MN, theirs.sum_MN.double())
        for added in (mine, theirs):
            expected = F.rms_norm(added.sum_MN.double(), (1024,), gain.double(), EPS) @ second.double().T
            assert_near(launch_of_sum(CONFIGS[0], added, second, eps=EPS), expected)
            assert_near(linear_small.launch_of_sum(tile, added, second, eps=EPS), expected)


def test_a_step_of_pairs_that_start_early_waits_for_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers without attention, in a graph: each kernel reads what the one before has written."""
    D, K, F_out = 1024, 2048, 3072
    into = {K: PdlConfig(2, 8, depth=1), F_out: PdlConfig(1, 8, depth=3)}
    out = {False: PdlConfig(2, 8, depth=2), True: PdlConfig(1, 4, depth=4)}
    layers = [
        (random(D, K, scale=0.02), random(2 * F_out, D, scale=0.02), random(D, F_out, scale=0.02),
         random(4096, D, scale=0.02), random(D)) for _ in range(8)
    ]  # fmt: skip

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        residual, y = torch.zeros_like(x), x.repeat(1, 4)
        for o, gate_up, down, qkv, gain in layers:
            added = launch_add(into[K], ResidualInput(residual, gain, 0.0), y[:, :K], o)
            gated = launch_of_sum(out[True], added, gate_up, eps=EPS, activation="silu")
            added = launch_add(into[F_out], ResidualInput(added.sum_MN, gain, 0.0), gated, down)
            y, residual = launch_of_sum(out[False], added, qkv, eps=EPS), added.sum_MN
        return y, added.sum_MN

    for num_tokens in (1, 5, 8, 16, 32):
        x = random(num_tokens, D)
        check_that_starting_early_leaves_no_trace(partial(step, x), x, monkeypatch, num_replays=40)


def test_the_same_input_gives_the_same_bits_again() -> None:
    w, gain = random(1024, 2048, scale=0.02), random(1024)
    for num_tokens in (1, 8, 32):
        x, residual = random(num_tokens, 2048), random(num_tokens, 1024)
        for config in fitting(num_tokens, 1024, 2048, adds=True):
            first = launch_add(config, ResidualInput(residual, gain, 0.0), x, w)
            for _ in range(200):
                again = launch_add(config, ResidualInput(residual, gain, 0.0), x, w)
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("config", CONFIGS[:3], ids=str)
def test_a_row_has_the_same_bits_whatever_stands_beside_it(config: PdlConfig) -> None:
    w, x = random(4096, 1024, scale=0.02), random(8, 1024)
    if can_launch(config, 8, 4096, 1024, gated=False):
        whole = launch(config, x, w)
        assert all(torch.equal(launch(config, x[:size], w), whole[:size]) for size in range(1, 8))


PREPARED = {  # hidden size, qkv, inputs of o, intermediate size
    "Qwen3-0.6B": (1024, 4096, 2048, 3072),
    "Llama-3.2-1B": (2048, 3072, 2048, 8192),
    "Qwen3-1.7B": (2048, 4096, 2048, 6144),
    "SmolLM2-135M": (576, 960, 576, 1536),
    "Gemma-3-1B": (1152, 1536, 1024, 6912),
    "Qwen2.5-0.5B": (896, 1152, 896, 4864),
}


@pytest.mark.parametrize("name", PREPARED)
def test_a_layer_of_a_model_that_was_prepared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut as the rule says, through the functions that layers call; nothing is compiled any more."""
    D, qkv, o, F_out = PREPARED[name]
    matrices = [
        Matrix(qkv, D, bias=True, reads=True),
        Matrix(D, o, writes=True),
        Matrix(F_out, D, "gelu_tanh", reads=True),
        Matrix(D, F_out, writes=True),
    ]
    compiled = CompiledLinears(torch.device("cuda"))
    assert compiled.pdl.load(matrices, compiled.device)
    monkeypatch.setattr(build, "make_cubin", None)
    weights = [random(m.N * (2 if m.activation else 1), m.K, scale=0.02) for m in matrices]
    qkv_w, o_w, gate_up_w, down_w = weights
    bias, gain, rows = random(qkv), random(D), random(8, o)
    residual = random(8, D)
    whole: list[torch.Tensor] = []
    for num_tokens in range(8, 0, -1):
        x = rows[:num_tokens]
        assert linear_small.can_add(x, o_w, gate_up_w, gated=True, compiled=compiled)
        added = linear_small.linear_add(
            ResidualInput(residual[:num_tokens], gain, 1.0), x, o_w, compiled=compiled
        )
        assert_near(added.sum_MN, x.double() @ o_w.double().T + residual[:num_tokens].double())
        gated = linear_small.linear_of_sum(added, EPS, gate_up_w, activation="gelu_tanh", compiled=compiled)
        normed = F.rms_norm(added.sum_MN.double(), (D,), gain.double() + 1, EPS)
        assert_near(gated, gate(normed @ gate_up_w.double().T, "gelu_tanh"))
        assert linear_small.can_add(gated, down_w, qkv_w, gated=False, compiled=compiled)
        last = linear_small.linear_add(
            ResidualInput(added.sum_MN, gain, 0.0), gated, down_w, compiled=compiled
        )
        y = linear_small.linear_of_sum(last, EPS, qkv_w, bias, compiled=compiled)
        normed = F.rms_norm(last.sum_MN.double(), (D,), gain.double(), EPS)
        assert_near(y, normed @ qkv_w.double().T + bias.double())
        whole = whole or [added.sum_MN, gated, last.sum_MN, y]
        for got, expected in zip((added.sum_MN, gated, last.sum_MN, y), whole, strict=True):
            assert torch.equal(got, expected[:num_tokens])  # the bits of a row do not depend on the others
    assert isinstance(linear_small._plan(rows, o_w, gated=False, compiled=compiled), PdlConfig)
    assert not isinstance(linear_small._plan(rows, o_w, gated=False), PdlConfig)
