"""What all OpenAI routes have in common: strict JSON in, JSON out, and nobody works for a client who left.

FastAPI's own JSON reader takes NaN, Infinity and lone surrogates; the one here does not. Its route class
is the only thing a route module must choose: `APIRouter(route_class=JsonRoute)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from infer.server.protocol.schemas import Body
from infer.server.state import ServerState

T = TypeVar("T")

IGNORED_HEADER = "x-infer-ignored"


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


class JsonRoute(APIRoute):
    """A route that reads its body as a `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given our request."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            strict = JsonRequest(request.scope, request.receive)
            if request.method == "POST":
                await strict.body()  # a client that leaves while sending is gone, not wrong
            return await handle(strict)

        return handle_json


def make_router() -> APIRouter:
    """A router for JSON routes whose errors are documented."""
    statuses = (400, 401, 413, 422, 500, 503, 504)
    errors: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in statuses}
    return APIRouter(route_class=JsonRoute, responses=errors)


def server_state(http: Request) -> ServerState:
    """What `create_app` put there for the routes."""
    state = http.app.state.server
    assert isinstance(state, ServerState)
    return state


def json_response(content: Mapping[str, Any], body: Body | None = None) -> Response:
    """An answer; the fields of `body` that had no effect are named in a header."""
    headers = ignored_headers(body) if body is not None else {}
    return Response(orjson.dumps(content), headers=headers, media_type="application/json")


def ignored_headers(body: Body) -> dict[str, str]:
    """The header that names the fields without effect, if there are any."""
    return {IGNORED_HEADER: ", ".join(body.ignored_fields)} if body.ignored_fields else {}


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but cancel it, and so abort the engine request, if the client hangs up first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
