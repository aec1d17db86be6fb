"""The Triton kernels of `grouped.py`: choose experts, order rows by expert, multiply, add up.

**route_kernel**, one program per token, finds the C largest probabilities one after the other; C is at
most eight or so, and a row of logits is at most a few hundred numbers.

**count_kernel** and **order_kernel**, a program per expert and part of the rows: the first counts the rows
of its expert in its part; the second computes from all counts where its own rows begin, and writes them
there in order. Nothing is counted with atomics, so the order is deterministic.

**grouped_kernel** computes yT = W xT block by block, with the operands swapped as in `triton_kernels.py`:
W has many rows and is the left operand of the tensor cores, which has 64 rows; x may have few rows.
A program takes one block of rows and BLOCK_N outputs, and loads the matrix of the block's expert. Programs
are numbered so that GROUP blocks, mostly of the same expert, share a tile of W while it is in the cache.
Blocks without an expert return immediately.

**sum_kernel** adds the C results of a token, in order, in float32.

Shapes:  R = T * C rows, N outputs (of the gate half when gated), K inputs.
"""

from __future__ import annotations

from infer.kernels.elementwise.gated_activation import activated
from infer.kernels.runtime.dispatch import jit, jit_for_any, tl


@jit
def route_kernel(
    logits_ptr, experts_ptr, weights_ptr, logits_row_stride, E, CHOICES: tl.constexpr,
    NORMALIZED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    places = tl.arange(0, BLOCK_C)
    logits = tl.load(logits_ptr + token * logits_row_stride + experts, mask=experts < E, other=-float("inf"))
    logits = logits.to(tl.float32)
    shares = tl.where(experts < E, tl.exp(logits - tl.max(logits, axis=0)), 0.0)
    total = tl.sum(shares, axis=0)
    shares = tl.where(total == total, shares, 0.0)  # NaN chooses arbitrary valid experts, with NaN weights

    chosen = tl.zeros([BLOCK_C], tl.int32)
    weights = tl.zeros([BLOCK_C], tl.float32)
    for choice in tl.static_range(CHOICES):
        best = tl.argmax(shares, axis=0)
        chosen = tl.where(places == choice, best, chosen)
        weights = tl.where(places == choice, tl.max(shares, axis=0), weights)
        shares = tl.where(experts == best, -1.0, shares)
    if NORMALIZED:
        total = tl.sum(weights, axis=0)
    tl.store(experts_ptr + token * CHOICES + places, chosen, mask=places < CHOICES)
    tl.store(weights_ptr + token * CHOICES + places, weights / total, mask=places < CHOICES)


@jit_for_any("num_rows", "part_rows")
def count_kernel(experts_ptr, counts_ptr, num_rows, part_rows, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    expert, part = tl.program_id(0), tl.program_id(1)
    count = tl.zeros([CHUNK], tl.int32)
    end = tl.minimum((part + 1) * part_rows, num_rows)
    for start in range(part * part_rows, end, CHUNK):
        rows = start + tl.arange(0, CHUNK)
        count += (tl.load(experts_ptr + rows, mask=rows < end, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert * PARTS + part, tl.sum(count, axis=0))


@jit_for_any("num_rows", "part_rows", "num_blocks")
def order_kernel(
    experts_ptr, counts_ptr, row_order_ptr, block_experts_ptr, num_rows, part_rows, E, num_blocks,
    BLOCK_T: tl.constexpr, PARTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    expert, part = tl.program_id(0), tl.program_id(1)
    experts, parts = tl.arange(0, BLOCK_E), tl.arange(0, PARTS)
    of_parts = experts[:, None] * PARTS + parts[None, :]
    counts_of_parts = tl.load(counts_ptr + of_parts, mask=(experts < E)[:, None], other=0)
    is_before = (experts == expert)[:, None] & (parts < part)[None, :]
    before = tl.sum(tl.sum(tl.where(is_before, counts_of_parts, 0), axis=1), axis=0)
    counts = tl.sum(counts_of_parts, axis=1)
    blocks = (counts + BLOCK_T - 1) // BLOCK_T
    first_block = tl.sum(tl.where(experts < expert, blocks, 0), axis=0)
    my_blocks = tl.sum(tl.where(experts == expert, blocks, 0), axis=0)
    my_rows = tl.sum(tl.where(experts == expert, counts, 0), axis=0)

    lanes = tl.arange(0, CHUNK)
    if part == 0:
        for start in range(0, my_blocks, CHUNK):
            to = block_experts_ptr + first_block + start + lanes
            tl.store(to, expert, mask=start + lanes < my_blocks)
        if expert == E - 1:  # the remaining blocks have no expert
            for start in range(first_block + my_blocks, num_blocks, CHUNK):
                tl.store(block_experts_ptr + start + lanes, -1, mask=start + lanes < num_blocks)
        padding = my_rows + tl.arange(0, BLOCK_T)
        to = row_order_ptr + first_block * BLOCK_T + padding
        tl.store(to, num_rows, mask=padding < my_blocks * BLOCK_T)

    place = first_block * BLOCK_T + before
    end = tl.minimum((part + 1) * part_rows, num_rows)
    for start in range(part * part_rows, end, CHUNK):
        rows = start + lanes
        is_mine = tl.load(experts_ptr + rows, mask=rows < end, other=-1) == expert
        rank = tl.cumsum(is_mine.to(tl.int32), axis=0)
        tl.store(row_order_ptr + place + rank - 1, rows, mask=is_mine)
        place += tl.sum(is_mine.to(tl.int32), axis=0)


@jit_for_any("num_rows", "num_blocks")
def grouped_kernel(
    x_ptr, w_ptr, y_ptr, row_order_ptr, block_experts_ptr, weights_ptr, x_row_stride, num_rows, N, K,
    num_blocks, ROWS_PER_INPUT: tl.constexpr, WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    WIDEN: tl.constexpr,  # True in the interpreter, which cannot multiply bfloat16
):  # fmt: skip
    GATED: tl.constexpr = ACTIVATION != ""
    in_group = tl.program_id(0) % (GROUP * tl.cdiv(N, BLOCK_N))
    first_block = tl.program_id(0) // (GROUP * tl.cdiv(N, BLOCK_N)) * GROUP
    group_len = tl.minimum(num_blocks - first_block, GROUP)
    block = first_block + in_group % group_len
    expert = tl.load(block_experts_ptr + block).to(tl.int64)  # int64: E * 2F * D may pass 2^31
    if expert < 0:
        return

    outputs = in_group // group_len * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.load(row_order_ptr + block * BLOCK_T + tl.arange(0, BLOCK_T))
    inputs = (tl.minimum(rows, num_rows - 1) // ROWS_PER_INPUT).to(tl.int64)
    ks = tl.arange(0, BLOCK_K)
    # Outputs past the end are clamped to the last one, like padding rows: computed, but not stored.
    matrix_rows = expert * N * (2 if GATED else 1) + tl.minimum(outputs, N - 1)
    w_ptrs = w_ptr + matrix_rows[:, None] * K + ks[None, :]
    up_ptrs = w_ptr + (matrix_rows[:, None] + N) * K + ks[None, :]
    x_ptrs = x_ptr + inputs[None, :] * x_row_stride + ks[:, None]

    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for k in range(0, K, BLOCK_K):
        in_k = k + ks < K
        w = tl.load(w_ptrs + k, mask=in_k[None, :], other=0.0)
        x = tl.load(x_ptrs + k, mask=in_k[:, None], other=0.0)
        if WIDEN:
            w, x = w.to(tl.float32), x.to(tl.float32)
        total = tl.dot(w, x, total, input_precision="ieee")
        if GATED:
            up = tl.load(up_ptrs + k, mask=in_k[None, :], other=0.0)
            if WIDEN:
                up = up.to(tl.float32)
            up_total = tl.dot(up, x, up_total, input_precision="ieee")

    if GATED:
        total = activated(total, ACTIVATION) * up_total
    if WEIGHTED:
        total = total * tl.load(weights_ptr + rows, mask=rows < num_rows, other=0.0)[None, :]
    y_ptrs = y_ptr + rows.to(tl.int64)[None, :] * N + outputs[:, None]
    is_stored = (rows < num_rows)[None, :] & (outputs < N)[:, None]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=is_stored)


@jit
def sum_kernel(outputs_ptr, y_ptr, D, CHOICES: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for choice in tl.static_range(CHOICES):
        row = token * CHOICES + choice
        total += tl.load(outputs_ptr + row * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * D + cols, total.to(y_ptr.dtype.element_ty), mask=cols < D)
