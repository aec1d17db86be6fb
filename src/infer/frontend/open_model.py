"""Find a model's files and open its text side, with the weights or apart from them.

open_model             encoder and weights, for an engine in this process
make_encoder           the encoder alone, from all headers: no engine is needed
open_text, then        tokenizer and text headers, while engines load in their own processes; the rest of
make_served_encoder    the facts comes from the engines, so this process does not import torch
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infer.config.settings import EngineConfig, LoadConfig
from infer.errors import ConfigError
from infer.frontend.prompts import PromptEncoder
from infer.loader.find.source import ModelSource, resolve_model
from infer.loader.text_headers import TextHeaders, read_text_headers
from infer.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from infer.client.messages import Ready
    from infer.loader.headers import ModelHeaders
    from infer.loader.load import LoadedModel  # it imports torch, which a server's process does not need


def open_model(config: EngineConfig, *, show_progress: bool) -> tuple[PromptEncoder, LoadedModel]:
    """Find and load a model: its text side, and the weights for an engine."""
    from infer.client.load import load_weights
    from infer.loader.headers import read_headers

    headers = read_headers(find_source(config.load, show_progress=show_progress), config.load.model_impl)
    encoder = make_encoder(config.load, headers)
    return encoder, load_weights(config, headers, show_progress=show_progress)


def make_encoder(config: LoadConfig, headers: ModelHeaders) -> PromptEncoder:
    """The encoder of a model, from its headers alone, without an engine."""
    from infer.loader.load import check_length

    model, tokenizer = headers.config, _load_tokenizer(config, headers)
    context_len = check_length(config.max_seq_len, model)
    return PromptEncoder(
        config, headers, tokenizer, family=model.family, context_len=context_len, model_len=model.context_len
    )


def make_served_encoder(
    config: LoadConfig, text: tuple[TextHeaders, Tokenizer], engines: Sequence[Ready]
) -> PromptEncoder:
    """The encoder of a model that engines run, for the context length that all of them have."""
    first, context_len = engines[0], min(engine.context_len for engine in engines)
    return PromptEncoder(
        config, *text, family=first.family, context_len=context_len, model_len=first.model_len
    )


def find_source(config: LoadConfig, *, show_progress: bool) -> ModelSource:
    """Find a model, and download it if needed."""
    return resolve_model(config.model, revision=config.revision, show_progress=show_progress)


def open_text(config: LoadConfig, source: ModelSource) -> tuple[TextHeaders, Tokenizer]:
    """Read what `make_served_encoder` needs of a model's files; the rest comes from the engines."""
    headers = read_text_headers(source)
    return headers, _load_tokenizer(config, headers)


def _load_tokenizer(config: LoadConfig, headers: TextHeaders) -> Tokenizer:
    if config.tokenizer is not None:
        path = Path(config.tokenizer).expanduser()
        if not path.exists():
            raise ConfigError(f"tokenizer is {config.tokenizer!r}, but there is no such file or directory")
        return Tokenizer.from_directory(path)
    if headers.gguf_metadata is not None:
        return Tokenizer.from_gguf(headers.gguf_metadata)
    return Tokenizer.from_directory(headers.source.path)
