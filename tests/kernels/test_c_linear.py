"""Packed weights times quantised activations, against the same written in PyTorch."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.cpu import operations
from infer.kernels.cpu.library import MXFP4, Library
from infer.kernels.linear.coded import E2M1
from infer.quant.memory import WeightMemory
from infer.quant.packed import PackedMatrix
from tests.kernels.c_builds import BUILDS, c_library

GROUP = operations.GROUP
SHAPES = [
    (1, 16, 32),
    (1, 100, 576),
    (3, 17, 45),
    (8, 48, 64),
    (15, 33, 100),
    (59, 17, 70),
    (70, 5, 7),
]  # M, N, K
LARGEST = {2: 127 * 128, 1: 127}  # integer of an activation, by its digits


@pytest.fixture(params=BUILDS)
def c(request: pytest.FixtureRequest) -> Library:
    return c_library(request.param)


def packed(c: Library, weight: torch.Tensor, bits: int, digits: int = 2) -> PackedMatrix:
    matrix = PackedMatrix(c, weight.shape[0], weight.shape[1], bits)
    matrix.digits = digits
    matrix.fill(weight, 0)
    return matrix


def quantized_groups(x: torch.Tensor, digits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of what happens to activations: integers [M, G, 32] and scales [M, G]."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    peak = padded.abs().amax(dim=2)
    largest = torch.tensor(
        LARGEST[digits]
    )  # a tensor: number / tensor is number * (1 / tensor), rounded twice
    inverse = torch.where(peak > 0, largest / peak, 0.0)
    integers = torch.round(padded.double() * inverse[:, :, None].double())  # rounded once, as the kernel does
    return integers, peak / largest


def product_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, digits: int
) -> torch.Tensor:
    """Compute x Wᵀ + b with the activations rounded as the kernel rounds them, in float64."""
    integers, scales = quantized_groups(x, digits)
    rounded = (integers * scales.double()[:, :, None]).flatten(1)[:, : x.shape[1]]
    y = rounded @ weight.double().T
    return (y if bias is None else y + bias.double()).float()


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_keeps_every_weight_within_half_a_step(c: Library, shape: tuple[int, int, int]) -> None:
    _, num_rows, size = shape
    weight = torch.randn(num_rows, size)
    kept = packed(c, weight, 8).dequantized()
    padded = torch.nn.functional.pad(weight, (0, -size % GROUP)).view(num_rows, -1, GROUP)
    peak = padded.abs().amax(dim=2, keepdim=True).expand_as(padded).flatten(1)[:, :size]
    assert ((kept - weight).abs() <= peak / 127 * 0.51 + 1e-6).all()


@pytest.mark.parametrize("offset", [0.0, 3.0, -40.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_group_in_int4_is_never_worse_than_sixteen_even_steps(
    c: Library, shape: tuple[int, int, int], offset: float
) -> None:
    """Steps from the least weight of a group to its largest are where the search for better ones begins."""
    _, num_rows, size = shape
    for weight in (torch.randn(num_rows, size) + offset, torch.randn(num_rows, size) ** 3):
        kept = packed(c, weight, 4).dequantized()
        for first in range(0, size, GROUP):
            group = weight[:, first : first + GROUP].contiguous()
            low, high = group.amin(1, keepdim=True).half().float(), group.amax(1, keepdim=True)
            step = ((high - group.amin(1, keepdim=True)) / 15).half().float()
            even = torch.round((group - low) / step.clamp_min(1e-9)).clamp(0, 15) * step + low
            error = (kept[:, first : first + GROUP] - group).square().sum(1)
            # a short group is repeated, and not every weight of it as often
            allowed = (even - group).square().sum(1) * (1.0001 if group.shape[1] == GROUP else 2.5)
            assert (error <= allowed + 1e-6).all()


def test_int4_loses_a_quarter_less_than_even_steps_around_zero(c: Library) -> None:
    """The squared error of normal weights, on average: 0.0050 here; -8 .. 7 times a scale had 0.0071."""
    weight = torch.randn(64, 1024)
    assert (packed(c, weight, 4).dequantized() - weight).square().mean() < 0.0053


@pytest.mark.parametrize("value", [0.0, 1.0, -0.375, 0.1, 300.0])
def test_a_constant_group_is_its_minimum(c: Library, value: float) -> None:
    kept = packed(c, torch.full((17, 45), value), 4).dequantized()
    assert torch.equal(kept, torch.full((17, 45), torch.tensor(value).half().item()))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("has_bias", "digits"), [(False, 2), (True, 2), (True, 1)])
def test_the_product_equals_the_reference(
    c: Library, shape: tuple[int, int, int], bits: int, has_bias: bool, digits: int
) -> None:
    num_rows, out, size = shape
    x, bias = torch.randn(num_rows, size), torch.randn(out) if has_bias else None
    matrix = packed(c, torch.randn(out, size), bits, digits)
    y = matrix.multiply(x, bias)
    expected = product_reference(x, matrix.dequantized(), bias, digits)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_activations_keep_what_lies_beside_a_loud_channel(c: Library, num_rows: int) -> None:
    """Against 127 steps for the group of the loud one, in which most of its neighbours would be lost."""
    x, matrix = torch.randn(num_rows, 96), packed(c, torch.randn(40, 96), 8)
    x[:, 33] = 100.0
    coarse = x.clone()
    coarse[:, 32:64] = torch.round(x[:, 32:64] * 1.27) / 1.27
    weight = matrix.dequantized().double()
    error = (matrix.multiply(x, None) - x.double() @ weight.T).norm()
    assert error < ((coarse - x).double() @ weight.T).norm() / 50


@pytest.mark.parametrize("digits", [2, 1])
@pytest.mark.parametrize("bits", [8, 6, 5, 4])
@pytest.mark.parametrize("num_rows", [1, 9, 16])
def test_the_largest_integers_do_not_overflow(c: Library, num_rows: int, bits: int, digits: int) -> None:
    """All weights at one end and all activations at the other: the integers' sum is as large as it gets."""
    if bits not in c.linear:
        pytest.skip("NEON keeps them in int8")
    largest = 127 if bits == 8 else 2**bits - 1
    matrix = PackedMatrix(c, 16, 64, bits)
    matrix.digits = digits
    ones, minima = torch.ones(16, 2).half(), {8: None, 6: torch.full((16, 2), 2.0).half()}
    kept = minima.get(bits, torch.zeros(16, 2).half())
    matrix.fill_integers(torch.full((16, 64), largest, dtype=torch.int8), ones, kept, 0)
    weight = 1.5 * (largest - 32) if bits == 6 else largest  # on average: second halves are twice as large
    for sign in (1.0, -1.0):
        y = matrix.multiply(torch.full((num_rows, 64), 127.0 * sign), None)
        assert torch.equal(y, torch.full((num_rows, 16), 64 * weight * 127.0 * sign))


@pytest.mark.parametrize("digits", [2, 1])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 37])
@pytest.mark.parametrize("bits", [6, 5])
def test_integers_of_5_and_6_bits_are_multiplied_as_they_are(
    c: Library, bits: int, num_rows: int, digits: int
) -> None:
    if bits not in c.linear:
        pytest.skip("NEON keeps them in int8")
    integers = torch.randint(0, 2**bits, (19, 96), dtype=torch.int8)
    scales, others = torch.randn(2, 19, 3).half()
    matrix = PackedMatrix(c, 19, 96, bits)
    matrix.digits = digits
    matrix.fill_integers(integers, scales.contiguous(), others.contiguous(), 0)
    numbers, by = integers.float(), scales.float().repeat_interleave(GROUP, 1)
    weight = numbers * by + others.float().repeat_interleave(GROUP, 1)
    if bits == 6:
        halves = torch.stack((scales, others), dim=2).flatten(1).float()
        weight = (numbers - 32) * halves.repeat_interleave(GROUP // 2, 1)
    assert torch.equal(matrix.dequantized(), weight)
    x, bias = torch.randn(num_rows, 96), torch.randn(19)
    expected = product_reference(x, weight, bias, digits)
    torch.testing.assert_close(matrix.multiply(x, bias), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("digits", [2, 1])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_does_not_depend_on_its_neighbours(c: Library, bits: int, digits: int) -> None:
    x = torch.randn(59, 70)  # two blocks of AMX, one, and rows without it
    matrix = packed(c, torch.randn(37, 70), bits, digits)
    together = matrix.multiply(x, None)
    alone = torch.cat([matrix.multiply(row[None], None) for row in x])
    assert torch.equal(together, alone)
    for num_rows in range(1, 16):  # eight of them, and each number that is left in one pass
        assert torch.equal(matrix.multiply(x[:num_rows], None), alone[:num_rows]), num_rows


def test_all_builds_agree_but_for_the_last_bit() -> None:
    x, weight = torch.randn(5, 96), torch.randn(40, 96)
    for bits in (8, 4):
        ys = [packed(c_library(build), weight, bits).multiply(x, None) for build in BUILDS]
        for y in ys[1:]:
            torch.testing.assert_close(y, ys[0], rtol=1e-5, atol=1e-5)


def test_threads_change_no_bit(c: Library) -> None:
    x, matrix = torch.randn(3, 256), packed(c, torch.randn(500, 256), 8)
    one = matrix.multiply(x, None)
    c.set_threads(3)
    try:
        for _ in range(50):
            assert torch.equal(matrix.multiply(x, None), one)
    finally:
        c.set_threads(1)


def test_rows_may_be_strided_and_have_more_dimensions(c: Library) -> None:
    wide = torch.randn(6, 100)
    matrix = packed(c, torch.randn(20, 40), 8)
    y = matrix.multiply(wide[:, 30:70], None)
    assert torch.equal(y, matrix.multiply(wide[:, 30:70].contiguous(), None))
    assert torch.equal(matrix.multiply(wide[:, 30:70].reshape(2, 3, 40), None).flatten(0, 1), y)


@pytest.mark.parametrize("bits", [8, 4])
def test_parts_may_be_filled_in_any_order(c: Library, bits: int) -> None:
    weight = torch.randn(50, 64)
    whole = packed(c, weight, bits)
    pieces = PackedMatrix(c, 50, 64, bits)
    for rows in (slice(30, 50), slice(0, 7), slice(7, 30)):
        pieces.fill(weight[rows].contiguous(), rows.start)
    assert torch.equal(whole.data, pieces.data) and torch.equal(whole.scales, pieces.scales)


def stored_integers(c: Library, bits: int) -> tuple[PackedMatrix, torch.Tensor]:
    """A matrix [19, 96] of given integers, and what it stands for, exact in float64."""
    low, high = (0, 16) if bits == 4 else (-127, 128)
    integers = torch.randint(low, high, (19, 96), dtype=torch.int8)
    scales, minima = torch.randn(19, 3).half(), torch.randn(19, 3).half() * 8
    matrix = PackedMatrix(c, 19, 96, bits)
    matrix.fill_integers(integers, scales, minima if bits == 4 else None, 0)
    expected = integers.double().view(19, 3, 32) * scales.double()[:, :, None]
    return matrix, (expected + minima.double()[:, :, None] if bits == 4 else expected).flatten(1)


@pytest.mark.parametrize("bits", [8, 4])
def test_stored_integers_are_kept_as_they_are(c: Library, bits: int) -> None:
    matrix, expected = stored_integers(c, bits)
    assert torch.equal(matrix.dequantized(), expected.float())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 37])
def test_the_product_of_whole_activations_is_exact_but_for_the_sum_of_groups(
    c: Library, num_rows: int, bits: int
) -> None:
    """Against float64: integers as activations, with their largest in every group, are not rounded at all."""
    matrix, weight = stored_integers(c, bits)
    x = torch.randint(-LARGEST[2], LARGEST[2] + 1, (num_rows, 96)).float()
    x[:, ::GROUP] = LARGEST[2]
    y, exact = matrix.multiply(x, None), x.double() @ weight.T
    size = x.double().abs() @ weight.abs().T  # of the terms: three groups are added, five roundings at most
    assert ((y - exact).abs() <= size * 2.0**-21).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(1, 96), (9, 80)])
def test_columns_may_be_kept_in_another_order(c: Library, shape: tuple[int, int], bits: int) -> None:
    num_rows, size = shape
    weight, x, order = torch.randn(19, size), torch.randn(num_rows, size), torch.randperm(size)
    matrix, plain = PackedMatrix(c, 19, size, bits), PackedMatrix(c, 19, size, bits)
    for each in (matrix, plain):
        each.fill(weight[:, order].contiguous(), 0)
    matrix.order = order.int()
    assert torch.equal(matrix.multiply(x, None), plain.multiply(x[:, order], None))
    assert torch.equal(matrix.dequantized()[:, order], plain.dequantized())


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_activation_breaks_its_row_and_no_other(c: Library, broken: float) -> None:
    x = torch.randn(3, 64)
    x[1, 40] = broken
    y = packed(c, torch.randn(9, 64), 8).multiply(x, None)
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 1e9])
def test_a_weight_that_cannot_be_packed_is_not_hidden(c: Library, value: float, bits: int) -> None:
    weight = torch.randn(4, 64)
    weight[2, 5] = value
    y = packed(c, weight, bits).multiply(torch.randn(1, 64), None)
    assert y[0].isnan().tolist() == [False, False, True, False]


def test_zero_rows_and_zero_groups_give_zero(c: Library) -> None:
    matrix = packed(c, torch.zeros(3, 64), 8)
    assert torch.equal(matrix.multiply(torch.randn(2, 64), None), torch.zeros(2, 3))
    matrix = packed(c, torch.randn(3, 64), 8)
    assert torch.equal(matrix.multiply(torch.zeros(2, 64), None), torch.zeros(2, 3))


def test_an_id_outside_the_table_reads_nothing(c: Library) -> None:
    rows = packed(c, torch.randn(5, 40), 8).lookup(torch.tensor([4, 5, -1]))
    assert rows[0].isfinite().all() and rows[1:].isnan().all()


def test_matrices_lie_side_by_side_on_cache_lines() -> None:
    memory = WeightMemory(1 << 16)
    first, second, large = memory.take(100), memory.take(10), memory.take(1 << 17)
    assert second.data_ptr() - first.data_ptr() == 128
    assert large.numel() == 1 << 17 and all(piece.data_ptr() % 64 == 0 for piece in (first, second, large))


@pytest.mark.parametrize("digits", [2, 1])
@pytest.mark.parametrize("shape", [(1, 16, 32), (3, 17, 64), (8, 48, 96), (15, 33, 128), (59, 17, 64)])
def test_floats_of_4_bits_are_multiplied_by_their_codes(
    c: Library, shape: tuple[int, int, int], digits: int
) -> None:
    if MXFP4 not in c.linear:
        pytest.skip("NEON keeps them in int8")
    num_tokens, num_rows, size = shape
    codes = torch.randint(0, 16, (num_rows, size), dtype=torch.int8)
    scales = torch.exp2(torch.randint(-9, -4, (num_rows, size // GROUP)).float())
    matrix = PackedMatrix(c, num_rows, size, 4)
    matrix.kind, matrix.digits = MXFP4, digits
    matrix.fill_integers(codes, (scales / 2).half(), (-6 * scales).half(), 0)
    weight = torch.tensor(E2M1)[codes.long()] * scales.repeat_interleave(GROUP, 1)
    assert torch.equal(matrix.dequantized(), weight)
    x, bias = torch.randn(num_tokens, size), torch.randn(num_rows)
    torch.testing.assert_close(
        matrix.multiply(x, bias), product_reference(x, weight, bias, digits), rtol=1e-5, atol=1e-5
    )
    loud = torch.full((num_tokens, size), 3.0)  # the largest integers times the largest codes
    matrix.fill_integers(torch.full_like(codes, 7), (scales / 2).half(), (-6 * scales).half(), 0)
    expected = product_reference(loud, 6 * scales.repeat_interleave(GROUP, 1), None, digits)
    torch.testing.assert_close(matrix.multiply(loud, None), expected, rtol=1e-5, atol=1e-5)
