"""`POST /v1/embeddings`: a text as a vector, the model's final hidden state.

Which one, `pooling` says: that of the last token (the default, what decoder models are trained for) or the
mean over all tokens. Vectors have the length 1, as OpenAI's have, so that a dot product is a cosine;
`normalize: false` gives the state as it is. A model whose files say how it is to be pooled is pooled so
(loader/pooling.py). OpenAI's client asks for base64: the bytes of little-endian 32-bit floats.
"""

from __future__ import annotations

import array
import asyncio
import base64
import math
import sys
import uuid

from fastapi import Request as HttpRequest
from fastapi import Response

from infer.engine.request import Request
from infer.errors import ContextOverflow, RequestError, RequestTimeout, spell_context, spell_limit
from infer.server.record import engine_id
from infer.server.routing import json_response, make_router, server_state, unless_disconnected
from infer.server.schemas import EmbeddingRequest
from infer.server.state import ServedModel
from infer.server.translate import encode_prompts, split_prompts

router = make_router()

FORMATS = ("float", "base64")


class InputOverflow(ContextOverflow):
    """A text is longer than the context; nothing is generated, so there is no max_tokens to lower."""

    def __init__(self, index: int, num_tokens: int, context_len: int, model_len: int) -> None:
        RequestError.__init__(
            self,
            f"input {index} has {num_tokens} tokens, but {spell_context(context_len)}; shorten it"
            + spell_limit(context_len, model_len),
            param="input",
        )


@router.post("/v1/embeddings", response_model=None)
async def create_embeddings(body: EmbeddingRequest, http: HttpRequest) -> Response:
    """One vector per input."""
    state = server_state(http)
    model = state.get_model(body.model)
    encoding = body.encoding_format or FORMATS[0]
    if encoding not in FORMATS:
        raise RequestError(
            f"encoding_format must be one of {', '.join(FORMATS)}, got {encoding[:40]!r}",
            param="encoding_format",
        )
    inputs = split_prompts(body.input, state.config.max_prompts, "input")
    ids = await encode_prompts(model.front, inputs, "input", add_special=body.add_special_tokens is not False)
    check_lengths(ids, model.front.context_len, model.front.model_len)
    pooling = model.front.pooling
    is_unit = pooling.normalize if body.normalize is None else body.normalize
    limit = min((each for each in (body.timeout, state.config.request_timeout) if each), default=None)
    try:
        async with asyncio.timeout(limit):
            vectors = await unless_disconnected(
                http.receive, _embed(model, ids, body.pooling or pooling.mode)
            )
    except TimeoutError:
        raise RequestTimeout(f"the embeddings were not ready after {limit:g} s; send fewer inputs") from None
    if is_unit:  # beside the event loop: millions of numbers take a while, and others are being answered
        vectors = await asyncio.to_thread(lambda found: [to_unit(vector) for vector in found], vectors)
    num_tokens = sum(len(each) for each in ids)
    return json_response(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": encode_vector(vector, encoding)}
                for i, vector in enumerate(vectors)
            ],
            "model": body.model if body.model is not None else model.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        },
        body,
    )


def check_lengths(inputs: list[list[int]], context_len: int, model_len: int) -> None:
    """Refuse an input that is empty or does not fit."""
    for i, ids in enumerate(inputs):
        if not ids:
            raise RequestError(f"input {i} has no tokens; give at least one", param="input")
        if len(ids) > context_len:
            raise InputOverflow(i, len(ids), context_len, model_len)


async def _embed(model: ServedModel, prompts: list[list[int]], pooling: str) -> list[list[float]]:
    """One after the other: each occupies the whole engine, and generation must go on between them."""
    vectors = []
    for prompt in prompts:
        request = Request(request_id=engine_id(f"embd-{uuid.uuid4().hex}"), prompt=tuple(prompt))
        vectors.append(await model.pick(request).embed(request.prompt, pooling, request.request_id))
    return vectors


def to_unit(vector: list[float]) -> list[float]:
    """The same direction with the length 1; nothing points nowhere, so zeros stay zeros."""
    length = math.hypot(*vector) or 1.0
    return [value / length for value in vector]


def encode_vector(vector: list[float], encoding: str) -> list[float] | str:
    """A vector as JSON numbers, or as base64 of its bytes."""
    if encoding == "float":
        return vector
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")
