"""`POST /v1/embeddings`: a text as a vector, the model's final hidden state.

frontend/embeddings.py prepares and checks texts, for the library and this route. This file has the HTTP side
and the encodings: OpenAI's client asks for base64, the bytes of little-endian 32-bit floats.
"""

from __future__ import annotations

import array
import asyncio
import base64
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import orjson
from fastapi import Request as HttpRequest
from fastapi import Response

from infer.client.client import embed
from infer.errors import RequestError, RequestTimeout
from infer.frontend.embeddings import EmbeddingJob, open_embeddings
from infer.scheduling.request import Request
from infer.server.protocol.body import Body
from infer.server.protocol.schemas import EmbeddingRequest, ReadingBody
from infer.server.protocol.stream import unless_disconnected
from infer.server.protocol.translate import most_tokens, request_options, split_prompts, time_limit
from infer.server.routes.json_route import ignored_headers, make_router, server_state
from infer.server.state import ServedModel, engine_id, mark

router = make_router()
T = TypeVar("T")

FORMATS = ("float", "base64")
MAX_INPUTS = 2048  # inputs of one body, as in OpenAI's API
MAX_TOGETHER = 16  # inputs of one body that are in the engine at a time


@router.post("/v1/embeddings", response_model=None)
async def create_embeddings(body: EmbeddingRequest, http: HttpRequest) -> Response:
    """Return one vector per input."""
    encoding = body.encoding_format or FORMATS[0]
    if encoding not in FORMATS:
        raise RequestError.about(
            "encoding_format", f"must be one of {', '.join(FORMATS)}, got {encoding[:40]!r}"
        )

    def write(index: int, vector: list[float]) -> bytes:
        written = encode_vector(vector, encoding)
        return orjson.dumps({"object": "embedding", "index": index, "embedding": written})

    vectors, num_tokens, name = await make_vectors(http, body, write)
    about = {"id": f"embd-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
    rest = about | {"usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}
    return await list_response(b'{"object":"list","data":[', vectors, rest, body)


async def make_vectors(
    http: HttpRequest, body: EmbeddingRequest, write: Callable[[int, list[float]], bytes]
) -> tuple[list[bytes], int, str]:
    """Return the vectors of a body's inputs, encoded by `write`, the number of tokens and the model name."""
    state = server_state(http)
    model = await state.use_model(body.model)
    inputs = split_prompts(body.input, MAX_INPUTS, "input", "send several requests")
    mark("parse")
    job = await asyncio.to_thread(
        open_embeddings,
        model.encoder,
        inputs,
        pooling=body.pooling,
        normalize=body.normalize,
        dimensions=body.dimensions,
        add_special=body.add_special_tokens is not False,
        most=most_tokens(body, model.encoder, 0),
        keeps_end=body.truncation_side != "right",
    )
    vectors = await run_job(
        http, body, model, job, lambda index, state: write(index, job.finish(state)), "input"
    )
    num_tokens = sum(len(prompt) for prompt in job.prompts)
    return vectors, num_tokens, body.model if body.model is not None else model.name


async def run_job(
    http: HttpRequest,
    body: ReadingBody,
    model: ServedModel,
    job: EmbeddingJob,
    finish: Callable[[int, list[float]], T],
    param: str,
) -> list[T]:
    """Return the results of `finish` for the hidden states of a job's inputs, in the body's field `param`."""
    mark("tokenize")
    state = server_state(http)
    limit = time_limit(body, state)
    requests = job.requests(lambda: engine_id(f"embd-{uuid.uuid4().hex}"), **request_options(body, state))
    try:
        async with asyncio.timeout(limit):
            return await unless_disconnected(http.receive, _embed(model, requests, finish, param))
    except TimeoutError:
        raise RequestTimeout(f"the embeddings were not ready after {limit:g} s; send fewer inputs") from None


async def _embed(
    model: ServedModel, requests: Sequence[Request], finish: Callable[[int, list[float]], T], param: str
) -> list[T]:
    """Return the results for all inputs; only a few are in the engine at a time, to leave room for others.

    A thread encodes each vector as soon as it arrives. As Python floats, millions of numbers take half a
    gigabyte, and encoding them all at once would hold the GIL and block every stream.
    """
    window = asyncio.Semaphore(min(MAX_TOGETHER, model.config.scheduler.max_queue or MAX_TOGETHER))

    async def embed_one(index: int, request: Request) -> T:
        async with window:
            return await asyncio.to_thread(finish, index, await embed(model.pick(request), request))

    tasks = [asyncio.ensure_future(embed_one(i, request)) for i, request in enumerate(requests)]
    try:
        return await asyncio.gather(*tasks)
    except RequestError as error:
        raise error.of_prompt("prompt", param) from None
    finally:
        for task in tasks:
            task.cancel()


def join_list(opening: bytes, items: Sequence[bytes], rest: Mapping[str, object]) -> bytes:
    """Return the JSON of a list and the fields after it; `bytes.join` releases the GIL for long texts."""
    commas = (text for item in items for text in (b",", item))
    return b"".join([opening, *list(commas)[1:], b"],", orjson.dumps(rest)[1:]])


async def list_response(
    opening: bytes, items: Sequence[bytes], rest: Mapping[str, object], body: Body
) -> Response:
    """Return a response with a list and the fields after it."""
    content = await asyncio.to_thread(join_list, opening, items, rest)
    return Response(content, headers=ignored_headers(body), media_type="application/json")


def encode_vector(vector: list[float], encoding: str) -> list[float] | str:
    """Encode a vector as JSON numbers, or as base64 of its bytes."""
    if encoding == "float":
        return vector
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")
