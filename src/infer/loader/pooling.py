"""Pooling: how a text becomes one vector, as the files of Sentence Transformers say, if there are any.

    modules.json             the steps after the network, each with its class and its folder
    1_Pooling/config.json    which hidden states count: {"pooling_mode_lasttoken": true} or
                             {"pooling_mode": "lasttoken"}

A checkpoint made for embeddings ships them; its vectors have the length 1 if and only if a step named
Normalize is among them. Any other model gets what clients of embeddings expect: the last token, which is the
only one that has seen all of the text, and the length 1, so that a dot product is a cosine.

A step that is not made here (a Dense layer, say) becomes part of the mode's name, which is then unknown. The
model is refused when an embedding is asked for, because without that step it would be another vector.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infer.errors import CheckpointError
from infer.loader.formats.hf_config import MAX_CONFIG_BYTES, read_json, read_json_list

MODES = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}  # their names and ours
PREFIX = "pooling_mode_"
JUDGE = "Judge whether the Document meets the requirements"  # how Qwen3-Reranker's prompt begins
STEPS = ("Pooling", "Normalize")  # the steps after the network that are made here


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The hidden states that make the vector, and whether it is scaled to length 1."""

    mode: str = "last"
    normalize: bool = True
    is_published: bool = field(default=False, compare=False)  # its files say so: it is made for embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """The way in which a model scores a query and a document (score_head.py)."""

    row: tuple[float, ...] = ()  # the score is its product with the hidden state; (): a cosine of vectors
    is_judged: bool = False  # the two texts stand in the prompt that Qwen3-Reranker was trained with


def read_pooling(directory: Path) -> Pooling:
    """The pooling that a model directory asks for; the defaults if it says nothing."""
    path = directory / "modules.json"
    if not path.exists():
        return Pooling()
    _network, *others = read_json_list(path, MAX_CONFIG_BYTES) or [{}]
    steps = [step for step in others if isinstance(step, dict)]
    kinds = {str(step.get("type")).rpartition(".")[2]: step for step in steps}
    mode = Pooling().mode
    if "Pooling" in kinds:
        config = directory / _folder(path, str(kinds["Pooling"].get("path"))) / "config.json"
        mode = _mode_of(read_json(config, MAX_CONFIG_BYTES)) if config.exists() else mode
    unknown = [kind for kind in kinds if kind not in STEPS]
    return Pooling(
        mode="+".join([mode, *unknown]), normalize="Normalize" in kinds, is_published="Pooling" in kinds
    )


def _folder(modules: Path, name: str) -> str:
    """The name, if it names a folder next to the file: a model must not send us anywhere else."""
    if "/" in name or name == "..":
        raise CheckpointError(f"{modules} names the folder {name!r}, which is not one of the model's own")
    return name


def _mode_of(raw: dict[str, Any]) -> str:
    """Our name for the mode; an unknown one keeps its own, and is refused when an embedding is asked for."""
    set_modes = [key.removeprefix(PREFIX) for key in raw if key.startswith(PREFIX) and raw[key] is True]
    found = str(raw.get("pooling_mode") or "+".join(set_modes) or "lasttoken")
    return MODES.get(found, found)
