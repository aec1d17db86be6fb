"""One function per operation of the C library: checks the operands, packs the arguments, runs or records.

Everything is float32 and on the CPU, as the functions that callers import (kernels/*.py, quant/packed.py)
ensure. The formats below must match the structs of csrc/ field by field: q is a pointer or an integer, d a
double.

Shapes:  T tokens, D hidden size, F intermediate size, N query heads, G kv heads, H head size, R = H / 2.
"""

from __future__ import annotations

import struct

import torch

from infer.kernels.cpu.library import MXFP4, Library
from infer.kernels.cpu.program import PER_ITEM, PER_ROW, empty, run_or_record
from infer.kernels.elementwise.kv_codes import KVScales

GROUP = 32  # weights that share a scale
# code bits -> bytes per group: a scale, or a scale and a minimum, or two scales (csrc/linear.h)
SCALE_BYTES = {8: 2, 6: 4, 5: 4, 4: 4}
TILE = 16  # rows of a matrix that are packed together
MAX_HEAD = 512  # most channels of a head in attention.c
EXACT_DIGITS, FAST_DIGITS = 2, 1  # 8-bit digits of a quantised activation (csrc/linear.h)
MAX_LIKELY = 4096  # most ids of a row that may be drawn in sampling.c
ITEM_TOKENS = 16  # tokens of a prompt that attend together
SEGMENT = 512  # positions that attention.c sums up before it merges them with earlier ones

_CHUNK_BYTES = 1 << 17  # bytes of weights in one chunk: half of a small L2 cache
_CHUNKS_PER_THREAD = 4  # fewest chunks of a matrix per thread: more chunks balance better
_CHUNK_NUMBERS = 1 << 13  # numbers in one chunk of elementwise work

# The arguments of the operations in csrc, in the order of their structs, which have the names.
_LINEAR = struct.Struct("qqqqqqqqqqqqqqqq")
_PACK = struct.Struct("qqqqqqqqqqq")
_EMBED = struct.Struct("qqqqqqqqq")
_NORM = struct.Struct("qqqqqqqqqqqqddq")
_LAYER_NORM = struct.Struct("qqqqqqqqqqdq")
_SCALE = struct.Struct("qqqqqqqdq")
_GATE = struct.Struct("qqqqqqqq")
_ROPE = struct.Struct("qqqqqqqqqqqqqq")
_WRITE = struct.Struct("qqqqqqqqqqqqqqqq")
_ATTEND = struct.Struct("qqqqqqqqqqqqqqdqqqqdq")
_KV_KINDS = {torch.float32: 0, torch.float8_e4m3fn: 1, torch.int8: 2}
_LIKELY = struct.Struct("qqqqqqqqqqqq")

_ACTIVATION_KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
EMBEDDING_KINDS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 17}


def _fill(form: struct.Struct, *fields: torch.Tensor | float | None) -> bytes:
    """Pack the arguments of an operation as its struct: tensors as addresses, None as NULL."""
    return form.pack(*(x.data_ptr() if isinstance(x, torch.Tensor) else x or 0 for x in fields))


def _rows_per_chunk(row_size: int) -> int:
    return max(1, _CHUNK_NUMBERS // max(1, row_size))


def _run_rows(
    library: Library,
    run: int,
    form: struct.Struct,
    row_size: int,
    num_rows: int,
    *fields: torch.Tensor | float | None,
) -> None:
    """Run an operation in chunks of rows: its struct begins with all rows and ends with rows per chunk."""
    rows_per_chunk = _rows_per_chunk(row_size)
    args = _fill(form, num_rows, *fields, rows_per_chunk)
    run_or_record(library, run, args, num_rows=num_rows, kind=PER_ROW, rows_per_chunk=rows_per_chunk)


def packed_bytes(num_rows: int, row_size: int, bits: int) -> tuple[int, int]:
    """Bytes of the integers and of the scales, minima included, of a packed matrix."""
    cells = -(-num_rows // TILE) * -(-row_size // GROUP)
    return cells * TILE * GROUP * bits // 8, cells * TILE * SCALE_BYTES[bits]


def linear(
    library: Library,
    x_MK: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    bias_N: torch.Tensor | None,
    *,
    num_rows: int,
    bits: int,
    digits: int = EXACT_DIGITS,
    order: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x Wᵀ + b with W packed, [M, N]; `num_rows` is N, `digits` the precision of activations.

    `out` is a view of a wider result: the columns to fill.

    `bits` are 8, 6, 5, 4, or `MXFP4` for 4-bit floats. With an `order`, int32 [K], column k of W belongs to
    column order[k] of x.
    """
    kernel, bits, (M, K) = library.linear[bits], 4 if bits == MXFP4 else bits, x_MK.shape
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    y_MN = empty((M, num_rows)) if out is None else out
    scratch = empty((library.linear_scratch(M, K, digits),), torch.uint8)
    tile_bytes = TILE * -(-K // GROUP) * GROUP * bits // 8
    num_tiles = -(-num_rows // TILE)
    num_shares = library.num_threads * _CHUNKS_PER_THREAD
    tiles_per_chunk = max(1, min(_CHUNK_BYTES // tile_bytes, num_tiles // num_shares))
    rows_per_chunk = _rows_per_chunk(K)
    args = _fill(
        _LINEAR, M, x_MK, x_MK.stride(0), y_MN, y_MN.stride(0), data, scales, bias_N, scratch, num_rows, K,
        bits, digits, tiles_per_chunk, rows_per_chunk, order,
    )  # fmt: skip
    run_or_record(library, library.quantize, args, num_rows=M, kind=PER_ROW, rows_per_chunk=rows_per_chunk)
    run_or_record(library, kernel, args, num_rows=M, chunks=-(-num_tiles // tiles_per_chunk))
    return y_MN


def pack(
    library: Library, rows: torch.Tensor, data: torch.Tensor, scales: torch.Tensor, *, first: int, bits: int
) -> None:
    """Quantise float32 rows and store them at row `first` of a packed matrix."""
    assert rows.is_contiguous() and rows.dtype is torch.float32, (rows.dtype, rows.stride())
    num_rows, size = rows.shape
    fields = rows, None, None, None, size, first, data, scales, bits
    _run_rows(library, library.pack, _PACK, size, num_rows, *fields)


def pack_integers(
    library: Library,
    integers: torch.Tensor,
    group_scales: torch.Tensor,
    group_minima: torch.Tensor | None,
    data: torch.Tensor,
    scales: torch.Tensor,
    *,
    first: int,
    bits: int,
) -> None:
    """Store already quantised rows at row `first`: int8 [rows, K] and float16 scales [rows, K / 32].

    With 6 bits, the minima are the scales of the second halves of groups.
    """
    assert (group_minima is not None) == (bits != 8), bits
    assert integers.is_contiguous() and integers.dtype is torch.int8, (integers.dtype, integers.stride())
    for halves in (group_scales, group_minima):
        assert halves is None or (halves.is_contiguous() and halves.dtype is torch.float16), halves.dtype
    num_rows, size = integers.shape
    fields = None, integers, group_scales, group_minima, size, first, data, scales, bits
    _run_rows(library, library.pack, _PACK, size, num_rows, *fields)


def embed(
    library: Library,
    ids_T: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor | None,
    *,
    num_rows: int,
    size: int,
    kind: int,
) -> torch.Tensor:
    """Look up rows as float32, [T, D]; `kind`: from EMBEDDING_KINDS, or the bits of a packed matrix."""
    assert ids_T.dtype is torch.int64 and ids_T.is_contiguous(), (ids_T.dtype, ids_T.stride())
    T = ids_T.shape[0]
    out_TD = empty((T, size))
    _run_rows(library, library.embed, _EMBED, size, T, ids_T, out_TD, size, num_rows, data, scales, kind)
    return out_TD


def rms_norm(
    library: Library,
    x: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    offset: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMS norm of the last dimension of [T, D] or [T, N, D], in new memory or in `out`."""
    T, N, D = (x.shape[0], 1, x.shape[1]) if x.dim() == 2 else x.shape
    y = empty(tuple(x.shape)) if out is None else out
    head_stride = x.stride(1) if x.dim() == 3 else 0
    fields = x, x.stride(0), head_stride, None, 0, weight_D, y, y.stride(0), None, N, D, eps, offset
    _run_rows(library, library.rms_norm, _NORM, N * D, T, *fields)
    return y


def add_rms_norm(
    library: Library,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of x + residual: the normalised sum and the sum."""
    T, D = x_TD.shape
    y_TD, sum_TD = empty((T, D)), empty((T, D))
    added = x_TD, x_TD.stride(0), 0, residual_TD, residual_TD.stride(0)
    _run_rows(library, library.rms_norm, _NORM, D, T, *added, weight_D, y_TD, D, sum_TD, 1, D, eps, offset)
    return y_TD, sum_TD


def layer_norm(
    library: Library,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm of x + residual: the normalised sum and the sum."""
    T, D = x_TD.shape
    y_TD, sum_TD = empty((T, D)), x_TD if residual_TD is None else empty((T, D))
    added = x_TD, x_TD.stride(0), residual_TD, 0 if residual_TD is None else residual_TD.stride(0)
    _run_rows(library, library.layer_norm, _LAYER_NORM, D, T, *added, weight_D, bias_D, y_TD, sum_TD, D, eps)
    return y_TD, sum_TD


def scale(
    library: Library, x_TD: torch.Tensor, factor: float, added_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply every element by `factor`, rounded to float32 first, and add another tensor if given."""
    T, D = x_TD.shape
    y_TD = empty((T, D))
    added = added_TD, 0 if added_TD is None else added_TD.stride(0)
    _run_rows(library, library.scale, _SCALE, D, T, x_TD, x_TD.stride(0), *added, y_TD, D, factor)
    return y_TD


def activation(library: Library, x: torch.Tensor, name: str, *, is_gated: bool = False) -> torch.Tensor:
    """Return act(x) for [T, F], or act(gate) * up for gates and ups in [T, 2F]."""
    T, size = x.shape[0], x.shape[1] // (2 if is_gated else 1)
    y_TF = empty((T, size))
    columns = min(size, 1024)
    args = _fill(_GATE, T, x, x.stride(0), y_TF, size, is_gated, _ACTIVATION_KINDS[name], columns)
    run_or_record(library, library.activation, args, num_rows=T, kind=PER_ROW, chunks=-(-size // columns))
    return y_TF


def rope(
    library: Library,
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys to their positions."""
    (T, N, H), G = q_TNH.shape, k_TGH.shape[1]
    q_out, k_out = empty((T, N, H)), empty((T, G, H))
    given = q_TNH, k_TGH, q_TNH.stride(0), k_TGH.stride(0), cos_PR, sin_PR, positions_T
    _run_rows(library, library.rope, _ROPE, (N + G) * H, T, *given, q_out, k_out, N, G, H // 2)
    return q_out, k_out


def write_cache(
    library: Library,
    k_TGH: torch.Tensor,
    v_TGH: torch.Tensor,
    keys_PGH: torch.Tensor,
    values_PGH: torch.Tensor,
    slots_T: torch.Tensor,
    scales: KVScales | None = None,
    fixed: torch.Tensor | None = None,
) -> None:
    """Write keys and values to their slots; with scales, as codes (kv_codes.h), whose scales may be fixed."""
    T, G, H = k_TGH.shape
    given = k_TGH, v_TGH, k_TGH.stride(0), v_TGH.stride(0), keys_PGH, values_PGH, *(scales or (None, None))
    how = slots_T, fixed, _KV_KINDS[keys_PGH.dtype], G, H, 0 if scales is None else scales.keys.shape[2]
    _run_rows(library, library.write_cache, _WRITE, G * H, T, *given, *how)


def attend(
    library: Library,
    q_TNH: torch.Tensor,
    keys_PGH: torch.Tensor,
    values_PGH: torch.Tensor,
    table_RB: torch.Tensor,
    items_I6: torch.Tensor,
    *,
    block_size: int,
    scale: float,
    window: int | None,
    parts: torch.Tensor | None = None,
    scales: KVScales | None = None,
    softcap: float | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every item over the paged cache; csrc/attention.c defines items.

    Items of single segments need `parts`, of `parts_shape`: zeros before the first call, reusable afterwards.
    """
    assert items_I6.shape[1] == 6 and items_I6.is_contiguous(), (items_I6.shape, items_I6.stride())
    T, N, H = q_TNH.shape
    G = keys_PGH.shape[1]
    out_TNH = empty((T, N, H))
    args = _fill(
        _ATTEND, T, q_TNH, q_TNH.stride(0), out_TNH, keys_PGH, values_PGH, table_RB, table_RB.stride(0),
        items_I6, N, G, H, block_size, window, scale, parts, _KV_KINDS[keys_PGH.dtype],
        *(scales or (None, None)), softcap, sinks_N,
    )  # fmt: skip
    run_or_record(
        library, library.attend, args, num_rows=T, kind=PER_ITEM, chunks=G, num_items=items_I6.shape[0]
    )
    return out_TNH


def parts_shape(num_parts: int, N: int, G: int, H: int) -> tuple[int, int]:
    """The shape of the results of single segments: H + 2 numbers per query head, a counter per kv head."""
    return num_parts, N * (H + 2) + G


def can_split(N: int, G: int, H: int) -> bool:
    """True if attention.c can process all query heads of a kv head at once, as single segments require."""
    return N // G * (-(-H // 16) * 16) <= 8192


def likely(
    library: Library,
    logits_SV: torch.Tensor,
    best_S: torch.Tensor,
    peak_S: torch.Tensor,
    temperature_S: torch.Tensor,
    keys_S2: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the ids of each row that can be drawn and their scaled logits, [S, K]; None: too many ids.

    Ids are in ascending order; a row is padded with ids whose logit is -inf.
    """
    num_rows, vocab_size = logits_SV.shape
    if logits_SV.stride(1) != 1:
        logits_SV = logits_SV.contiguous()
    ids_SK = torch.empty(num_rows, MAX_LIKELY, dtype=torch.int32)
    values_SK = torch.empty(num_rows, MAX_LIKELY)
    counts_S = torch.empty(num_rows, dtype=torch.int64)
    args = _fill(
        _LIKELY, num_rows, logits_SV, logits_SV.stride(0), vocab_size, best_S, peak_S, temperature_S, keys_S2,
        MAX_LIKELY, ids_SK, values_SK, counts_S,
    )  # fmt: skip
    library.run_one(library.likely, num_rows, args)
    width = max(1, *counts_S.tolist())  # a row with a NaN may have none
    return (ids_SK[:, :width], values_SK[:, :width]) if width <= MAX_LIKELY else None
