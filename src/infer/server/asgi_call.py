"""Call an ASGI application of this process directly, without a network.

    process 0 of a server    passes it requests that other API processes forward (forward.py)
    infer batch              passes it the lines of a file

The application cannot tell the difference: the same layers, limits and errors apply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Scope

Headers = list[tuple[bytes, bytes]]


class AppAnswer(NamedTuple):
    """The whole response, and the scope as the application's middleware left it."""

    status: int  # 0: the client left before anything was sent
    headers: Headers
    body: bytes
    scope: Scope


async def call_app(
    app: ASGIApp,
    method: str,
    path: str,
    *,
    headers: Iterable[tuple[bytes, bytes]] = (),
    body: bytes = b"",
    query_string: bytes = b"",
    left: asyncio.Event | None = None,
    **marks: Any,
) -> AppAnswer:
    """Call an application; `left` is set when the client leaves, `marks` are extra entries of the scope."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query_string,
        "headers": list(headers),
        **marks,
    }
    gone = asyncio.Event() if left is None else left
    sent: list[Message] = []
    bodies: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if bodies:
            return bodies.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    if not sent and gone.is_set():
        return AppAnswer(0, [], b"", scope)
    start, *rest = sent
    answered = [(bytes(name), bytes(value)) for name, value in start["headers"]]
    return AppAnswer(start["status"], answered, b"".join(message.get("body", b"") for message in rest), scope)
