"""The quantized matrices of a safetensors checkpoint, each combined into one tensor named `weight`.

    q_proj.qweight, q_proj.qzeros, q_proj.scales, q_proj.g_idx   ──►   q_proj.weight, [N, K]

The result can be used like a dense matrix: as a part of a fused matrix, an expert or a head, next to matrices
that are not quantized. It is unpacked while it is copied into place, some rows at a time. If the scheme in
memory can keep the integers, they are copied instead (quant/packed.py). So formats on disk
(stored_formats.py) and schemes in memory are independent of each other.

The tensors decide which matrices are quantized. A config's lists of exceptions are not read; its other
settings are hints (`Settings`). A config whose method would give the same bytes another meaning is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from infer.config.foreign import METHODS
from infer.errors import CheckpointError, ConfigError
from infer.loader.formats.axes import WHOLE, Axes
from infer.loader.formats.checkpoint import StoredTensor, slices_of
from infer.loader.formats.hf_config import MAX_CONFIG_BYTES, read_json
from infer.loader.formats.kv_scales import LEAVES as KV_LEAVES
from infer.loader.formats.stored_formats import CODES, FORMATS
from infer.loader.formats.stored_module import Layout, Settings, StoredFormat, StoredModule
from infer.models.weight_map import WeightMap, find_target
from infer.quant.coded import CodedRows, StoredCodes

FORMAT_NAMES = tuple(dict.fromkeys(row.name for row in FORMATS))
KNOWN_METHODS = (*FORMAT_NAMES, "auto-round", "mxfp4")  # methods that a config may name
# files that may hold the settings if config.json does not
CONFIG_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
# (method of the config, format of the tensors) that contradict each other although types or shapes agree:
# integers instead of fp8 numbers, or words packed along the other axis
_OTHER_NUMBERS = {("fp8", "compressed-tensors"), ("awq", "gptq"), ("gptq", "awq")}
_MOST_CODES = 64 << 20  # bytes of codes; larger leaves stay on the host and are copied to a GPU row by row
_ALIGNED = 32  # rows: codes of any number of bits along them fill whole words
_LEAVES = sorted({leaf for row in FORMATS for leaf in (*row.needs, *row.may_have)}, key=len, reverse=True)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QuantizedTensor(StoredTensor):
    """The weight of one matrix, assembled from its leaves when it is read."""

    format: StoredFormat
    module: StoredModule
    layout: Layout
    transposed: bool = False  # True: the name means [in, out], as in GPT-2; every format stores [out, in]

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape, as its name means it."""
        shape = self.layout.num_rows, self.layout.size
        return shape[::-1] if self.transposed else shape

    @property
    def num_bytes(self) -> int:
        """The size of all leaves on disk."""
        return sum(leaf.num_bytes for leaf in self.module.leaves.values())

    @property
    def type_name(self) -> str:
        """The format, and the type of its numbers."""
        return f"{self.format.name}:{self.layout.label}"

    @property
    def codes(self) -> StoredCodes | None:
        """The description of its codes."""
        return self.layout.codes

    @property
    def formats(self) -> tuple[str, ...]:
        """The names of its format: ours, and the config's."""
        return tuple(filter(None, {self.format.name, self.module.settings.method}))

    @property
    def axes(self) -> Axes:
        """The axes of each leaf; scales of activations are whole."""
        known = self.format.axes(self.module, self.layout)
        leaves = self.module.leaves.items()
        return {leaf: known.get(leaf, (WHOLE,) * len(tensor.shape)) for leaf, tensor in leaves}

    def transpose(self) -> StoredTensor | None:
        """Return the matrix as it is stored, if the name means its transpose."""
        return replace(self, transposed=False) if self.transposed else None

    def matrix(self, index: int) -> StoredTensor:
        """Raise an error: no published format stores quantized stacks in a way that can be read here."""
        raise CheckpointError(f"{self.module.name} holds all experts in one stack, which is not supported")

    def rows(self, num_rows: int, device: torch.device) -> Iterator[tuple[slice, CodedRows | torch.Tensor]]:
        """Yield the rows, some at a time, as the file has them; float32 if codes have uneven steps."""
        host, leaves = torch.device("cpu"), self.module.leaves
        tensors = {
            leaf: self.module.read(leaf, host if leaf in CODES and stored.num_bytes > _MOST_CODES else device)
            for leaf, stored in leaves.items()
        }
        read = self.format.open(self.module, self.layout, tensors)
        step = max(1, num_rows // _ALIGNED) * _ALIGNED
        for part in slices_of(self.layout.num_rows, step):
            yield part, read(part)


def quantized_checkpoint(
    tensors: Mapping[str, StoredTensor], weight_map: WeightMap, settings: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors, with one `weight` in place of the leaves of each quantized matrix.

    Scales of a KV cache (kv_scales.py) are left out.
    """
    kept = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in KV_LEAVES}
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in kept.items():
        module, leaf = _split(name)
        modules.setdefault(module, {})[leaf] = tensor
    hints, found = Settings(settings), dict[str, StoredTensor]()
    for name, tensor in kept.items():
        module, leaf = _split(name)
        if leaf == "bias" or not _is_quantized(modules[module]):
            found[name] = tensor
        elif f"{module}.weight" not in found:
            leaves = {leaf: tensor for leaf, tensor in modules[module].items() if leaf != "bias"}
            found[f"{module}.weight"] = _quantized(module, leaves, weight_map, hints)
    matrices = [each for each in found.values() if isinstance(each, QuantizedTensor)]
    _refuse_other_numbers(hints, matrices)
    _warn_of_contradiction(hints, matrices)
    return found


def _refuse_other_numbers(settings: Settings, matrices: list[QuantizedTensor]) -> None:
    """Refuse tensors in another format than the config's, if the same bytes would mean other numbers."""
    for each in matrices:
        if (settings.method, each.format.name) in _OTHER_NUMBERS:
            held = ", ".join(
                f"{leaf} {tensor.type_name} {list(tensor.shape)}"
                for leaf, tensor in each.module.leaves.items()
            )
            each.module.fail(
                f"the config says {settings.method}, but its tensors ({held}) are stored as "
                f"{each.format.name}, so one of the two is wrong; fetch or convert the checkpoint again"
            )


def _warn_of_contradiction(settings: Settings, matrices: list[QuantizedTensor]) -> None:
    """Warn if a config names a method or a number of bits that no tensor has; the tensors take precedence."""
    wrong, bits = [], settings.raw.get("bits")
    if settings.method and settings.method not in (*KNOWN_METHODS, *METHODS):
        wrong.append(f"quant_method {settings.method!r}")
    if type(bits) is int and all(each.format.name in ("gptq", "awq") for each in matrices):
        wrong += [] if any(each.layout.bits == bits for each in matrices) else [f"bits {bits}"]
    if matrices and wrong:
        held = ", ".join(sorted({each.type_name for each in matrices}))
        log.warning("the config says %s, but the tensors are read as %s", " and ".join(wrong), held)


def _split(name: str) -> tuple[str, str]:
    """Split a tensor's name into module and leaf, which may be a leaf of a leaf: `weight.absmax`."""
    leaf = next((leaf for leaf in _LEAVES if name.endswith(f".{leaf}")), name.rpartition(".")[2])
    return name.removesuffix(f".{leaf}"), leaf


def _is_quantized(leaves: Mapping[str, StoredTensor]) -> bool:
    """Return True if a module has a leaf of any quantized format."""
    return any(leaf in leaves for leaf in _LEAVES if leaf != "weight")


def _quantized(
    module: str, leaves: Mapping[str, StoredTensor], weight_map: WeightMap, settings: Settings
) -> QuantizedTensor:
    stored = StoredModule(module, leaves, settings)
    row = next((row for row in FORMATS if row.needs.keys() <= leaves.keys() and row.matches(leaves)), None)
    if row is None:
        held = ", ".join(f"{leaf} {tensor.type_name} {list(tensor.shape)}" for leaf, tensor in leaves.items())
        formats = f"the formats {', '.join(FORMAT_NAMES)}"
        stored.fail(f"it is stored as {held}, which is none of {formats}{_said(settings)}")
    for leaf, tensor in leaves.items():
        types = row.needs.get(leaf) or row.may_have.get(leaf)
        if types is None:
            stored.fail(f"{leaf} is not a tensor of {row.name}{_said(settings)}")
        if tensor.type_name not in types:
            stored.fail(f"{leaf} is {tensor.type_name}; {row.name} has {' or '.join(types)}")
    layout = row.measure(stored)
    try:
        target, _ = find_target(f"{module}.weight", weight_map)
    except CheckpointError:  # placement reports all such tensors together
        return QuantizedTensor(row, stored, layout)
    return QuantizedTensor(row, stored, layout, transposed=target.transposed)


def _said(settings: Settings) -> str:
    details = {
        key: settings.raw[key]
        for key in ("quant_method", "format", "checkpoint_format", "version", "packing_format")
        if isinstance(settings.raw.get(key), str)
    }
    said = ", ".join(f"{key} {value}" for key, value in details.items())
    return f" (the config says {said})" if said else ""


def read_settings(raw: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """Read the quantization settings of a checkpoint, from its config or a separate file."""
    for key in ("quantization_config", "compression_config"):
        settings: Mapping[str, Any] | None = raw.get(key)
        if settings is not None:
            if not isinstance(settings, Mapping):
                raise CheckpointError(f"{key!r} in config.json must be an object, got {settings!r}")
            return _with_method(settings)
    path = next((directory / name for name in CONFIG_FILES if (directory / name).is_file()), None)
    if path is None:
        return {}
    found = read_json(path, MAX_CONFIG_BYTES)
    inner = found.get("quantization")  # ModelOpt nests its settings, next to the producer's name
    return _with_method(inner if isinstance(inner, Mapping) else found)


def _with_method(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Set `quant_method` from the fields or names that other tools use for it: `quant_algo`, fbgemm_fp8."""
    method, algorithm = settings.get("quant_method"), settings.get("quant_algo")
    if algorithm and method in (None, "modelopt"):
        is_fp8 = str(algorithm).upper().startswith("FP8")
        return {**settings, "quant_method": "fp8" if is_fp8 else f"modelopt {algorithm}"}
    return {**settings, "quant_method": "fp8"} if method == "fbgemm_fp8" else settings


def check_method(settings: Mapping[str, Any]) -> None:
    """Refuse an unknown method if there are no tensors to go by."""
    method = settings.get("quant_method")
    if method is not None and method not in KNOWN_METHODS:  # older tools name none
        raise ConfigError(
            f"this checkpoint is quantized with {method!r}, which is not supported; supported: "
            f"{', '.join(KNOWN_METHODS)}; or use its weights in float16, bfloat16 or float32"
        )


def describe(tensors: Collection[StoredTensor]) -> str:
    """Describe the formats of matrices, most weights first, with their bytes: `gptq:int4-g128 4.9GiB`."""
    weights: dict[str, int] = {}
    for tensor in tensors:
        weights[tensor.type_name] = weights.get(tensor.type_name, 0) + math.prod(tensor.shape)
    names = "+".join(sorted(weights, key=lambda name: -weights[name]))
    return names and f"{names} {short_bytes(sum(tensor.num_bytes for tensor in tensors))}"


def published_as(tensors: Mapping[str, StoredTensor]) -> str:
    """Describe a checkpoint's quantized formats, with their bytes; "": it has plain numbers, or is GGUF."""
    return describe([tensor for tensor in tensors.values() if isinstance(tensor, QuantizedTensor)])


def short_bytes(num_bytes: int) -> str:
    """Format a size without a space, for a log line."""
    return f"{num_bytes / 2**30:.1f}GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f}MiB"
