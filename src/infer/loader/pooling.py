"""Pooling: how a text becomes one vector, read from the files of Sentence Transformers if there are any.

    modules.json             the steps after the network, each with its class and its folder
    1_Pooling/config.json    the hidden states to use: {"pooling_mode_lasttoken": true} or
                             {"pooling_mode": "lasttoken"}

A checkpoint made for embeddings ships them; its vectors are scaled to length 1 if and only if one of the
steps is Normalize. All other models get what embedding clients expect: the hidden state of the last token,
the only one that has seen the whole text, scaled to length 1 so that a dot product is a cosine.

The name of an unsupported step (for example a Dense layer) is appended to the mode, which is then unknown.
Requests for embeddings are then refused, because the vector would be wrong without that step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infer.errors import CheckpointError
from infer.loader.formats.hf_config import MAX_CONFIG_BYTES, read_json, read_json_list

MODES = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}  # names in the files -> our names
PREFIX = "pooling_mode_"
JUDGE = "Judge whether the Document meets the requirements"  # how Qwen3-Reranker's prompt begins
STEPS = ("Pooling", "Normalize")  # supported steps after the network


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The hidden states that make the vector, and a flag: scale it to length 1."""

    mode: str = "last"
    normalize: bool = True
    is_published: bool = field(default=False, compare=False)  # True: read from files, so made for embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """The way in which a model scores a query and a document (score_head.py)."""

    row: tuple[float, ...] = ()  # score = row · hidden state; (): the cosine of the two texts' vectors
    is_judged: bool = False  # True: both texts are put into Qwen3-Reranker's prompt


def read_pooling(directory: Path) -> Pooling:
    """Read the pooling of a model directory; the defaults if it has none."""
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
    """Return the name of a folder next to the file; any other path is refused, as files are not trusted."""
    if "/" in name or name == "..":
        raise CheckpointError(f"{modules} names the folder {name!r}, which is not one of the model's own")
    return name


def _mode_of(raw: dict[str, Any]) -> str:
    """Return our name for the mode; an unknown mode keeps its name, and requests for embeddings fail."""
    set_modes = [key.removeprefix(PREFIX) for key in raw if key.startswith(PREFIX) and raw[key] is True]
    found = str(raw.get("pooling_mode") or "+".join(set_modes) or "lasttoken")
    return MODES.get(found, found)
