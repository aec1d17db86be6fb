"""The access log: gives every request an id, a record, and one line in the log.

    method=POST path="/v1/completions" status=200 ms=41.3 prompt_tokens=5 output_tokens=16 model="m" ...
    method=POST path="/v1/completions" status=400 ... request_id=req-80 param="stop" error="stop: must be ..."

The id is the client's `x-request-id` if it is short and plain, else a new one; either is sent back. Polls of
`/health` and `/metrics` arrive every few seconds as long as the server lives, so successful ones are logged
at level debug. A failing `/health` is logged when its status changes.

If a request has the header `x-infer-trace`, the response header `server-timing` has the time of each stage
up to the first token (`infer bench trace` prints it).

The response header `x-infer-model` names the model that serves a request, because an alias may stand for
several. Characters beyond ASCII are percent-encoded there.

A `RequestRecord` (state.py) collects the facts about a request. For a rejected request it also has the error,
and the log line quotes the part that is safe to log (redaction.py).

This outermost middleware turns an unexpected exception into a 500; its traceback is only in the log.
"""

from __future__ import annotations

import logging
import re
import secrets
import string
from time import perf_counter
from urllib.parse import quote

import orjson
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.server.asgi_call import Headers
from infer.server.explain.served import ServedRequests
from infer.server.metrics import ServerMetrics
from infer.server.middleware.auth import HEALTH_PATH, header_of, route_path
from infer.server.middleware.redaction import redacted_reason
from infer.server.protocol.errors import SPECIFIED_PREFIX, ApiError, api_of
from infer.server.state import RAW_SEND, RequestRecord, recording
from infer.server.tracing import Tracing

logger = logging.getLogger(__name__)

PLAIN_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")  # fullmatch only: it cannot forge a log line
MAX_LOGGED_PATH = 200
MAX_KEPT_ERROR = 300  # characters
METRICS_PATH = "/metrics"
TRACE_HEADER = b"x-infer-trace"
MODEL_HEADER = b"x-infer-model"
PLAIN_CHARS = string.punctuation + " "  # characters of names that need no encoding in a header
FORWARDED = "infer.forwarded"  # key of a scope, which no client can set

STRICT_PREFIXES = (SPECIFIED_PREFIX, "/admin")  # routes that reject every unknown field


class AccessLog:
    """ASGI middleware: id, record, log line and counters of every request."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        *,
        is_logged: bool,
        ignores_unknown: bool,
        stories: ServedRequests | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._tracing = tracing
        self._metrics = metrics
        self._is_logged = is_logged
        self._ignores_unknown = ignores_unknown
        self._stories = stories if stories is not None and stories.limit else None
        self._health_status = 0  # status of the last poll

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, log it and count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = route_path(scope)
        is_lenient = self._ignores_unknown and not path.startswith(STRICT_PREFIXES)
        record = RequestRecord(_request_id(scope), perf_counter(), path, api_of(path), is_lenient)
        if FORWARDED in scope:  # another API process logs and counts it
            with recording(record):
                await self._app(scope, receive, send)
            return
        record.is_traced = header_of(scope, TRACE_HEADER) not in (None, b"0")
        record.stories = self._stories
        if record.is_traced or self._stories is not None:
            record.marks = []
        tracing = None if path in (HEALTH_PATH, METRICS_PATH) else self._tracing
        span = None if tracing is None else tracing.begin(scope, record)
        headers = [] if tracing is None else tracing.headers(span)
        self._metrics.num_active += 1
        try:
            with recording(record):
                await self._serve(scope, receive, send, record, headers)
        finally:
            self._metrics.num_active -= 1
            self._finish(scope, record)
            if tracing is not None:
                tracing.end(span, scope, record, route_of(scope))

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord, headers: Headers
    ) -> None:
        id_headers = [(b"x-request-id", record.request_id.encode()), *headers]
        if record.api == "anthropic":
            id_headers.append((b"request-id", record.request_id.encode()))  # its name in Anthropic's API
        scope[RAW_SEND] = send

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *id_headers]
                if (name := record.model_name) is not None:
                    message["headers"].append((MODEL_HEADER, quote(name, safe=PLAIN_CHARS).encode()))
                if record.story is not None:
                    record.story.status, record.story.started_at = record.status, perf_counter()
                if record.is_traced:
                    record.mark("send")
                    message["headers"].append((b"server-timing", record.timing.encode()))
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                record.is_complete = True
            try:
                await send(message)
            except OSError:
                record.is_gone = True
                raise

        async def receiving() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not record.is_complete:
                record.is_gone = True
            return message

        try:
            await self._app(scope, receiving, sending)
        except Exception:
            if record.is_gone:  # the client has left
                return
            logger.exception("request failed request_id=%s", record.request_id)
            if record.status:
                raise  # part of a response was sent: closing the connection is all that is left
            message = "the server failed to answer this request; its log says why"
            await ApiError(status=500, message=message).response()(scope, receive, sending)

    def _finish(self, scope: Scope, record: RequestRecord) -> None:
        method = scope["method"]
        if (story := record.story) is not None and record.stories is not None:
            story.ended_at, story.is_gone = perf_counter(), record.is_gone
            story.error = None if record.error is None else record.error.message[:MAX_KEPT_ERROR]
            record.stories.end(story)
        self._metrics.count_http(
            method,
            route_of(scope),
            record.status,
            is_gone=record.is_gone,
            error_code=None if record.error is None else str(record.error.code or record.error.status),
        )
        if self._is_logged:
            logger.log(
                self._level(scope, record.status),
                "method=%s path=%s status=%d ms=%.1f prompt_tokens=%d output_tokens=%d%s%s request_id=%s%s",
                method,
                orjson.dumps(scope["path"][:MAX_LOGGED_PATH]).decode(),  # quoted: may contain a newline
                record.status,
                1000 * (perf_counter() - record.arrived_at),
                record.num_prompt_tokens,
                record.num_output_tokens,
                "" if (name := record.model_name) is None else f" model={orjson.dumps(name).decode()}",
                " client=gone" if record.is_gone else "",
                record.request_id,
                "" if record.error is None else redacted_reason(record.error),
            )

    def _level(self, scope: Scope, status: int) -> int:
        path = route_path(scope)
        is_quiet = path in (HEALTH_PATH, METRICS_PATH) and status == 200
        if path == HEALTH_PATH:
            is_quiet = is_quiet or status == self._health_status
            self._health_status = status
        return logging.DEBUG if is_quiet else logging.INFO


def _request_id(scope: Scope) -> str:
    given = (header_of(scope, b"x-request-id") or b"").decode("latin-1")
    return given if PLAIN_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


def route_of(scope: Scope) -> str:
    """Return the route as it was declared, so that a metric has one row per route."""
    route = scope.get("route")
    if route is None:  # rejected before routing, or unknown
        routes = scope["app"].routes
        route = next((each for each in routes if each.matches(scope)[0] is not Match.NONE), None)
    return str(route.path) if route is not None else "unmatched"
