"""Products with coded weights on a real GPU: every form, cut and epilogue against the numbers in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from infer.config.profiles.hopper_h200 import H200
from infer.kernels.linear import pdl
from infer.kernels.linear.coded import TABLED, CodedForm, CodedWeights
from infer.kernels.linear.coded_linear import coded_linear, plan_of
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.cuda import Matrix, is_for
from infer.kernels.linear.pdl import PdlConfig
from infer.kernels.linear.residual import ResidualInput
from infer.kernels.linear.small import launch, launch_add, launch_of_sum
from infer.kernels.linear.wgmma import WgmmaConfig, choose_coded, coded_width, has_fp8_tokens, max_coded
from infer.kernels.runtime.profiles import gpu_of
from tests.gpu.graphs import capture, check_that_starting_early_leaves_no_trace, random
from tests.kernels.coded_contract import CodedContract, check_products
from tests.kernels.linear_contract import gate
from tests.unit.kernels.test_linear_coded import FORMS, Filled

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]

EPS = 1e-6
TOKENS = [1, 3, 9, 17, 33, 64, 97, 128, 300]  # a form has every third of them, the next form the next ones
CUTS = [(64, 2, 1, 1), (128, 4, 2, 1), (192, 3, 1, 1), (64, 3, 4, 2)]  # rows, stages, split, blocks
D, K, F_OUT = 768, 1280, 992  # no tile of 192 or 128 rows divides all of them; gates have whole bands


def form_of(name: str) -> CodedForm:
    return CodedWeights.empty(64, 4096, **FORMS[name], device="meta").form


def cuts_of(name: str) -> Iterator[tuple[int, WgmmaConfig | PdlConfig]]:
    """Numbers of tokens, each with another cut; the next form has them the other way round."""
    form, place = form_of(name), list(FORMS).index(name)
    if not form.has_minima and form.codes not in TABLED:
        yield 5, PdlConfig(1 + place % 2, (1, 4, 8)[place % 3], 1 + place % 4, form)
        yield (1, PdlConfig(1, 8, 2, form, by_words=True)) if place % 2 else (13, PdlConfig(1, 8, 1, form))
    yield 40, WgmmaConfig(48, 64, 4, 1, 1, form, 128, teams=3)
    for number, num_tokens in enumerate(TOKENS):
        if (number + place) % 3:
            continue
        cut = CUTS[(number + place) % len(CUTS)]
        if num_tokens > 64:
            cut, rounds = (cut[0], 3, cut[2], 1), form.group > 0
            width = 96 if num_tokens == 97 else 128
            yield num_tokens, WgmmaConfig(width, *cut, form, 128, rounds=rounds, many=width < num_tokens)
            continue
        columns = 256 if number % 2 and form.scale_rows == 1 else 128
        if columns == 256:
            cut = (cut[0], 2, *cut[2:])
        by_warps = num_tokens <= 32 and number % 3 != 1
        teams = 2 if cut[1] > 2 and cut[0] < 192 else 1
        width = coded_width(num_tokens)
        yield num_tokens, WgmmaConfig(width, *cut, form, columns, by_warps, teams=teams)


@pytest.fixture(scope="module", autouse=True)
def ready() -> None:
    torch.manual_seed(0)
    if not is_for(gpu_of(torch.device("cuda"))):
        pytest.skip("not a Hopper")


class TestTritonOnAGpu(CodedContract):
    device = "cuda"
    sizes = [(100, 576), (33, 40)]  # each is compiled once more
    tokens = [1, 64, 129]


def assert_close(y: torch.Tensor, expected: torch.Tensor, size: torch.Tensor, loss: float) -> None:
    """`size`: the sum of the magnitudes of what was added, of which `loss` may be lost."""
    error = (y.double() - expected).abs()
    bound = 2**-8 * expected.abs() + loss * size + 1e-6
    assert (error <= bound).all(), f"{(error / bound).max().item():.2f} times the bound"


@pytest.mark.parametrize("name", FORMS)
def test_a_pair_around_the_residual_stream(name: str) -> None:
    first, second = Filled(name, D, K, "cuda"), Filled(name, 2 * F_OUT, D, "cuda")
    exact = [filled.numbers.cuda() for filled in (first, second)]
    gain, bias = random(D), random(D)
    for num_tokens, config in cuts_of(name):
        x = random(num_tokens, 2 * K, scale=0.1)[:, :K]
        rounds = isinstance(config, WgmmaConfig) and config.rounds  # of two as near either may be taken
        w1, w2 = (numbers.bfloat16().double() if rounds else numbers.double() for numbers in exact)
        loss = 2**-14 if rounds else 2**-16
        product, size = x.double() @ w1.T, x.double().abs() @ w1.abs().T
        assert_close(launch(config, x, first.weights, bias_N=bias), product + bias.double(), size, loss)
        residual = random(num_tokens, D)
        added = launch_add(config, ResidualInput(residual, gain, 1.0), x, first.weights)
        assert_close(added.sum_MN, product + residual.double(), size, loss)
        normed = F.rms_norm(added.sum_MN.double(), (D,), gain.double() + 1.0, EPS)
        expected = gate(normed @ w2.T, "silu")
        gated = launch_of_sum(config, added, second.weights, eps=EPS, activation="silu")
        assert (gated.double() - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("name", FORMS)
def test_what_a_model_prepares(name: str) -> None:
    """Through the functions that projections call, cut as the rule says; many tokens go to the libraries.

    Of the numbers of tokens some are compiled for: one for each kind of cut.
    """
    filled = Filled(name, 2048, 1024, "cuda")
    form = filled.weights.form
    compiled = CompiledLinears(torch.device("cuda"))
    compiled.want(Matrix(2048, 1024, form=form))
    compiled.want(Matrix(1024, 1024, "silu", form=form))
    compiled.coded.tokens = range(33, 1000, 100)
    compiled.load()
    numbers, most = filled.numbers.cuda(), max_coded(1024, form)
    for num_tokens in (1, 33, 133, 233, 333, 633, 1033):
        x = random(num_tokens, 1024, scale=0.1)
        plan = plan_of(x, filled.weights, gated=False, compiled=compiled)
        if num_tokens > 1 or not (
            form.has_minima or form.codes in TABLED
        ):  # one of those is not compiled here
            assert (plan is not None) == (num_tokens <= most)
        y = coded_linear(x, filled.weights, compiled=compiled).float()
        rounds = num_tokens > most or has_fp8_tokens(num_tokens, 1024, form)  # tokens, too
        bound = 2**-4 if form.codes == "fp8" and rounds else 2**-7
        expected = F.linear(x.float(), numbers)
        assert ((y - expected).abs() <= bound * F.linear(x.float().abs(), numbers.abs())).all()
        gated = coded_linear(x, filled.weights, activation="silu", compiled=compiled).float()
        expected = gate(expected.double(), "silu").float()
        assert (gated - expected).abs().max() <= 0.05 * expected.abs().max()
    check_products(filled, random(150, 1024, scale=0.1), random(2048), tolerance=2**-4)


def as_fp8(x: torch.Tensor) -> torch.Tensor:
    """Rows rounded to FP8 with a scale for each."""
    scales = x.float().abs().amax(1, keepdim=True) / 448
    return ((x.float() / scales).to(torch.float8_e4m3fn).float() * scales).double()


@pytest.mark.parametrize(("num_tokens", "cut"), [(129, (128, 4, 2)), (300, (192, 3, 1)), (1000, (64, 8, 4))])
def test_many_tokens_of_fp8_are_rounded(num_tokens: int, cut: tuple[int, int, int]) -> None:
    """Codes are multiplied with codes: the product of what is rounded, with every prologue and epilogue.

    The matrix unit adds products of FP8 with 14 bits or so, hence the larger loss.
    """
    first, second = Filled("fp8", D, K, "cuda"), Filled("fp8", 2 * F_OUT, D, "cuda")
    w1, w2 = (filled.numbers.cuda().double() for filled in (first, second))
    config = WgmmaConfig(128, *cut, 1, form_of("fp8"), 128, many=True, fp8_tokens=True)
    gain, bias, x = random(D), random(D), random(num_tokens, 2 * K, scale=0.1)[:, :K]
    rounded, loss = as_fp8(x), 2**-11
    product, size = rounded @ w1.T, rounded.abs() @ w1.abs().T
    assert_close(launch(config, x, first.weights, bias_N=bias), product + bias.double(), size, loss)
    residual = random(num_tokens, D)
    added = launch_add(config, ResidualInput(residual, gain, 1.0), x, first.weights)
    assert_close(added.sum_MN, product + residual.double(), size, loss)
    inverse = (added.sum_MN.double().square().mean(1, keepdim=True) + EPS).rsqrt()
    expected = gate(as_fp8(added.scaled_MN) * inverse @ w2.T, "silu")
    gated = launch_of_sum(config, added, second.weights, eps=EPS, activation="silu")
    assert (gated.double() - expected).norm() < 0.01 * expected.norm()
    x[1, 7] = torch.nan
    y = launch(config, x, first.weights)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


@pytest.mark.parametrize("num_tokens", [65, 600, 4097])
def test_many_tokens_of_w8a8_are_rounded(num_tokens: int) -> None:
    """On the matrix units for int8: exactly the product of what is rounded; without the scheme it is not."""
    filled = Filled("int8", 2048, 1024, "cuda")
    x = random(num_tokens, 1024, scale=0.1)
    scales = x.float().abs().amax(1, keepdim=True) / 127
    expected = F.linear((x.float() / scales).round() * scales, filled.numbers.cuda())
    y = coded_linear(x, filled.weights, int8_tokens=True).float()
    assert (y - expected).abs().max() < 2**-7 * expected.abs().max()
    plain = coded_linear(x, filled.weights).float()
    assert (y - expected).norm() < 0.5 * (plain - expected).norm()
    gated = coded_linear(x, filled.weights, activation="silu", int8_tokens=True).float()
    expected = gate(expected.double(), "silu").float()
    assert (gated - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.parametrize("name", FORMS)
def test_rows_that_are_no_whole_boxes_have_another_kernel(name: str) -> None:
    filled = Filled(name, 288, 288, "cuda")
    compiled = CompiledLinears(torch.device("cuda"))
    compiled.want(Matrix(288, 288, form=filled.weights.form))
    compiled.load()
    for num_tokens in (1, 33, 150):
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

    def rule(N: int, K: int, *, gated: bool = False) -> WgmmaConfig | PdlConfig:
        is_few = num_tokens <= H200.linear.coded_pdl_tokens
        config = pdl.choose_config(num_tokens, N, K, gated=gated, form=form) if is_few else None
        chosen = config or choose_coded(num_tokens, N, K, form, gated=gated)
        assert chosen is not None
        return chosen

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


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        *[("fp8", 1), ("int4-128", 12), ("fp8-blocks", 16), ("fp8", 32), ("int4-128", 64)],
        *[("int8", 200), ("fp8", 200)],
    ],
)
def test_a_step_that_starts_early_waits_for_its_input(
    name: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, step = make_step(name, num_tokens)
    check_that_starting_early_leaves_no_trace(step, x, monkeypatch, num_replays=20)
    graph, outputs = capture(step)
    x.copy_(random(*x.shape))
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(outputs, step(), strict=True))
