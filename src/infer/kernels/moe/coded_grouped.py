"""Experts in 8 or 4 bits: the grouped product of grouped.py with coded weights (linear/coded.py).

Rows are sorted by expert in the same way. There are three ways to multiply them:

    few rows of an expert   in CUDA C++, if the kernels were compiled (coded_cuda.py)
                            otherwise, a program multiplies a block of rows by 32 rows of their expert's
                            matrix, unpacked tile by tile; gate and up are one product before the gate
    many rows               all matrices are unpacked first, into memory for one of the two stacks: the
                            product of many rows takes much longer than unpacking

Shapes:  T tokens, C choices per token, E experts, D hidden size, F intermediate size, R = T C rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from infer.kernels.elementwise.gated_activation import gated_activation
from infer.kernels.linear.coded import BAND, CodedWeights
from infer.kernels.linear.coded_linear import expand, stored_parts, tile_constants, tile_sizes
from infer.kernels.linear.coded_triton import coded_tile
from infer.kernels.moe.choice import EXPERT_WAYS, ExpertsProblem
from infer.kernels.moe.coded_cuda import GroupedLinear, block_height
from infer.kernels.moe.grouped import ManyOfBoth, Stack, choose_tiles, order_rows, rows_in_order
from infer.kernels.runtime.choice import choose
from infer.kernels.runtime.dispatch import INTERPRETED, jit_for_any, tl


@jit_for_any("num_rows", "num_blocks")
def coded_grouped_kernel(
    x_ptr, cells_ptr, words_ptr, scales_ptr, minima_ptr, y_ptr, row_order_ptr, block_experts_ptr, weights_ptr,
    x_row_stride, cells_stride, scales_stride, minima_stride, num_rows, N, K, num_cells, num_groups,
    ROWS_PER_INPUT: tl.constexpr, WEIGHTED: tl.constexpr,
    FORM: tl.constexpr, GROUP: tl.constexpr, SPANS: tl.constexpr, MINIMA: tl.constexpr, BY_BAND: tl.constexpr,
    CELL_BYTES: tl.constexpr,
    WIDEN: tl.constexpr,  # True in the interpreter, which cannot multiply bfloat16
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    band, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(row_order_ptr + block * BLOCK_T + tl.arange(0, BLOCK_T))
    inputs = (tl.minimum(rows, num_rows - 1) // ROWS_PER_INPUT).to(tl.int64)
    x_rows = x_ptr + inputs[None, :] * x_row_stride
    total = tl.zeros([32, BLOCK_T], tl.float32)
    for cell in range(num_cells):
        columns = (cell * 128 + tl.arange(0, 128))[:, None]
        x = tl.load(x_rows + columns, mask=columns < K, other=0.0)
        w = coded_tile(
            cells_ptr + expert * cells_stride, words_ptr + expert * (cells_stride // 4),
            scales_ptr + expert * scales_stride, minima_ptr + expert * minima_stride,
            band, cell, num_cells, num_groups, FORM, GROUP, SPANS, MINIMA, BY_BAND, CELL_BYTES, 1,
        ).to(x_ptr.dtype.element_ty)  # fmt: skip
        if WIDEN:
            w, x = w.to(tl.float32), x.to(tl.float32)
        total = tl.dot(w, x, total, input_precision="ieee")
    if WEIGHTED:
        total = total * tl.load(weights_ptr + rows, mask=rows < num_rows, other=0.0)[None, :]
    outputs = (band * 32 + tl.arange(0, 32))[:, None]
    y_ptrs = y_ptr + rows.to(tl.int64)[None, :] * N + outputs
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=(rows < num_rows)[None, :] & (outputs < N))


def coded_expert_rows(
    x_TD: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor, gate_up: CodedWeights,
    down: CodedWeights, *, activation: str,
    compiled: tuple[GroupedLinear | None, GroupedLinear | None] = (None, None), invariant: bool = False,
    many: ManyOfBoth = (None, None),
) -> torch.Tensor:  # fmt: skip
    """The weighted results of each token's experts on a GPU, [T, C, D]; matrices hold all experts.

    `compiled`: the CUDA C++ kernels of gate-up and down, where they exist; `many`: the kernels for many rows
    of unpacked matrices. `invariant`: blocks of one size for any number of tokens.
    """
    (T, num_choices), num_experts = experts_TC.shape, len(gate_up.cells)
    num_rows = T * num_choices
    shape = T, num_choices, down.num_rows
    if not T:
        return x_TD.new_empty(shape)
    has_bands = all(stack.num_rows % BAND == 0 for stack in (gate_up, down))
    problem = ExpertsProblem(
        T, num_choices, num_experts, is_coded=True, invariant=invariant, has_bands=has_bands,
        grouped=compiled, many=many,
    )  # fmt: skip
    way = choose(EXPERT_WAYS, problem)
    if way in ("many", "unpacked"):

        def stack(weights: CodedWeights) -> Stack:
            return lambda: expand_stack(weights, x_TD.dtype)

        return rows_in_order(
            x_TD, experts_TC, weights_TC, stack(gate_up), stack(down), num_experts, gate_up.num_rows // 2,
            activation=activation, many=many if way == "many" else None,
        )  # fmt: skip
    first, second = compiled
    if way == "cuda":
        assert first is not None and second is not None
        order = order_rows(experts_TC, num_experts, block_height(num_rows, num_experts))
        gated_RF = first.multiply(x_TD, gate_up, num_rows, *order, None, rows_per_input=num_choices)
        return second.multiply(gated_RF, down, num_rows, *order, weights_TC).view(shape)
    is_small = invariant or x_TD.element_size() == 4  # larger blocks of float32 take long to compile
    block_t = choose_tiles(1 if is_small else num_rows, num_experts, x_TD.element_size())[0].block_t
    order = order_rows(experts_TC, num_experts, block_t)
    both_RF = multiply_coded_rows(x_TD, gate_up, num_rows, *order, None, rows_per_input=num_choices)
    gated_RF = gated_activation(both_RF, activation=activation)
    return multiply_coded_rows(gated_RF, down, num_rows, *order, weights_TC).view(shape)


def expand_stack(stack: CodedWeights, dtype: torch.dtype) -> torch.Tensor:
    """Unpack the matrices of all experts, [E, N, K], in one launch, since they are contiguous."""
    num_experts = len(stack.cells)
    parts = {name: tensor.flatten(0, 1) for name, tensor in stack.tensors().items()}
    whole = replace(stack.with_tensors(parts), num_rows=num_experts * stack.num_rows)
    return expand(whole, dtype).view(num_experts, *stack.shape)


def multiply_coded_rows(
    x: torch.Tensor, w: CodedWeights, num_rows: int, row_order: torch.Tensor, block_experts: torch.Tensor,
    weights_TC: torch.Tensor | None, *, rows_per_input: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Multiply each row by the matrix of its expert, and by its weight if there are weights."""
    y_RN = torch.empty((num_rows, w.num_rows), dtype=x.dtype, device=x.device)
    num_blocks, parts = len(block_experts), stored_parts(w)
    coded_grouped_kernel[(-(-w.num_rows // BAND), num_blocks)](
        x, *parts, y_RN, row_order, block_experts, weights_TC,
        x.stride(0), *(part.stride(0) for part in (w.cells, *parts[2:])),
        num_rows, w.num_rows, w.size, *tile_sizes(w),
        ROWS_PER_INPUT=rows_per_input, WEIGHTED=weights_TC is not None, **tile_constants(w),
        WIDEN=INTERPRETED, BLOCK_T=len(row_order) // num_blocks, num_warps=4,
    )  # fmt: skip
    return y_RN
