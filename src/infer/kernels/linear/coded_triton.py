"""Coded weights (coded.py) in Triton: unpacked to plain rows, looked up, and multiplied without wgmma.cu.

    expand_kernel   W, or its codes alone, as plain rows: what the libraries' products of many tokens read
    lookup_kernel   some rows of W, for a tied embedding
    skinny_kernel   y = x WT + bias of few tokens on other GPUs, unpacked tile by tile; weights are rounded
                    to the type of x, as a dense matrix of that type has them

A tile is read in the order in which it lies, and its axes are put into the order of rows and columns in
registers; only a lookup computes where each code is.

Shapes:  M tokens, N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

from infer.kernels.runtime.dispatch import jit, jit_for_any, tl


@jit
def _number(byte, FORM: tl.constexpr):
    """What a code of 8 bits stands for; fp8 has the exponent of float16 less 8."""
    if FORM == "fp8":
        wide = byte.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif FORM == "int8":
        return (byte ^ 0x80).to(tl.float32) - 128.0
    return byte.to(tl.float32)


@jit
def _codes(codes_ptr, band, chunk, num_chunks, FORM: tl.constexpr, CHUNKS: tl.constexpr):
    """The bytes, one for each code, of 32 rows and CHUNKS times 64 columns from `chunk` on."""
    if FORM == "int4":
        at = (band * num_chunks + chunk).to(tl.int64) * 1024 + tl.arange(0, CHUNKS * 1024)
        both = tl.load(codes_ptr + at, mask=at < (band + 1).to(tl.int64) * num_chunks * 1024, other=0)
        axes = tl.join(both & 15, both >> 4).reshape([CHUNKS, 2, 8, 4, 4, 2, 2, 2])
        # chunk, block, g, t, 16 columns, column + 1, column + 8, row + 8
        ordered = axes.permute([1, 7, 2, 0, 4, 6, 3, 5])
    else:
        at = (band * num_chunks + chunk).to(tl.int64) * 2048 + tl.arange(0, CHUNKS * 2048)
        both = tl.load(codes_ptr + at, mask=at < (band + 1).to(tl.int64) * num_chunks * 2048, other=0)
        axes = both.reshape([CHUNKS, 2, 2, 8, 4, 2, 2, 2, 2])
        # chunk, block, half, g, t, 16 columns, column + 8, column + 1, row + 8
        ordered = axes.permute([1, 8, 3, 0, 2, 5, 6, 4, 7])
    return ordered.reshape([32, CHUNKS * 64])


@jit
def _of_groups(
    ptr, band, rows, column, num_groups, GROUP: tl.constexpr, BY_BAND: tl.constexpr, COLUMNS: tl.constexpr
):
    """Scales or minima of a tile, as bits of float32: [rows, COLUMNS]."""
    COUNT: tl.constexpr = 1 if GROUP == 0 or GROUP >= COLUMNS else COLUMNS // GROUP
    group = tl.arange(0, COUNT) + (0 if GROUP == 0 else column // GROUP)
    at = (band * num_groups + tl.minimum(group, num_groups - 1)).to(tl.int64)[None, :]
    values = tl.load(ptr + (at + 0 * rows[:, None] if BY_BAND else at * 32 + rows[:, None]))
    wide = tl.broadcast_to(values[:, :, None], [rows.shape[0], COUNT, COLUMNS // COUNT])
    return wide.reshape([rows.shape[0], COLUMNS])


@jit
def _scaled(number, word, least, FORM: tl.constexpr, MINIMA: tl.constexpr):
    if FORM == "int4":
        bits = word.to(tl.int32, bitcast=True)
        number = (number - (bits & 15).to(tl.float32)) * (bits & -16).to(tl.float32, bitcast=True)
    else:
        number = number * word
    return number + least if MINIMA else number


@jit
def _tile(
    codes_ptr, scales_ptr, minima_ptr, band, chunk, num_chunks, num_groups,
    FORM: tl.constexpr, GROUP: tl.constexpr, MINIMA: tl.constexpr, BY_BAND: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """32 rows and CHUNKS times 64 columns of W in float32."""
    rows = tl.arange(0, 32)
    number = _number(_codes(codes_ptr, band, chunk, num_chunks, FORM, CHUNKS), FORM)
    word = _of_groups(scales_ptr, band, rows, chunk * 64, num_groups, GROUP, BY_BAND, CHUNKS * 64)
    least = word
    if MINIMA:
        least = _of_groups(minima_ptr, band, rows, chunk * 64, num_groups, GROUP, BY_BAND, CHUNKS * 64)
    return _scaled(number, word, least, FORM, MINIMA)


@jit
def expand_kernel(
    codes_ptr, scales_ptr, minima_ptr, out_ptr, N, K, num_chunks, num_groups,
    FORM: tl.constexpr, GROUP: tl.constexpr, MINIMA: tl.constexpr, BY_BAND: tl.constexpr,
    RAW: tl.constexpr,  # codes alone
    CHUNKS: tl.constexpr,
):  # fmt: skip
    band, chunk = tl.program_id(0), tl.program_id(1) * CHUNKS
    rows = (band * 32 + tl.arange(0, 32))[:, None]
    columns = (chunk * 64 + tl.arange(0, CHUNKS * 64))[None, :]
    if RAW:
        tile = _codes(codes_ptr, band, chunk, num_chunks, FORM, CHUNKS)
    else:
        tile = _tile(
            codes_ptr, scales_ptr, minima_ptr, band, chunk, num_chunks, num_groups,
            FORM, GROUP, MINIMA, BY_BAND, CHUNKS,
        )  # fmt: skip
    at = out_ptr + rows.to(tl.int64) * K + columns
    tl.store(at, tile.to(out_ptr.dtype.element_ty), mask=(rows < N) & (columns < K))


@jit
def lookup_kernel(
    ids_ptr, codes_ptr, scales_ptr, minima_ptr, out_ptr, K, num_chunks, num_groups,
    FORM: tl.constexpr, GROUP: tl.constexpr, MINIMA: tl.constexpr, BY_BAND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.load(ids_ptr + tl.program_id(0)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < K
    band, block, upper, g = row // 32, row // 16 % 2, row // 8 % 2, row % 8
    in_lane = g * 64 + columns // 2 % 4 * 16
    first = (band * num_chunks + columns // 64) * 2 + block
    if FORM == "int4":
        at = first * 512 + in_lane + columns // 16 % 4 * 4 + columns % 2 * 2 + columns // 8 % 2
    else:
        at = first * 1024 + columns // 32 % 2 * 512 + in_lane
        at += columns // 16 % 2 * 8 + columns // 8 % 2 * 4 + columns % 2 * 2 + upper
    byte = tl.load(codes_ptr + at, mask=is_column, other=0)
    if FORM == "int4":
        byte = (byte >> (upper * 4).to(tl.uint8)) & 15
    group = columns * 0 if GROUP == 0 else columns // GROUP
    where = band * num_groups + tl.minimum(group, num_groups - 1)
    if not BY_BAND:
        where = where * 32 + row % 32
    word = tl.load(scales_ptr + where)
    least = tl.load(minima_ptr + where) if MINIMA else word
    number = _scaled(_number(byte, FORM), word, least, FORM, MINIMA)
    at_out = out_ptr + tl.program_id(0).to(tl.int64) * K + columns
    tl.store(at_out, number.to(out_ptr.dtype.element_ty), mask=is_column)


@jit_for_any("M")
def coded_skinny_kernel(
    x_ptr, codes_ptr, scales_ptr, minima_ptr, bias_ptr, y_ptr, x_row_stride, M, N, K, num_chunks, num_groups,
    FORM: tl.constexpr, GROUP: tl.constexpr, MINIMA: tl.constexpr, BY_BAND: tl.constexpr, BIAS: tl.constexpr,
    WIDEN: tl.constexpr,  # Triton's interpreter cannot multiply matrices of bfloat16
    BLOCK_M: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    band = tl.program_id(0)
    tokens = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
    x_rows = x_ptr + tl.minimum(tokens, M - 1).to(tl.int64) * x_row_stride
    total = tl.zeros([32, BLOCK_M], tl.float32)
    for chunk in range(0, num_chunks, CHUNKS):
        columns = (chunk * 64 + tl.arange(0, CHUNKS * 64))[:, None]
        x = tl.load(x_rows + columns, mask=columns < K, other=0.0)
        w = _tile(
            codes_ptr, scales_ptr, minima_ptr, band, chunk, num_chunks, num_groups,
            FORM, GROUP, MINIMA, BY_BAND, CHUNKS,
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
def quantize_rows_kernel(x_ptr, codes_ptr, scales_ptr, x_row_stride, K, BLOCK: tl.constexpr):
    """Rows as e4m3 with a scale for each of them."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(x))
    scale = tl.maximum(tl.max(most), 1e-12) / 448.0
    tl.store(scales_ptr + row, scale)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
        code = tl.minimum(tl.maximum(x / scale, -448.0), 448.0).to(codes_ptr.dtype.element_ty)
        tl.store(codes_ptr + row * K + columns, code, mask=columns < K)
