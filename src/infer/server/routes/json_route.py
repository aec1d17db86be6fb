"""The common part of all JSON routes: strict JSON in, JSON out, and large work in a thread.

FastAPI's own JSON reader takes NaN, Infinity and lone surrogates; the one here does not. A route module gets
it from `make_router`.

Parsing holds Python's lock, in a thread too, and a schema of 8 MiB takes a second. So the fields of a large
body are measured before it is parsed, which takes milliseconds and makes no objects.
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

from infer.errors import RequestError
from infer.server.protocol.schemas import MAX_CONSTRAINT_BYTES, Body
from infer.server.state import ServerState

P = ParamSpec("P")
T = TypeVar("T")

LARGE = 2_000  # tokens or logprobs to spell: some milliseconds

IGNORED_HEADER = "x-infer-ignored"

MAX_FIELD_BYTES = {  # of the JSON of fields that hold schemas; other fields may fill the body
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
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


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
    """Refuse a body with a schema too large to be parsed at once; other faults are left to the parser."""
    try:
        sizes = {name: len(bytes(value)) for name, value in _FIELDS.decode(body).items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    for name, limit in MAX_FIELD_BYTES.items():
        if sizes.get(name, 0) > limit:
            raise RequestError(f"{name} has {sizes[name]} bytes, at most {limit} are allowed", param=name)


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
