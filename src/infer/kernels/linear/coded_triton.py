"""Coded weights (coded.py) in Triton: unpacked to plain rows, looked up, and multiplied without wgmma.cu.

    expand_kernel         W, or its codes alone, as plain rows, which library products of many tokens read
    lookup_kernel         some rows of W, for a tied embedding
    coded_skinny_kernel   y = x WT + bias for few tokens on other GPUs, unpacked tile by tile; weights are
                          rounded to the type of x, like a dense matrix of that type

A tile is read in memory order, and its axes are permuted to rows and columns in registers; only a lookup
computes the address of each code.

Shapes:  M tokens, N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

import torch

from infer.kernels.runtime.dispatch import jit, jit_for_any, launch_options, next_power_of_two, tl, use_triton
from infer.kernels.runtime.launch import launch_triton


@jit
def _number(byte, FORM: tl.constexpr):
    """The number that a code stands for; the exponent of fp8 is float16's minus 8."""
    if FORM == "fp8":
        wide = byte.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif FORM == "e5m2":  # the upper half of a float16
        return (byte.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif FORM == "mxfp4":  # the exponent of e2m1 is float16's minus 14
        wide = byte.to(tl.uint16)
        half = ((wide & 8) << 12) | ((wide & 7) << 9)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif FORM == "int8":
        return (byte ^ 0x80).to(tl.float32) - 128.0
    return byte.to(tl.float32)


@jit
def _codes(cells_ptr, first, FORM: tl.constexpr, CELLS: tl.constexpr, CELL_BYTES: tl.constexpr):
    """The codes, one per byte, of 32 rows and CELLS times 128 columns, from the cell at `first` on."""
    if FORM == "int4" or FORM == "mxfp4" or (FORM == "lut4" or FORM == "nf4"):
        inside = tl.arange(0, CELLS * 2048)
        both = tl.load(cells_ptr + first + inside // 2048 * CELL_BYTES + inside % 2048)
        axes = tl.join(both & 15, both >> 4).reshape([CELLS * 2, 2, 8, 4, 4, 2, 2, 2])
        if FORM == "lut4" or FORM == "nf4":
            # 64 columns, block, g, t, 16 columns, row + 8, column + 8, column + 1
            ordered = axes.permute([1, 5, 2, 0, 4, 6, 3, 7])
        else:
            # 64 columns, block, g, t, 16 columns, column + 1, column + 8, row + 8
            ordered = axes.permute([1, 7, 2, 0, 4, 6, 3, 5])
    else:
        inside = tl.arange(0, CELLS * 4096)
        both = tl.load(cells_ptr + first + inside // 4096 * CELL_BYTES + inside % 4096)
        if FORM == "fp8":
            lower, upper = both.reshape([CELLS * 2048, 2]).split()
            one = (upper & 0x80) | ((upper & 0x07) << 4) | (lower >> 4)
            two = ((upper & 0x08) << 4) | (upper & 0x70) | (lower & 0x0F)
            both = tl.join(one, two)
        axes = both.reshape([CELLS * 2, 2, 2, 8, 4, 2, 2, 2, 2])
        # 64 columns, block, half, g, t, 16 columns, column + 8, column + 1, row + 8
        ordered = axes.permute([1, 8, 3, 0, 2, 5, 6, 4, 7])
    return ordered.reshape([32, CELLS * 128])


@jit
def _of_groups(
    words_ptr, scales_ptr, band, cell, first, num_cells, num_groups,
    GROUP: tl.constexpr, SPANS: tl.constexpr, BY_BAND: tl.constexpr, CELLS: tl.constexpr,
    CELL_BYTES: tl.constexpr,
):  # fmt: skip
    """The scales or minima of a tile: from the cells (starting at `first`), per row, or per band."""
    COUNT: tl.constexpr = SPANS * CELLS if SPANS else (CELLS if BY_BAND else 1)
    rows, span = tl.arange(0, 32)[:, None], tl.arange(0, COUNT)[None, :]
    if SPANS:
        at = words_ptr + (first + span // SPANS * CELL_BYTES) // 4 + span % SPANS * 32 + rows
    elif BY_BAND:
        group = tl.minimum((cell + span) * 128 // GROUP, num_groups - 1)
        at = scales_ptr + band.to(tl.int64) * num_groups + group + 0 * rows
    else:
        at = scales_ptr + band.to(tl.int64) * 32 + rows + 0 * span
    values = tl.load(at)
    wide = tl.broadcast_to(values[:, :, None], [32, COUNT, CELLS * 128 // COUNT])
    return wide.reshape([32, CELLS * 128])


@jit
def _scaled(number, word, least, FORM: tl.constexpr, MINIMA: tl.constexpr):
    if FORM == "int4":
        bits = word.to(tl.int32, bitcast=True)
        number = (number - (bits & 15).to(tl.float32)) * (bits & -16).to(tl.float32, bitcast=True)
    else:
        number = number * word
    return number + least if MINIMA else number


@jit
def coded_tile(
    cells_ptr, words_ptr, scales_ptr, minima_ptr, band, cell, num_cells, num_groups,
    FORM: tl.constexpr, GROUP: tl.constexpr, SPANS: tl.constexpr, MINIMA: tl.constexpr, BY_BAND: tl.constexpr,
    CELL_BYTES: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """A tile of W in float32, 32 rows and CELLS times 128 columns; `minima_ptr` may point to tables."""
    CODE_BYTES: tl.constexpr = (
        2048 if FORM == "int4" or FORM == "mxfp4" or (FORM == "lut4" or FORM == "nf4") else 4096
    )
    first = (band.to(tl.int64) * num_cells + cell) * CELL_BYTES
    codes = _codes(cells_ptr, first, FORM, CELLS, CELL_BYTES)
    if FORM == "lut4" or FORM == "nf4":
        own = (band.to(tl.int64) * 32 + tl.arange(0, 32))[:, None] * (16 if FORM == "lut4" else 0)
        number = tl.load(minima_ptr + own + codes.to(tl.int32))
    else:
        number = _number(codes, FORM)
    word = _of_groups(
        words_ptr, scales_ptr, band, cell, first + CODE_BYTES, num_cells, num_groups,
        GROUP, SPANS, BY_BAND, CELLS, CELL_BYTES,
    )  # fmt: skip
    least = word
    if MINIMA:
        least = _of_groups(
            words_ptr, minima_ptr, band, cell, first + CODE_BYTES + SPANS * 128, num_cells, num_groups,
            GROUP, SPANS, BY_BAND, CELLS, CELL_BYTES,
        )  # fmt: skip
    return _scaled(number, word, least, FORM, MINIMA)


@jit
def expand_kernel(
    cells_ptr, words_ptr, scales_ptr, minima_ptr, out_ptr, N, K, num_cells, num_groups,
    FORM: tl.constexpr, GROUP: tl.constexpr, SPANS: tl.constexpr, MINIMA: tl.constexpr, BY_BAND: tl.constexpr,
    CELL_BYTES: tl.constexpr,
    RAW: tl.constexpr,  # codes alone
):  # fmt: skip
    band, cell = tl.program_id(0), tl.program_id(1)
    rows = (band * 32 + tl.arange(0, 32))[:, None]
    columns = (cell * 128 + tl.arange(0, 128))[None, :]
    if RAW:
        tile = _codes(cells_ptr, (band.to(tl.int64) * num_cells + cell) * CELL_BYTES, FORM, 1, CELL_BYTES)
    else:
        tile = coded_tile(
            cells_ptr, words_ptr, scales_ptr, minima_ptr, band, cell, num_cells, num_groups,
            FORM, GROUP, SPANS, MINIMA, BY_BAND, CELL_BYTES, 1,
        )  # fmt: skip
    at = out_ptr + rows.to(tl.int64) * K + columns
    tl.store(at, tile.to(out_ptr.dtype.element_ty), mask=(rows < N) & (columns < K))


@jit
def lookup_kernel(
    ids_ptr, cells_ptr, words_ptr, scales_ptr, minima_ptr, out_ptr, K, num_cells, num_groups,
    FORM: tl.constexpr, GROUP: tl.constexpr, SPANS: tl.constexpr, MINIMA: tl.constexpr, BY_BAND: tl.constexpr,
    CELL_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.load(ids_ptr + tl.program_id(0)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < K
    band, block, upper, g = row // 32, row // 16 % 2, row // 8 % 2, row % 8
    first = (band * num_cells + columns // 128) * CELL_BYTES
    in_lane = g * 64 + columns // 2 % 4 * 16
    if FORM == "lut4" or FORM == "nf4":
        inside = (columns // 64 % 2 * 2 + block) * 512 + in_lane
        inside += columns // 16 % 4 * 4 + upper * 2 + columns // 8 % 2
        byte = tl.load(cells_ptr + first + inside, mask=is_column, other=0)
        byte = (byte >> (columns % 2 * 4).to(tl.uint8)) & 15
    elif FORM == "int4" or FORM == "mxfp4":
        inside = (columns // 64 % 2 * 2 + block) * 512 + in_lane
        inside += columns // 16 % 4 * 4 + columns % 2 * 2 + columns // 8 % 2
        byte = tl.load(cells_ptr + first + inside, mask=is_column, other=0)
        byte = (byte >> (upper * 4).to(tl.uint8)) & 15
    else:
        inside = (columns // 64 % 2 * 2 + block) * 1024 + columns // 32 % 2 * 512 + in_lane
        inside += columns // 16 % 2 * 8 + columns // 8 % 2 * 4 + columns % 2 * 2
        if FORM == "fp8":
            low = tl.load(cells_ptr + first + inside, mask=is_column, other=0)
            high = tl.load(cells_ptr + first + inside + 1, mask=is_column, other=0)
            one = (high & 0x80) | ((high & 0x07) << 4) | (low >> 4)
            two = ((high & 0x08) << 4) | (high & 0x70) | (low & 0x0F)
            byte = tl.where(upper == 0, one, two)
        else:
            byte = tl.load(cells_ptr + first + inside + upper, mask=is_column, other=0)
    CODE_BYTES: tl.constexpr = (
        2048 if FORM == "int4" or FORM == "mxfp4" or (FORM == "lut4" or FORM == "nf4") else 4096
    )
    if SPANS:
        where = words_ptr + (first + CODE_BYTES) // 4 + columns % 128 // (128 // SPANS) * 32 + row % 32
        least_at = where + SPANS * 32
    else:
        index = band * 32 + row % 32 + columns * 0
        if BY_BAND:
            index = band * num_groups + tl.minimum(columns // GROUP, num_groups - 1)
        where, least_at = scales_ptr + index, minima_ptr + index
    word = tl.load(where, mask=is_column, other=0.0)
    least = tl.load(least_at, mask=is_column, other=0.0) if MINIMA else word
    if FORM == "lut4" or FORM == "nf4":
        number = tl.load(minima_ptr + row * (16 if FORM == "lut4" else 0) + byte.to(tl.int32)) * word
    else:
        number = _scaled(_number(byte, FORM), word, least, FORM, MINIMA)
    at_out = out_ptr + tl.program_id(0).to(tl.int64) * K + columns
    tl.store(at_out, number.to(out_ptr.dtype.element_ty), mask=is_column)


@jit_for_any("M")
def coded_skinny_kernel(
    x_ptr, cells_ptr, words_ptr, scales_ptr, minima_ptr, bias_ptr, y_ptr, M, x_row_stride, N, K,
    num_cells, num_groups,
    FORM: tl.constexpr, GROUP: tl.constexpr, SPANS: tl.constexpr, MINIMA: tl.constexpr, BY_BAND: tl.constexpr,
    CELL_BYTES: tl.constexpr, BIAS: tl.constexpr,
    WIDEN: tl.constexpr,  # Triton's interpreter cannot multiply matrices of bfloat16
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    band = tl.program_id(0)
    tokens = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
    x_rows = x_ptr + tl.minimum(tokens, M - 1).to(tl.int64) * x_row_stride
    total = tl.zeros([32, BLOCK_M], tl.float32)
    for cell in range(num_cells):
        columns = (cell * 128 + tl.arange(0, 128))[:, None]
        x = tl.load(x_rows + columns, mask=columns < K, other=0.0)
        w = coded_tile(
            cells_ptr, words_ptr, scales_ptr, minima_ptr, band, cell, num_cells, num_groups,
            FORM, GROUP, SPANS, MINIMA, BY_BAND, CELL_BYTES, 1,
        ).to(x_ptr.dtype.element_ty)  # fmt: skip
        if WIDEN:
            w, x = w.to(tl.float32), x.to(tl.float32)
        total = tl.dot(w, x, total, input_precision="ieee")
    rows = (band * 32 + tl.arange(0, 32))[:, None]
    if BIAS:
        total += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + tokens.to(tl.int64) * N + rows
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=(rows < N) & (tokens < M))


@jit
def quantize_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, x_row_stride, K,
    TOP: tl.constexpr,  # largest code: 448 in e4m3, 127 in int8
    AS_CELLS: tl.constexpr,  # True: columns in the order of cells
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantize rows, with one scale per row; the scale of a row with a NaN is NaN."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_row_stride + column, mask=column < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x)), 1e-12) / (TOP * 1.0)
    num_lost = tl.max((x != x).to(tl.int32))  # NaN, which a maximum ignores
    tl.store(scales_ptr + row, tl.where(num_lost > 0, float("nan"), scale))
    number = tl.minimum(tl.maximum(x / scale, TOP * -1.0), TOP * 1.0)
    if TOP == 127:
        number = tl.where(x == x, (number + 12582912.0) - 12582912.0, 0.0)  # 1.5 * 2^23: rounds to an integer
    code = number.to(codes_ptr.dtype.element_ty)
    if AS_CELLS:  # swap the axes `column + 8` and t in each 16 columns
        axes = tl.reshape(code.to(tl.uint8, bitcast=True), (BLOCK // 16, 2, 4, 2))
        in_order = tl.reshape(tl.permute(axes, (0, 2, 1, 3)), (BLOCK,))
        code = in_order.to(codes_ptr.dtype.element_ty, bitcast=True)
    tl.store(codes_ptr + row * K + column, code, mask=column < K)


def quantize_rows(
    x_MK: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, as_cells: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize tokens to FP8 or int8, with one scale per token, [M, 1].

    With `as_cells`, each 16 columns are in the order in which lanes hold 8-bit codes, four at a time.
    """
    (M, K), device = x_MK.shape, x_MK.device
    codes_MK = torch.empty((M, K), dtype=dtype, device=device)
    scales_M1 = torch.empty((M, 1), dtype=torch.float32, device=device)
    launch_triton(
        quantize_rows_kernel, (M,), (x_MK, codes_MK, scales_M1), (x_MK.stride(0), K),
        TOP=127 if dtype is torch.int8 else 448, AS_CELLS=as_cells, BLOCK=next_power_of_two(K),
        num_warps=8 if K <= 8192 else 16, **launch_options(device),
    )  # fmt: skip
    return codes_MK, scales_M1


@jit
def gather_columns_kernel(
    x_ptr, order_ptr, out_ptr, x_row_stride, K, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(order_ptr + column, mask=column < K, other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_row_stride + source, mask=column < K, other=0.0)
    tl.store(out_ptr + row * K + column, x, mask=column < K)


def gather_columns_reference(x_MK: torch.Tensor, order_K: torch.Tensor) -> torch.Tensor:
    """Reorder the columns of tokens, by PyTorch."""
    return x_MK.index_select(1, order_K)


def gather_columns(x_MK: torch.Tensor, order_K: torch.Tensor) -> torch.Tensor:
    """Reorder the columns of tokens; `order_K` is int32."""
    M, K = x_MK.shape
    if not use_triton(x_MK) or x_MK.stride(1) != 1 or not M:
        return gather_columns_reference(x_MK, order_K)
    out_MK = torch.empty((M, K), dtype=x_MK.dtype, device=x_MK.device)
    launch_triton(
        gather_columns_kernel,
        (M, -(-K // 1024)),
        (x_MK, order_K, out_MK),
        (x_MK.stride(0), K),
        BLOCK=1024,
        **launch_options(x_MK.device),
    )
    return out_MK


@jit
def scale_sums_kernel(
    sums_ptr, token_scales_ptr, row_scales_ptr, bias_ptr, y_ptr, N, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """Multiply integer sums [M, N] by the scales of their token and of their row of W."""
    token, rows = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(sums_ptr + token * N + rows, mask=rows < N, other=0).to(tl.float32)
    y = y * tl.load(token_scales_ptr + token) * tl.load(row_scales_ptr + rows, mask=rows < N, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * N + rows, y.to(y_ptr.dtype.element_ty), mask=rows < N)


@jit_for_any("M")
def quantize_blocks_kernel(x_ptr, codes_ptr, scales_ptr, M, x_row_stride, K, BLOCKS: tl.constexpr):
    """Quantize rows to e4m3, with scales [K / 128, M] per 128 columns; the scale of a NaN is NaN."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS
    blocks = first + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + row * x_row_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-12) / 448.0
    kept = tl.where(tl.max((x != x).to(tl.int32), 1) > 0, float("nan"), scale)
    tl.store(scales_ptr + blocks.to(tl.int64) * M + row, kept, mask=blocks * 128 < K)
    code = tl.minimum(tl.maximum(x / scale[:, None], -448.0), 448.0).to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * K + columns, code, mask=columns < K)
