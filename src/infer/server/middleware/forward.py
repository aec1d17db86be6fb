"""Forward requests that only process 0 of a server can answer.

`/health`, `/metrics`, `/explain/...` and the operator's routes are about the whole server. Another API
process forwards them with all their headers and returns the response, so it is the same in every process.
`/admin/live` is not forwarded: it is about one engine, which every process can query, and its response is an
endless stream. If the client leaves before the response, which may take long, process 0 is notified.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import TypeAlias

from starlette.types import ASGIApp, Receive, Scope, Send

from infer.errors import EngineStopped
from infer.server.asgi_call import call_app
from infer.server.middleware.access_log import FORWARDED, METRICS_PATH, route_of
from infer.server.middleware.auth import EXPLAIN_PREFIX, HEALTH_PATH, LIVE_PATH, is_admin, route_path
from infer.server.processes.messages import ClientLeft, ForwardedAnswer, ForwardRequest

Ask: TypeAlias = Callable[[ForwardRequest | ClientLeft], Awaitable[ForwardedAnswer | None]]


class Forward:
    """ASGI middleware: forwards requests about the whole server to process 0 with `ask`."""

    def __init__(self, app: ASGIApp, ask: Ask) -> None:
        self._app = app
        self._ask = ask
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on to the routes of this process, or to process 0."""
        path = route_path(scope) if scope["type"] == "http" else ""
        is_whole = path in (HEALTH_PATH, METRICS_PATH) or path.startswith(EXPLAIN_PREFIX)
        if not is_whole and (path == LIVE_PATH or not is_admin(path)):
            await self._app(scope, receive, send)
            return
        request = ForwardRequest(
            name=f"{os.getpid()}/{next(self._numbers)}",
            method=scope["method"],
            path=scope["path"],
            query_string=scope["query_string"],
            headers=scope["headers"],
            body=(await receive()).get("body", b""),  # complete: BodyLimit has read it
        )
        watcher = asyncio.ensure_future(self._tell_leaving(receive, request.name))
        try:
            answer = await self._ask(request)
        finally:
            watcher.cancel()
        if answer is None:  # the client left, and process 0 sent nothing
            return
        scope["route"] = SimpleNamespace(path=answer.route)  # the field that `route_of` reads
        start = {"type": "http.response.start", "status": answer.status, "headers": answer.headers}
        await send(start)
        await send({"type": "http.response.body", "body": answer.body, "more_body": False})

    async def _tell_leaving(self, receive: Receive, name: str) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        with suppress(EngineStopped):  # process 0 is gone
            await self._ask(ClientLeft(name))


class Forwarded:
    """Answers, in process 0, the requests that other API processes forward."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._left: dict[str, asyncio.Event] = {}  # set when a client leaves, by request name

    async def answer(self, question: ForwardRequest | ClientLeft) -> ForwardedAnswer | None:
        """Answer a request, or note that a client has left."""
        if isinstance(question, ClientLeft):
            if (left := self._left.get(question.name)) is not None:
                left.set()
            return None
        self._left[question.name] = left = asyncio.Event()
        try:
            return await self._answer(question, left)
        finally:
            del self._left[question.name]

    async def _answer(self, request: ForwardRequest, left: asyncio.Event) -> ForwardedAnswer | None:
        answer = await call_app(
            self._app,
            request.method,
            request.path,
            headers=list(request.headers),
            body=request.body,
            query_string=request.query_string,
            left=left,
            **{FORWARDED: True},
        )
        if not answer.status:
            return None
        return ForwardedAnswer(answer.status, answer.headers, answer.body, route_of(answer.scope))
