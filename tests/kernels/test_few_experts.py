"""The experts of few tokens, emulated: choices, index maps, sums across warps, the ends of the stream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from infer.config.profiles.hopper_h200 import H200
from infer.kernels.elementwise.rms_norm import add_rms_norm_reference
from infer.kernels.linear import cuda as linear_cuda
from infer.kernels.linear.coded import CodedForm, CodedWeights
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.moe import coded_grouped
from infer.kernels.moe.coded_cuda import GroupedLinear, block_height
from infer.kernels.moe.coded_grouped import coded_expert_rows
from infer.kernels.moe.few import ExpertShape, FewExperts, cut_down, cut_gate_up
from infer.kernels.moe.grouped import experts_mlp_reference, route_reference
from infer.kernels.runtime import cuda_build
from infer.quant.rounding import round_rows
from tests.kernels.emulated_linear import EmulatedLaunch
from tests.kernels.kernel_contract import nan_in_fresh_memory
from tests.kernels.linear_contract import EPS, assert_near

SHAPES = {
    "2 of 8, normalized": ExpertShape(256, 128, 8, 2, True, "silu"),
    "8 of 70": ExpertShape(256, 64, 70, 8, False, "gelu_tanh"),
    "3 of 6, uneven shares": ExpertShape(320, 320, 6, 3, True, "silu"),
}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(linear_cuda, "load_variant", EmulatedLaunch)
    monkeypatch.setattr(cuda_build, "index_of", lambda device: 0)
    with nan_in_fresh_memory():
        yield


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).bfloat16()


def make(
    name: str, num_tokens: int
) -> tuple[FewExperts, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = SHAPES[name]
    few = FewExperts(shape, H200.linear)
    assert few.expect()
    gate_up = random(shape.num_experts, 2 * shape.size, shape.hidden_size, scale=0.1)
    down = random(shape.num_experts, shape.hidden_size, shape.size, scale=0.1)
    logits = random(num_tokens, shape.num_experts)
    logits[0, 1] = logits[0, 2] = 4.0  # of two equal ones the first comes first
    return few, random(num_tokens, shape.hidden_size), logits, gate_up, down


def expected_of(
    few: FewExperts, x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    shape = few.shape
    experts, weights = route_reference(logits, shape.num_choices, shape.normalized)
    as_double = (x.double(), experts, weights, gate_up.double(), down.double())
    return experts_mlp_reference(*as_double, shape.activation)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_every_token_goes_through_its_experts(name: str, num_tokens: int) -> None:
    few, x, logits, gate_up, down = make(name, num_tokens)
    assert few.is_for(num_tokens) and not few.is_for(9)
    y = few.down(few.gated(x, 0.0, logits, gate_up), logits, down)
    assert isinstance(y, torch.Tensor)
    assert_near(y, expected_of(few, x, logits, gate_up, down))


@pytest.mark.parametrize("name", SHAPES)
def test_both_ends_of_the_residual_stream(name: str) -> None:
    """Gate and up finish the norm of a sum, and down adds to the stream and begins the next norm."""
    few, update, logits, gate_up, down = make(name, 3)
    size = few.shape.hidden_size
    residual, gain, next_gain = random(3, size), random(size), random(size)
    normed, total = add_rms_norm_reference(update.double(), residual.double(), gain.double(), EPS, 0.0)
    scaled = (total.bfloat16().float() * gain.float()).bfloat16()
    squares = total.bfloat16().double().square().view(3, 2, -1).sum(dim=2).T.contiguous()
    begun = ResidualSum(total.bfloat16(), scaled, squares)

    gated = few.gated(begun, EPS, logits, gate_up)
    found = few.down(gated, logits, down, ResidualInput(total.bfloat16(), next_gain, 1.0))
    assert isinstance(found, ResidualSum)
    after = total + expected_of(few, normed, logits, gate_up, down)
    assert_near(found.sum_MN, after)
    assert_near(found.scaled_MN, found.sum_MN.double() * (next_gain.double() + 1.0))
    assert found.squares_PM.shape == (few.num_parts(3), 3)
    torch.testing.assert_close(found.squares_PM.sum(dim=0), found.sum_MN.double().square().sum(dim=1))


@pytest.mark.parametrize("form", [CodedForm("fp8"), CodedForm("int4", 64), CodedForm("fp8", 128, False, 128)])
def test_coded_experts(form: CodedForm) -> None:
    stacks = [coded_stack(8, rows, size, form) for rows, size in ((256, 256), (256, 128))]
    shape = ExpertShape(256, 128, 8, 2, True, "silu", *(codes.form for codes, _ in stacks))
    few = FewExperts(shape, H200.linear)
    assert few.expect()
    x, logits = random(2, 256), random(2, 8)
    y = few.down(few.gated(x, 0.0, logits, stacks[0][0]), logits, stacks[1][0])
    assert isinstance(y, torch.Tensor)
    assert_near(y, expected_of(few, x, logits, stacks[0][1], stacks[1][1]))


@pytest.mark.parametrize("num_tokens", [2, 9, 20])
@pytest.mark.parametrize("form", [CodedForm("fp8"), CodedForm("int4", 64), CodedForm("int8")])
def test_coded_rows_in_order(form: CodedForm, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every height of blocks, with padding, with an expert that no token chose."""
    stacks = [coded_stack(6, rows, size, form) for rows, size in ((256, 256), (256, 128))]
    both = tuple(
        GroupedLinear(codes.form, 128 if act else 256, codes.size, act)
        for (codes, _), act in zip(stacks, ("silu", ""), strict=True)
    )
    assert all(kernel.expect() for kernel in both)
    x, logits = random(num_tokens, 256), random(num_tokens, 6)
    logits[:, 4] = -9.0
    experts, weights = route_reference(logits, 2, True)
    monkeypatch.setattr(coded_grouped, "order_rows", order_rows_reference)
    rows = coded_expert_rows(
        x, experts, weights, stacks[0][0], stacks[1][0], activation="silu", compiled=(both[0], both[1])
    )
    expected = (x.double(), experts, weights, stacks[0][1].double(), stacks[1][1].double())
    assert_near(rows.float().sum(1).bfloat16(), experts_mlp_reference(*expected, "silu"))
    assert block_height(num_tokens * 2, 6) == {2: 8, 9: 8, 20: 16}[num_tokens]


def order_rows_reference(
    experts_TC: torch.Tensor, num_experts: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels of grouped.py make, with a block that no expert needs."""
    flat, order, owners = experts_TC.flatten(), [], []
    for expert in range(num_experts):
        rows = (flat == expert).nonzero().flatten().tolist()
        rows += [flat.numel()] * (-len(rows) % block)
        order += rows
        owners += [expert] * (len(rows) // block)
    order += [flat.numel()] * block
    return torch.tensor(order, dtype=torch.int32), torch.tensor([*owners, -1], dtype=torch.int32)


def coded_stack(count: int, rows: int, size: int, form: CodedForm) -> tuple[CodedWeights, torch.Tensor]:
    """Random matrices of all experts as codes, and the numbers that they stand for."""
    made = []
    for _ in range(count):
        one = CodedWeights.empty(rows, size, *form, device="cpu")
        one.fill(0, *round_rows(torch.randn(rows, size) * 0.1, form))
        made.append(one)
    names = made[0].tensors()
    stack = made[0].with_tensors({name: torch.stack([one.tensors()[name] for one in made]) for name in names})
    return stack, torch.stack([one.dequantized() for one in made])


def test_shapes_that_have_no_cut() -> None:
    """More choices than a block has warps, columns that are not whole chunks, an odd number of experts."""
    assert cut_down(ExpertShape(256, 64, 32, 16, True, "silu"), 1) is not None
    assert cut_down(ExpertShape(256, 64, 32, 17, True, "silu"), 1) is None
    assert cut_down(ExpertShape(256, 96, 8, 2, True, "silu"), 1) is None
    assert cut_gate_up(ExpertShape(256, 128, 7, 2, True, "silu")) is None
    for shape in SHAPES.values():
        few = FewExperts(shape._replace(num_experts=7), H200.linear)
        assert not few.expect() and not few.is_for(1)


def test_codes_that_the_kernels_cannot_read_are_left_to_triton() -> None:
    form = CodedForm("mxfp4", 32)
    shape = ExpertShape(2048, 768, 128, 8, True, "silu", form, form)
    assert FewExperts(shape, H200.linear).expect() == []
    assert GroupedLinear(form, 768, 2048, "silu").expect() == []
