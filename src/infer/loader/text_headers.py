"""What a model's files say about text, read without PyTorch: all that a server needs of a model it has an
engine for.

    tokenizer           in the directory, or in the metadata of a GGUF file
    sampling, EOS ids   generation_config.json
    pooling             modules.json, of a checkpoint made for embeddings
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infer.loader.find import default_model
from infer.loader.find.source import ModelSource
from infer.loader.formats.gguf import GGUFFile, read_gguf
from infer.loader.formats.hf_config import GenerationDefaults, read_generation_defaults
from infer.loader.pooling import Pooling, read_pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class TextHeaders:
    """What a model's files say beside its network: enough to tokenize for it and to sample from it."""

    source: ModelSource
    defaults: GenerationDefaults
    gguf_metadata: Mapping[str, Any] | None  # of a GGUF file: the tokenizer is in there
    pooling: Pooling = Pooling()  # frozen, so all may share it


def read_text_headers(source: ModelSource, file: GGUFFile | None = None) -> TextHeaders:
    """Read the files beside the weights; `file` is the GGUF file of the source, where it is open already."""
    if source.is_gguf:
        return TextHeaders(
            source=source,
            defaults=GenerationDefaults(sampling=default_model.sampling_of(source.path)),
            gguf_metadata=(file or read_gguf(source.path)).metadata,
        )
    return TextHeaders(
        source=source,
        defaults=read_generation_defaults(source.path),
        gguf_metadata=None,
        pooling=read_pooling(source.path),
    )
