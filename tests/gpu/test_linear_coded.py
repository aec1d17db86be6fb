"""Products with coded weights on a real GPU: every form, cut and epilogue against the numbers in float64."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from infer.kernels.linear import wgmma
from infer.kernels.linear.coded import CodedForm, CodedWeights
from infer.kernels.linear.coded_linear import coded_linear, plan_of
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.cuda import Defines, Matrix, cubin, is_for
from infer.kernels.linear.residual import ResidualInput
from infer.kernels.linear.small import launch, launch_add, launch_of_sum
from infer.kernels.linear.wgmma import WgmmaConfig, choose_coded, coded_width, defines_of
from tests.gpu.graphs import capture, check_that_starting_early_leaves_no_trace, random
from tests.unit.kernels.coded_contract import CodedContract, check_products
from tests.unit.kernels.linear_contract import gate
from tests.unit.kernels.test_linear_coded import FORMS, Filled

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]

EPS = 1e-6
TOKENS = [1, 3, 9, 17, 33, 64, 97, 128]
CUTS = [(64, 2, 1, 1), (128, 4, 2, 1), (192, 3, 1, 1), (64, 3, 4, 2)]  # rows, stages, split, blocks
D, K, F_OUT = 768, 1280, 992  # no tile of 192 or 128 rows divides all of them; gates have whole bands


def form_of(name: str) -> CodedForm:
    return CodedWeights.empty(64, 4096, **FORMS[name], device="meta").form


def cuts_of(name: str) -> Iterator[tuple[int, WgmmaConfig]]:
    """Numbers of tokens, each with another cut; the next form has them the other way round."""
    form = form_of(name)
    for number, num_tokens in enumerate(TOKENS):
        cut = CUTS[(number + list(FORMS).index(name)) % len(CUTS)]
        if num_tokens > 64:
            cut = (64, *cut[1:])
        columns = 256 if number % 2 and form.scale_rows == 1 else 128
        if columns == 256:
            cut = (cut[0], 2, *cut[2:])
        by_warps = num_tokens <= 32 and number % 3 != 1
        if num_tokens <= 64 or not form.has_minima:
            yield num_tokens, WgmmaConfig(coded_width(num_tokens), *cut, form, columns, by_warps)


def variants() -> Iterator[Defines]:
    for name in FORMS:
        for _, config in cuts_of(name):
            yield defines_of(config, bias=True)
            yield defines_of(config, adds=True)
            yield defines_of(config, parts=True)
            yield defines_of(config, parts=True, activation="silu")


@pytest.fixture(scope="module", autouse=True)
def ready() -> None:
    torch.manual_seed(0)
    if not is_for(torch.device("cuda")):
        pytest.skip("not a Hopper")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(partial(cubin, wgmma.SOURCE, "sm_90a"), dict.fromkeys(variants())))


class TestTritonOnAGpu(CodedContract):
    device = "cuda"
    sizes = [(100, 576), (33, 40), (1000, 1088)]
    tokens = [1, 17, 64, 129]


def assert_close(y: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """`size`: the sum of the magnitudes of what was added."""
    error = (y.double() - expected).abs()
    bound = 2**-8 * expected.abs() + 2**-16 * size + 1e-6
    assert (error <= bound).all(), f"{(error / bound).max().item():.2f} times the bound"


@pytest.mark.parametrize("name", FORMS)
def test_a_pair_around_the_residual_stream(name: str) -> None:
    first, second = Filled(name, D, K, "cuda"), Filled(name, 2 * F_OUT, D, "cuda")
    w1, w2 = (filled.numbers.cuda().double() for filled in (first, second))
    gain, bias = random(D), random(D)
    for num_tokens, config in cuts_of(name):
        x = random(num_tokens, 2 * K, scale=0.1)[:, :K]
        product, size = x.double() @ w1.T, x.double().abs() @ w1.abs().T
        assert_close(launch(config, x, first.weights, bias_N=bias), product + bias.double(), size)
        residual = random(num_tokens, D)
        added = launch_add(config, ResidualInput(residual, gain, 1.0), x, first.weights)
        assert_close(added.sum_MN, product + residual.double(), size)
        normed = F.rms_norm(added.sum_MN.double(), (D,), gain.double() + 1.0, EPS)
        expected, size = normed @ w2.T, 2**9 * normed.abs() @ w2.abs().T  # r * gain is rounded
        assert_close(launch_of_sum(config, added, second.weights, eps=EPS), expected, size)
        gated = launch_of_sum(config, added, second.weights, eps=EPS, activation="silu")
        scale = gate(expected, "silu").abs().max()
        assert (gated.double() - gate(expected, "silu")).abs().max() < 0.02 * scale


@pytest.mark.parametrize("name", FORMS)
def test_what_a_model_prepares(name: str) -> None:
    """Through the functions that projections call, cut as the rule says; many tokens go to the libraries."""
    filled = Filled(name, 2048, 1024, "cuda")
    form = filled.weights.form
    compiled = CompiledLinears(torch.device("cuda"))
    compiled.want(Matrix(2048, 1024, form=form))
    compiled.want(Matrix(1024, 1024, "silu", form=form))
    compiled.load()
    numbers = filled.numbers.cuda()
    for num_tokens in (1, 9, 33, 100, 129, 200):
        x = random(num_tokens, 1024, scale=0.1)
        plan = plan_of(x, filled.weights, gated=False, compiled=compiled)
        assert (plan is not None) == (num_tokens <= (64 if form.has_minima else 128))
        y = coded_linear(x, filled.weights, compiled=compiled).float()
        bound = 2**-4 if form.codes == "fp8" and num_tokens > 128 else 2**-7
        expected = F.linear(x.float(), numbers)
        assert ((y - expected).abs() <= bound * F.linear(x.float().abs(), numbers.abs())).all()
        gated = coded_linear(x, filled.weights, activation="silu", compiled=compiled).float()
        expected = gate(expected.double(), "silu").float()
        assert (gated - expected).abs().max() <= 0.05 * expected.abs().max()
    check_products(filled, random(150, 1024, scale=0.1), random(2048), tolerance=2**-4)


@pytest.mark.parametrize("name", FORMS)
def test_rows_that_are_no_whole_boxes_have_another_kernel(name: str) -> None:
    filled = Filled(name, 288, 288, "cuda")
    compiled = CompiledLinears(torch.device("cuda"))
    compiled.want(Matrix(288, 288, form=filled.weights.form))
    compiled.load()
    for num_tokens in (1, 9, 33, 100, 150):
        x = random(num_tokens, 288, scale=0.1)
        assert plan_of(x, filled.weights, gated=False, compiled=compiled) is None
        y = coded_linear(x, filled.weights, compiled=compiled).float()
        numbers = filled.numbers.cuda()
        bound = 2**-4 if filled.weights.form.codes == "fp8" and num_tokens > 64 else 2**-7
        size = F.linear(x.float().abs(), numbers.abs())
        assert ((y - F.linear(x.float(), numbers)).abs() <= bound * size).all()


def make_step(name: str, num_tokens: int) -> tuple[torch.Tensor, partial[tuple[torch.Tensor, ...]]]:
    form = form_of(name)
    sizes = ((512, 1024), (2048, 512), (512, 1024), (1024, 512))
    layers = [[Filled(name, *size, "cuda", pieces=1).weights for size in sizes] for _ in range(4)]
    gains = [random(512) for _ in layers]

    def rule(N: int, K: int, *, gated: bool = False) -> WgmmaConfig:
        config = choose_coded(num_tokens, N, K, form, gated=gated)
        assert config is not None
        return config

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        residual, y = torch.zeros_like(x[:, :512]), x
        for (o, gate_up, down, qkv), gain in zip(layers, gains, strict=True):
            added = launch_add(rule(512, 1024), ResidualInput(residual, gain, 0.0), y, o)
            gated = launch_of_sum(rule(1024, 512, gated=True), added, gate_up, eps=EPS, activation="silu")
            added = launch_add(rule(512, 1024), ResidualInput(added.sum_MN, gain, 0.0), gated, down)
            y, residual = launch_of_sum(rule(1024, 512), added, qkv, eps=EPS), added.sum_MN
        return y, added.sum_MN

    x = random(num_tokens, 1024)
    return x, partial(step, x)


@pytest.mark.parametrize("num_tokens", [1, 16, 64])
@pytest.mark.parametrize("name", ["fp8", "int4-128", "fp8-blocks"])
def test_a_step_that_starts_early_waits_for_its_input(
    name: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, step = make_step(name, num_tokens)
    check_that_starting_early_leaves_no_trace(step, x, monkeypatch, num_replays=20)
    graph, outputs = capture(step)
    x.copy_(random(*x.shape))
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(outputs, step(), strict=True))
