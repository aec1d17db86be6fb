"""The common part of all JSON routes: strict JSON in, JSON out, and large work in a thread.

FastAPI's own JSON reader takes NaN, Infinity and lone surrogates; the one here does not. A route module gets
it from `make_router`.

Parsing holds Python's lock, in a thread too, and a schema of 8 MiB takes a second. So the fields of a large
body are measured before it is parsed, which takes milliseconds and makes no objects. What is in none of the
measured fields counts together: unknown fields, and a field that is given twice, of which the last is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ParamSpec, TypeVar

import msgspec
import orjson
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from infer.errors import MalformedRequest, RequestError
from infer.server.protocol.schemas import MAX_CONSTRAINT_BYTES, Body
from infer.server.state import ServerState

P = ParamSpec("P")
T = TypeVar("T")

LARGE = 2_000  # tokens or logprobs to spell: some milliseconds

IGNORED_HEADER = "x-infer-ignored"

MAX_FIELD_BYTES = {  # of the JSON of fields that hold schemas
    "guided_choice": MAX_CONSTRAINT_BYTES,
    "guided_grammar": MAX_CONSTRAINT_BYTES,
    "guided_json": MAX_CONSTRAINT_BYTES,
    "guided_regex": MAX_CONSTRAINT_BYTES,
    "output_config": MAX_CONSTRAINT_BYTES,
    "output_format": MAX_CONSTRAINT_BYTES,
    "response_format": MAX_CONSTRAINT_BYTES,
    "structured_outputs": MAX_CONSTRAINT_BYTES,
    "text": MAX_CONSTRAINT_BYTES,
    "tools": 4 * MAX_CONSTRAINT_BYTES,
}
LARGE_FIELDS = ("input", "instructions", "messages", "prompt", "system", "tokens")  # may fill the body
MAX_REST_BYTES = 4 * MAX_CONSTRAINT_BYTES  # of all other fields together
_FIELDS = msgspec.json.Decoder(
    msgspec.defstruct(
        "_Fields", [(name, msgspec.Raw, msgspec.Raw(b"")) for name in (*MAX_FIELD_BYTES, *LARGE_FIELDS)]
    )
)


class ErrorDetail(BaseModel):
    """What went wrong, and which field is to blame."""

    message: str
    type: str
    param: str | None
    code: int | str | None


class ErrorBody(BaseModel):
    """Every error answer."""

    error: ErrorDetail


class JsonRequest(Request):
    """A request whose JSON is JSON: no NaN, no Infinity, no half characters."""

    async def json(self) -> Any:
        """The parsed body; raises a `json.JSONDecodeError`."""
        return orjson.loads(await self.body())


def check_fields(body: bytes) -> None:
    """Refuse a body that is no JSON object, or holds what is too large to be parsed at once."""
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequest(
            f"the body is not a JSON object: {error}; send UTF-8 text, not compressed"
        ) from None
    sizes = {name: len(bytes(getattr(fields, name))) for name in (*MAX_FIELD_BYTES, *LARGE_FIELDS)}
    for name, limit in MAX_FIELD_BYTES.items():
        if sizes[name] > limit:
            raise RequestError(f"{name} has {sizes[name]} bytes, at most {limit} are allowed", param=name)
    if (rest := len(body) - sum(sizes.values())) > MAX_REST_BYTES:
        raise RequestError(
            f"the body has {rest} bytes in other fields than {', '.join(sizes)}, or in one of these that is "
            f"given twice; at most {MAX_REST_BYTES} are allowed"
        )


class JsonRoute(APIRoute):
    """A route that reads its body as a `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given our request."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            strict = JsonRequest(request.scope, request.receive)
            if request.method == "POST":
                body = await strict.body()  # raises ClientDisconnect if the client leaves while sending
                if len(body) > MAX_CONSTRAINT_BYTES:
                    check_fields(body)
            return await handle(strict)

        return handle_json


def make_router(error_body: type[BaseModel] = ErrorBody) -> APIRouter:
    """A router for JSON routes, with their errors in the OpenAPI schema."""
    statuses = (400, 401, 413, 422, 500, 503, 504)
    errors: dict[int | str, dict[str, Any]] = {status: {"model": error_body} for status in statuses}
    return APIRouter(route_class=JsonRoute, responses=errors)


def server_state(http: Request) -> ServerState:
    """The state that `build_app` gave to the routes."""
    state = http.app.state.server
    assert isinstance(state, ServerState)
    return state


def json_response(content: Mapping[str, Any], body: Body | None = None) -> Response:
    """A JSON answer; a header names the fields of `body` that had no effect."""
    headers = ignored_headers(body) if body is not None else {}
    return Response(orjson.dumps(content), headers=headers, media_type="application/json")


def ignored_headers(body: Body) -> dict[str, str]:
    """The header that names the fields without effect, if there are any."""
    return {IGNORED_HEADER: ", ".join(body.ignored_fields)} if body.ignored_fields else {}


async def in_thread_if_large(size: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Return the result of some work of a known size, which a thread does if it is large.

    An event loop that is busy for a tenth of a second stops every stream of the server for that long. For
    small work the way to a thread and back costs more than the work.
    """
    if size < LARGE:
        return work(*args, **options)
    return await asyncio.to_thread(work, *args, **options)
