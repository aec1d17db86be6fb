"""Errors in the formats of each API's clients: statuses, bodies and codes.

`REFUSALS` has the statuses of rejected requests. They differ by route: `/v1/completions` and
`/v1/completions/stream` distinguish unusable values (422) from unreadable bodies (400). All other routes
answer like the APIs that they implement, whose clients branch on 400 and 404. Besides these:

    QueueFull, EngineStopped       503     retry after Retry-After seconds; `x-infer-refused: 1` means that
                                           no work was started (an engine may end because of a request)
    RequestTimeout                 504     ask for less, or for more time; do not retry the same request
    EngineError, anything else     500     tell the operator

Every body is `{"error": {"message", "type", "param", "code"}}`, even for unknown routes. Under /v1/messages
it is `{"type": "error", "error": {"type", "message"}, "request_id"}`, from every layer of the server, and
under /api/ it is Ollama's `{"error": "message"}`.

Our messages about a request contain only our own words and the client's. A message of an engine or a template
may quote another library's exception, with addresses and paths of this machine in it, so they are scrubbed:
all paths except our routes. The client learns that an unexpected exception happened, and nothing else about
it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from infer.errors import (
    ContextOverflow,
    EngineError,
    EngineStopped,
    InferError,
    MalformedRequest,
    NameTaken,
    QueueFull,
    RequestError,
    RequestTimeout,
    TemplateError,
    UnknownModel,
    UnknownPrevious,
    UnknownResponse,
    closest,
    json_type,
    shorten,
    show_value,
)
from infer.server.state import Api, RequestFailure, current_id, current_record

logger = logging.getLogger(__name__)

RETRY_SOON_S = 1  # a full queue moves within about a second
RETRY_LATER_S = 5  # a model is loading, an engine restarts, or this server is stopping
REFUSED_HEADER = "x-infer-refused"  # set on a 503 if no work was started: another server may be tried
CLIENT_GONE = 499  # status that proxies log for it; no client sees it
MAX_MESSAGE_LEN = 1000
SPECIFIED_PREFIX = "/v1/completions"  # prefix of the routes with 422


class Refusal(NamedTuple):
    """The status and code of an exception that a client can fix."""

    error: type[RequestError]
    specified: int  # status on /v1/completions and /v1/completions/stream
    elsewhere: int  # status on every other route
    code: str | None = None  # code that programs branch on; None: the status


REFUSALS = (  # the first row whose class matches
    Refusal(MalformedRequest, 400, 400),
    Refusal(NameTaken, 409, 409),
    Refusal(UnknownModel, 422, 404, "model_not_found"),
    Refusal(UnknownPrevious, 400, 400, "previous_response_not_found"),
    Refusal(UnknownResponse, 404, 404),
    Refusal(ContextOverflow, 422, 400, "context_length_exceeded"),
    Refusal(RequestError, 422, 400),
)

ERROR_TYPES = {  # vLLM's names; openai's client maps by status
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    405: "MethodNotAllowedError", 408: "RequestTimeoutError", 409: "ConflictError",
    413: "PayloadTooLargeError", 415: "UnsupportedMediaTypeError", 422: "UnprocessableEntityError",
    431: "RequestHeaderFieldsTooLargeError", 500: "InternalServerError", 501: "NotImplementedError",
    503: "ServiceUnavailableError", 504: "GatewayTimeoutError", 505: "HTTPVersionNotSupportedError",
}  # fmt: skip

PREFIXES: Mapping[str, Api] = {"/v1/messages": "anthropic", "/api/": "ollama"}  # paths of other APIs
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",  # theirs has status 529, which proxies do not know
    504: "timeout_error",
}
# details by field to blame: they make Anthropic's tool runner send whole conversations
ANTHROPIC_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}

Path = tuple[str | int, ...]  # place of a value in a body: ("messages", 0, "content", 2)
MAX_DEPTH = 250  # most objects and lists inside each other in a body
TOO_DEEP = "depth limit exceeded"  # orjson's words for far more
MAX_FORMS = 100  # most errors that are examined: each value of a long list may have one
UNION_MEMBERS = ("str", "int", "float", "bool", "dict", "list")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,16}\b")
_PATH = re.compile(r"(?<![\w/.:<])/(?:[\w.@+~-]{1,255}/)*[\w.@+~-]{1,255}")  # </tag> is not a path
ROUTES = frozenset({  # routes that a hint may send a client to
    "/api/chat", "/api/copy", "/api/create", "/api/delete", "/api/embed", "/api/embeddings",
    "/api/generate", "/api/ps", "/api/pull", "/api/push", "/api/show", "/api/tags", "/api/version",
    "/completion", "/completions", "/detokenize", "/health", "/metrics", "/props", "/rerank", "/score",
    "/slots", "/tokenize", "/tokenizer_info", "/v1/chat/completions", "/v1/completions",
    "/v1/completions/stream", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens", "/v1/models",
    "/v1/rerank", "/v1/responses", "/v1/responses/input_tokens", "/v1/score", "/v2/rerank", "/version",
})  # fmt: skip

FOREIGN_ROUTES = {"/v1/complete": "/v1/messages"}  # another API's routes: our equivalents


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiError(RequestFailure):
    """A failure in the formats of our APIs."""

    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def for_now(cls, message: str, **headers: str) -> ApiError:
        """Return a 503 that asks the client to retry."""
        return cls(status=503, message=message, headers={"retry-after": str(RETRY_LATER_S), **headers})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = ERROR_TYPES.get(self.status) or ERROR_TYPES[500 if self.status >= 500 else 400]
        code = self.code or self.status
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The JSON body in Anthropic's format."""
        kind = "api_error" if self.status >= 500 else "invalid_request_error"
        error: dict[str, Any] = {"type": ANTHROPIC_TYPES.get(self.status, kind), "message": self.message}
        if self.param in ANTHROPIC_DETAILS:
            error["details"] = ANTHROPIC_DETAILS[self.param]
        return {"type": "error", "error": error, "request_id": current_id()}

    def encode(self) -> bytes:
        """Return the JSON body in the format of the current request's API; its log line gets the error."""
        record = current_record()
        if record is not None:
            record.error = self
        api = "openai" if record is None else record.api
        bodies = {"openai": self.body, "anthropic": self.anthropic_body, "ollama": {"error": self.message}}
        return orjson.dumps(bodies[api])

    def response(self) -> Response:
        """Return the error as a response, for a route or (since it is ASGI) for middleware."""
        headers = dict(self.headers)
        return Response(self.encode(), self.status, headers=headers, media_type="application/json")

    async def send_unread(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose body has not been read; if it has a body, close its connection.

        A connection that stays open would have to read, and discard, whatever a rejected client sends.
        """
        has_body = any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")
            for name, value in scope["headers"]
        )
        told = replace(self, headers={**self.headers, "connection": "close"}) if has_body else self
        await told.response()(scope, receive, send)


def api_of(path: str) -> Api:
    """Return the API that a path belongs to."""
    return next((api for prefix, api in PREFIXES.items() if path.startswith(prefix)), "openai")


def scrub(message: str) -> str:
    """Return a message without memory addresses and file paths, cut to MAX_MESSAGE_LEN characters."""

    def hide(found: re.Match[str]) -> str:
        return found[0] if found[0].rstrip(".") in ROUTES else "[path]"

    return _PATH.sub(hide, _ADDRESS.sub("[address]", shorten(message, MAX_MESSAGE_LEN)))


def to_api_error(error: BaseException) -> ApiError:
    """Convert an exception to an `ApiError`; failures of the server are logged with the request's id.

    The client does not get the text of an unexpected exception.
    """
    if isinstance(error, RequestError):
        refusal = next(each for each in REFUSALS if isinstance(error, each.error))
        is_foreign = isinstance(error, TemplateError)
        message = scrub(str(error)) if is_foreign else shorten(str(error), MAX_MESSAGE_LEN)
        record = current_record()
        is_specified = record is not None and record.path.startswith(SPECIFIED_PREFIX)
        status = refusal.specified if is_specified else refusal.elsewhere
        return ApiError(status=status, message=message, param=error.param, code=refusal.code)
    if isinstance(error, QueueFull | EngineStopped):
        headers = {"Retry-After": str(RETRY_LATER_S)}
        if isinstance(error, QueueFull):
            headers = {"Retry-After": str(RETRY_SOON_S), REFUSED_HEADER: "1"}
        return ApiError(status=503, message=scrub(str(error)), headers=headers)
    if isinstance(error, RequestTimeout):
        headers = {"x-should-retry": "false"}  # OpenAI's clients would retry, and wait again
        return ApiError(status=504, message=scrub(str(error)), headers=headers)
    if isinstance(error, EngineError):
        logger.error("request failed request_id=%s reason=%r", current_id(), str(error))
        return ApiError(status=500, message=scrub(str(error)))
    logger.error("request failed request_id=%s", current_id(), exc_info=error)
    return ApiError(status=500, message="the server failed to answer this request; its log says why")


def validation_error(errors: list[dict[str, Any]], headers: Mapping[str, str]) -> RequestError:
    """Return the error of the first wrong field: a wrong type is malformed, a wrong value is invalid.

    A value of a union type has an error for each member: the most deeply nested error is the most specific,
    and errors at the same depth are reported together.
    """
    path = _steps(errors[0])
    of_field = [each for each in errors[:MAX_FORMS] if _steps(each)[: len(path)] == path]
    first = max(of_field, key=lambda each: len(_steps(each))) if path else errors[0]
    kind, where = str(first["type"]), spell_path(_steps(first))
    if kind == "json_invalid" or not where:
        return MalformedRequest(whole_body_fault(kind, first, headers))
    if kind == "missing":
        return MalformedRequest.missing(where)
    forms = [
        re.sub("List should have at least 1 item.*", "Input should be a list that is not empty", each["msg"])
        for each in of_field
        if _steps(each) == _steps(first)
    ]
    said = " or ".join((forms[0], *(form.removeprefix("Input should be ") for form in forms[1:])))
    said = re.sub("dictionary( or object to extract fields from)?", "object", said)  # its name in JSON
    message = f"{where}: {said[:1].lower()}{said[1:]}, got {show_value(first['input'])}"
    if kind.endswith("_type") or kind.startswith("union"):
        return MalformedRequest(message, param=where)
    return RequestError(message, param=where)


def whole_body_fault(kind: str, first: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """Return the message for a body without readable fields: how it was sent, or its type."""
    example = "send a JSON object, such as {...}"
    media_type = headers.get("content-type")
    if kind == "json_invalid":
        said = str(first["ctx"]["error"])
        if "not valid UTF-8" in said:
            return "the body is not UTF-8 text, as JSON must be; encode it as UTF-8"
        if said == TOO_DEEP:
            return f"the body has more than {MAX_DEPTH} objects and lists inside each other; nest it less"
        return f"the body is not valid JSON: {said} (character {first['loc'][-1] + 1})"
    value = first["input"]
    if isinstance(value, bytes):  # not read as JSON
        came = f"as content-type {media_type[:80]}" if media_type else "without a content-type"
        advice = "send it as application/json (curl -H 'content-type: application/json')"
        return f"the body came {came}; {advice}"
    if value is None:
        return f"the body is empty or null; {example}"
    return f"the body must be a JSON object, such as {{...}}, got {json_type(value)}"


def spell_path(path: Path) -> str:
    """Spell a path: ("messages", 0, "content") -> messages[0].content."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


def _steps(error: Mapping[str, Any]) -> Path:
    """Return the keys and indices of an error's location in the body, without names of union members."""
    return tuple(
        step
        for step in error["loc"][1:]
        if isinstance(step, int) or step.isdigit() or (step.isidentifier() and step not in UNION_MEMBERS)
    )


def install_error_handlers(app: FastAPI) -> None:
    """Install handlers that answer every failure in the format of the request's API."""

    async def on_error(http: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        if isinstance(error, HTTPException):
            return _http_error(http, error).response()
        if isinstance(error, RequestValidationError):
            error = validation_error(list(error.errors()), http.headers)
        return to_api_error(error).response()

    for kind in (InferError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, on_error)


def _http_error(http: Request, error: HTTPException) -> ApiError:
    """Return the error for an unknown route or a method that a route does not allow."""
    message = str(error.detail)
    path, headers = http.scope["path"][:100], dict(error.headers or {})
    if error.status_code == 404:
        hint = closest(path.rstrip("/"), sorted(ROUTES), aliases=FOREIGN_ROUTES)
        message = f"there is no route {http.method} {path}{hint or '; GET /openapi.json lists the routes'}"
    elif error.status_code == 405:
        headers["Allow"] = ", ".join(way for way in ("GET", "HEAD", "POST", "DELETE") if _takes(http, way))
        message = f"{path} does not take {http.method}; it takes {headers['Allow']}"
    return ApiError(status=error.status_code, message=message, headers=headers)


def _takes(http: Request, method: str) -> bool:
    """Return True if any route accepts this method at a request's path; FastAPI checks only the first."""
    scope = {**http.scope, "method": method}
    return any(route.matches(scope)[0] is Match.FULL for route in http.app.routes)
