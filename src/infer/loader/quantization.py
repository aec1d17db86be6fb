"""Which scheme keeps the weights of each layer, and in which dtype the model computes.

Every matrix of a checkpoint, stored densely or in a published format that is read as one
(formats/quantized.py), is kept as `quantization` says; the name of such a format only checks that the file
has it, and means auto:

    quantization   what is kept                     computed in    chosen by auto on a CPU when
    none           the numbers of the checkpoint    dtype.py       never; always on a GPU
    int4+int8      matrix by matrix: int4 where     float32        the file holds 16-bit or packed numbers
                   the file has 4 bits, else int8
    int8           groups of 32, 8.5 bits each      float32        the same, if no matrix has 4 bits
    int4           groups of 32, 5 bits each        float32        the same, if all have
    fp32           float32                          float32        the file holds float32, or there are no
                                                                   C kernels, or dtype says float32
    bf16           bfloat16                         bfloat16       never: see dtype.py for what dtype chooses

On a GPU auto keeps the codes of a file as codes, matrix by matrix, where they fit a form of codes
(quant/rounding.py), and unpacks the others to the dtype; but blocks of GGUF in groups of 16 (Q6_K, Q3_K,
Q2_K, IQ2_XS, IQ2_S, IQ1_M) are rounded to int8, for the memory. none unpacks all of them. fp8, int8 and int4
round what is not in that form while it is loaded:

    quantization   a matrix of the layers is kept in               the head           computed in
    auto           the codes of the file, int8, or the dtype       as any matrix      dtype.py
    none           the dtype                                       the dtype          dtype.py
    fp8            floats of 8 bits, a scale per row               int8               dtype.py
    int8           integers, a scale per row                       int8               dtype.py
    int4           integers 0 .. 15, groups of 128, 64 or 32       int8               dtype.py

Decoding reads every weight once per token, so half the bytes are twice the speed. Weights of 16 bits lose
next to nothing in 8, and blocks of 4 bits nothing at all in 4, while in 8 some would be rounded again
(docs/features/cpu.md has the figures). A matrix that is fused of several has 4 bits if all of them have; the
head always has 8. The choice depends on the files and the machine, never on a timing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from infer.config.foreign import FORMATS, OTHER_FORMATS, hint_of_quantization
from infer.config.foreign import SCHEMES as NOT_BUILT_SCHEMES
from infer.errors import CheckpointError, ConfigError
from infer.kernels.cpu.build import cpu_flags
from infer.kernels.cpu.library import library, why_not
from infer.kernels.linear.coded import CodedForm
from infer.kernels.runtime.dispatch import device_kind
from infer.layers.linear import Projected
from infer.loader.dtype import choose_dtype
from infer.loader.formats.checkpoint import FLOATS, StoredTensor
from infer.loader.formats.gguf_quants import ROUNDED
from infer.loader.formats.quantized import describe, format_names, published_as, short_bytes
from infer.loader.formats.stored_module import Settings
from infer.models.model import Model
from infer.models.weight_map import WeightMap, find_target
from infer.quant.memory import WeightMemory
from infer.quant.projection import Projection, Scheme
from infer.quant.registry import SCHEMES
from infer.quant.rounding import joined, rounded_form, stored_form

MIXED = "int4+int8"
PACKED = ("int8", "int4", MIXED)
_ROUNDING_COSTS = {  # measured on a CPU (docs/features/cpu.md)
    "int8": ", about +0.3% perplexity on the default model",
    "int4": ", about +25% perplexity on the default model",
}
AS_STORED = "as stored"
DENSE = "none"
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_CPU_FORMS = ("auto", "none", "fp32", "bf16", "int8", "int4", MIXED)


class WeightFormat(NamedTuple):
    """What was chosen, and why in one line."""

    name: str  # int8, int4, int4+int8, fp32, bf16; "as stored" on a GPU
    dtype: torch.dtype  # of activations, and of weights that are dense
    reason: str


class StoredMatrix(NamedTuple):
    """A matrix of the layers as a file holds it, all parts of a fused one and all experts together."""

    bits: int  # of the packed form that suits it: 4 if that keeps all of it, else 8
    formats: frozenset[str] = frozenset()  # in which it is published: gptq, awq, gguf, ...
    types: frozenset[str] = frozenset()  # of its numbers in the file: BF16, Q4_1, ...


def stored_matrices(tensors: Mapping[str, StoredTensor], weight_map: WeightMap) -> dict[str, StoredMatrix]:
    """The matrices of the layers by module name: from headers alone."""
    found: dict[str, StoredMatrix] = {}
    for module, weights in stored_weights(tensors, weight_map).items():
        is_norm = not any(len(weight.shape) >= 2 for weight in weights)
        if not module.startswith("layers.") or module.endswith(".router") or is_norm:
            continue
        found[module] = StoredMatrix(
            4 if all(weight.is_four_bit for weight in weights) else 8,
            frozenset(name for weight in weights for name in format_names(weight)),
            frozenset(weight.type_name for weight in weights),
        )
    return found


def matrix_of_config(settings: Mapping[str, Any]) -> StoredMatrix:
    """What a `quantization_config` alone says about the matrices, where there are no tensors yet."""
    bits = Settings(settings).hints("bits", "num_bits", "w_bit", "wbits") or [8]
    return StoredMatrix(4 if max(bits) <= 4 else 8, formats=frozenset({Settings(settings).method}))


def stored_weights(
    tensors: Mapping[str, StoredTensor], weight_map: WeightMap
) -> dict[str, list[StoredTensor]]:
    """The weight of every module of ours, or of each of its parts and experts."""
    found: dict[str, list[StoredTensor]] = {}
    for name, tensor in tensors.items():
        try:
            target, leaf = find_target(name, weight_map)
        except CheckpointError:  # loading will say so, of all such tensors together
            continue
        if leaf == "weight" and not target.ignored:
            found.setdefault(target.module, []).append(tensor)
    return found


def choose_format(
    quantization: str,
    dtype: str,
    device: torch.device,
    stored: torch.dtype | None,
    matrices: Mapping[str, StoredMatrix],
    home: str | None = None,
) -> WeightFormat:
    """The form of the weights on `device`; `stored` is the checkpoint's dtype, None if packed in blocks.

    `home` is the kind of device whose schemes keep them, if that is another one's (`home_of`).
    """
    kind = home or home_of(device)
    quantization = _checked(quantization, kind, matrices.values())
    _check_name(quantization, kind)
    if kind != "cpu":
        name = AS_STORED if quantization == "auto" else quantization
        reason = "as the file has it" if quantization == "auto" else "asked for"
        return WeightFormat(name, choose_dtype(dtype, device, stored), reason)
    if quantization in SCHEMES and quantization not in _CPU_FORMS:
        return WeightFormat(quantization, choose_dtype(dtype, device, stored), "asked for")
    if quantization == "auto":
        return _auto(dtype, device, stored, matrices)
    if quantization == DENSE:
        return WeightFormat(AS_STORED, choose_dtype(dtype, device, stored), "asked for")
    if quantization == "bf16":
        return _bf16(dtype)
    if dtype not in ("auto", "float32"):
        raise ConfigError(
            f"quantization={quantization} computes in float32, but dtype is {dtype}; drop one of them"
        )
    if quantization in PACKED and library() is None:
        raise ConfigError(f"quantization={quantization} needs the C kernels: {why_not()}; use fp32 or auto")
    if quantization == MIXED:
        return _mixed(stored, matrices)
    return WeightFormat(quantization, torch.float32, "asked for")


def _checked(quantization: str, kind: str, matrices: Iterable[StoredMatrix]) -> str:
    """The form asked for; the name of a format is `auto`, if the checkpoint is published in it."""
    found, types = set[str](), set[str]()
    for matrix in matrices:
        found, types = found | matrix.formats, types | matrix.types
    name = OTHER_FORMATS.get(quantization, quantization)
    if name in found:
        return "auto"
    if name in FORMATS and name not in SCHEMES:
        held = ", ".join(sorted(found)) if found else "plain numbers"
        if (not found or found == {"gguf"}) and types:
            held = f"{held.replace('gguf', 'GGUF')} ({', '.join(sorted(types))})"
        names = ["auto", *sorted(found), *_forms_on(kind)]
        raise ConfigError(
            f"quantization is {quantization}, but this checkpoint is stored as {held}; "
            f"leave quantization out, or use one of {_possible(names)}"
        )
    return quantization


def _forms_on(kind: str) -> list[str]:
    """The forms that a device can give any file."""
    forms = _CPU_FORMS if kind == "cpu" else ("auto", DENSE)
    return [*forms, *(row.name for row in SCHEMES.values() if kind in row.devices)]


def _possible(names: Iterable[str]) -> str:
    """Names for an error, each once and without those that this machine would refuse."""
    return ", ".join(name for name in dict.fromkeys(names) if name != "bf16" or _multiplies_bf16())


def _multiplies_bf16() -> bool:
    """Whether this CPU has any instruction for products of bfloat16."""
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & set(cpu_flags().split()))


def _check_name(quantization: str, kind: str) -> None:
    """Refuse what is unknown, and what this device cannot do."""
    allowed = _forms_on(kind)
    if quantization in allowed:
        return
    names = _possible(allowed)
    if quantization in SCHEMES or quantization in _CPU_FORMS:
        where = "a GPU" if kind == "cpu" else "a CPU"
        better = "; int8 has the same bytes and errs less" if quantization == "fp8" else ""
        raise ConfigError(f"quantization={quantization} needs {where}{better}; possible here: {names}")
    where = "a CPU" if kind == "cpu" else "a GPU"
    if quantization.lower() in NOT_BUILT_SCHEMES:
        raise ConfigError(f"quantization={quantization} is not built yet; on {where} it can be {names}")
    raise ConfigError(
        f"quantization must be one of {names} on {where}, got {quantization!r}"
        f"{hint_of_quantization(quantization)}"
    )


def _auto(
    dtype: str, device: torch.device, stored: torch.dtype | None, matrices: Mapping[str, StoredMatrix]
) -> WeightFormat:
    if dtype != "auto":
        return WeightFormat(
            _DTYPES.get(dtype, dtype), choose_dtype(dtype, device, stored), f"dtype is {dtype}"
        )
    if stored in (torch.float32, torch.float64):
        return WeightFormat("fp32", torch.float32, "the file holds float32")
    if library() is None:
        chosen = choose_dtype(dtype, device, stored)
        return WeightFormat(
            "bf16" if chosen is torch.bfloat16 else "fp32", chosen, f"no C kernels: {why_not()}"
        )
    return _mixed(stored, matrices)


def _mixed(stored: torch.dtype | None, matrices: Mapping[str, StoredMatrix]) -> WeightFormat:
    """Matrix by matrix, under the name of the one form if all have it."""
    bits = {matrix.bits for matrix in matrices.values()}
    if bits == {4, 8}:
        return WeightFormat(MIXED, torch.float32, "int4 where the file has 4 bits, int8 elsewhere")
    if bits == {4}:
        return WeightFormat("int4", torch.float32, "the file holds 4-bit weights, which it keeps")
    formats = sorted({name for matrix in matrices.values() for name in matrix.formats} - {"gguf"})
    held = "+".join(formats) or ("packed" if stored is None else f"{stored.itemsize * 8}-bit")
    return WeightFormat("int8", torch.float32, f"the file holds {held} weights")


def _bf16(dtype: str) -> WeightFormat:
    if dtype not in ("auto", "bfloat16"):
        raise ConfigError(f"quantization=bf16 computes in bfloat16, but dtype is {dtype}; drop one of them")
    if not _multiplies_bf16():
        raise ConfigError(
            "quantization=bf16 needs a CPU that multiplies bfloat16; this one does not: use int8"
        )
    return WeightFormat("bf16", torch.bfloat16, "asked for")


def scheme_of(form: str, is_head: bool, stored: Sequence[StoredTensor]) -> Scheme:
    """The scheme of one matrix on a CPU where the weights are kept in the form `form`."""
    if form not in (*PACKED, *SCHEMES):
        return SCHEMES[DENSE]
    if form in PACKED and is_head:
        return SCHEMES["int8"]
    if form == MIXED:
        is_four_bit = bool(stored) and all(tensor.is_four_bit for tensor in stored)
        return SCHEMES["int4" if is_four_bit else "int8"]
    return SCHEMES[form]


def home_of(device: torch.device) -> str:
    """Whose schemes keep the weights of a model on a device: cpu or cuda."""
    return "cpu" if device_kind(device) == "cpu" else "cuda"


def coded_form(
    layer: Projected, form: str, is_head: bool, stored: Sequence[StoredTensor], settings: Mapping[str, Any]
) -> CodedForm | None:
    """How a GPU keeps the matrix of a layer in codes; None: in the dtype.

    `stored` are the tensors that fill it; `settings`, what a config says about them where there are none yet.
    """
    spec = layer.spec
    if layer.always_dense or form == DENSE or (form != AS_STORED and form not in SCHEMES):
        return None
    forms = [tensor.coded_form for tensor in stored if len(tensor.shape) >= 2]
    if not stored and settings and not is_head:
        forms = [form_of_config(settings, spec.size)]
    held = joined(forms, spec.size, spec.row_counts)
    if form == AS_STORED:
        return held
    asked = "int8" if is_head else form  # its errors go straight into the logits, and fp8 has larger ones
    return held if held is not None and held.codes == asked else rounded_form(asked, spec.size)


def form_of_config(settings: Mapping[str, Any], size: int) -> CodedForm | None:
    """What a `quantization_config` alone says about the codes of a matrix with `size` columns."""
    said = Settings(settings)
    if said.method == "fp8":
        blocks = said.hints("weight_block_size")
        return stored_form("fp8", blocks[-1] if blocks else size, size, scale_rows=blocks[0] if blocks else 1)
    bits = max(said.hints("bits", "num_bits", "w_bit", "wbits") or [0])
    group = (said.hints("group_size", "q_group_size") or [size])[0]
    codes = "int4" if bits <= 4 else "fp8" if "float" in str(settings.get("format")) else "int8"
    is_read = bits and said.method in ("gptq", "awq", "auto-round", "compressed-tensors")
    has_minima = codes == "int8" and said.has_minima(bits)
    is_kept = is_read and not settings.get("desc_act")
    return stored_form(codes, group, size, has_minima=has_minima) if is_kept else None


def make_projections(
    model: Model,
    form: str,
    device: torch.device,
    dtype: torch.dtype,
    stored: torch.dtype | None,
    tensors: Mapping[str, StoredTensor],
    weight_map: WeightMap,
    settings: Mapping[str, Any] | None = None,
    home: str | None = None,
) -> None:
    """Give every linear layer and every stack of experts an empty projection of its scheme.

    `home` is the kind of device that the model is for, where the weights are not there (`home_of`).

    A tied embedding reads its rows from the head, if the head's scheme can; else the head is its own table.
    """
    weights = stored_weights(tensors, weight_map)
    memory = WeightMemory() if device_kind(device) == "cpu" else None
    on_gpu = (home or home_of(device)) != "cpu"
    for name, layer in model.named_modules():
        if not isinstance(layer, Projected):
            continue
        is_tied = layer is model.head and model.config.tie_embeddings
        coded, held_int8 = None, False
        parts = weights.get("embedding" if is_tied else name, [])
        if on_gpu:
            coded = coded_form(layer, form, layer is model.head, parts, settings or {})
            scheme = SCHEMES[DENSE if coded is None else coded.codes]
            held_int8 = all(tensor.coded_form == coded for tensor in parts)
        else:
            scheme = SCHEMES[DENSE] if layer.always_dense else scheme_of(form, layer is model.head, parts)
        if is_tied and scheme.name == DENSE:
            continue
        spec = replace(
            layer.spec,
            device=device,
            dtype=dtype,
            memory=memory,
            form=coded,
            int8_tokens=coded == CodedForm("int8") and held_int8 and Settings(settings or {}).has_int8_tokens,
        )
        projection = scheme.make(spec)
        if is_tied and type(projection).lookup is Projection.lookup:  # it cannot look up rows
            continue
        layer.use(projection)
        if is_tied:
            model.embedding.table = projection
            shell = torch.empty(model.embedding.weight.shape, device="meta")  # without any memory
            model.embedding.weight = nn.Parameter(shell, requires_grad=False)
    if form in PACKED and not on_gpu and not model.config.tie_embeddings:
        is_bfloat16 = torch.bfloat16 in (stored, *(table.dtype for table in weights.get("embedding", [])))
        half = torch.bfloat16 if is_bfloat16 else torch.float16
        weight = model.embedding.weight
        model.embedding.weight = nn.Parameter(torch.empty_like(weight, dtype=half), requires_grad=False)


def kept_bytes(model: Model) -> int:
    """The bytes of all weights of a model, shared ones once; of projections, as they are kept."""
    return sum(kept_schemes(model, torch.float32).values())


def bytes_per_weight(model: Model, dtype: torch.dtype) -> float:
    """The mean over the matrices that are kept in another form than `dtype`, or its own size without any."""
    packed = [layer for layer in _layers(model) if layer.stored.scheme != DENSE]
    numbers = sum(layer.spec.num_weights for layer in packed)
    kept = sum(layer.stored.num_bytes() for layer in packed)
    return kept / numbers if numbers else float(dtype.itemsize)


def is_scheme(weight_format: str) -> bool:
    """Whether a form of weights is a scheme's own, and not a dtype."""
    return weight_format in (*PACKED, *SCHEMES)


def describe_kept(
    model: Model, form: str, dtype: torch.dtype, tensors: Mapping[str, StoredTensor], weight_map: WeightMap
) -> str:
    """What a GPU has made of weights that are not all plain numbers, for the start line; "": they are.

    `kept as int4 3.9GiB + bfloat16 1.2GiB`; matrices of a format that fits no codes are named, and those
    of GGUF whose short groups are rounded: `Q6_K 0.6GiB rounded to int8`.
    """
    kept = kept_schemes(model, dtype)
    if len(kept) == 1:
        return ""
    text = _spell_sizes(kept)
    if form in SCHEMES:
        return f"rounded to {text}{SCHEMES[form].cost and ', ' + SCHEMES[form].cost}"
    is_dense = {
        name: layer.stored.scheme == DENSE
        for name, layer in model.named_modules()
        if isinstance(layer, Projected)
    }
    if model.embedding.table is not None:
        is_dense["embedding"] = False  # which is the head's
    unpacked, rounded = list[StoredTensor](), list[StoredTensor]()
    for module, parts in stored_weights(tensors, weight_map).items():
        for weight in parts if module in is_dense else ():
            if weight.dtype is None and is_dense[module]:
                unpacked.append(weight)
            elif weight.type_name in ROUNDED:
                rounded.append(weight)
    text += f", {describe(rounded)} rounded to int8" if rounded else ""
    return f"kept as {text}" + (f", unpacked {describe(unpacked)}" if unpacked else "")


def describe_packed(
    model: Model,
    form: str,
    dtype: torch.dtype,
    tensors: Mapping[str, StoredTensor],
    matrices: Mapping[str, StoredMatrix],
    rounded: Iterable[Projection] = (),
) -> str:
    """What a CPU has made of the weights of a file, for the start line; "": they are plain numbers.

    `Q4_1 86.0MiB, kept as int4 ...` where int4 keeps all codes of the layers, `BF16 256.5MiB, rounded to ...`
    with the cost for plain numbers, `Q6_K ..., in int8 ...` where it depends on the block format (cpu.md).
    A file with codes and plain numbers has both: those of `rounded` were made of plain numbers here.
    """
    if form not in PACKED:
        return ""
    kept, made = kept_schemes(model, dtype), Counter[str]()
    for projection in rounded:
        made[projection.scheme] += projection.num_bytes()
    stored = [tensor for tensor in tensors.values() if len(tensor.shape) >= 2]
    found = "" if published_as(tensors) else f"{describe(stored)}, "
    if all(tensor.type_name in FLOATS for tensor in stored):
        return f"{found}rounded to {_spell_sizes(kept)}{_ROUNDING_COSTS.get(form, '')}"
    from_file = {name: size - made[name] for name, size in kept.items() if size > made[name]}
    is_kept = form == "int4" and all(matrix.bits == 4 for matrix in matrices.values())
    text = f"{found}{'kept as' if is_kept else 'in'} {_spell_sizes(from_file)}"
    return f"{text}, rounded to {_spell_sizes(made)}" if made else text


def _spell_sizes(sizes: Mapping[str, int]) -> str:
    return " + ".join(f"{name} {short_bytes(size)}" for name, size in sizes.items())


def kept_schemes(model: Model, dtype: torch.dtype) -> dict[str, int]:
    """The bytes of all weights by the scheme that keeps them, most first; of dense ones by their dtype."""
    dense = str(dtype).removeprefix("torch.")
    found = {dense: sum(parameter.numel() * parameter.element_size() for parameter in _others(model))}
    for layer in _layers(model):
        name = dense if layer.stored.scheme == DENSE else layer.stored.scheme
        found[name] = found.get(name, 0) + layer.stored.num_bytes()
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def num_weights(model: Model) -> int:
    """The numbers that a model has learnt, shared ones once, whatever they are kept in."""
    return sum(layer.spec.num_weights for layer in _layers(model)) + sum(
        parameter.numel() for parameter in _others(model)
    )


def _layers(model: Model) -> list[Projected]:
    return [layer for layer in model.modules() if isinstance(layer, Projected)]


def _others(model: Model) -> list[nn.Parameter]:
    """The parameters that belong to no projection; a tied embedding is its head's."""
    projected = {id(tensor) for layer in _layers(model) for tensor in layer.stored.tensors.values()}
    if model.embedding.table is not None:
        projected.add(id(model.embedding.weight))
    return [parameter for parameter in model.parameters() if id(parameter) not in projected]
