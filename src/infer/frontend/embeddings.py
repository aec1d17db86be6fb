"""Embeddings: the final hidden state of an input, pooled.

Pooling takes the state of the last token (the default, which decoder models are trained for) or the mean over
all tokens. Vectors have length 1, as in OpenAI's API, so that a dot product is a cosine. A model's files may
say how to pool (loader/pooling.py); a caller's choice overrides them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from infer.errors import ContextOverflow, RequestError, spell_context, spell_limit
from infer.frontend.prompts import PromptEncoder
from infer.scheduling.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingJob:
    """The inputs of embeddings as token ids, and how their states are pooled and scaled."""

    prompts: tuple[tuple[int, ...], ...]
    pooling: str
    normalize: bool
    dimensions: int | None = None  # count of numbers kept at the start of a vector; None: all

    def finish(self, hidden: list[float]) -> list[float]:
        """The vector of one input, from its hidden state."""
        if self.dimensions is not None:
            if not 1 <= self.dimensions <= len(hidden):
                raise RequestError.about(
                    "dimensions",
                    f"is {self.dimensions}, but this model's embeddings have {len(hidden)} numbers; give "
                    f"1 to {len(hidden)}, or leave it out",
                )
            hidden = hidden[: self.dimensions]
        return to_unit(hidden) if self.normalize else hidden

    def requests(self, next_id: Callable[[], str], **options: Any) -> list[Request]:
        """A request for each input; `options` as in `RequestOptions`, without an id."""
        return [
            Request(request_id=next_id(), prompt=prompt, pooling=self.pooling, **options)
            for prompt in self.prompts
        ]


def open_embeddings(
    encoder: PromptEncoder,
    inputs: Sequence[str | list[int]],
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
    add_special: bool = True,
    most: int | None = None,
    keeps_end: bool = True,
) -> EmbeddingJob:
    """Encode and check all inputs; by default they are pooled and scaled as the model's files say."""
    prompts = encoder.encode_all(inputs, "input", add_special=add_special, most=most, keeps_end=keeps_end)
    check_inputs(encoder, prompts, "input")
    return EmbeddingJob(
        prompts=tuple(tuple(ids) for ids in prompts),
        pooling=encoder.pooling.mode if pooling is None else pooling,
        normalize=encoder.pooling.normalize if normalize is None else normalize,
        dimensions=dimensions,
    )


def check_inputs(encoder: PromptEncoder, prompts: Sequence[list[int]], param: str) -> None:
    """Refuse inputs without tokens, and inputs longer than the context."""
    for i, ids in enumerate(prompts):
        if not ids:
            raise RequestError(f"{param} {i} has no tokens; give at least one", param=param)
        if len(ids) > encoder.context_len:
            limit = spell_context(encoder.context_len)
            whose = spell_limit(encoder.context_len, encoder.model_len)
            said = f"{param} {i} has {len(ids)} tokens, but {limit}; shorten it{whose}"
            raise ContextOverflow.in_words(said, param=param)


def to_unit(vector: list[float]) -> list[float]:
    """The vector scaled to length 1; zeros stay zeros."""
    length = math.hypot(*vector) or 1.0
    return [value / length for value in vector]
