"""Experts with biases (gpt-oss): plain grouped products, with biases added where rows are read anyway.

    both[r]    = x[token of r] WT                 a grouped product without biases
    gated[r]   = gate(both[r] + gate_up bias)     one launch, with the bias of the row's expert
    out[r]     = gated[r] WT                      a grouped product, not weighted
    y[t]       = sum over c of  weight * (out[t, c] + down bias)

So every form of weights supports biases, and the kernels that multiply are independent of them.

Shapes:  T tokens, C choices per token, R = T C rows, E experts, D hidden size, F intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from infer.kernels.elementwise.gated_activation import activated, clamped_gate
from infer.kernels.linear.coded import CodedWeights
from infer.kernels.moe.coded_grouped import multiply_coded_rows
from infer.kernels.moe.grouped import choose_tiles, multiply_rows, order_rows
from infer.kernels.runtime.dispatch import jit, tl

_BLOCK = 1024

Order = tuple[torch.Tensor, torch.Tensor]  # row_order, block_experts
Product = Callable[[torch.Tensor, int, Order, int], torch.Tensor]  # (x, rows, order, rows per input) -> y


class ExpertProducts(NamedTuple):
    """The products of a step's rows with the matrices of their experts."""

    num_experts: int
    block_t: Callable[[int], int]  # rows per block, given the total number of rows
    gate_up: Product
    down: Product


def dense_products(gate_up_EFD: torch.Tensor, down_EDF: torch.Tensor, *, invariant: bool) -> ExpertProducts:
    """Make products with plain stacks."""
    num_experts, element_size = len(gate_up_EFD), gate_up_EFD.element_size()

    def product(w_ENK: torch.Tensor) -> Product:
        def multiply(x: torch.Tensor, num_rows: int, order: Order, rows_per_input: int) -> torch.Tensor:
            y_RN = torch.empty((num_rows, w_ENK.shape[1]), dtype=x.dtype, device=x.device)
            tiles = choose_tiles(1 if invariant else num_rows, num_experts, element_size)[1]
            multiply_rows(x, w_ENK, y_RN, *order, None, tiles, rows_per_input=rows_per_input)
            return y_RN

        return multiply

    def block_t(num_rows: int) -> int:
        return choose_tiles(1 if invariant else num_rows, num_experts, element_size)[0].block_t

    return ExpertProducts(num_experts, block_t, product(gate_up_EFD), product(down_EDF))


def coded_products(gate_up: CodedWeights, down: CodedWeights, *, invariant: bool) -> ExpertProducts:
    """Make products with stacks of codes."""
    num_experts = len(gate_up.cells)

    def product(w: CodedWeights) -> Product:
        def multiply(x: torch.Tensor, num_rows: int, order: Order, rows_per_input: int) -> torch.Tensor:
            return multiply_coded_rows(x, w, num_rows, *order, None, rows_per_input=rows_per_input)

        return multiply

    def block_t(num_rows: int) -> int:
        return choose_tiles(1 if invariant else num_rows, num_experts, 2)[0].block_t

    return ExpertProducts(num_experts, block_t, product(gate_up), product(down))


@jit
def _gate_kernel(both_ptr, bias_ptr, experts_ptr, y_ptr, F, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < F
    expert = tl.load(experts_ptr + row).to(tl.int64)
    gate = tl.load(both_ptr + row * 2 * F + cols, mask=in_row, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * F + F + cols, mask=in_row, other=0.0).to(tl.float32)
    gate += tl.load(bias_ptr + expert * 2 * F + cols, mask=in_row, other=0.0).to(tl.float32)
    up += tl.load(bias_ptr + expert * 2 * F + F + cols, mask=in_row, other=0.0).to(tl.float32)
    gated = clamped_gate(gate, up) if ACTIVATION == "clamped" else activated(gate, ACTIVATION) * up
    tl.store(y_ptr + row * F + cols, gated.to(y_ptr.dtype.element_ty), mask=in_row)


@jit
def _sum_kernel(
    outputs_ptr, bias_ptr, experts_ptr, weights_ptr, y_ptr, D, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        row = token * CHOICES + choice
        expert = tl.load(experts_ptr + row).to(tl.int64)
        out = tl.load(outputs_ptr + row * D + cols, mask=cols < D, other=0.0).to(tl.float32)
        out += tl.load(bias_ptr + expert * D + cols, mask=cols < D, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + row) * out
    tl.store(y_ptr + token * D + cols, total.to(y_ptr.dtype.element_ty), mask=cols < D)


def biased_experts_mlp(
    x_TD: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor, products: ExpertProducts,
    gate_up_bias_EF: torch.Tensor, down_bias_ED: torch.Tensor, *, activation: str,
) -> torch.Tensor:  # fmt: skip
    """Send each token through its experts on a GPU; the specification is `Projection.experts_mlp`."""
    (T, num_choices), (_, size) = experts_TC.shape, gate_up_bias_EF.shape
    if not T:
        return torch.empty_like(x_TD)
    num_rows, F, D = T * num_choices, size // 2, x_TD.shape[1]
    order = order_rows(experts_TC, products.num_experts, products.block_t(num_rows))
    both_RF = products.gate_up(x_TD, num_rows, order, num_choices)
    gated_RF = torch.empty((num_rows, F), dtype=x_TD.dtype, device=x_TD.device)
    _gate_kernel[(num_rows, -(-F // _BLOCK))](
        both_RF, gate_up_bias_EF, experts_TC, gated_RF, F, ACTIVATION=activation, BLOCK=_BLOCK
    )
    outputs_RD = products.down(gated_RF, num_rows, order, 1)
    y_TD = torch.empty((T, D), dtype=x_TD.dtype, device=x_TD.device)
    _sum_kernel[(T, -(-D // _BLOCK))](
        outputs_RD, down_bias_ED, experts_TC, weights_TC, y_TD, D, CHOICES=num_choices, BLOCK=_BLOCK
    )
    return y_TD
