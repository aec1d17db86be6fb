"""Read the JSON files next to the weights: config.json and generation_config.json.

    config.json              the shape of the network; each family reads it (models/registry.py)
    generation_config.json   its authors' sampling parameters, and the tokens that end an answer

A model often has several end tokens (end of text, end of turn), and the two files may name different ones:
all of them count.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from infer.errors import CheckpointError

T = TypeVar("T")

MAX_CONFIG_BYTES = 16 << 20
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The generation settings of a checkpoint."""

    eos_ids: tuple[int, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)  # values of SAMPLING_KEYS that the file sets


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read a file that must hold one JSON object of at most `max_bytes`."""
    return _read(path, max_bytes, dict, "object")


def read_json_list(path: Path, max_bytes: int) -> list[Any]:
    """Read a file that must hold one JSON list of at most `max_bytes`."""
    return _read(path, max_bytes, list, "list")


def open_at_once(path: str, flags: int) -> int:
    """Open a file without blocking, as the `opener` of `open`; a pipe without a writer reads as empty."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read(path: Path, max_bytes: int, kind: type[T], name: str) -> T:
    try:
        with open(path, "rb", opener=open_at_once) as handle:
            text = handle.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if len(text) > max_bytes:
        raise CheckpointError(f"{path} is larger than the {max_bytes} bytes allowed for it")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, endless integers
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, kind):
        raise CheckpointError(f"{path} must hold a JSON {name}, got {type(value).__name__}")
    return value


def read_hf_config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json."""
    return read_json(directory / "config.json", MAX_CONFIG_BYTES)


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """Read generation_config.json; the defaults are empty if there is none.

    Its sampling parameters count only if `do_sample` is set: without it, its authors decode greedily and
    the other numbers are leftovers.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    raw = read_json(path, MAX_CONFIG_BYTES)
    sampling: dict[str, float] = {}
    for key in SAMPLING_KEYS if raw.get("do_sample") is True else ():
        value = raw.get(key)
        if value is None:
            continue
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise CheckpointError(f"{key!r} in {path} must be a finite number, got {value!r}")
        sampling[key] = value
    return GenerationDefaults(eos_ids=_read_eos(raw, path), sampling=sampling)


def _read_eos(raw: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise CheckpointError(f"'eos_token_id' in {path} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def merge_eos_ids(*sources: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Return every id that ends an answer once, in order, without ids outside the vocabulary."""
    return tuple(dict.fromkeys(i for ids in sources for i in ids if 0 <= i < vocab_size))
