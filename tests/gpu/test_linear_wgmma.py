"""The linear of warpgroups on a real GPU: cuts of all kinds, real shapes, graphs, the same bits again."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from infer.kernels.linear import small as linear_small
from infer.kernels.linear import wgmma as linear_wgmma
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.cuda import Defines, Matrix, cubin, is_for
from infer.kernels.linear.pdl import PdlConfig, can_launch
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.linear.small import TilePlan, launch, launch_add, launch_of_sum
from infer.kernels.linear.triton_configs import SkinnyConfig
from infer.kernels.linear.wgmma import WgmmaConfig, choose_config, defines_of, token_width
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime.profiles import gpu_of
from tests.gpu.graphs import capture, check_that_starting_early_leaves_no_trace, random
from tests.kernels.linear_contract import assert_near, gate

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]

EPS = 1e-6
TOKENS = [2, 9, 16, 17, 31, 32, 33, 48, 64]
MORE_TOKENS = [65, 96, 127, 128]
CUTS = [  # rows, stages, split, blocks
    (64, 2, 1, 1),
    (128, 4, 2, 1),
    (192, 3, 1, 1),
    (64, 3, 3, 1),
    (64, 4, 4, 2),
    (64, 2, 8, 3),
]
SHAPES = [(1000, 2048), (72, 1000), (8, 8), (2056, 136)]  # N, K: multiples of 8, and of nothing else
PLAIN_SHAPES = [(4096, 1024), (1024, 3072), (6144, 4096), (1000, 1000)]
GATED_SHAPES = [(3072, 1024), (1000, 1024), (12288, 512)]
GATED = {"silu": GATED_SHAPES, "gelu_tanh": GATED_SHAPES[:1], "gelu": GATED_SHAPES[:1]}
STEPS = [(1024, 2048, 3072), (2048, 2048, 8192)]  # hidden size, inputs of o, intermediate size
MODELS = {  # hidden size, qkv, inputs of o, intermediate size
    "Qwen3-0.6B": (1024, 4096, 2048, 3072),
    "Llama-3.2-1B": (2048, 3072, 2048, 8192),
    "Qwen3-8B": (4096, 6144, 4096, 12288),
    "SmolLM2-135M": (576, 960, 576, 1536),
}


Cut = tuple[int, int, int, int]


def cut_of(cut: Cut, num_tokens: int) -> WgmmaConfig:
    return WgmmaConfig(token_width(num_tokens), *cut)


def widths_of(cut: Cut) -> tuple[int, int]:
    """Each cut has two of the four numbers of tokens that kernels around the residual stream are made for."""
    return (16, 48) if CUTS.index(cut) % 2 else (32, 64)


def tokens_of(cut: Cut) -> list[int]:
    return [num_tokens for num_tokens in TOKENS if token_width(num_tokens) in widths_of(cut)]


def rule(num_tokens: int, N: int, K: int, *, gated: bool = False) -> WgmmaConfig:
    config = choose_config(num_tokens, N, K, gated=gated)
    assert config is not None
    return config


def variants() -> Iterator[Defines]:
    """What most of the tests here ask for."""
    for cut, num_tokens in itertools.product(CUTS, TOKENS):
        yield defines_of(cut_of(cut, num_tokens))
    for config in (cut_of(cut, width) for cut in CUTS for width in widths_of(cut)):
        yield defines_of(config, adds=True)
        yield defines_of(config, parts=True, bias=True)
        yield defines_of(config, parts=True, activation="silu")
    for num_tokens in TOKENS + MORE_TOKENS:
        for N, K in PLAIN_SHAPES:
            yield defines_of(rule(num_tokens, N, K), bias=True)
        for activation, shapes in GATED.items():
            for N, K in shapes:
                yield defines_of(rule(num_tokens, N, K, gated=True), activation=activation)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """One after the other, as the tests come to them, they would take minutes."""
    if torch.cuda.is_available() and is_for(gpu_of(torch.device("cuda"))):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(partial(cubin, linear_wgmma.SOURCE, "sm_90a"), set(variants())))


@pytest.fixture(autouse=True)
def seed() -> None:
    if torch.cuda.is_available() and not is_for(gpu_of(torch.device("cuda"))):
        pytest.skip("needs the matrix unit of Hopper")
    torch.manual_seed(0)


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, device="cuda").bfloat16()


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_each_product_finds_its_place(cut: Cut) -> None:
    """Small integers: exact in any order. Nothing is written behind the last row."""
    for N, K in SHAPES:
        w = integers(N, K)
        for num_tokens in TOKENS:
            x = integers(num_tokens, K + 56)[:, :K]
            y = torch.full((num_tokens + 4, N), torch.nan, dtype=x.dtype, device="cuda")
            launch(cut_of(cut, num_tokens), x, w, out=y[:num_tokens])
            expected = F.linear(x.double(), w.double()).bfloat16()
            assert torch.equal(y[:num_tokens], expected), (N, K, num_tokens)
            assert y[num_tokens:].isnan().all(), (N, K, num_tokens)


@pytest.mark.parametrize(("N", "K"), PLAIN_SHAPES)
def test_linear_as_the_rule_cuts_it(N: int, K: int) -> None:
    w, bias = random(N, K, scale=0.02), random(N)
    for num_tokens in TOKENS + MORE_TOKENS:
        x = random(num_tokens, 2 * K)[:, :K]
        expected = F.linear(x.double(), w.double(), bias.double())
        assert_near(launch(rule(num_tokens, N, K), x, w, bias_N=bias), expected)


@pytest.mark.parametrize("activation", GATED)
def test_gated_linear(activation: str) -> None:
    for N, K in GATED[activation]:
        w = random(2 * N, K, scale=0.02)
        for num_tokens in TOKENS + MORE_TOKENS:
            x = random(num_tokens, K)
            expected = gate(F.linear(x.double(), w.double()), activation)
            assert_near(launch(rule(num_tokens, N, K, gated=True), x, w, activation=activation), expected)


def test_float16() -> None:
    """The kernel knows the type, although no model is prepared for it."""
    x, w = random(33, 1024).half(), random(1000, 1024, scale=0.02).half()
    assert_near(launch(WgmmaConfig(48, 64, 4, split=2), x, w), F.linear(x.double(), w.double()))


def check_added(added: ResidualSum, total: torch.Tensor, gain: torch.Tensor, offset: float) -> torch.Tensor:
    """The sum, what it is scaled to, its squares; and what the norm makes of it."""
    assert_near(added.sum_MN, total)
    scaled = added.sum_MN.float() * (gain.float() + offset)
    assert torch.equal(added.scaled_MN, scaled.bfloat16())
    squares = added.sum_MN.double().square().sum(1)
    assert torch.allclose(added.squares_PM.sum(0), squares, rtol=1e-6)
    return F.rms_norm(added.sum_MN.double(), (len(gain),), gain.double() + offset, EPS)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_pair_around_the_residual_stream(cut: Cut) -> None:
    """Widths that no tile divides, a residual whose rows lie apart, a reader that is cut in the same way."""
    K, D, N = 2048, 1032, 1000
    first, second, gain, bias = (
        random(D, K, scale=0.02),
        random(2 * N, D, scale=0.02),
        random(D),
        random(2 * N),
    )
    for num_tokens in tokens_of(cut):
        config, x = cut_of(cut, num_tokens), random(num_tokens, K)
        residual = random(num_tokens, 2 * D)[:, :D]
        added = launch_add(config, ResidualInput(residual, gain, 1.0), x, first)
        normed = check_added(added, x.double() @ first.double().T + residual.double(), gain, 1.0)
        expected = normed @ second.double().T
        assert_near(launch_of_sum(config, added, second, eps=EPS, bias_N=bias), expected + bias.double())
        assert_near(launch_of_sum(config, added, second, eps=EPS, activation="silu"), gate(expected, "silu"))


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_of_a_model_that_was_prepared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut as the rule says, through the functions that layers call; nothing is compiled any more."""
    D, qkv, o, F_out = MODELS[name]
    matrices = [
        Matrix(qkv, D, bias=True, reads=True),
        Matrix(D, o, writes=True),
        Matrix(F_out, D, "silu", reads=True),
        Matrix(D, F_out, writes=True),
    ]
    compiled = CompiledLinears(torch.device("cuda"))
    assert compiled.wgmma.load(matrices, compiled.device)
    assert compiled.wgmma_more.load(matrices[1:], compiled.device)
    monkeypatch.setattr(build, "make_cubin", None)
    weights = [random(m.N * (2 if m.activation else 1), m.K, scale=0.02) for m in matrices]
    qkv_w, o_w, gate_up_w, down_w = weights
    bias, gain = random(qkv), random(D)
    for num_tokens in TOKENS + MORE_TOKENS:
        x, residual = random(num_tokens, o), random(num_tokens, D)
        ours = weights if num_tokens in TOKENS else weights[1:]
        assert all(
            isinstance(linear_small._plan(x, w, gated=w is gate_up_w, compiled=compiled), WgmmaConfig)
            for w in ours
        )
        assert linear_small.can_add(x, o_w, gate_up_w, gated=True, compiled=compiled)
        added = linear_small.linear_add(ResidualInput(residual, gain, 0.0), x, o_w, compiled=compiled)
        normed = check_added(added, x.double() @ o_w.double().T + residual.double(), gain, 0.0)
        gated = linear_small.linear_of_sum(added, EPS, gate_up_w, activation="silu", compiled=compiled)
        assert_near(gated, gate(normed @ gate_up_w.double().T, "silu"))
        assert linear_small.can_add(gated, down_w, qkv_w, gated=False, compiled=compiled) == (
            num_tokens in TOKENS
        )
        if num_tokens in MORE_TOKENS:  # the library reads it next
            assert_near(
                linear_small.linear(gated, down_w, compiled=compiled), gated.double() @ down_w.double().T
            )
            continue
        last = linear_small.linear_add(
            ResidualInput(added.sum_MN, gain, 0.0), gated, down_w, compiled=compiled
        )
        normed = check_added(last, gated.double() @ down_w.double().T + added.sum_MN.double(), gain, 0.0)
        y = linear_small.linear_of_sum(last, EPS, qkv_w, bias, compiled=compiled)
        assert_near(y, normed @ qkv_w.double().T + bias.double())


def test_each_kernel_reads_what_another_added() -> None:
    K, D, N = 2048, 1024, 4096
    first, second, gain = random(D, K, scale=0.02), random(N, D, scale=0.02), random(D)
    for num_tokens in (9, 16, 31):
        width, ahead = token_width(num_tokens), PdlConfig(2, 8, depth=2)
        assert can_launch(ahead, num_tokens, D, K, gated=False, adds=True)
        plans: list[TilePlan] = [ahead, SkinnyConfig(64, 128, 2, 4, 3)]
        plans += [WgmmaConfig(width, 64, 4, split=4), WgmmaConfig(width, 128, 4)]
        x, residual = random(num_tokens, K), random(num_tokens, D)
        total = x.double() @ first.double().T + residual.double()
        for writer in plans:
            added = launch_add(writer, ResidualInput(residual, gain, 0.0), x, first)
            normed = check_added(added, total, gain, 0.0)
            for reader in plans:
                assert_near(launch_of_sum(reader, added, second, eps=EPS), normed @ second.double().T)


def make_step(
    D: int, K: int, F_out: int, num_tokens: int
) -> tuple[torch.Tensor, partial[tuple[torch.Tensor, ...]]]:
    """Layers without attention, cut as the rule says: each kernel reads what the one before has written."""
    layers = [
        (random(D, K, scale=0.02), random(2 * F_out, D, scale=0.02), random(D, F_out, scale=0.02),
         random(4 * D, D, scale=0.02), random(D)) for _ in range(6)
    ]  # fmt: skip

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        residual, y = torch.zeros_like(x), x.repeat(1, 4)
        for o, gate_up, down, qkv, gain in layers:
            added = launch_add(rule(num_tokens, D, K), ResidualInput(residual, gain, 0.0), y[:, :K], o)
            config = rule(num_tokens, F_out, D, gated=True)
            gated = launch_of_sum(config, added, gate_up, eps=EPS, activation="silu")
            added = launch_add(
                rule(num_tokens, D, F_out), ResidualInput(added.sum_MN, gain, 0.0), gated, down
            )
            y, residual = launch_of_sum(rule(num_tokens, 4 * D, D), added, qkv, eps=EPS), added.sum_MN
        return y, added.sum_MN

    x = random(num_tokens, D)
    return x, partial(step, x)


@pytest.mark.parametrize(
    ("sizes", "num_tokens"),
    [(STEPS[place % 2], num_tokens) for place, num_tokens in enumerate([2, 9, 16, 33, 64, 80, 128])],
)
def test_a_step_that_starts_early_waits_for_its_input(
    sizes: tuple[int, int, int], num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, step = make_step(*sizes, num_tokens)
    check_that_starting_early_leaves_no_trace(step, x, monkeypatch, num_replays=40)


@pytest.mark.parametrize("num_tokens", [17, 48])
def test_a_graph_replays_on_numbers_that_came_later(num_tokens: int) -> None:
    x, step = make_step(1024, 2048, 3072, num_tokens)
    graph, outputs = capture(step)
    for _ in range(20):
        x.copy_(random(*x.shape))
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(outputs, step(), strict=True))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_same_input_gives_the_same_bits_again(cut: Cut) -> None:
    first, second, gain = random(1024, 2048, scale=0.02), random(4096, 1024, scale=0.02), random(1024)
    for num_tokens in widths_of(cut):
        config, x, residual = cut_of(cut, num_tokens), random(num_tokens, 2048), random(num_tokens, 1024)
        added = launch_add(config, ResidualInput(residual, gain, 0.0), x, first)
        y = launch_of_sum(config, added, second, eps=EPS, activation="silu")
        for _ in range(100):
            again = launch_add(config, ResidualInput(residual, gain, 0.0), x, first)
            assert all(torch.equal(*pair) for pair in zip(added, again, strict=True))
            assert torch.equal(launch_of_sum(config, again, second, eps=EPS, activation="silu"), y)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_row_has_the_same_bits_whatever_stands_beside_it(cut: Cut) -> None:
    w, gain, x, residual = random(1024, 2048, scale=0.02), random(1024), random(64, 2048), random(64, 1024)
    for width in widths_of(cut):
        config = cut_of(cut, width)
        whole = launch_add(config, ResidualInput(residual[:width], gain, 0.0), x[:width], w)
        for size in (1, width - 15, width - 8, width - 1):
            part = launch_add(config, ResidualInput(residual[:size], gain, 0.0), x[:size], w)
            assert torch.equal(part.sum_MN, whole.sum_MN[:size])
            assert torch.equal(part.squares_PM, whole.squares_PM[:, :size])
