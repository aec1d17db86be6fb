"""The meaning of `quantization` and `dtype` for a file and a device: one rule for all matrices.

`quantization` decides in which form every matrix of a checkpoint is kept, whether it is stored densely or in
a published format (formats/quantized.py). The name of a published format checks that the file has it, and
otherwise means auto:

    quantization   what is kept                     computed in    chosen by auto on a CPU when
    none           the numbers of the checkpoint    dtype.py       never; always on a GPU
    int4+int8      matrix by matrix: int4 where     float32        the file holds 16-bit or packed numbers
                   the file has 4 bits, int5 or
                   int6 for GGUF's 5 or 6, else int8
    int8           groups of 32, 8.5 bits each      float32        the same, if no matrix has fewer bits
    int4           groups of 32, 5 bits each        float32        the same, if all have 4 bits
    fp32           float32                          float32        the file holds float32, or there are no
                                                                   C kernels, or dtype says float32
    bf16           bfloat16                         bfloat16       never: see dtype.py for what dtype chooses

On a GPU auto keeps the file's codes, matrix by matrix, if some form fits them (weight_plan.py), and unpacks
other matrices to the dtype; but GGUF blocks in groups of 16 (Q6_K, Q3_K, Q2_K, IQ2_XS, IQ2_S, IQ1_M) are
rounded to int8, to save memory. none unpacks all of them. fp8, int8 and int4 keep codes of that kind, and
round all other matrices while loading:

    quantization   a matrix of the layers is kept in               the head           computed in
    auto           the codes of the file, int8, or the dtype       like any matrix    dtype.py
    none           the dtype                                       the dtype          dtype.py
    fp8            floats of 8 bits, a scale per row               int8               dtype.py
    int8           integers, a scale per row                       int8               dtype.py
    int4           integers 0 .. 15, groups of 128, 64 or 32       int8               dtype.py

Decoding reads every weight once per token, so half the bytes mean twice the speed. Rounding 16-bit weights to
8 bits loses almost nothing. 4-bit blocks lose nothing in 4 bits, while in 8 bits some would be rounded again
(docs/features/cpu.md has the figures). The rule depends on the files and the machine, never on a timing;
weight_plan.py applies it to each matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from infer.config.foreign import FORMATS, OTHER_FORMATS, hint_of_quantization
from infer.config.foreign import SCHEMES as NOT_BUILT_SCHEMES
from infer.errors import ConfigError
from infer.kernels.cpu.build import cpu_flags
from infer.kernels.cpu.library import library, why_not
from infer.kernels.runtime.dispatch import device_kind
from infer.loader.dtype import choose_dtype
from infer.quant.projection import Scheme
from infer.quant.registry import SCHEMES

MIXED = "int4+int8"
PACKED = ("int8", "int4", MIXED)
AS_STORED = "as stored"
DENSE = "none"
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_CPU_FORMS = ("auto", "none", "fp32", "bf16", "int8", "int4", MIXED)


class Held(NamedTuple):
    """The matrices of the layers in a file; a fused matrix counts as one, and so does a stack of experts."""

    dtype: torch.dtype | None  # None: packed in blocks, or in a published format
    formats: frozenset[str] = frozenset()  # published formats: gptq, awq, gguf, ...
    types: frozenset[str] = frozenset()  # number types in the file: BF16, Q4_1, ...
    bits: frozenset[int] = frozenset()  # bits in which a CPU can keep each matrix: 4, 5, 6 or 8


class Rule(NamedTuple):
    """The form of a model's matrices in memory, and the reason in one line."""

    label: str  # name for people: int8, int4, int4+int8, fp32, bf16; "as stored" on a GPU
    dtype: torch.dtype  # dtype of activations and of dense weights
    reason: str
    scheme: Scheme | None = None  # the scheme that every matrix is converted to
    keeps_codes: bool = False  # True: the form of each matrix follows from the codes in its file
    home: str = "cpu"  # the kind of device whose schemes are used: cpu or cuda

    @property
    def is_dense(self) -> bool:
        """True if all weights are plain numbers."""
        return not self.keeps_codes and self.scheme is None


def choose_rule(
    quantization: str, dtype: str, device: torch.device, held: Held, home: str | None = None
) -> Rule:
    """Return the rule that `quantization` and `dtype` mean for a file with these matrices.

    `home` is the kind of device whose schemes are used, if not this device's (`home_of`).
    """
    kind = home or home_of(device)
    quantization = _checked(quantization, kind, held)
    _check_name(quantization, kind)
    scheme = None if quantization == DENSE else SCHEMES.get(quantization)
    if kind != "cpu":
        is_auto = quantization == "auto"
        label, reason = (AS_STORED, "as the file has it") if is_auto else (quantization, "asked for")
        return Rule(label, choose_dtype(dtype, device, held.dtype), reason, scheme, is_auto, kind)
    if quantization == "auto":
        return _auto(dtype, device, held)
    if scheme is not None and quantization not in _CPU_FORMS:
        return Rule(quantization, choose_dtype(dtype, device, held.dtype), "asked for", scheme)
    if quantization == DENSE:
        return Rule(AS_STORED, choose_dtype(dtype, device, held.dtype), "asked for")
    computed = torch.bfloat16 if quantization == "bf16" else torch.float32
    if dtype not in ("auto", name := str(computed).removeprefix("torch.")):
        raise ConfigError(
            f"quantization={quantization} computes in {name}, but dtype is {dtype}; drop one of them"
        )
    if quantization == "bf16" and not _multiplies_bf16():
        raise ConfigError(
            "quantization=bf16 needs a CPU that multiplies bfloat16; this one does not: use int8"
        )
    if quantization in PACKED and library() is None:
        raise ConfigError(f"quantization={quantization} needs the C kernels: {why_not()}; use fp32 or auto")
    return _mixed(held) if quantization == MIXED else Rule(quantization, computed, "asked for", scheme)


def _auto(dtype: str, device: torch.device, held: Held) -> Rule:
    if dtype != "auto":
        chosen = choose_dtype(dtype, device, held.dtype)
        return Rule(_DTYPES.get(dtype, dtype), chosen, f"dtype is {dtype}")
    if held.dtype in (torch.float32, torch.float64):
        return Rule("fp32", torch.float32, "the file holds float32")
    if library() is None:
        chosen = choose_dtype(dtype, device, held.dtype)
        return Rule("bf16" if chosen is torch.bfloat16 else "fp32", chosen, f"no C kernels: {why_not()}")
    return _mixed(held)


def _mixed(held: Held) -> Rule:
    """Return the rule that chooses a form for each matrix, named after the form if all get the same one."""
    if len(held.bits) > 1 or held.bits & {5, 6}:
        kept = [f"int{bits} where the file has {bits} bits" for bits in sorted(held.bits - {8})]
        reason = ", ".join([*kept, "int8 elsewhere"])
        return Rule(MIXED, torch.float32, reason, keeps_codes=True)
    if held.bits == {4}:
        reason = "the file holds 4-bit weights, which it keeps"
        return Rule("int4", torch.float32, reason, SCHEMES["int4"])
    formats = "+".join(sorted(held.formats - {"gguf"}))
    found = formats or ("packed" if held.dtype is None else f"{held.dtype.itemsize * 8}-bit")
    return Rule("int8", torch.float32, f"the file holds {found} weights", SCHEMES["int8"])


def _checked(quantization: str, kind: str, held: Held) -> str:
    """Return the requested form; the name of a format means `auto`, if the checkpoint has that format."""
    name, found = OTHER_FORMATS.get(quantization, quantization), held.formats
    if name in found:
        return "auto"
    if name in FORMATS and name not in SCHEMES:
        text = ", ".join(sorted(found)) if found else "plain numbers"
        if (not found or found == {"gguf"}) and held.types:
            text = f"{text.replace('gguf', 'GGUF')} ({', '.join(sorted(held.types))})"
        names = ["auto", *sorted(found), *_forms_on(kind)]
        raise ConfigError(
            f"quantization is {quantization}, but this checkpoint is stored as {text}; "
            f"leave quantization out, or use one of {_possible(names)}"
        )
    return quantization


def _check_name(quantization: str, kind: str) -> None:
    """Refuse unknown names, and forms that this device does not support."""
    allowed = _forms_on(kind)
    if quantization in allowed:
        return
    names = _possible(allowed)
    if quantization in SCHEMES or quantization in _CPU_FORMS:
        where = "a GPU" if kind == "cpu" else "a CPU"
        better = "; int8 has the same size and smaller errors" if quantization == "fp8" else ""
        raise ConfigError(f"quantization={quantization} needs {where}{better}; possible here: {names}")
    where = "a CPU" if kind == "cpu" else "a GPU"
    if quantization.lower() in NOT_BUILT_SCHEMES:
        raise ConfigError(f"quantization={quantization} is not built yet; on {where} it can be {names}")
    raise ConfigError(
        f"quantization must be one of {names} on {where}, got {quantization!r}"
        f"{hint_of_quantization(quantization)}"
    )


def _forms_on(kind: str) -> list[str]:
    """The forms that a device supports for any file."""
    forms = _CPU_FORMS if kind == "cpu" else ("auto", DENSE)
    return [*forms, *(row.name for row in SCHEMES.values() if kind in row.devices)]


def _possible(names: Iterable[str]) -> str:
    """Join names for an error message, each once, without names that this machine would refuse."""
    return ", ".join(name for name in dict.fromkeys(names) if name != "bf16" or _multiplies_bf16())


def _multiplies_bf16() -> bool:
    """Return True if this CPU has any instruction for bfloat16 products."""
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & set(cpu_flags().split()))


def is_scheme(name: str) -> bool:
    """Return True if a value of `quantization` names a scheme, not a dtype."""
    return name in (*PACKED, *SCHEMES)


def home_of(device: torch.device) -> str:
    """Return the kind of device whose schemes are used for a device's weights: cpu or cuda."""
    return "cpu" if device_kind(device) == "cpu" else "cuda"
