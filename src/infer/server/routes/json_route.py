"""The common part of all JSON routes: strict JSON in, JSON out, and large work in a thread.

    body ──► job (translate.py) ──► Generation ──► FrameWriter ──► a stream, or the whole answer      `answer`
      └───► chat, from a body of another API (messages.py, responses.py) ──► job                  `open_agent`

FastAPI's own JSON parser accepts NaN, Infinity and lone surrogates; this one does not. A route module gets it
from `make_router`. A body without a content-type, or with the default of `curl -d`, is read as JSON unless it
comes from a web page, whose browser sends an Origin header: a page of another site can send such a body
without permission, but not one of type JSON.

Parsing holds the GIL, even in a thread, and 8 MiB of small objects take a second. So a large body is scanned
before it is parsed, without creating objects. Its values are counted, piece by piece, with the event loop's
other work in between, because the time to parse and check a body depends on its strings, objects, lists and
escapes, and hardly on long texts. Its fields are measured, too (first, if the body is not very large). All
bytes outside the measured fields count together: unknown fields, and earlier copies of a repeated field (the
last copy counts).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, ParamSpec, TypeVar

import msgspec
import orjson
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from infer.errors import MalformedRequest, RequestError
from infer.server.protocol.body import Body
from infer.server.protocol.errors import MAX_DEPTH, TOO_DEEP
from infer.server.protocol.generation import Generation
from infer.server.protocol.schemas import MAX_CONSTRAINT_BYTES, AskingBody, ChatRequest
from infer.server.protocol.stream import BEGIN_S, EventStream, FrameWriter, close_opening, unless_disconnected
from infer.server.protocol.structured import CONSTRAINTS
from infer.server.protocol.translate import Job, open_chat
from infer.server.protocol.turns import spelled
from infer.server.state import ServerState, current_record

P = ParamSpec("P")
T = TypeVar("T")
Asking = TypeVar("Asking", bound=AskingBody)
Agent = TypeVar("Agent", bound=Body)

LARGE = 2_000  # tokens or logprobs to spell in a few milliseconds

IGNORED_HEADER = "x-infer-ignored"
CURL_TYPE = "application/x-www-form-urlencoded"  # default type of `curl -d`

MAX_FIELD_BYTES = {  # largest size in JSON bytes of fields with schemas
    **dict.fromkeys(CONSTRAINTS, MAX_CONSTRAINT_BYTES),
    **dict.fromkeys(
        ("format", "grammar", "json_schema", "output_config", "output_format", "text"), MAX_CONSTRAINT_BYTES
    ),
    "tools": 4 * MAX_CONSTRAINT_BYTES,
}
LARGE_FIELDS = (  # fields that may fill the body
    "context", "documents", "input", "instructions", "messages", "prompt", "queries", "system", "text_1",
    "text_2", "tokens",
)  # fmt: skip
MAX_REST_BYTES = 4 * MAX_CONSTRAINT_BYTES  # most bytes of all other fields together
MAX_VALUES = 100_000  # most strings, objects and lists of a large body
MAX_COMMAS = 1_000_000  # most commas between values, such as token ids
MAX_ESCAPES = 1_500_000  # most characters written with a backslash
PIECE = 65_536  # bytes that are scanned at a time
_QUICKLY_MEASURED = 2 << 20  # bytes of any body whose fields can be measured within milliseconds
_FIELDS = msgspec.json.Decoder(
    msgspec.defstruct(
        "_Fields", [(name, msgspec.Raw, msgspec.Raw(b"")) for name in (*MAX_FIELD_BYTES, *LARGE_FIELDS)]
    )
)


class ErrorDetail(BaseModel):
    """The message of an error and the field to blame."""

    message: str
    type: str
    param: str | None
    code: int | str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


class JsonRequest(Request):
    """A request with strict JSON: no NaN, no Infinity, no lone surrogates."""

    async def json(self) -> Any:
        """Return the parsed body; the record gets its user. Raises a `json.JSONDecodeError`."""
        text = await self.body()
        body = orjson.loads(text)
        if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
            check_depth(body)
        if (record := current_record()) is not None:
            record.note_user(body)
        return body


def check_depth(body: Any) -> None:
    """Reject a body of more than MAX_DEPTH levels with a `json.JSONDecodeError`.

    What is nested deeper could not be sent back, nor always be printed.
    """
    try:
        orjson.dumps([[[[body]]]])  # an error above 254 levels: an answer may nest a value deeper
    except TypeError:
        raise orjson.JSONDecodeError(TOO_DEEP, "", 0) from None


class BodyCounts:
    """Counts the values, commas and escapes of a JSON text, which may be given in any pieces."""

    def __init__(self) -> None:
        self.num_values = self.num_commas = self.num_escapes = 0
        self._rest, self._in_string = b"", False

    def add(self, piece: bytes) -> None:
        """Count more bytes of the text."""
        piece = self._rest + piece
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._rest = b"\\" if num_backslashes % 2 else b""  # half of an escape: the other half follows
        whole = piece[: len(piece) - len(self._rest)]
        bare = whole.replace(b"\\\\", b"").replace(b'\\"', b"")  # the remaining quotes delimit strings
        self.num_escapes += (len(whole) - len(bare)) // 2 + bare.count(b"\\")
        parts = bare.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        num_strings = (len(parts) - self._in_string) // 2  # strings that begin here
        self.num_values += num_strings + outside.count(b"{") + outside.count(b"[")
        self.num_commas += outside.count(b",")
        self._in_string ^= len(parts) % 2 == 0

    def check(self) -> None:
        """Reject a text that is too large to be parsed at once."""
        for count, limit, what in (
            (self.num_values, MAX_VALUES, "strings, objects and lists"),
            (self.num_commas, MAX_COMMAS, "values in lists and objects"),
            (self.num_escapes, MAX_ESCAPES, "characters written with a backslash (send UTF-8 as it is)"),
        ):
            if count > limit:
                raise RequestError(f"the body has more than {limit} {what}; send fewer at a time")


def check_fields(body: bytes) -> None:
    """Reject a body that is not a JSON object, or has a part that is too large to be parsed at once."""
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequest(
            f"the body is not a JSON object: {error}; send UTF-8 text, not compressed"
        ) from None
    sizes = {name: len(bytes(getattr(fields, name))) for name in (*MAX_FIELD_BYTES, *LARGE_FIELDS)}
    for name, limit in MAX_FIELD_BYTES.items():
        if sizes[name] > limit:
            raise RequestError.about(name, f"has {sizes[name]} bytes, at most {limit} are allowed")
    if (rest := len(body) - sum(sizes.values())) > MAX_REST_BYTES:
        raise RequestError(
            f"the body has {rest} bytes in other fields than {', '.join(sizes)}, or in one of these that is "
            f"given twice; at most {MAX_REST_BYTES} are allowed"
        )


async def check_values(text: bytes) -> None:
    """Reject JSON with more values than can be parsed at once, yielding to the event loop meanwhile."""
    counts = BodyCounts()
    for start in range(0, len(text), PIECE):
        counts.add(text[start : start + PIECE])
        counts.check()
        await asyncio.sleep(0)


async def check_body(body: bytes) -> None:
    """Reject a body that would take long to parse."""
    if is_measured := len(body) <= _QUICKLY_MEASURED:  # an error that names the field is better
        check_fields(body)
    await check_values(body)
    if not is_measured:
        check_fields(body)


class JsonRoute(APIRoute):
    """A route that reads its body as a `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, wrapped to pass it a `JsonRequest`."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            scope = request.scope
            if (
                "origin" not in request.headers
                and request.headers.get("content-type", CURL_TYPE) == CURL_TYPE
            ):
                others = [header for header in scope["headers"] if header[0] != b"content-type"]
                scope["headers"] = [*others, (b"content-type", b"application/json")]
            strict = JsonRequest(scope, request.receive)
            if request.method == "POST":
                body = await strict.body()  # raises ClientDisconnect if the client leaves while sending
                if len(body) > MAX_CONSTRAINT_BYTES:
                    await check_body(body)
            return await handle(strict)

        return handle_json


def make_router(error_body: type[BaseModel] = ErrorBody) -> APIRouter:
    """Return a router for JSON routes, with their errors in the OpenAPI schema."""
    statuses = (400, 401, 413, 422, 500, 503, 504)
    errors: dict[int | str, dict[str, Any]] = {status: {"model": error_body} for status in statuses}
    return APIRouter(route_class=JsonRoute, responses=errors)


def server_state(http: Request) -> ServerState:
    """Return the state that `build_app` has set for the routes."""
    state: ServerState = http.app.state.server
    return state


async def answer(
    http: Request, body: Asking, job: Awaitable[Job], form: Callable[[Generation, Asking], FrameWriter]
) -> Response:
    """Answer a body that requests text: run its job, and stream the output or send it as one body.

    With models on demand, a stream may begin while its model is loading.
    """
    if server_state(http).demand is None:
        writer = await _open_writer(body, job, form)
    else:
        opening = asyncio.ensure_future(_open_writer(body, job, form))
        limit_s = BEGIN_S if body.stream else None
        try:
            await unless_disconnected(http.receive, asyncio.wait((opening,), timeout=limit_s))
        except BaseException:
            await close_opening(opening)
            raise
        if not opening.done():
            kind = form.func if isinstance(form, partial) else form
            assert isinstance(kind, type) and issubclass(kind, FrameWriter)
            return EventStream(kind, opening, {})
        writer = opening.result()  # raises the error of the body or the model
    if body.stream:
        return await EventStream.start(http, writer, ignored_headers(body))
    answers = await unless_disconnected(http.receive, writer.generation.collect(writer.note))
    num_tokens, params = writer.generation.usage()["total_tokens"], writer.generation.job.params
    asked = [count for count in (params.logprobs, params.prompt_logprobs) if count is not None]
    num_spelled = num_tokens * (1 + max(asked)) if asked else 0  # each token and its alternatives
    content = await in_thread_if_large(num_spelled, writer.whole, answers)
    await writer.settle()
    return json_response(content, body)


async def _open_writer(
    body: AskingBody, job: Awaitable[Job], form: Callable[[Generation, Any], FrameWriter]
) -> FrameWriter:
    with spelled(body.spellings):
        return form(Generation(await job, body.spellings), body)


async def open_agent(
    http: Request, body: Agent, to_chat: Callable[[Agent], ChatRequest], *, num_items: int = 0
) -> Job:
    """Return the job of another API's body: `to_chat` makes a chat of it and `num_items` stored items."""
    size = len(await http.body()) // 4  # a block of 30 bytes takes as long as a few tokens
    chat = await in_thread_if_large(size + 10 * num_items, to_chat, body)
    job = await open_chat(chat, server_state(http))
    body.note_ignored(body.spellings.get(name, name) for name in chat.ignored_fields)
    return job


def json_response(content: Mapping[str, Any], body: Body | None = None) -> Response:
    """Return a JSON response; a header names the fields of `body` that had no effect."""
    headers = ignored_headers(body) if body is not None else {}
    return Response(orjson.dumps(content), headers=headers, media_type="application/json")


def ignored_headers(body: Body) -> dict[str, str]:
    """Return the header that names the fields without effect, if there are any."""
    record = current_record()
    names = list(body.ignored_fields)
    if record is not None:
        names = [name for name in names if not (record.has_chosen and name == record.user_field)]
        names += record.unknown
    return {IGNORED_HEADER: ", ".join(names)} if names else {}


async def in_thread_if_large(size: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run `work` and return its result, in a thread if `size` is large.

    An event loop that is busy for a tenth of a second stalls every stream of the server for that long. Small
    work takes less time than switching to a thread and back.
    """
    if size < LARGE:
        return work(*args, **options)
    return await asyncio.to_thread(work, *args, **options)
