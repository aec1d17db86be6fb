"""Write a checkpoint as a GGUF file: sizes, tokenizer and weights in one, for llama.cpp and for this engine.

    config.json               ──►   llama.embedding_length, llama.rope.freq_base, ...
    tokenizer.json            ──►   tokenizer.ggml.tokens, merges or scores, types, name of the split rule
    a matrix of a layer       ──►   blocks of the requested type
    embedding and head        ──►   Q8_0, because errors of the head go straight into the logits
    norms and biases          ──►   F32

Rows whose length is not a multiple of 256 get blocks of 32 (Q4_1 instead of Q4_K), and rows whose length is
not a multiple of 32 become F16. This is the inverse of loader/formats/gguf.py, gguf_config.py,
gguf_tensors.py and tokenizer/gguf_vocab.py, for architectures whose files differ in little more than names.
"""

from __future__ import annotations

import logging
import math
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from infer.errors import ConfigError
from infer.loader.formats.checkpoint import StoredTensor
from infer.loader.formats.gguf import BLOCK, DEFAULT_ALIGNMENT, GGMLType
from infer.loader.formats.gguf_config import ROPE_FACTORS
from infer.loader.formats.gguf_tensors import NAMES, PERMUTED
from infer.loader.headers import ModelHeaders
from infer.models.config import ModelConfig, RopeScaling
from infer.tokenizer.directory_vocab import read_directory_vocabulary
from infer.tokenizer.gguf_metadata import tokenizer_metadata
from infer.tools.gguf_blocks import round_to_blocks

log = logging.getLogger(__name__)

ARCHITECTURES = {  # family -> GGUF
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "cohere2": "cohere2",
    "ministral3": "mistral3", "mistral3": "mistral3",
}  # fmt: skip
KINDS = {"gguf-q8_0": "Q8_0", "gguf-q4_0": "Q4_0", "gguf-q4_1": "Q4_1", "gguf-q4_k": "Q4_K"}
_FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 14}
_ROWS_AT_ONCE = 1 << 22  # weights that are rounded at a time


class _Stored(NamedTuple):
    """A tensor to write: its name in the file, and its rows."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLType
    source: StoredTensor | torch.Tensor
    num_heads: int = 0  # > 0: the rows of each head are reordered (gguf_tensors.py)

    @property
    def num_bytes(self) -> int:
        numbers, size = BLOCK[self.kind]
        return math.prod(self.shape) // numbers * size


def write_gguf(headers: ModelHeaders, out: Path, kind: str, advance: Callable[[int], None]) -> None:
    """Write a checkpoint of plain numbers to `out`, with its matrices in blocks of `kind`."""
    architecture = _architecture_of(headers)
    metadata = _metadata(headers, architecture, kind)
    tensors = list(_tensors(headers, architecture, GGMLType[kind]))
    _warn_of_others(tensors, kind)
    with out.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_text(key) + _typed(value))
        offset = 0
        for tensor in tensors:
            sizes = tensor.shape[::-1]
            place = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, tensor.kind, offset)
            file.write(_text(tensor.name) + place)
            offset += -(-tensor.num_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
        for tensor in tensors:
            _align(file)
            begin = file.tell()
            for rows in _rows(tensor):
                file.write(rows.contiguous().view(torch.uint8).numpy().tobytes())
            assert file.tell() - begin == tensor.num_bytes, tensor.name
            advance(getattr(tensor.source, "num_bytes", 0))
        _align(file)


def _architecture_of(headers: ModelHeaders) -> str:
    config, family = headers.config, headers.family.name
    if family not in ARCHITECTURES:
        raise ConfigError(
            f"a {family} model cannot be written as GGUF; families: {', '.join(ARCHITECTURES)}. "
            "The other schemes write it as safetensors"
        )
    kind = None if config.rope_scaling is None else config.rope_scaling.kind
    known = ("yarn",) if ARCHITECTURES[family] == "mistral3" else ("linear", "llama3")
    if kind not in (None, *known):
        raise ConfigError(
            f"a {family} model with rope scaling {kind!r} cannot be written as GGUF; "
            f"only with {', '.join(known)} or none. The other schemes write it as safetensors"
        )
    if family == "cohere2":
        _check_cohere2(config)
        return "cohere2"
    windows = set(config.layer_windows)
    if len(windows) > 1 or (windows - {None} and family != "mistral"):
        raise ConfigError(
            "a model whose layers have windows cannot be written as GGUF, except Mistral and Cohere 2"
        )
    return ARCHITECTURES[family]


def _check_cohere2(config: ModelConfig) -> None:
    """Refuse what the architecture has no tensor or key for."""
    period = _window_period(config)
    why = {
        "a head of its own": not config.tie_embeddings,
        "biases": config.qkv_bias or config.attention_out_bias or config.mlp_bias,
        "heads that do not divide the hidden size": config.num_heads * config.head_dim != config.hidden_size,
        "windows without a period": config.layer_windows
        != tuple(None if (n + 1) % period == 0 else config.window(0) for n in range(config.num_layers)),
    }
    found = [what for what, is_so in why.items() if is_so]
    if found:
        raise ConfigError(f"a cohere2 model with {found[0]} cannot be written as GGUF")


def _window_period(config: ModelConfig) -> int:
    """Return the number of layers up to the first one without a window."""
    windows = [*config.layer_windows, None]
    return windows.index(None) + 1


# -- metadata -----------------------------------------------------------------------------------------


def _metadata(headers: ModelHeaders, architecture: str, kind: str) -> dict[str, Any]:
    config, scaling = headers.config, headers.config.rope_scaling
    window = next(iter(config.layer_windows), None)
    sizes: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.context_len,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.layer_norm{'' if architecture == 'cohere2' else '_rms'}_epsilon": float(config.norm_eps),
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
        **({} if window is None else {"attention.sliding_window": window}),
    }
    if scaling is not None and scaling.kind == "linear":
        sizes |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    if scaling is not None and scaling.kind == "yarn":
        sizes |= _yarn(scaling)
    if config.query_growth:
        sizes["attention.temperature_scale"] = float(config.query_growth)
    if architecture == "cohere2":
        sizes |= {"logit_scale": float(config.logit_scale), "rope.scaling.type": "none"}
        sizes["attention.sliding_window_pattern"] = _window_period(config)
    return {
        "general.architecture": architecture,
        "general.name": headers.source.name.rpartition("/")[2],
        "general.file_type": _FILE_TYPES[kind],
        "general.quantization_version": 2,
        **{f"{architecture}.{key}": value for key, value in sizes.items()},
        **tokenizer_metadata(
            read_directory_vocabulary(headers.source.path), headers.eos_ids, config.vocab_size
        ),
    }


def _yarn(scaling: RopeScaling) -> dict[str, Any]:
    plain = 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
    if scaling.attention_factor not in (1.0, plain) or not scaling.truncate:
        raise ConfigError(
            f"yarn with the attention factor {scaling.attention_factor:g} and truncate {scaling.truncate} "
            f"cannot be written as GGUF, only with 1 or {plain:g}, and true"
        )
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling.factor),
        "rope.scaling.original_context_length": scaling.original_context_len,
        "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
        "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
        **({"rope.scaling.yarn_log_multiplier": 1.0} if scaling.attention_factor == 1.0 else {}),
    }


# -- tensors ------------------------------------------------------------------------------------------


def _tensors(headers: ModelHeaders, architecture: str, kind: GGMLType) -> Iterator[_Stored]:
    config = headers.config
    names = {ours: theirs for theirs, ours in NAMES[architecture].items()}
    for source in headers.sources:
        if source.target is not None and source.target.ignored:  # a tensor of a vision tower
            continue
        name, tensor = source.name.replace("language_model.", ""), source.tensor
        module, _, leaf = name.rpartition(".")
        layer = re.search(r"\.layers\.(\d+)\.", name)
        key = names.get(re.sub(r"\.layers\.\d+\.", ".layers.{}.", module))
        if name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and module == "lm_head"):
            continue
        if key is None or leaf not in ("weight", "bias"):
            raise ConfigError(f"{name} has no name in a GGUF file of a {architecture} model")
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(key.rpartition(".")[2], 0)
        of_layer = layer is not None and len(tensor.shape) == 2
        stored = _kind_for(tensor.shape, kind if of_layer else GGMLType.Q8_0)
        where = key.format(*([layer[1]] if layer else []))
        yield _Stored(
            f"{where}.{leaf}", tensor.shape, stored, tensor, heads if architecture in PERMUTED else 0
        )
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        factors = _llama3_factors(config)
        yield _Stored(ROPE_FACTORS, tuple(factors.shape), GGMLType.F32, factors)


def _warn_of_others(tensors: list[_Stored], kind: str) -> None:
    """Warn of matrices in layers that do not get the requested type."""
    of_layers = [each.kind.name for each in tensors if each.name.startswith("blk.") and len(each.shape) == 2]
    for other in sorted({*of_layers} - {kind}):
        log.warning(
            "rows of %d of the %d matrices do not fill blocks of %s: these are written in %s",
            of_layers.count(other), len(of_layers), kind, other,
        )  # fmt: skip


def _kind_for(shape: tuple[int, ...], kind: GGMLType) -> GGMLType:
    """Return the type for a tensor: the requested one, if the row length is a multiple of its block."""
    if len(shape) == 1:
        return GGMLType.F32
    wanted = (kind, GGMLType.Q4_1) if kind is GGMLType.Q4_K else (kind,)
    return next((each for each in wanted if shape[-1] % BLOCK[each][0] == 0), GGMLType.F16)


def _llama3_factors(config: ModelConfig) -> torch.Tensor:
    """Return the divisor of each pair of channels, from which readers recover the parameters."""
    scaling = config.rope_scaling
    assert scaling is not None
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    turns = scaling.original_context_len * config.rope_theta ** (-pairs / config.head_dim) / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / (keep + (1 - keep) / scaling.factor)).float()


def _rows(tensor: _Stored) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor, some rows at a time."""
    source, kind = tensor.source, tensor.kind
    if isinstance(source, torch.Tensor):
        yield source
        return
    numbers = torch.empty(source.shape, dtype=source.dtype or torch.float32)
    source.copy_to(numbers)
    if tensor.num_heads:  # (head, 2, H/2) -> (head, H/2, 2)
        by_half = numbers.reshape(tensor.num_heads, 2, -1, *numbers.shape[1:])
        numbers = by_half.transpose(1, 2).reshape(numbers.shape)
    if numbers.dim() == 1 or kind is GGMLType.F16:
        yield numbers.half() if kind is GGMLType.F16 else numbers.float()
        return
    step = max(1, _ROWS_AT_ONCE // numbers.shape[1])
    yield from (round_to_blocks(rows, kind.name) for rows in torch.split(numbers, step))


# -- bytes --------------------------------------------------------------------------------------------


def _align(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % DEFAULT_ALIGNMENT))


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> bytes:
    """Encode a value, preceded by its type."""
    if isinstance(value, list):
        inner = [_typed(each) for each in value]
        kind = next(iter(inner), _typed(""))[:4]  # empty lists have the element type string, as for no merges
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + b"".join(e[4:] for e in inner)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    is_float = isinstance(value, float)
    return (
        struct.pack("<If", 6, value)
        if is_float
        else struct.pack("<II" if value >= 0 else "<Ii", 4 if value >= 0 else 5, value)
    )
