"""Write a checkpoint in one of the published quantized formats, with each weight rounded to nearest.

    dense checkpoint ──► matrix by matrix: integers, scales, zeros ──► tensors and config of the format

loader/formats/stored_formats.py reads the formats; this module writes them. Rounding to nearest needs no
calibration data and no GPU, and loses almost nothing at 8 bits; at 4 bits, the methods that the formats are
named after choose better integers. Embeddings, norms, routers and the head stay dense.

    scheme        format                               a matrix becomes
    gptq          GPTQ, version 1 or 2                 2, 3, 4 or 8 bits, groups of columns
    awq           AWQ, version gemm                    4 bits, groups
    ct-w4a16      compressed-tensors, pack-quantized   4 bits, groups
    ct-w8a16      compressed-tensors, pack-quantized   8 bits, a scale per row
    ct-int8       compressed-tensors, int-quantized    int8, a scale per row
    fp8-channel   compressed-tensors, float-quantized  e4m3, a scale per row
    fp8-block     fp8                                  e4m3, a scale per 128 x 128 block
    fp8-tensor    fp8                                  e4m3, one scale
    nf4           bitsandbytes                         4-bit table, a scale per 64 weights, itself in 8 bits
    squeezellm    SqueezeLLM                           3 or 4 bits, a table per row, and separate outliers
    gguf-...      GGUF, a file (gguf_writer.py)        blocks of Q8_0, Q4_0, Q4_1 or Q4_K

Shapes:  N rows of W (out), K columns (in), G groups of a row.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infer.errors import CheckpointError, ConfigError
from infer.layers.moe import ALWAYS_DENSE
from infer.loader.find.hub import FOLDERS
from infer.loader.find.source import ModelSource
from infer.loader.formats.checkpoint import INDEX, SINGLE, StoredTensor, write_safetensors
from infer.loader.formats.hf_config import read_hf_config
from infer.loader.formats.quantized import published_as
from infer.loader.headers import ModelHeaders, read_headers
from infer.log import progress
from infer.models.weight_map import Target, find_target
from infer.quant.rounding import NF4
from infer.tools.gguf_writer import KINDS, write_gguf

SHARD_BYTES = 4 << 30
log = logging.getLogger(__name__)
_E4M3_MAX = 448.0
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word

_LLOYD_ROUNDS = 12

Leaves = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A scheme and its options."""

    scheme: str
    bits: int = 4  # gptq and squeezellm only
    group_size: int = 128  # columns that share a scale; -1: all
    symmetric: bool = True  # gptq and ct-w4a16 only; awq always has zeros
    version: int = 1  # gptq only: format version, which decides how zeros are stored
    act_order: bool = False  # gptq only: columns are sorted by size before they are grouped
    nested: bool = True  # nf4 only: scales are quantized too
    outliers: float = 0.45  # squeezellm only: percent of the weights, the largest, that are stored separately

    def groups_of(self, size: int) -> int:
        """Return the columns of a group in a matrix of `size` columns."""
        return size if self.group_size == -1 else min(self.group_size, size)


def round_to_groups(
    weight_NK: torch.Tensor, bits: int, group_size: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return unsigned codes [N, K], and float16 scales and zeros [N, G] with  w = (code - zero) * scale."""
    num_rows, size = weight_NK.shape
    short = -size % group_size
    groups = torch.nn.functional.pad(weight_NK.float(), (0, short)).view(num_rows, -1, group_size)
    most, middle = (1 << bits) - 1, 1 << bits - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    steps = torch.maximum(-low, high) / (middle - 1) if symmetric else (high - low) / most
    scales = steps.clamp(min=1e-7).half()  # 1e-7: about the smallest positive float16
    zeros = torch.full_like(low, middle) if symmetric else (-low / scales.float()).round().clamp(0, most)
    codes = (groups / scales.float()[..., None]).round_().add_(zeros[..., None]).clamp_(0, most)
    return codes.to(torch.uint8).flatten(1)[:, :size], scales, zeros.to(torch.uint8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack rows of codes as little-endian bit streams in int32 words."""
    if bits in (2, 4, 8):  # a byte has only whole codes
        per_byte = 8 // bits
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % (4 * per_byte)))
        packed = codes[..., ::per_byte].clone(memory_format=torch.contiguous_format)
        for place in range(1, per_byte):
            packed |= codes[..., place::per_byte] << bits * place
        return packed.view(torch.int32)
    places = torch.arange(bits, dtype=torch.uint8, device=codes.device)
    stream = (codes[..., None] >> places & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 32))
    values = 1 << torch.arange(8, dtype=torch.uint8, device=codes.device)
    return (stream.view(*codes.shape[:-1], -1, 8) * values).sum(-1, dtype=torch.uint8).view(torch.int32)


def _gptq(weight: torch.Tensor, recipe: Recipe, sizes_K: torch.Tensor | None = None) -> Leaves:
    size, group_size = weight.shape[1], recipe.groups_of(weight.shape[1])
    sizes_K = _column_sizes(weight) if sizes_K is None else sizes_K
    order = sizes_K.argsort(descending=True, stable=True) if recipe.act_order else torch.arange(size)
    codes, scales, zeros = round_to_groups(
        weight[:, order], recipe.bits, group_size, symmetric=recipe.symmetric
    )
    place = order.argsort()
    stored = zeros if recipe.version == 2 else zeros - 1 & (1 << recipe.bits) - 1
    return {
        "qweight": pack(codes[:, place], recipe.bits).T.contiguous(),
        "qzeros": pack(stored.T, recipe.bits),
        "scales": scales.T.contiguous(),
        "g_idx": (place // group_size).int(),
    }


def _column_sizes(weight_NK: torch.Tensor) -> torch.Tensor:
    return weight_NK.float().square().sum(0)


def _awq(weight: torch.Tensor, recipe: Recipe) -> Leaves:
    codes, scales, zeros = round_to_groups(weight, 4, recipe.groups_of(weight.shape[1]), symmetric=False)

    def words(rows: torch.Tensor) -> torch.Tensor:
        return pack(rows.reshape(len(rows), -1, 8)[:, :, _AWQ_COLUMNS].flatten(1), 4)

    return {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T.contiguous()}


def _ct_packed(weight: torch.Tensor, recipe: Recipe) -> Leaves:
    bits = 8 if recipe.scheme == "ct-w8a16" else 4
    group_size = weight.shape[1] if bits == 8 else recipe.groups_of(weight.shape[1])
    codes, scales, zeros = round_to_groups(weight, bits, group_size, symmetric=recipe.symmetric)
    leaves = {
        "weight_packed": pack(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not recipe.symmetric:
        leaves["weight_zero_point"] = pack(zeros.T, bits).T.contiguous()
    return leaves


def _ct_int8(weight: torch.Tensor, recipe: Recipe) -> Leaves:
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    return {"weight": (weight.float() / scale).round().to(torch.int8), "weight_scale": scale}


def _fp8(weight: torch.Tensor, recipe: Recipe) -> Leaves:
    rows, columns = {
        "fp8-tensor": tuple(weight.shape), "fp8-channel": (1, weight.shape[1]), "fp8-block": (128, 128)
    }[recipe.scheme]  # fmt: skip
    (num_rows, size), numbers = weight.shape, weight.float()
    padded = torch.nn.functional.pad(numbers, (0, -size % columns, 0, -num_rows % rows))
    blocks = padded.view(-1, rows, padded.shape[1] // columns, columns)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / _E4M3_MAX
    by_weight = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:num_rows, :size]
    codes = (numbers / by_weight).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    if recipe.scheme == "fp8-block":
        return {"weight": codes, "weight_scale_inv": scale}
    return {"weight": codes, "weight_scale": scale if recipe.scheme == "fp8-channel" else scale.view(())}


def _nf4(weight: torch.Tensor, recipe: Recipe) -> Leaves:
    table, flat = torch.tensor(NF4), weight.float().flatten()
    count = len(flat)
    blocks = torch.nn.functional.pad(flat, (0, -count % 64)).view(-1, 64)
    absmax = blocks.abs().amax(1).clamp(min=1e-12)
    borders = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / absmax[:, None], borders).to(torch.uint8).flatten()[:count]
    pairs = torch.nn.functional.pad(codes, (0, count % 2)).view(-1, 2)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32"}
    state["shape"] = list(weight.shape)
    leaves = {"weight": (pairs[:, :1] << 4 | pairs[:, 1:]), "weight.quant_map": table}
    if recipe.nested:
        offset, levels = absmax.mean(), torch.linspace(-1, 1, 256)
        above = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        nested = above.abs().amax(1).clamp(min=1e-12)
        level = torch.bucketize(above / nested[:, None], (levels[1:] + levels[:-1]) / 2)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        leaves |= {"weight.nested_absmax": nested, "weight.nested_quant_map": levels}
        absmax = level.flatten()[: len(absmax)].to(torch.uint8)
    text = json.dumps(state).encode()
    return leaves | {
        "weight.absmax": absmax,
        "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(text), dtype=torch.uint8),
    }


def _squeezellm(weight: torch.Tensor, recipe: Recipe) -> Leaves:
    """Quantize each row to the means of its clusters; the largest weights are a sparse matrix to add."""
    numbers = weight.float()
    count = round(numbers.numel() * recipe.outliers / 100)
    is_apart = torch.zeros(numbers.numel(), dtype=torch.bool)
    is_apart[numbers.abs().flatten().topk(count).indices] = True
    is_apart = is_apart.view(numbers.shape)
    table = _means_of_clusters(numbers, ~is_apart, 1 << recipe.bits)
    codes = torch.searchsorted((table[:, 1:] + table[:, :-1]) / 2, numbers)
    nearest = table.abs().argmin(1, keepdim=True)  # outliers get the code of the number nearest to zero
    codes = torch.where(is_apart, nearest, codes).to(torch.uint8)
    leaves = {"qweight": pack(codes, recipe.bits).T.contiguous(), "lookup_table": table}
    if not count:
        return leaves
    rest = numbers - table.gather(1, nearest)
    rows = torch.nn.functional.pad(is_apart.sum(1).cumsum(0), (1, 0))
    sparse = {"rows": rows.int(), "cols": is_apart.nonzero()[:, 1].int(), "vals": rest[is_apart]}
    return leaves | sparse


def _means_of_clusters(numbers_NK: torch.Tensor, counts_NK: torch.Tensor, num_clusters: int) -> torch.Tensor:
    """Return the means [N, C] of clusters of each row's weights that count, ascending (Lloyd's algorithm)."""
    ordered = torch.where(counts_NK, numbers_NK, torch.inf).sort(1).values
    shares = (torch.arange(num_clusters) + 0.5) / num_clusters
    places = (shares * counts_NK.sum(1, keepdim=True)).long().clamp(max=numbers_NK.shape[1] - 1)
    table, held = ordered.gather(1, places), counts_NK.float()
    table = torch.where(table.isfinite(), table, 0).sort(1).values  # not finite: a row of outliers alone
    for _ in range(_LLOYD_ROUNDS):
        which = torch.searchsorted((table[:, 1:] + table[:, :-1]) / 2, numbers_NK)
        sizes = torch.zeros_like(table).scatter_add_(1, which, held)
        sums = torch.zeros_like(table).scatter_add_(1, which, numbers_NK * held)
        table = torch.where(sizes > 0, sums / sizes.clamp(min=1), table).sort(1).values
    return table


_WRITERS: Mapping[str, Callable[[torch.Tensor, Recipe], Leaves]] = {
    "gptq": _gptq, "awq": _awq, "ct-w4a16": _ct_packed, "ct-w8a16": _ct_packed, "ct-int8": _ct_int8,
    "fp8-channel": _fp8, "fp8-block": _fp8, "fp8-tensor": _fp8, "nf4": _nf4, "squeezellm": _squeezellm,
}  # fmt: skip
SCHEME_NAMES = tuple(_WRITERS)
ALL_NAMES = (*SCHEME_NAMES, *KINDS)


def quantize_matrix(weight_NK: torch.Tensor, recipe: Recipe, sizes_K: torch.Tensor | None = None) -> Leaves:
    """Return the tensors of one matrix in the format of a recipe, by leaf.

    Act-order sorts columns by `sizes_K`, or by their sizes in this matrix.
    """
    if recipe.act_order:
        return _gptq(weight_NK, recipe, sizes_K)
    return _WRITERS[recipe.scheme](weight_NK, recipe)


def config_of(recipe: Recipe, dense: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of this format; `dense` are the modules that are not quantized."""
    scheme, group_size = recipe.scheme, recipe.group_size
    if scheme == "gptq":
        return {
            "quant_method": "gptq", "bits": recipe.bits, "group_size": group_size, "sym": recipe.symmetric,
            "desc_act": recipe.act_order, "lm_head": False,
            "checkpoint_format": "gptq" if recipe.version == 1 else "gptq_v2",
        }  # fmt: skip
    if scheme == "awq":
        return {
            "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": dense,
        }  # fmt: skip
    if scheme == "nf4":
        return {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": recipe.nested, "bnb_4bit_compute_dtype": "float32",
        }  # fmt: skip
    if scheme == "squeezellm":
        return {"quant_method": "squeezellm", "wbits": recipe.bits}
    if scheme in ("fp8-block", "fp8-tensor"):
        block = {"weight_block_size": [128, 128]} if scheme == "fp8-block" else {}
        return {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **block,
            "modules_to_not_convert": dense,
        }  # fmt: skip
    is_packed = scheme in ("ct-w4a16", "ct-w8a16")
    per_row = scheme != "ct-w4a16"
    weights = {
        "num_bits": 4 if scheme == "ct-w4a16" else 8, "type": "float" if scheme == "fp8-channel" else "int",
        "strategy": "channel" if per_row else "group", "group_size": None if per_row else group_size,
        "symmetric": recipe.symmetric or not is_packed, "dynamic": False,
    }  # fmt: skip
    inputs = {"num_bits": 8, "type": weights["type"], "strategy": "token", "symmetric": True, "dynamic": True}
    names = {"ct-int8": "int-quantized", "fp8-channel": "float-quantized"}
    return {
        "quant_method": "compressed-tensors", "format": names.get(scheme, "pack-quantized"),
        "quantization_status": "compressed", "ignore": dense,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": weights, "input_activations": None if is_packed else inputs
            }
        },
    }  # fmt: skip


def check_recipe(recipe: Recipe) -> None:
    """Refuse settings that the format of a recipe does not support."""
    if recipe.scheme not in ALL_NAMES:
        raise ConfigError(f"scheme must be one of {', '.join(ALL_NAMES)}, got {recipe.scheme!r}")
    if recipe.bits not in (2, 3, 4, 8):
        raise ConfigError(f"bits must be 2, 3, 4 or 8, got {recipe.bits}")
    if recipe.scheme == "squeezellm" and recipe.bits not in (3, 4):
        raise ConfigError(f"bits of squeezellm must be 3 or 4, got {recipe.bits}")
    if not 0 <= recipe.outliers <= 10:
        raise ConfigError(f"outliers must be 0 to 10 percent of the weights, got {recipe.outliers}")
    if recipe.act_order and recipe.scheme != "gptq":
        raise ConfigError(f"act_order is for gptq; {recipe.scheme} has groups of neighbours")
    if recipe.group_size != -1 and recipe.group_size < 8:
        raise ConfigError(f"group_size must be -1 (all columns) or at least 8, got {recipe.group_size}")


def quantize_checkpoint(
    source: ModelSource, out_dir: Path, recipe: Recipe, *, show_progress: bool = False
) -> None:
    """Quantize the checkpoint of `source`, which must have plain numbers, to a directory or a GGUF file."""
    check_recipe(recipe)
    if source.is_gguf:
        raise ConfigError("a GGUF file is quantized already; give the safetensors checkpoint it was made of")
    _check_out(out_dir, recipe)
    headers = read_headers(source, "infer")
    if headers.family.name == "gpt_oss":
        raise ConfigError("experts of gpt-oss have a layout of their own, which no scheme here writes")
    if headers.quantization or published_as(headers.tensors):
        raise ConfigError(f"{source.name} is quantized already; give the checkpoint it was made of")
    if recipe.scheme in KINDS:
        with (
            _finished_as(out_dir, out_dir.parent) as unfinished,
            _progress(source, headers, show_progress) as advance,
        ):
            write_gguf(headers, unfinished, KINDS[recipe.scheme], advance)
        return
    chosen = [name for name, tensor in headers.tensors.items() if _is_chosen(headers, name, tensor)]
    _warn_of_groups(recipe, {_row_size(headers, name) for name in chosen})
    matrices = {name.rpartition(".")[0] for name in chosen}
    dense = [name.removesuffix(".weight") for name in headers.tensors if name == "lm_head.weight"]
    dense += sorted(
        name.removesuffix(".weight")
        for name, tensor in headers.tensors.items()
        if len(tensor.shape) == 2 and ".layers." in name and name.removesuffix(".weight") not in matrices
    )
    raw = read_hf_config(source.path) | {"quantization_config": config_of(recipe, dense)}
    with _finished_as(out_dir, out_dir) as unfinished:
        unfinished.mkdir()
        with _progress(source, headers, show_progress) as advance:
            _write_shards(unfinished, _tensors(headers, set(chosen), recipe, advance))
        for file in source.path.iterdir():
            if file.is_file() and file.suffix in (".json", ".txt", ".model", ".jinja") and file.name != INDEX:
                shutil.copy(file, unfinished / file.name)
        for folder in filter(Path.is_dir, (source.path / name for name in FOLDERS)):
            shutil.copytree(folder, unfinished / folder.name)
        (unfinished / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _finished_as(out: Path, home: Path) -> Iterator[Path]:
    """Yield a temporary path in the directory `home`; its content becomes `out` when the block succeeds.

    A file is renamed. The files of a directory are moved up to `home`, `config.json` last, because without it
    the others do not count as a model.
    """
    is_new = not home.exists()
    home.mkdir(parents=True, exist_ok=True)
    unfinished = home / f"{out.name}.unfinished"
    try:
        yield unfinished
        if out is not home:
            unfinished.rename(out)
        else:
            for file in sorted(unfinished.iterdir(), key=lambda file: file.name == "config.json"):
                file.rename(out / file.name)
    finally:
        shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):  # the directory is not empty
                home.rmdir()


def _check_out(out: Path, recipe: Recipe) -> None:
    """Refuse an output that already exists, or whose name does not suit the scheme."""
    if recipe.scheme not in KINDS:
        if out.is_file():
            raise ConfigError(f"{out} is a file, and {recipe.scheme} writes a directory; choose another name")
        if out.suffix == ".gguf":
            raise ConfigError(
                f"{recipe.scheme} writes a directory: its name must not end in .gguf, got {out}"
            )
        if out.exists() and any(out.iterdir()):
            raise ConfigError(f"{out} is not empty; delete it or choose another directory")
    elif out.suffix != ".gguf":
        raise ConfigError(f"{recipe.scheme} writes one file: its name must end in .gguf, got {out}")
    elif out.exists():
        raise ConfigError(f"{out} exists; delete it or choose another name")


def _progress(
    source: ModelSource, headers: ModelHeaders, is_shown: bool
) -> AbstractContextManager[Callable[[int], None]]:
    total = sum(tensor.num_bytes for tensor in headers.tensors.values())
    return progress(f"quantizing {source.name}", total, is_shown=is_shown, counts_bytes=True)


def _row_size(headers: ModelHeaders, name: str) -> int:
    is_transposed = find_target(name, headers.family.weight_map)[0].transposed
    return headers.tensors[name].shape[0 if is_transposed else 1]


def _warn_of_groups(recipe: Recipe, sizes: set[int]) -> None:
    """Warn of groups that are larger than rows, or that no 4-bit form of this engine can keep."""
    if recipe.scheme not in ("gptq", "awq", "ct-w4a16") or recipe.group_size == -1:
        return
    short = sorted(size for size in sizes if size < recipe.group_size)
    if short:
        log.warning(
            "groups of %d are larger than rows of %s: each of these rows is one group",
            recipe.group_size, ", ".join(map(str, short)),
        )  # fmt: skip
    if recipe.group_size % 32 and len(short) < len(sizes) and recipe.bits <= 4:
        log.warning(
            "groups of %d are not a multiple of 32: this engine will keep the file in 8 bits or unpacked, "
            "not in 4; use --group-size 32, 64 or 128",
            recipe.group_size,
        )


def _is_chosen(headers: ModelHeaders, name: str, tensor: StoredTensor) -> bool:
    """Return True if a tensor is a matrix of a layer; routers stay dense."""
    try:
        target, leaf = find_target(name, headers.family.weight_map)
    except CheckpointError:
        return False
    is_matrix = leaf == "weight" and len(tensor.shape) == 2 and name.endswith(".weight")
    return is_matrix and target.module.startswith("layers.") and not target.module.endswith(ALWAYS_DENSE)


def _tensors(
    headers: ModelHeaders, chosen: set[str], recipe: Recipe, advance: Callable[[int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    targets = {name: find_target(name, headers.family.weight_map)[0] for name in chosen}
    sizes: dict[tuple[str, int | None], torch.Tensor] = {}  # sizes of columns, by the input they read
    for name, place in targets.items() if recipe.act_order else ():
        key = (place.module, place.expert)
        sizes[key] = sizes.get(key, 0) + _column_sizes(_matrix(headers.tensors[name], place))
    for name, stored in headers.tensors.items():
        target = targets.get(name)
        tensor = _matrix(stored, target)
        if target is not None:
            if recipe.scheme in ("gptq", "awq", "squeezellm") and any(size % 32 for size in tensor.shape):
                raise ConfigError(f"{name} is {list(tensor.shape)}; {recipe.scheme} packs multiples of 32")
            known = sizes.get((target.module, target.expert))
            for leaf, value in quantize_matrix(tensor, recipe, known).items():
                yield f"{name.removesuffix('weight')}{leaf}", value
        else:
            yield name, tensor
        advance(stored.num_bytes)


def _matrix(stored: StoredTensor, target: Target | None) -> torch.Tensor:
    """Read a tensor as it is stored; a chosen one as [out, in]."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    stored.copy_to(tensor)
    return tensor.T.contiguous() if target is not None and target.transposed else tensor


def _write_shards(out_dir: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write safetensors files of a few gigabytes each, and an index if there are several."""
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        write_safetensors(out_dir / f"part-{len(shards)}", held)
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        held[name] = tensor
        if sum(tensor.nbytes for tensor in held.values()) > SHARD_BYTES:
            flush()
    if held:
        flush()
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    for number, name in enumerate(names):
        (out_dir / f"part-{number}").rename(out_dir / name)
    if count > 1:
        index = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        (out_dir / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8")
