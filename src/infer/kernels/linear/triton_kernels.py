"""The two Triton kernels of `small.py`: one for at most four tokens, one for up to 128.

Both compute the same function. Prologue and epilogue are chosen at compile time:

    BIAS         a bias per output
    ACTIVATION   "" or the name of the gate: W stacks the rows of the gate on the rows of `up`

    NORM         (gemv)    the input is (x + residual), normalised; the sum is written out once
    RESIDUAL     (gemv)    a residual is added (only with NORM)
    ADDS         (skinny)  the output is added to the residual stream, and prepared for the norm that follows
    PARTS        (skinny)  the input was prepared this way, in this many tiles or fewer; 0: it was not

**gemv_kernel**, for a handful of tokens, is a plain dot product. A program takes a few rows of W and
loops over K; every thread keeps 16-byte pieces of these rows in flight and one partial sum per row,
and the sums of all threads are added once, at the end. The next tile of W is loaded before the current one
is used: by hand, because Triton pipelines only the operands of `tl.dot`.

**skinny_kernel** uses the tensor cores, with the operands swapped: it computes yT = W xT. Hopper's tensor
cores take 64 rows on the left side and 8 to 256 columns on the right. Tokens are few and rows of W are
many, so W goes left and no row is wasted on padding. If N gives too few programs to fill the GPU, K is
split among several; each writes its partial tile to a workspace, and the one that arrives last adds the
tiles up, in the order of the splits and not of arrival, so that the same input gives the same bits.

    counter[tile]   0 -> 1 -> ... -> num_splits - 1: the last program adds, stores y, resets it to 0

With one tile shape, the bits of a row of y do not depend on the number of other tokens: M chooses how many
columns are computed, never in which pieces K is cut or in which order they are added.

Folding the norm works because it scales whole rows: with r = x + residual and g = norm_weight + offset,

    rms_norm(r) WT = ((r * g) WT) / rms(r)

For one token, one pass over K computes both the dot products and the sum of squares, and the division comes
last (NORM). With more tokens, every program would have to normalise all of them again. Instead, the
projection that computed x does it: it has r when it stores a tile, and each element of it only once.

    o, down        r = y + residual;   stores r,  r * g,  and its tile's sum of r^2 for each token       ADDS
    gate_up, qkv   y = (r * g) WT;     adds up the tiles' sums, divides by rms(r)                        PARTS

The squares are added in float64. Tile heights and the order of threads vary, and yet the sum is the same:
the order only affects bits that are 29 places below the last one that remains after rounding to float32.

Rows past the end are clamped to the last row instead of masked: their values are discarded, and a load
without a mask is cheaper. Only the store is masked.

With programmatic dependent launch (`dispatch.py`), the first tile of W is read while the previous kernel
still runs; the activations are read after the wait.

Shapes:  M tokens, N outputs (rows of W, of its gate half when gated), K inputs.
"""

from __future__ import annotations

from infer.kernels.elementwise.gated_activation import activated
from infer.kernels.runtime.dispatch import jit, jit_for_any, tl
from infer.kernels.runtime.ptx import prefetch_l2

# The batch size changes from step to step: 1, or a multiple of 16, must not trigger a compilation.
_jit_any_m = jit_for_any("M", "num_splits", "num_parts")


@jit
def _input_tile(
    x_ptr, residual_ptr, new_residual_ptr, x_offsets, residual_offsets, new_residual_offsets, in_tile,
    kept,  # part of the tile whose sum this program writes
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """x, or x + residual rounded to the type of x; one program stores the sum."""
    x = tl.load(x_ptr + x_offsets, mask=in_tile, other=0.0)
    if RESIDUAL:
        residual = tl.load(residual_ptr + residual_offsets, mask=in_tile, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(new_residual_ptr + new_residual_offsets, x, mask=kept)
    return x


@jit
def _store_outputs(
    total,  # [rows, tokens]
    up_total,
    squares,  # [1, tokens]: sum of r^2 over all of K
    bias_ptr, y_ptr,
    rows,  # [rows, 1]
    tokens,  # [1, tokens]
    M, N, K, eps, NORM: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Apply the scale of the norm, the bias and the gate to the dot products, and round once."""
    if NORM:
        inv_rms = tl.rsqrt(squares / K + eps)
        total = total * inv_rms
        if ACTIVATION != "":
            up_total = up_total * inv_rms
    if BIAS:
        total = total + tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        total = activated(total, ACTIVATION) * up_total
    y_ptrs = y_ptr + tokens.to(tl.int64) * N + rows
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=(rows < N) & (tokens < M))


@jit
def _sum_in_thread(products, VECTOR: tl.constexpr):
    """Add up adjacent columns that one thread holds: [rows, cols] -> [rows, cols / VECTOR]."""
    return tl.sum(tl.reshape(products, [products.shape[0], products.shape[1] // VECTOR, VECTOR]), axis=2)


@_jit_any_m
def gemv_kernel(
    x_ptr, residual_ptr, norm_weight_ptr, w_ptr, bias_ptr, y_ptr, new_residual_ptr, x_row_stride,
    residual_row_stride, w_row_stride, M, N, K, eps, offset,
    BLOCK_M: tl.constexpr,  # 1, 2 or 4
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,  # elements in the 16 bytes that a thread loads at once
    UNROLL: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = ACTIVATION != ""
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    cols = tl.arange(0, BLOCK_K)[None, :]
    w_ptrs = w_ptr + tl.minimum(rows, N - 1).to(tl.int64) * w_row_stride + cols
    up_ptrs = w_ptr + (tl.minimum(rows, N - 1) + N).to(tl.int64) * w_row_stride + cols

    w = tl.load(w_ptrs, mask=cols < K, other=0.0, eviction_policy="evict_first")
    if GATED:
        up = tl.load(up_ptrs, mask=cols < K, other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    # A partial sum per thread, row and token; sums across threads are added at the end.
    sums = (tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32),) * BLOCK_M
    up_sums = (tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32),) * BLOCK_M
    squares = (tl.zeros([1, BLOCK_K // VECTOR], tl.float32),) * BLOCK_M
    kept_len = tl.where(tl.program_id(0) == 0, K, 0)

    for k in tl.range(0, K, BLOCK_K, loop_unroll_factor=UNROLL):
        in_next = k + BLOCK_K + cols < K
        next_w = tl.load(w_ptrs + k + BLOCK_K, mask=in_next, other=0.0, eviction_policy="evict_first")
        if GATED:
            next_up = tl.load(up_ptrs + k + BLOCK_K, mask=in_next, other=0.0, eviction_policy="evict_first")

        in_k = k + cols < K
        if NORM:
            gain = tl.load(norm_weight_ptr + k + cols, mask=in_k, other=0.0).to(tl.float32) + offset
        next_sums, next_up_sums, next_squares = (), (), ()
        for m in tl.static_range(BLOCK_M):
            token = tl.minimum(m, M - 1).to(tl.int64)
            x = _input_tile(
                x_ptr, residual_ptr, new_residual_ptr,
                token * x_row_stride + k + cols, token * residual_row_stride + k + cols, token * K + k + cols,
                in_k, k + cols < kept_len, RESIDUAL,
            ).to(tl.float32)  # fmt: skip
            if NORM:
                next_squares += (squares[m] + _sum_in_thread(x * x, VECTOR),)  # type: ignore[assignment]
                x = x * gain
            next_sums += (sums[m] + _sum_in_thread(w.to(tl.float32) * x, VECTOR),)  # type: ignore[assignment]
            if GATED:
                next_up_sums += (up_sums[m] + _sum_in_thread(up.to(tl.float32) * x, VECTOR),)  # type: ignore[assignment]

        sums = next_sums
        w = next_w
        if NORM:
            squares = next_squares
        if GATED:
            up_sums = next_up_sums
            up = next_up

    for m in tl.static_range(BLOCK_M):
        _store_outputs(
            tl.sum(sums[m], axis=1, keep_dims=True), tl.sum(up_sums[m], axis=1, keep_dims=True),
            tl.sum(squares[m], axis=1, keep_dims=True),
            bias_ptr, y_ptr, rows, tl.full([1, 1], m, tl.int32), M, N, K, eps,
            NORM, BIAS, ACTIVATION,
        )  # fmt: skip


@jit
def _store_tile(
    total,  # [rows, tokens]
    up_total, squares,
    residual,  # [rows, tokens]
    gain,  # [rows, 1]
    bias_ptr,
    y_ptr,  # output; with ADDS, r * gain
    sum_ptr, squares_ptr, rows, tokens, tile, M, N, K, eps, ADDS: tl.constexpr, PARTS: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Store the outputs, or their sum with the stream and all of the next norm except its division."""
    if not ADDS:
        _store_outputs(
            total, up_total, squares, bias_ptr, y_ptr, rows, tokens, M, N, K, eps, PARTS > 0, BIAS, ACTIVATION
        )
    else:
        if BIAS:
            total = total + tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
        added = (total + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        r = tl.where(rows < N, added.to(tl.float32), 0.0)
        offsets = tokens.to(tl.int64) * N + rows
        in_tile = (rows < N) & (tokens < M)
        tl.store(sum_ptr + offsets, added, mask=in_tile)
        tl.store(y_ptr + offsets, (r * gain).to(y_ptr.dtype.element_ty), mask=in_tile)
        tile_squares = tl.sum((r * r).to(tl.float64), axis=0, keep_dims=True)
        tl.store(squares_ptr + tile * M + tokens, tile_squares, mask=tokens < M)


@_jit_any_m
def skinny_kernel(
    x_ptr,
    residual_ptr,  # read only with ADDS, like the next two
    norm_weight_ptr, sum_ptr,
    squares_ptr,  # [part, token], float64: written with ADDS, read with PARTS
    w_ptr, bias_ptr, y_ptr,
    partial_ptr,  # [tile, split, sums]: see PARTIAL
    counter_ptr,  # [tile], all zero before and after
    x_row_stride, residual_row_stride, w_row_stride, M, N, K,
    split_len,  # a multiple of BLOCK_K
    num_splits, num_parts, eps, offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,  # Triton's interpreter cannot multiply matrices of bfloat16
    ADDS: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = ACTIVATION != ""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    tokens = tl.arange(0, BLOCK_M)[None, :]
    w_rows = w_ptr + tl.minimum(rows, N - 1).to(tl.int64) * w_row_stride
    up_rows = w_ptr + (tl.minimum(rows, N - 1) + N).to(tl.int64) * w_row_stride
    token_rows = tl.minimum(tokens, M - 1).to(tl.int64)
    k_start = split * split_len

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        lines = tl.minimum(k_start + tl.arange(0, 4) * 64, K - 1)[None, :]
        prefetch_l2(w_rows + lines)
        if GATED:
            prefetch_l2(up_rows + lines)
        tl.extra.cuda.gdc_wait()

    # The inputs of the epilogue are requested now, and arrive during the product.
    residual = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    gain = tl.zeros([BLOCK_N, 1], tl.float32)
    if ADDS:
        residual = tl.load(residual_ptr + token_rows * residual_row_stride + tl.minimum(rows, N - 1))
        gain = tl.load(norm_weight_ptr + tl.minimum(rows, N - 1)).to(tl.float32) + offset
    squares = tl.zeros([1, BLOCK_M], tl.float32)
    if PARTS > 0:
        parts = tl.arange(0, PARTS)[:, None]
        squares_PM = tl.load(squares_ptr + parts * M + token_rows, mask=parts < num_parts, other=0.0)

    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(k_start, tl.minimum(k_start + split_len, K), BLOCK_K):
        cols = (k + tl.arange(0, BLOCK_K))[:, None]  # the rows of xT
        w_cols = (k + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_ptr + token_rows * x_row_stride + cols, mask=cols < K, other=0.0)
        w = tl.load(w_rows + w_cols, mask=w_cols < K, other=0.0, eviction_policy="evict_first")
        if WIDEN:
            w, x = w.to(tl.float32), x.to(tl.float32)
        total = tl.dot(w, x, total, input_precision="ieee")
        if GATED:
            up = tl.load(up_rows + w_cols, mask=w_cols < K, other=0.0, eviction_policy="evict_first")
            if WIDEN:
                up = up.to(tl.float32)
            up_total = tl.dot(up, x, up_total, input_precision="ieee")
    if PARTS > 0:
        squares = tl.sum(squares_PM, axis=0, keep_dims=True).to(tl.float32)

    if SPLIT:
        TILE: tl.constexpr = BLOCK_N * BLOCK_M
        PARTIAL: tl.constexpr = TILE * (2 if GATED else 1)  # numbers that one program writes
        in_partial = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tokens
        first_ptr = partial_ptr + tile.to(tl.int64) * num_splits * PARTIAL
        own_ptr = first_ptr + split * PARTIAL
        tl.store(own_ptr + in_partial, total)
        if GATED:
            tl.store(own_ptr + TILE + in_partial, up_total)
        tl.debug_barrier()  # every thread has stored before one of them increments the counter
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == num_splits - 1:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up_total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(num_splits):
                other_ptr = first_ptr + other * PARTIAL
                total += tl.load(other_ptr + in_partial, cache_modifier=".cg")
                if GATED:
                    up_total += tl.load(other_ptr + TILE + in_partial, cache_modifier=".cg")
            _store_tile(
                total, up_total, squares, residual, gain, bias_ptr, y_ptr, sum_ptr, squares_ptr,
                rows, tokens, tile, M, N, K, eps, ADDS, PARTS, BIAS, ACTIVATION,
            )  # fmt: skip
            tl.store(counter_ptr + tile, 0)
    else:
        _store_tile(
            total, up_total, squares, residual, gain, bias_ptr, y_ptr, sum_ptr, squares_ptr,
            rows, tokens, tile, M, N, K, eps, ADDS, PARTS, BIAS, ACTIVATION,
        )  # fmt: skip
