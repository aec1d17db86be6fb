"""Saying no before any route runs: an `ApiError` sent from bare ASGI.

Middleware stands outside the application, where no exception handler of a framework would be asked.
"""

from __future__ import annotations

from dataclasses import replace

from starlette.types import Scope, Send

from infer.server.protocol.errors import ApiError


async def refuse(send: Send, error: ApiError) -> None:
    """Answer with an error; what is left of the request's body is not read."""
    body = error.encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse_unread(scope: Scope, send: Send, error: ApiError) -> None:
    """The same for a request whose body nobody has read: where there is one, the connection ends here.

    To keep the connection would mean to read, and throw away, whatever the sender of a refused request
    likes to send.
    """
    if has_body(scope):
        error = replace(error, headers={**error.headers, "connection": "close"})
    await refuse(send, error)


def has_body(scope: Scope) -> bool:
    """Whether a request says that it brings a body."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")
        for name, value in scope["headers"]
    )
