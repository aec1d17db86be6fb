"""The text part of a model's headers, read without PyTorch: all that a server needs if an engine in another
process runs the model.

    tokenizer           in the directory, or in the metadata of a GGUF file
    sampling, EOS ids   generation_config.json
    pooling             modules.json, in a checkpoint made for embeddings
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
    """Everything in a model's files except the network: enough to tokenize and to sample."""

    source: ModelSource
    defaults: GenerationDefaults
    gguf_metadata: Mapping[str, Any] | None  # metadata of a GGUF file, with the tokenizer in it
    pooling: Pooling = Pooling()  # frozen, so instances may share the default


def read_text_headers(source: ModelSource, file: GGUFFile | None = None) -> TextHeaders:
    """Read the files next to the weights; `file` is the source's GGUF file, if it is already open."""
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
