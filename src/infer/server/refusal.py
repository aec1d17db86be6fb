"""Saying no before any route runs: an `ApiError` sent from bare ASGI.

Middleware stands outside the application, where no exception handler of a framework would be asked.
"""

from __future__ import annotations

import orjson
from starlette.types import Send

from infer.server.errors import ApiError

RETRY_LATER_S = 5  # a model is loading, or this server is about to leave


async def refuse(send: Send, error: ApiError) -> None:
    """Answer with an error; what is left of the request's body is not read."""
    body = orjson.dumps(error.body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
