"""Products with adapters in CUDA C++, emulated: h = A x, and a matrix that adds B h to its own product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from infer.kernels.linear import cuda as linear_cuda
from infer.kernels.linear import low_rank as linear_low_rank
from infer.kernels.linear import shrink as linear_shrink
from infer.kernels.linear import wgmma as linear_wgmma
from infer.kernels.linear.cuda import Variant
from infer.kernels.linear.low_rank import (
    LowRankStack,
    RowSlots,
    add_low_rank_reference,
)
from infer.kernels.linear.residual import LowRankTerm, ResidualInput
from infer.kernels.linear.shrink import shrink
from infer.kernels.linear.small import launch, launch_add, launch_of_sum
from infer.kernels.linear.wgmma import WgmmaConfig
from infer.kernels.runtime import tensor_map
from infer.kernels.runtime.cuda_build import as_pointers
from tests.kernels.emulated import compile_library
from tests.kernels.emulated_wgmma import EmulatedLaunch, encode_tiled
from tests.kernels.low_rank_contract import tiles_by_hand

RANK, NUM_SLOTS = 16, 6
ONE_BLOCK = WgmmaConfig(16, 64, stages=2, low_rank=True)
TWO_BLOCKS = WgmmaConfig(32, 128, stages=2, split=2, low_rank=True)
GATED = WgmmaConfig(16, 192, stages=3, low_rank=True)
SLOTS = [2, 0, 5, 5, 2, 5, 5, 5, 5, 5, 5, 5, 0]  # a full tile of 5, and a second one


class EmulatedShrink:
    def __init__(self, variant: Variant) -> None:
        self.library = compile_library("emulated_shrink.cpp", variant.source, variant.defines, "-O1")
        self.variant = variant

    def __call__(self, num_blocks: int, *arguments: Any) -> None:
        values = [of_type(each) for of_type, each in zip(self.variant.types, arguments, strict=True)]
        assert self.library.emulate(num_blocks, self.variant.num_threads, as_pointers(values))


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    kinds = {linear_shrink.SOURCE: EmulatedShrink, linear_wgmma.SOURCE: EmulatedLaunch}
    monkeypatch.setattr(linear_cuda, "load_variant", lambda variant, *_: kinds[variant.source](variant))
    monkeypatch.setattr(linear_low_rank, "make_tiles", tiles_by_hand)
    monkeypatch.setattr(tensor_map, "encoder", lambda: encode_tiled)
    linear_wgmma._kernel.cache_clear()
    yield
    linear_wgmma._kernel.cache_clear()


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape).bfloat16()


def make_stack(parts: list[int], K: int, *, sparse: int = 1) -> LowRankStack:
    """Small integers, exact in any order; `sparse`: one in this many of the columns of A is not zero."""
    stack = LowRankStack(
        parts, K, num_slots=NUM_SLOTS, rank=RANK, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    for slot in (2, 5):
        for part, count in enumerate(parts):
            rank = 16 if slot == 2 else 3 + part
            a_RK = integers(rank, K) * (torch.arange(K) % sparse == 0)
            stack.fill(slot, part, a_RK.bfloat16(), integers(count, rank))
    return stack


def expected(x: torch.Tensor, w: torch.Tensor, slots: torch.Tensor, stack: LowRankStack) -> torch.Tensor:
    y = F.linear(x.float(), w.float())
    for row, slot in enumerate(slots.tolist()):
        if slot:
            h = torch.split((stack.a[slot - 1].float() @ x[row].float()).bfloat16().float(), RANK)
            parts = zip(stack.b_parts(slot), h, strict=True)
            y[row] += torch.cat([b.float() @ h_R for b, h_R in parts])
    return y


def test_the_reference_is_the_same_sum() -> None:
    stack, slots = make_stack([40, 24], 64), torch.tensor(SLOTS)
    x, w = integers(len(SLOTS), 64), integers(64, 64)
    y = add_low_rank_reference(F.linear(x, w), x, RowSlots(slots), stack)
    assert torch.equal(y, expected(x, w, slots, stack).bfloat16())


@pytest.mark.parametrize(("K", "num_parts"), [(64, 1), (1088, 2), (2112, 3)])  # one, two and three blocks
def test_every_row_finds_its_own_a(K: int, num_parts: int) -> None:
    stack, slots = make_stack([24] * num_parts, K, sparse=9), torch.tensor(SLOTS, dtype=torch.int32)
    x = integers(len(SLOTS), K + 8)[:, :K]
    term = shrink(x, RowSlots(slots), stack)
    h = term.h_TC.view(len(SLOTS), 3, term.columns)
    for row, slot in enumerate(SLOTS):
        wanted = torch.zeros(3, term.columns)
        if slot:
            own = (stack.a[slot - 1].float() @ x[row].float()).view(num_parts, RANK)
            wanted[:num_parts, (slot - 1) * RANK : slot * RANK] = own
        assert torch.equal(h[row].float(), wanted), row


@pytest.mark.parametrize(
    ("config", "parts", "K"),
    [(ONE_BLOCK, [40, 24, 16], 200), (ONE_BLOCK, [64], 64), (TWO_BLOCKS, [96, 40], 968)],
)
def test_a_matrix_adds_the_terms_of_its_parts(config: WgmmaConfig, parts: list[int], K: int) -> None:
    """Parts that begin within a tile, in one block and in a cluster that shares the chunks of adapters."""
    stack, slots = make_stack(parts, 64 * -(-K // 64), sparse=9), torch.tensor(SLOTS, dtype=torch.int32)
    stack.a = stack.a[..., :K]
    x, w = integers(len(SLOTS), K), integers(sum(parts), K)
    term = term_of(x, slots, stack)
    y = launch(config, x, w, low_rank=term)
    assert torch.equal(y, expected(x, w, slots, stack).bfloat16())


def term_of(x: torch.Tensor, slots: torch.Tensor, stack: LowRankStack) -> LowRankTerm:
    """What `shrink` leaves, by the definition."""
    tiles = tiles_by_hand(slots, NUM_SLOTS, RANK)
    h = tiles.h_TC.view(len(slots), 3, tiles.columns)
    for row, slot in enumerate(slots.tolist()):
        if slot:
            own = (stack.a[slot - 1].float() @ x[row].float()).view(-1, RANK)
            h[row, : len(own), (slot - 1) * RANK : slot * RANK] = own
    return LowRankTerm(stack.b, stack.parts, stack.used, tiles.h_TC, tiles.columns, tiles.table)


def test_gate_and_up_and_the_end_of_a_norm() -> None:
    """The sum that a matrix with adapters adds to the stream, and gate and up that read it."""
    T, D, N = len(SLOTS), 136, 200
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    down, gate_up = make_stack([D], 192, sparse=9), make_stack([N, N], D, sparse=9)
    x, w_down, w_up = integers(T, 192), integers(D, 192), torch.randn(2 * N, D).bfloat16()
    residual, gain = torch.randn(T, D).bfloat16(), torch.randn(D).bfloat16()
    stream = ResidualInput(residual, gain, 0.0)
    total = launch_add(ONE_BLOCK, stream, x, w_down, low_rank=term_of(x, slots, down))
    summed = (expected(x, w_down, slots, down) + residual.float()).bfloat16()
    assert torch.equal(total.sum_MN, summed)
    assert torch.equal(total.scaled_MN, (summed.float() * gain.float()).bfloat16())
    y = launch_of_sum(
        replace(GATED, width=16), total, w_up, eps=1e-6, activation="silu",
        low_rank=term_of(total.scaled_MN, slots, gate_up),
    )  # fmt: skip
    root = (summed.float().square().mean(1, keepdim=True) + 1e-6).rsqrt()
    gate, up = torch.split(expected(total.scaled_MN, w_up, slots, gate_up) * root, N, dim=1)
    torch.testing.assert_close(y.float(), F.silu(gate) * up, rtol=2e-2, atol=2e-2)


def test_chunks_without_weights_are_not_read() -> None:
    """Adapters that have nothing for a matrix leave the product as it is, whatever h holds."""
    stack = make_stack([64], 64)
    stack.clear(2)
    stack.clear(5)
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    x, w = integers(len(SLOTS), 64), integers(64, 64)
    term = term_of(x, slots, stack)
    term.h_TC.fill_(float("nan"))
    assert torch.equal(launch(ONE_BLOCK, x, w, low_rank=term), F.linear(x.float(), w.float()).bfloat16())
