"""The published formats of quantized matrices in safetensors: a table with one row each.

A format is recognised by the tensors of a module, its *leaves*, and by their shapes and dtypes. A config is
only used for what the tensors do not show (`Settings`: GPTQ's version, group sizes that do not divide a row).
`measure` reads a matrix's layout from headers, and refuses leaves that do not fit together. `open` makes the
function that reads rows, on the device of their scales (the codes of a large matrix may be on the host).


    gptq                 qweight [K·b/32, N]  qzeros [G, N·b/32]  scales [G, N]  g_idx [K]
    awq                  qweight [K, N/8]     qzeros [G, N/8]     scales [G, N]
    compressed-tensors   weight_packed [N, K·b/32]  weight_scale [N, G]  weight_zero_point [N·b/32, G]
                         weight_shape [2]  weight_g_idx [K]
    fp8, int8            weight [N, K]  weight_scale or weight_scale_inv: one, [N, 1], [N, G] or by blocks
    bitsandbytes         weight [N·K/2, 1]  weight.absmax  weight.quant_map  weight.quant_state.…
                         weight [N, K]  SCB [N]
    squeezellm           qweight [K·b/32, N]  lookup_table [N, 2^b]  rows [N+1]  cols  vals

Scales of activations (`input_scale`) are checked but not used: if tokens are rounded, each has its own scale.

Shapes:  N rows of W (out), K columns (in), G groups of a row, b bits of a code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from infer.loader.formats.axes import COLUMNS, ROWS, WHOLE, Axes, Axis, groups, words
from infer.loader.formats.bit_stream import unpack
from infer.loader.formats.checkpoint import StoredTensor
from infer.loader.formats.stored_module import Layout, ReadRows, StoredFormat, StoredModule, Tensors
from infer.quant.coded import CodedRows, Outliers, StoredCodes

MAX_STATE_BYTES = 1 << 16  # limit of the JSON next to a matrix of bitsandbytes
CODES = {"weight", "qweight", "weight_packed"}  # names of the leaf that has a matrix's codes
_SCALES = ("F16", "BF16", "F32")
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word that holds column 0, 1, ..., 7


def _has_weight_of(types: tuple[str, ...]) -> Callable[[Mapping[str, StoredTensor]], bool]:
    return lambda leaves: leaves["weight"].type_name in types


def _last(leaves: Mapping[str, StoredTensor], leaf: str) -> int:
    return (leaves[leaf].shape or (0,))[-1]


# -- GPTQ ---------------------------------------------------------------------------------------------


def _measure_gptq(module: StoredModule) -> Layout:
    num_groups, num_rows = module.shape("scales", 2)
    bits, rest = divmod(32 * module.shape("qzeros", 2)[1], num_rows)
    if rest or bits not in (2, 3, 4, 8):
        held = list(module.leaves["qzeros"].shape)
        module.fail(f"qzeros is {held} for {num_rows} rows, which is not GPTQ in 2, 3, 4 or 8 bits")
    num_words = module.shape("qweight", 2)[0]
    size = module.shape("g_idx", 1)[0] if "g_idx" in module.leaves else num_words * 32 // bits
    module.check("qweight", (module.words(size, bits, "columns"), num_rows))
    module.check("qzeros", (num_groups, module.words(num_rows, bits, "rows")))
    version = module.settings.raw.get("checkpoint_format")
    if version not in (None, "gptq", "gptq_v2") and not (version == "gptq_p" and bits != 3):
        module.fail(
            f"checkpoint_format is {version!r}; supported: gptq, gptq_v2, and gptq_p in 2, 4 or 8 bits"
        )
    order = module.order("g_idx", module.group_size(size, num_groups, "g_idx"))
    return _integers(num_rows, size, bits, order, has_minima=module.settings.has_minima(bits))


def _open_gptq(module: StoredModule, layout: Layout, tensors: Tensors) -> ReadRows:
    num_rows, size, bits = layout[:3]
    zeros = unpack(tensors["qzeros"], bits, num_rows).T.short()
    middle, settings = 1 << bits - 1, module.settings
    is_constant = bool((zeros == zeros[0, 0]).all()) and int(zeros[0, 0]) in (middle - 1, middle)
    if settings.is_symmetric and not is_constant:
        module.fail(f"the config says sym, but qzeros are neither all {middle - 1} nor all {middle}")
    if is_constant and settings.is_symmetric is not False:
        zeros = torch.full_like(zeros, middle)  # versions are ignored here: some files name the wrong one
    elif not settings.has_true_zeros:
        zeros = zeros + 1 & (1 << bits) - 1  # wraps around: a zero of 0 is stored as all ones
    scales = module.finite("scales", tensors["scales"]).T
    groups = layout.group_size or tensors["g_idx"].long()

    def rows(part: slice) -> CodedRows:
        codes = unpack(tensors["qweight"][:, part].T.to(scales.device), bits, size)
        return CodedRows(codes, bits, scales[part], zeros[part], groups)

    return rows


def _axes_gptq(module: StoredModule, layout: Layout) -> Axes:
    group, bits = groups("columns", layout.group_size, layout.size), layout.bits
    return {
        "qweight": (words("columns", bits), ROWS), "qzeros": (group, words("rows", bits)),
        "scales": (group, ROWS), "g_idx": (COLUMNS,), "lookup_table": (ROWS, WHOLE),
    }  # fmt: skip


# -- AWQ ----------------------------------------------------------------------------------------------


def _measure_awq(module: StoredModule) -> Layout:
    num_groups, num_rows = module.shape("scales", 2)
    size = module.shape("qweight", 2)[0]
    num_words = module.words(num_rows, 4, "rows")
    module.check("qweight", (size, num_words))
    module.check("qzeros", (num_groups, num_words))
    return _integers(num_rows, size, 4, (module.group_size(size, num_groups, ""), ""))


def _open_awq(module: StoredModule, layout: Layout, tensors: Tensors) -> ReadRows:
    scales = module.finite("scales", tensors["scales"]).T
    order = torch.tensor(_AWQ_ORDER, device=scales.device)

    def in_order(words: torch.Tensor) -> torch.Tensor:
        codes = unpack(words, 4, 8 * words.shape[1])
        return codes.view(len(codes), -1, 8)[:, :, order].flatten(1).T

    zeros = in_order(tensors["qzeros"]).short()

    def rows(part: slice) -> CodedRows:
        words = tensors["qweight"][:, part.start // 8 : -(-part.stop // 8)]
        codes = in_order(words.to(scales.device))[: part.stop - part.start].contiguous()
        return CodedRows(codes, 4, scales[part], zeros[part], layout.group_size)

    return rows


def _axes_awq(module: StoredModule, layout: Layout) -> Axes:
    group, eight = groups("columns", layout.group_size, layout.size), words("rows", 4)
    return {"qweight": (COLUMNS, eight), "qzeros": (group, eight), "scales": (group, ROWS)}


# -- compressed-tensors, packed -----------------------------------------------------------------------


def _measure_packed(module: StoredModule) -> Layout:
    num_rows, num_words = module.shape("weight_packed", 2)
    module.check("weight_shape", (2,))
    stored = module.read("weight_shape").tolist()
    size = int(stored[1])
    if stored[0] != num_rows or not 0 < size <= 32 * num_words:
        module.fail(f"weight_shape is {stored}, but weight_packed is {[num_rows, num_words]}")
    fitting = [bits for bits in range(1, 9) if num_words in _word_counts(size, bits)]
    hints = module.settings.hints("num_bits")
    bits = next((bits for bits in [*hints, 4, 8, *fitting] if bits in fitting), None)
    if bits is None:
        module.fail(f"{num_words} words for {size} columns; codes of 1 to 8 bits do not fill them")
    scales = module.shape("weight_scale", 2)
    module.check("weight_scale", (num_rows, scales[1]))
    counts = {(count, scales[1]) for count in (*_word_counts(num_rows, bits), num_rows)}
    module.check("weight_zero_point", *sorted(counts))
    order = module.order("weight_g_idx", module.group_size(size, scales[1], "weight_g_idx"))
    has_minima = bits == 8 and "weight_zero_point" in module.leaves
    return _integers(num_rows, size, bits, order, has_minima=has_minima)


def _word_counts(size: int, bits: int) -> tuple[int, int]:
    """Return the number of words for `size` codes: as a stream, and with only whole codes in a word."""
    return -(-size * bits // 32), -(-size // (32 // bits))


def _open_packed(module: StoredModule, layout: Layout, tensors: Tensors) -> ReadRows:
    num_rows, size, bits = layout[:3]
    middle = 1 << bits - 1
    padded = tensors["weight_packed"].shape[1] != _word_counts(size, bits)[0]
    scales = module.finite("weight_scale", tensors["weight_scale"])
    zeros: torch.Tensor | int = middle  # both codes and zeros are stored with the middle added
    stored = tensors.get("weight_zero_point")
    if stored is not None and stored.dtype is torch.int32:
        zeros = unpack(stored.T, bits, num_rows, padded=padded).T.short()
    elif stored is not None:
        zeros = stored.short() + middle
        if int(zeros.min()) < 0 or int(zeros.max()) >= 2 * middle:
            module.fail(f"weight_zero_point has zeros that are no codes of {bits} bits")
    if isinstance(zeros, torch.Tensor) and zeros.shape != scales.shape:
        module.fail(f"weight_zero_point is {list(zeros.shape)}, weight_scale {list(scales.shape)}")
    groups = layout.group_size or tensors["weight_g_idx"].long()

    def rows(part: slice) -> CodedRows:
        codes = unpack(tensors["weight_packed"][part].to(scales.device), bits, size, padded=padded)
        return CodedRows(codes, bits, scales[part], zeros if isinstance(zeros, int) else zeros[part], groups)

    return rows


def _axes_packed(module: StoredModule, layout: Layout) -> Axes:
    bits, group = layout.bits, groups("columns", layout.group_size, layout.size)
    is_padded = module.leaves["weight_packed"].shape[1] != _word_counts(layout.size, bits)[0]

    def packed(along: str) -> Axis:
        return Axis(along, 32 // bits, unit="word") if is_padded else words(along, bits)

    zeros = module.leaves.get("weight_zero_point")
    is_packed = zeros is not None and zeros.type_name == "I32"
    return {
        "weight_packed": (ROWS, packed("columns")), "weight_scale": (ROWS, group),
        "weight_zero_point": (packed("rows") if is_packed else ROWS, group), "weight_g_idx": (COLUMNS,),
    }  # fmt: skip


# -- numbers of 8 bits: fp8, and the unpacked integers of compressed-tensors ---------------------------


def _scale_leaf(leaves: Mapping[str, Any]) -> str:
    return "weight_scale" if "weight_scale" in leaves else "weight_scale_inv"


def _measure_scaled(module: StoredModule) -> Layout:
    num_rows, size = module.shape("weight", 2)
    if {"weight_scale", "weight_scale_inv"} <= module.leaves.keys():
        module.fail("there are both a weight_scale and a weight_scale_inv")
    leaf = _scale_leaf(module.leaves)
    row_step, group_size = _blocks(module, leaf, num_rows, size)
    kind = {"I8": "int8", "F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}[module.leaves["weight"].type_name]
    if row_step == 1:
        label = _label(kind, group_size, size)
    else:
        label = (
            f"{kind}-tensor"
            if (row_step, group_size) == (num_rows, size)
            else f"{kind}-{row_step}x{group_size}"
        )
    module.check("weight_zero_point", module.leaves[leaf].shape)
    is_integer, has_minima = kind == "int8", "weight_zero_point" in module.leaves
    codes = None
    if is_integer or not has_minima:
        form = {"e4m3": "fp8"}.get(kind, kind)
        codes = StoredCodes(form, size, group_size, has_minima, row_step)
    return Layout(num_rows, size, 8, group_size, label, codes)


def _blocks(module: StoredModule, leaf: str, num_rows: int, size: int) -> tuple[int, int]:
    """Return the numbers of rows and of columns that share a scale, from the shape of the scales."""
    counts = _as_matrix(module.leaves[leaf].shape)
    if counts is None or 0 in counts:
        module.fail(f"{leaf} is {list(module.leaves[leaf].shape)}; one scale, [rows] or a matrix is needed")
    blocks = module.settings.hints("weight_block_size", "block_structure")
    if counts[0] == num_rows and num_rows > 1:
        row_step = 1
    else:
        row_step = module.step(num_rows, counts[0], "rows of scales", blocks[:1], is_block=True)
    hints = [*module.settings.hints("group_size"), *blocks[1:]]
    return row_step, module.step(size, counts[1], "columns of scales", hints, is_block=row_step != 1)


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the shape of scales, [], [1], [N] or [N, G], as rows and columns."""
    if len(shape) > 2:
        return None
    return (shape[0], shape[1]) if len(shape) == 2 else ((shape or (1,))[0], 1)


_NO_NUMBERS = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}  # bits that are all set in NaN


def _open_scaled(module: StoredModule, layout: Layout, tensors: Tensors) -> ReadRows:
    leaf = _scale_leaf(tensors)
    row_step, _ = _blocks(module, leaf, layout.num_rows, layout.size)
    counts = _as_matrix(tuple(tensors[leaf].shape))
    assert counts is not None
    scales = module.finite(leaf, tensors[leaf]).view(counts)  # factors, even if the name ends in "inv"
    zeros = tensors["weight_zero_point"].view(counts).short() if "weight_zero_point" in tensors else None
    for unused in ("input_scale", "activation_scale"):  # scales of activations, only checked
        if unused in tensors:
            module.finite(unused, tensors[unused])

    def rows(part: slice) -> CodedRows:
        codes = tensors["weight"][part].to(scales.device)
        if ones := _NO_NUMBERS.get(codes.dtype):
            magnitudes = codes.view(torch.uint8) & ones
            if bool((magnitudes == ones).any()):  # NaN or infinity; kernels would read them as large numbers
                module.fail("weight has codes that are not finite")
        which = torch.arange(part.start, part.stop, device=codes.device) // row_step
        return CodedRows(codes, 8, scales[which], 0 if zeros is None else zeros[which], layout.group_size)

    return rows


def _axes_scaled(module: StoredModule, layout: Layout) -> Axes:
    leaf, (num_rows, size) = _scale_leaf(module.leaves), layout[:2]
    row_step, group_size = _blocks(module, leaf, num_rows, size)
    block = groups("rows", row_step, num_rows, "block"), groups("columns", group_size, size, "block")
    scales = block[: len(module.leaves[leaf].shape)]
    return {"weight": (ROWS, COLUMNS), leaf: scales, "weight_zero_point": scales}


# -- bitsandbytes -------------------------------------------------------------------------------------

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


class _State(NamedTuple):
    """The content of the JSON stored with a matrix."""

    shape: tuple[int, int]
    block: int  # numbers that share an absmax
    nested_block: int  # absmax values that share a nested absmax; 0: absmax is not quantized
    offset: float  # offset of quantized absmax values


def _state_leaf(leaves: Mapping[str, Any]) -> str:
    return next(leaf for leaf in _STATES if leaf in leaves)


def _read_state(module: StoredModule) -> _State:
    leaf = _state_leaf(module.leaves)
    if module.shape(leaf, 1)[0] > MAX_STATE_BYTES:
        module.fail(f"{leaf} has more than {MAX_STATE_BYTES} bytes")
    try:
        raw = json.loads(bytes(module.read(leaf).tolist()))
        rows, columns = (int(size) for size in raw["shape"])
        is_nested = "weight.nested_absmax" in module.leaves
        nested = int(raw["nested_blocksize"]) if is_nested else 0
        offset = float(raw["nested_offset"]) if is_nested else 0.0
        state = _State((rows, columns), int(raw["blocksize"]), nested, offset)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        module.fail(f"{leaf} is not the JSON of a state: {error!r}")
    if min(state.shape) < 1 or state.block < 1 or (is_nested and nested < 1) or offset - offset != 0:
        module.fail(f"{leaf} says {state}")
    return state


def _measure_nf4(module: StoredModule) -> Layout:
    state = _read_state(module)
    num_rows, size = state.shape
    count = num_rows * size
    num_blocks = -(-count // state.block)
    module.check("weight", (-(-count // 2), 1), (1, -(-count // 2)))
    module.check("weight.absmax", (num_blocks,))
    module.check("weight.quant_map", (16,))
    kind = "U8" if state.nested_block else "F32"
    if kind == "F32" and module.leaves["weight.absmax"].type_name == "U8":
        module.fail("weight.absmax is quantized (U8), but weight.nested_absmax is missing")
    if module.leaves["weight.absmax"].type_name != kind:
        module.fail(f"weight.absmax is {module.leaves['weight.absmax'].type_name}, {kind} is needed")
    if state.nested_block:
        if "weight.nested_quant_map" not in module.leaves:
            module.fail("weight.nested_quant_map is missing")
        module.check("weight.nested_absmax", (-(-num_blocks // state.nested_block),))
        module.check("weight.nested_quant_map", (256,))
    label = _state_leaf(module.leaves).rpartition("__")[2]
    codes = StoredCodes(label, size, min(state.block, size)) if _has_own_blocks(state) else None
    return Layout(num_rows, size, 4, 0, f"{label}-g{state.block}", codes)


def _has_own_blocks(state: _State) -> bool:
    """Return True if blocks, which continue across rows, each lie in one row or cover whole rows."""
    return state.shape[1] % state.block == 0 or state.block % state.shape[1] == 0


def _open_nf4(module: StoredModule, layout: Layout, tensors: Tensors) -> ReadRows:
    state, size = _read_state(module), layout.size
    absmax = tensors["weight.absmax"]
    if state.nested_block:
        nested = module.finite("weight.nested_absmax", tensors["weight.nested_absmax"])
        numbers = tensors["weight.nested_quant_map"].float()[absmax.long()]
        which = torch.arange(len(numbers), device=numbers.device) // state.nested_block
        absmax = numbers * nested[which] + state.offset
    absmax = module.finite("weight.absmax", absmax)
    table, packed = (
        module.finite("weight.quant_map", tensors["weight.quant_map"]),
        tensors["weight"].flatten(),
    )
    has_own_blocks, group = _has_own_blocks(state), min(state.block, size)

    def rows(part: slice) -> CodedRows | torch.Tensor:
        first, last = part.start * size, part.stop * size
        pairs = packed[first // 2 : -(-last // 2)].to(absmax.device)
        codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten()[first % 2 :][: last - first]
        if has_own_blocks:
            which = torch.arange(first, last, group, device=absmax.device) // state.block
            scales = absmax[which].view(-1, size // group)
            return CodedRows(codes.view(-1, size), 4, scales, 0, group, table=table[None])
        which = torch.arange(first, last, device=absmax.device) // state.block
        return (table[codes.long()] * absmax[which]).view(-1, size)

    return rows


def _axes_nf4(module: StoredModule, layout: Layout) -> Axes:
    """Return the axes; blocks continue across rows, so cuts are only possible before rows that start one."""
    state, size = _read_state(module), layout.size

    def numbers(count: int) -> Axis:
        common = math.gcd(size, count)
        return Axis("rows", count // common, size // common, "run of blocks")

    sides = numbers(2), Axis("columns", size, unit="run of blocks")
    is_column = module.leaves["weight"].shape[1] == 1
    return {
        "weight": sides if is_column else sides[::-1], "weight.absmax": (numbers(state.block),),
        "weight.nested_absmax": (numbers(state.block * max(1, state.nested_block)),),
    }  # fmt: skip


def _measure_llm_int8(module: StoredModule) -> Layout:
    num_rows, size = module.shape("weight", 2)
    module.check("SCB", (num_rows,))
    if "weight_format" in module.leaves and module.read("weight_format").flatten().tolist() != [0]:
        module.fail("weight_format is not 0, rows as they are; no other order is supported")
    return Layout(num_rows, size, 8, size, "int8", StoredCodes("int8", size, size))


def _open_llm_int8(module: StoredModule, layout: Layout, tensors: Tensors) -> ReadRows:
    scales = module.finite("SCB", tensors["SCB"])[:, None] / 127

    def rows(part: slice) -> CodedRows:
        return CodedRows(tensors["weight"][part].to(scales.device), 8, scales[part], 0, layout.size)

    return rows


# -- SqueezeLLM ---------------------------------------------------------------------------------------


def _measure_squeezellm(module: StoredModule) -> Layout:
    num_rows, num_values = module.shape("lookup_table", 2)
    bits = num_values.bit_length() - 1
    if num_values not in (8, 16):
        module.fail(f"lookup_table has {num_values} values for a row; 8 or 16, of 3 or 4 bits, are supported")
    size = module.shape("qweight", 2)[0] * 32 // bits
    module.check("qweight", (module.words(size, bits, "columns"), num_rows))
    sparse = [leaf for leaf in ("rows", "cols", "vals") if leaf in module.leaves]
    if sparse and len(sparse) < 3:
        module.fail(
            f"of the sparse weights only {' and '.join(sparse)} are there; rows, cols and vals are needed"
        )
    if sparse:
        module.check("rows", (num_rows + 1,))
        module.check("cols", module.leaves["vals"].shape)
    if "full_rows" in module.leaves and bool(module.read("full_rows").any()):
        module.fail("full_rows, dense rows next to the sparse weights, are not supported")
    count = math.prod(module.leaves["vals"].shape) if sparse else 0
    codes = StoredCodes("lut4", size, size, num_outliers=count)
    return Layout(num_rows, size, bits, 0, f"lut{bits}{'-sparse' if sparse else ''}", codes)


def _axes_squeezellm(module: StoredModule, layout: Layout) -> Axes:
    num_rows, size = layout[:2]
    sparse = {leaf: (Axis("rows", num_rows, unit="sparse matrix"),) for leaf in ("rows", "vals")}
    columns = {"cols": (Axis("columns", size, unit="sparse matrix"),)}
    return {**_axes_gptq(module, layout), **sparse, **columns}


def _open_squeezellm(module: StoredModule, layout: Layout, tensors: Tensors) -> ReadRows:
    num_rows, size, bits = layout[:3]
    table = module.finite("lookup_table", tensors["lookup_table"])
    starts = tensors["rows"].long() if "rows" in tensors else None
    ones = torch.ones((num_rows, 1), device=table.device)
    if starts is not None:
        cols, vals = tensors["cols"], module.finite("vals", tensors["vals"])
        is_sound = int(starts[0]) == 0 and int(starts[-1]) == len(cols) and bool((starts.diff() >= 0).all())
        if not is_sound or (len(cols) and not 0 <= int(cols.min()) <= int(cols.max()) < size):
            module.fail(f"rows, cols and vals are not a sparse matrix of {num_rows} rows and {size} columns")

    def rows(part: slice) -> CodedRows:
        words, outliers = tensors["qweight"][:, part].T.to(table.device), None
        if starts is not None and len(cols):
            bounds = starts[part.start : part.stop + 1]
            inside = slice(int(bounds[0]), int(bounds[-1]))
            outliers = Outliers(bounds - bounds[0], tensors["cols"][inside], vals[inside])
        codes = unpack(words, bits, size)
        return CodedRows(codes, bits, ones[part], 0, size, table=table[part], outliers=outliers)

    return rows


def _integers(
    num_rows: int, size: int, bits: int, order: tuple[int, str], *, has_minima: bool = False
) -> Layout:
    """The layout of integers of `bits` bits, which share a scale in groups (`StoredModule.order`)."""
    group, digest = order
    codes = StoredCodes("int4" if bits <= 4 else "int8", size, group, has_minima, order=digest)
    group_size = 0 if digest else group
    return Layout(num_rows, size, bits, group_size, _label(f"int{bits}", group_size, size), codes)


def _label(kind: str, group_size: int, size: int) -> str:
    """Return a label: int4-g128; int8 if a row is one group; int4-actorder if columns name their groups."""
    return f"{kind}-actorder" if not group_size else kind if group_size >= size else f"{kind}-g{group_size}"


# fmt: off
_INT_GROUPS = {"qweight": ("I32",), "qzeros": ("I32",), "scales": _SCALES}
_INPUTS = {"input_scale": _SCALES, "activation_scale": _SCALES, "input_zero_point": ("I8", "I32", *_FLOAT8)}
FORMATS: tuple[StoredFormat, ...] = (
    StoredFormat(
        name="gptq", needs=_INT_GROUPS, may_have={"g_idx": ("I32",)},
        matches=lambda leaves: _last(leaves, "qweight") == _last(leaves, "scales"),
        measure=_measure_gptq, open=_open_gptq, axes=_axes_gptq,
    ),
    StoredFormat(
        name="awq", needs=_INT_GROUPS,
        matches=lambda leaves: 8 * _last(leaves, "qweight") == _last(leaves, "scales"),
        measure=_measure_awq, open=_open_awq, axes=_axes_awq,
    ),
    StoredFormat(
        name="compressed-tensors",
        needs={"weight_packed": ("I32",), "weight_scale": _SCALES, "weight_shape": ("I64", "I32")},
        may_have={"weight_zero_point": ("I32", "I8"), "weight_g_idx": ("I32",), **_INPUTS},
        measure=_measure_packed, open=_open_packed, axes=_axes_packed,
    ),
    StoredFormat(
        name="squeezellm", needs={"qweight": ("I32",), "lookup_table": _SCALES},
        may_have={"rows": ("I32",), "cols": ("I32",), "vals": _SCALES, "startrows": ("I32",),
                  "full_rows": _SCALES, "full_row_indices": ("I32",)},
        measure=_measure_squeezellm, open=_open_squeezellm, axes=_axes_squeezellm,
    ),
    *(
        StoredFormat(
            name="bitsandbytes",
            needs={"weight": ("U8",), "weight.absmax": ("F32", "U8"), "weight.quant_map": _SCALES,
                   state: ("U8",)},
            may_have={"weight.nested_absmax": ("F32",), "weight.nested_quant_map": _SCALES},
            measure=_measure_nf4, open=_open_nf4, axes=_axes_nf4,
        )
        for state in _STATES
    ),
    StoredFormat(
        name="bitsandbytes", needs={"weight": ("I8",), "SCB": ("F32",)}, may_have={"weight_format": ("U8",)},
        measure=_measure_llm_int8, open=_open_llm_int8,
        axes=lambda module, layout: {"weight": (ROWS, COLUMNS), "SCB": (ROWS,)},
    ),
    *(
        StoredFormat(
            name=name, needs={"weight": types, leaf: _SCALES},
            may_have={"weight_zero_point": ("I8", *_FLOAT8), **_INPUTS},
            matches=_has_weight_of(types),
            measure=_measure_scaled, open=_open_scaled, axes=_axes_scaled,
        )
        for name, types, leaf in (
            ("fp8", _FLOAT8, "weight_scale"),
            ("fp8", _FLOAT8, "weight_scale_inv"),
            ("compressed-tensors", ("I8",), "weight_scale"),
        )
    ),
)
# fmt: on
