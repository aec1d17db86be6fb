"""Limits on the bodies of requests, and on when requests are accepted at all.

`BodyLimit` reads the whole body before a route sees it and counts the bytes, so a chunked upload without a
content-length has the same limit, and a client that trickles bytes is cut off. This applies to every method,
because a GET may have a body, too. A compressed body is rejected with 415, because its real size is unknown
before it is read.

`Gate` answers 503 with a Retry-After while models are loading and once the server is draining. Monitoring
routes (health, metrics, version, explain, the web page) and the operator's routes pass. It also counts
running requests, so that a drain knows when the last one has finished.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.config.knobs import parse_bytes
from infer.server.middleware.auth import EXPLAIN_PREFIX, header_of, is_admin, is_open, route_path
from infer.server.protocol.errors import REFUSED_HEADER, ApiError
from infer.server.state import ServerState, mark

BODY_TIMEOUT_S = 30.0
WATCHING = ("/health", "/metrics", "/version", "/api/version")
CLOSE = {"connection": "close"}


class BodyTooLarge(Exception):
    """A body has more bytes than allowed; caught in this file."""


class BodyLimit:
    """ASGI middleware: passes the application a complete, bounded body, or answers 413, 408 or 415."""

    def __init__(self, app: ASGIApp, max_body_size: str, *, timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._app = app
        self._max_text = max_body_size
        self._max_bytes = parse_bytes(max_body_size)
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read one request's body and pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        encoding = (header_of(scope, b"content-encoding") or b"").decode("latin-1")
        if encoding.strip().lower() not in ("", "identity"):
            message = f"the body came with content-encoding {encoding[:40]}; send it as it is, not compressed"
            await ApiError(status=415, message=message).send_unread(scope, receive, send)
            return
        try:
            declared = header_of(scope, b"content-length") or b""
            if declared.isdigit() and int(declared) > self._max_bytes:
                raise BodyTooLarge
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(receive)
        except BodyTooLarge:
            message = f"the request body is larger than {self._max_text} (max_body_size); send less at a time"
            await ApiError(status=413, message=message, headers=CLOSE).response()(scope, receive, send)
            return
        except TimeoutError:
            message = f"the request body did not arrive within {self._timeout_s:g} s"
            await ApiError(status=408, message=message, headers=CLOSE).response()(scope, receive, send)
            return
        if body is not None:  # None: the client left before its end
            mark("receive")
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > self._max_bytes:
                raise BodyTooLarge
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the body first and then further messages of the connection."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replaying() -> Message:
        return waiting.pop() if waiting else await receive()

    return replaying


class Gate:
    """ASGI middleware: answers 503 while no work can be started; counts running requests."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or reject it with 503."""
        if scope["type"] != "http" or self._is_always_open(route_path(scope)):
            await self._app(scope, receive, send)
            return
        board = self._state.board
        board.count_request(1)  # before reading the flags, so that a drain misses no request
        try:
            if board.is_starting or board.is_draining:
                what = "draining and accepts no new requests" if board.is_draining else "starting"
                message = f"the server is {what}; try again in a few seconds"
                refusal = ApiError.for_now(message, **{REFUSED_HEADER: "1"})
                await refusal.response()(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            board.count_request(-1)

    def _is_always_open(self, path: str) -> bool:
        """Return True if a path (without the root path, as routers see it) is for monitoring or operation."""
        is_watching = path in WATCHING or path.startswith(EXPLAIN_PREFIX)
        return is_watching or is_admin(path) or is_open(path, self._state.config)
