"""In which form the weights are kept when the model runs on a CPU.

    cpu_weights   what is kept                     computed in    chosen by auto when
    int4+int8     matrix by matrix: int4 where     float32        the file holds 16-bit or packed numbers
                  the file has 4 bits, else int8
    int8          groups of 32, 8.5 bits each      float32        the same, if no matrix has 4 bits
    int4          groups of 32, 5 bits each        float32        the same, if all have
    fp32          float32                          float32        the file holds float32, or there are no
                                                                  C kernels, or dtype says float32
    bf16          bfloat16                         bfloat16       never: see dtype.py for what dtype chooses

Decoding reads every weight once per token, so half the bytes are twice the speed. Weights of 16 bits lose
next to nothing in 8, and blocks of 4 bits nothing at all in 4, while in 8 some would be rounded again
(docs/features/cpu.md has the figures). A matrix that is fused of several has 4 bits if all of them have; the
head always has 8. The choice depends on the files and the machine, never on a timing.

Packing happens tensor by tensor, a few rows at a time, as they come from the disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from infer.errors import CheckpointError, ConfigError
from infer.kernels.cpu.build import cpu_flags
from infer.kernels.cpu.library import library, why_not
from infer.kernels.runtime.torch_threads import one_thread
from infer.layers.linear import Linear
from infer.layers.moe import ExpertLinear
from infer.loader.dtype import choose_dtype
from infer.loader.formats.checkpoint import QuantizedRows, StoredTensor
from infer.models.model import Model
from infer.models.weight_map import WeightMap, find_target
from infer.quant.packed import BYTES_PER_WEIGHT, PackedMatrix, WeightMemory

MIXED = "int4+int8"
PACKED = ("int8", "int4", MIXED)
_CHUNK_NUMBERS = 1 << 20  # 4 MiB of float32 at a time


class WeightFormat(NamedTuple):
    """What was chosen, and why in one line."""

    name: str  # int8, int4, int4+int8, fp32, bf16; "as stored" on a GPU
    dtype: torch.dtype  # of activations, and of weights that are not packed
    reason: str


class StoredMatrix(NamedTuple):
    """A matrix of the layers as a file holds it, all parts of a fused one and all experts together."""

    num_weights: int
    bits: int  # of the packed form that suits it: 4 if that keeps all of it, else 8


def stored_matrices(tensors: Mapping[str, StoredTensor], weight_map: WeightMap) -> dict[str, StoredMatrix]:
    """What can be packed, the head apart, by the name of our module: from headers alone."""
    found: dict[str, StoredMatrix] = {}
    for name, tensor in tensors.items():
        try:
            target, leaf = find_target(name, weight_map)
        except CheckpointError:  # loading will say so, of all such tensors together
            continue
        is_linear = target.module.startswith("layers.") and not target.module.endswith(".router")
        if is_linear and leaf == "weight" and len(tensor.shape) >= 2:
            others = found.get(target.module, StoredMatrix(0, 4))
            found[target.module] = StoredMatrix(
                others.num_weights + math.prod(tensor.shape), others.bits if tensor.is_four_bit else 8
            )
    return found


def choose_format(
    cpu_weights: str,
    dtype: str,
    device: torch.device,
    stored: torch.dtype | None,
    matrices: Mapping[str, StoredMatrix],
) -> WeightFormat:
    """The form of the weights on `device`; `stored` is the checkpoint's dtype, None if packed in blocks."""
    if device.type != "cpu":
        if cpu_weights != "auto":
            raise ConfigError(f"cpu_weights is {cpu_weights}, but the model runs on {device}; use device=cpu")
        return WeightFormat("as stored", choose_dtype(dtype, device, stored), "the model is not on the CPU")
    if cpu_weights == "auto":
        return _auto(dtype, device, stored, matrices)
    if cpu_weights == "bf16":
        return _bf16(dtype)
    if dtype not in ("auto", "float32"):
        raise ConfigError(
            f"cpu_weights={cpu_weights} computes in float32, but dtype is {dtype}; drop one of them"
        )
    if cpu_weights in PACKED and library() is None:
        raise ConfigError(f"cpu_weights={cpu_weights} needs the C kernels: {why_not()}; use fp32 or auto")
    if cpu_weights == MIXED:
        return _mixed(stored, matrices)
    return WeightFormat(cpu_weights, torch.float32, "asked for")


def _auto(
    dtype: str, device: torch.device, stored: torch.dtype | None, matrices: Mapping[str, StoredMatrix]
) -> WeightFormat:
    if dtype != "auto":
        name = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)
        return WeightFormat(name, choose_dtype(dtype, device, stored), f"dtype is {dtype}")
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
    held = "packed" if stored is None else f"{stored.itemsize * 8}-bit"
    return WeightFormat("int8", torch.float32, f"the file holds {held} weights")


def bits_of(name: str, module: str, matrices: Mapping[str, StoredMatrix]) -> int:
    """The bits of a module's weights where they are kept in the form `name`."""
    if module == "head" or name == "int8":
        return 8
    return 4 if name == "int4" else matrices[module].bits


def _bf16(dtype: str) -> WeightFormat:
    if dtype not in ("auto", "bfloat16"):
        raise ConfigError(f"cpu_weights=bf16 computes in bfloat16, but dtype is {dtype}; drop one of them")
    flags = cpu_flags().split()
    if not {"amx_bf16", "avx512_bf16", "bf16"} & set(flags):
        raise ConfigError(
            "cpu_weights=bf16 needs a CPU that multiplies bfloat16; this one does not: use int8"
        )
    return WeightFormat("bf16", torch.bfloat16, "asked for")


def packed_bytes(name: str, num_weights: int, matrices: Mapping[str, StoredMatrix]) -> float:
    """Of so many weights in the form `name`; the few that belong to no matrix count as int8."""
    if name == "int4" and not matrices:  # nothing is known but their number
        return num_weights * BYTES_PER_WEIGHT[4]
    four_bits = sum(m.num_weights for module, m in matrices.items() if bits_of(name, module, matrices) == 4)
    return four_bits * BYTES_PER_WEIGHT[4] + (num_weights - four_bits) * BYTES_PER_WEIGHT[8]


def pack_layers(
    model: Model, name: str, stored: torch.dtype | None, matrices: Mapping[str, StoredMatrix]
) -> None:
    """Give every linear layer and every expert an empty packed matrix, and a tied embedding the head's."""
    c = library()
    assert c is not None, why_not()
    memory = WeightMemory()
    for layer_name, layer in model.named_modules():
        if isinstance(layer, Linear):
            bits = bits_of(name, layer_name, matrices)
            num_rows, size = layer.weight.shape
            layer.scheme = PackedMatrix(c, num_rows, size, bits, memory)
            layer.weight = _shell(layer.weight)
        elif isinstance(layer, ExpertLinear):
            num_experts, num_rows, size = layer.weight.shape
            bits = bits_of(name, layer_name, matrices)
            layer.packed = [PackedMatrix(c, num_rows, size, bits, memory) for _ in range(num_experts)]
            layer.weight = _shell(layer.weight)
    embedding = model.embedding
    if model.config.tie_embeddings:
        assert isinstance(model.head.scheme, PackedMatrix)
        embedding.packed = model.head.scheme
        embedding.weight = _shell(embedding.weight)
        model.head.weight = embedding.weight
    else:
        half = torch.bfloat16 if stored is torch.bfloat16 else torch.float16
        embedding.weight = nn.Parameter(torch.empty_like(embedding.weight, dtype=half), requires_grad=False)


def _shell(weight: torch.Tensor) -> nn.Parameter:
    """A parameter of the same shape without any memory."""
    return nn.Parameter(torch.empty(weight.shape, device="meta"), requires_grad=False)


def packed_matrices(model: Model) -> list[PackedMatrix]:
    """All of them: of layers, experts and the head."""
    schemes: list[object] = []
    for layer in model.modules():
        if isinstance(layer, Linear):
            schemes.append(layer.scheme)
        elif isinstance(layer, ExpertLinear):
            schemes += layer.packed or ()
    return [scheme for scheme in schemes if isinstance(scheme, PackedMatrix)]


def matrix_of(model: Model, parameter: str, expert: int | None = None) -> PackedMatrix | None:
    """The packed matrix that stands for a parameter, or for one expert's share of it, if there is one."""
    module_name, _, leaf = parameter.rpartition(".")
    if leaf != "weight":
        return None
    module = model.get_submodule(module_name)
    if module is model.embedding:
        return model.embedding.packed
    scheme = module.scheme if isinstance(module, Linear) else None
    if isinstance(module, ExpertLinear) and module.packed is not None:
        assert expert is not None, parameter
        scheme = module.packed[expert]
    return scheme if isinstance(scheme, PackedMatrix) else None


def fill_packed(matrix: PackedMatrix, source: StoredTensor, *, first: int, transposed: bool) -> None:
    """Quantise a stored tensor into the rows of a packed matrix from `first` on."""
    by_rows = source.transpose() if transposed else source
    with one_thread():  # of PyTorch's; packing has its own
        if by_rows is None:
            whole = torch.empty(source.shape)
            source.copy_to(whole)
            matrix.fill(whole.T.contiguous(), first)
            return
        for rows in by_rows.chunks(max(1, _CHUNK_NUMBERS // matrix.size), matrix.bits):
            if isinstance(rows, QuantizedRows):
                matrix.fill_integers(*rows, first)
                first += len(rows.integers)
            else:
                matrix.fill(rows, first)
                first += len(rows)
