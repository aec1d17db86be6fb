"""A text as a vector: what the library and the server do with it before the engine and behind it.

    texts or ids ──► ids, checked ──► Engine.embed, one input at a time ──► brought to the length 1

The engine makes one of the model's final hidden states of an input; which one, `pooling` says: that of the
last token (the default, what decoder models are trained for) or the mean over all. Vectors have the length 1,
as OpenAI's have, so that a dot product is a cosine; `normalize=False` gives the state as it is. A model whose
files say how it is to be pooled is pooled so (loader/pooling.py), unless the caller knows better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from infer.errors import ContextOverflow, RequestError, spell_context, spell_limit
from infer.frontend.prompts import PromptEncoder


class InputOverflow(ContextOverflow):
    """A text is longer than the context; nothing is generated, so there is no max_tokens to lower."""

    def __init__(self, index: int, num_tokens: int, context_len: int, model_len: int) -> None:
        RequestError.__init__(
            self,
            f"input {index} has {num_tokens} tokens, but {spell_context(context_len)}; shorten it"
            + spell_limit(context_len, model_len),
            param="input",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingJob:
    """Inputs ready for an engine, and what is to be made of them."""

    prompts: tuple[tuple[int, ...], ...]
    pooling: str
    normalize: bool

    def finish(self, hidden: list[float]) -> list[float]:
        """The vector that a caller gets for the hidden state of one input."""
        return to_unit(hidden) if self.normalize else hidden


def open_embeddings(
    encoder: PromptEncoder,
    inputs: Sequence[str | list[int]],
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    add_special: bool = True,
) -> EmbeddingJob:
    """Encode and check all inputs before any is computed; what is not given is as the model's authors say."""
    prompts = encoder.encode_all(inputs, "input", add_special=add_special)
    for i, ids in enumerate(prompts):
        if not ids:
            raise RequestError(f"input {i} has no tokens; give at least one", param="input")
        if len(ids) > encoder.context_len:
            raise InputOverflow(i, len(ids), encoder.context_len, encoder.model_len)
    return EmbeddingJob(
        prompts=tuple(tuple(ids) for ids in prompts),
        pooling=encoder.pooling.mode if pooling is None else pooling,
        normalize=encoder.pooling.normalize if normalize is None else normalize,
    )


def to_unit(vector: list[float]) -> list[float]:
    """The same direction with the length 1; nothing points nowhere, so zeros stay zeros."""
    length = math.hypot(*vector) or 1.0
    return [value / length for value in vector]
