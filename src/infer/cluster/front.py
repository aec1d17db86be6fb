"""The front of a cluster: an application that forwards requests to replicas, and answers for all of them.

    client ──► AccessLog ─► CORS ─► Auth ─► BodyLimit ─► Gate ─► Front ──HTTP──► replica, which does the work

The front forwards the replica's tokens unchanged. If a replica dies before its answer has begun, another
replica takes over, unnoticed by the client; pings (`: ping`) do not count as a beginning. If it dies later, a
stream ends with an error in the form of its API, and an answer that is not streamed breaks off. A refused
request (503: the replica's queue is full, or it drains) goes to the next replica, until one accepts it. If a
replica or an engine ends during a request, the request may be the cause, so it is tried only once more.

`/health` is 200 while any replica serves. `/metrics` has the series of all replicas, each with its number as
the label `replica`. Admin routes act on one server and are not here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from urllib.parse import quote

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.cluster.replicas import RemoteServer, ReplicaSet
from infer.cluster.upstream import ReplicaGone, ResponseHead, Upstream
from infer.server.metrics import CONTENT_TYPE, ServerMetrics
from infer.server.middleware.access_log import METRICS_PATH, AccessLog
from infer.server.middleware.auth import EXPLAIN_PREFIX, HEALTH_PATH, Auth, route_path
from infer.server.middleware.host_check import HostCheck, cors_options
from infer.server.middleware.limits import BodyLimit, Gate
from infer.server.protocol.errors import REFUSED_HEADER, ApiError
from infer.server.protocol.stream import LAST_READ_S, FrameWriter
from infer.server.routes.chat import ChatWriter
from infer.server.routes.completions import CompletionWriter, EventWriter
from infer.server.routes.llama_cpp import LlamaWriter
from infer.server.routes.messages import MessageWriter
from infer.server.routes.ollama import OllamaWriter
from infer.server.routes.responses import ResponseWriter
from infer.server.state import ServerState, current_id

logger = logging.getLogger(__name__)

# Headers of a single connection, and headers that the front writes itself.
PER_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"expect", b"date"}
OF_REQUEST = PER_HOP | {b"host", b"content-length", b"x-request-id"}
OF_ANSWER = PER_HOP | {b"x-request-id", b"request-id"}
KEYS = {b"authorization", b"x-api-key"}
OVERTIME_S = LAST_READ_S + 10  # time for a replica's own timeout error, and for a client that reads slowly
MAX_BEGUN = 2  # replicas that may begin a request, if the first of them ends
STREAMS = (b"text/event-stream", b"application/x-ndjson")
WRITERS: dict[str, type[FrameWriter]] = {  # formats of streams, by path
    "/v1/chat/completions": ChatWriter,
    "/v1/completions": CompletionWriter,
    "/v1/completions/stream": EventWriter,
    "/v1/messages": MessageWriter,
    "/v1/responses": ResponseWriter,
    **dict.fromkeys(("/completion", "/completions"), LlamaWriter),
    **dict.fromkeys(("/api/chat", "/api/generate"), OllamaWriter),
}


def build_front(state: ServerState, replicas: ReplicaSet, *, check_host: bool) -> ASGIApp:
    """The application with all its middleware; `check_host` as in server/app.py."""
    config = state.config
    app: ASGIApp = Gate(Front(state, replicas), state)
    app = Auth(BodyLimit(app, config.max_body_size), config)
    if config.cors_origin:
        app = CORSMiddleware(app, **cors_options(config))
    if check_host:
        app = HostCheck(app, config.allowed_host)
    metrics = ServerMetrics(config.metrics_prefix)
    logged = AccessLog(app, metrics, is_logged=config.access_log, ignores_unknown=False)

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = SimpleNamespace(path="forwarded")  # the front knows no routes
        await logged(scope, receive, send)

    return named


class _Answer:
    """One answer on its way to the client, from any replica."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        self.path = route_path(scope)
        self.has_head = False
        self.has_begun = False  # True once more than pings was forwarded
        self.num_begun = 0  # replicas that may have begun the request
        self.is_stream = False

    async def start(self, head: ResponseHead) -> None:
        """Forward the head, once."""
        if not self.has_head:
            self.has_head = True
            kinds = [value for name, value in head.headers if name == b"content-type"]
            self.is_stream = any(kind.startswith(STREAMS) for kind in kinds)
            headers = [(name, value) for name, value in head.headers if name not in OF_ANSWER]
            await self.send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def pass_on(self, piece: bytes) -> None:
        """Forward a piece of the body."""
        self.has_begun = self.has_begun or not _is_sign_of_life(piece)
        await self.send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        """End the body."""
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """Answer with an error, or end a stream with it; cut off any other answer whose head was sent."""
        if not self.has_head:
            await error.response()(self.scope, self.receive, self.send)
            return
        if not self.is_stream:
            raise ConnectionError(error.message)
        frame = WRITERS.get(self.path, EventWriter).failure(error)
        await self.send({"type": "http.response.body", "body": frame, "more_body": False})


class Front:
    """ASGI application: forwards the requests that it does not answer itself."""

    def __init__(self, state: ServerState, replicas: ReplicaSet) -> None:
        self._state = state
        self._replicas = replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        body = (await receive()).get("body", b"")  # the whole body: BodyLimit has read it
        path = route_path(scope)
        if path == HEALTH_PATH:
            await self._health()(scope, receive, send)
        elif path == METRICS_PATH:
            await (await self._metrics())(scope, receive, send)
        else:
            await self._forward_in_time(body, _Answer(scope, receive, send))

    def _health(self) -> Response:
        board = self._state.board
        reason = "starting: no replica is ready yet" if board.is_starting else None
        reason = "draining: no new requests are taken" if board.is_draining else reason
        reason = reason or (None if self._replicas.up else "no replica serves at the moment")
        if reason is None:
            return Response(b'{"status":"ok"}', media_type="application/json")
        return ApiError.for_now(reason).response()

    async def _metrics(self) -> Response:
        servers = self._replicas.up
        asked = [server.get(METRICS_PATH) for server in servers]
        pages = await asyncio.gather(*asked, return_exceptions=True)
        found = [
            (server.number, page[1])
            for server, page in zip(servers, pages, strict=True)
            if not isinstance(page, BaseException) and page[0] == 200
        ]
        return Response(merge_pages(found), media_type=CONTENT_TYPE)

    async def _forward_in_time(self, body: bytes, answer: _Answer) -> None:
        """Forward a request in time; replicas enforce `request_timeout` themselves, unless one hangs."""
        seconds = self._state.config.request_timeout
        try:
            async with asyncio.timeout(seconds + OVERTIME_S if seconds else None):
                await self._forward(body, answer)
        except TimeoutError:
            message = f"the request took longer than {seconds:g} s (request_timeout)"
            await answer.fail(ApiError(status=504, message=message))

    async def _forward(self, body: bytes, answer: _Answer) -> None:
        tried: list[RemoteServer] = []
        refusal: tuple[ResponseHead, bytes] | None = None  # the last refusal
        while answer.num_begun < MAX_BEGUN:
            if (server := self._replicas.pick(body, tried)) is None:
                break
            tried.append(server)
            server.num_active += 1
            try:
                refusal = await self._try(server, body, answer)
            except ReplicaGone as error:
                is_news, server.is_up = server.is_up, False  # down until a probe succeeds
                logger.warning(
                    "replica gone number=%d began=%s request_id=%s error=%s",
                    server.number, answer.has_begun, current_id(), error,
                )  # fmt: skip
                if is_news and len(self._replicas.servers) == 1:
                    await self._replicas.probe()  # otherwise no replica takes requests until the next probe
                if answer.has_begun:
                    message = "the replica that was answering has ended; send the request again"
                    await answer.fail(ApiError(status=500, message=message))
                    return
                continue
            finally:
                server.num_active -= 1
            if refusal is None:
                return
        if refusal is not None and not answer.has_head:
            head, said = refusal
            await answer.start(head)
            await answer.pass_on(said)
            await answer.end()
            return
        if answer.num_begun < MAX_BEGUN:
            failure = ApiError.for_now("no replica serves at the moment; try again in a few seconds")
        else:
            message = f"{MAX_BEGUN} replicas ended while they ran this request; it may be the cause"
            failure = ApiError(status=500, message=message, headers={"x-should-retry": "false"})
        await answer.fail(failure)

    async def _try(
        self, server: RemoteServer, body: bytes, answer: _Answer
    ) -> tuple[ResponseHead, bytes] | None:
        """Let one replica answer; returns None, or its refusal if another replica should be tried."""
        connection = await server.connect()
        answer.num_begun += 1
        request = self._message(answer.scope, body, server)
        leaving = asyncio.ensure_future(_close_when_left(answer.receive, connection))
        try:
            try:
                head = await connection.ask(request)
            except ReplicaGone:
                if not connection.is_used or leaving.done():
                    raise
                leaving.cancel()  # an idle connection that the replica had closed
                connection = await server.connect_anew()
                leaving = asyncio.ensure_future(_close_when_left(answer.receive, connection))
                head = await connection.ask(request)
            is_unknown = head.status == 404 and answer.path.startswith(EXPLAIN_PREFIX)  # ask another replica
            if head.status == 503 or is_unknown:
                if is_unknown or any(name == REFUSED_HEADER.encode() for name, _ in head.headers):
                    answer.num_begun -= 1
                said = b"".join([piece async for piece in connection.pieces()])
                server.give_back(connection)
                return head, said
            if answer.has_head and head.status != 200:
                message = f"another replica took over and refused the request with status {head.status}"
                await answer.fail(ApiError(status=500, message=message))
                return None
            async for piece in connection.pieces():
                # not before the first piece: until then another replica may take over
                await answer.start(head)
                await answer.pass_on(piece)
            await answer.start(head)
            await answer.end()
            server.give_back(connection)
            return None
        except ReplicaGone:
            if leaving.done() and not leaving.cancelled():  # the client has left, the connection is closed
                return None
            raise
        finally:
            leaving.cancel()
            if connection not in server.idle:  # also an answer that was not read, or not sent, to its end
                connection.close()

    def _message(self, scope: Scope, body: bytes, server: RemoteServer) -> bytes:
        """The request as bytes, with the front's request id, and the front's key if clients need none."""
        dropped = OF_REQUEST if self._state.config.api_key else OF_REQUEST | KEYS
        path = quote(route_path(scope)).encode() if scope.get("root_path") else bytes(scope["raw_path"])
        query = b"?" + scope["query_string"] if scope.get("query_string") else b""
        first = scope["method"].encode() + b" " + path.partition(b"?")[0] + query + b" HTTP/1.1"
        lines = [first, b"host: replica"]
        lines += [name + b": " + value for name, value in scope["headers"] if name not in dropped]
        lines.append(b"x-request-id: " + str(current_id()).encode())
        lines.append(b"content-length: " + str(len(body)).encode())
        if not self._state.config.api_key:
            lines.append(b"authorization: Bearer " + server.key.encode())
        return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def _close_when_left(receive: Receive, connection: Upstream) -> None:
    """Close the connection when the client leaves, so that the replica stops computing the answer."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()
    connection.close()


def _is_sign_of_life(piece: bytes) -> bool:
    """True if a piece of a stream holds only pings, which readers skip."""
    return all(part.startswith((b":", b"event: ping")) for part in piece.split(b"\n\n") if part.strip())


def merge_pages(pages: list[tuple[int, bytes]]) -> bytes:
    """Several pages of metrics as one, with the number of the replica as a label of every series."""
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}  # (comments, samples) by name
    for number, page in pages:
        for name, comments, samples in _families(page):
            known = families.setdefault(name, (comments, []))
            known[1].extend(_with_label(sample, number) for sample in samples)
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    return b"\n".join(lines) + b"\n"


def _families(page: bytes) -> Iterator[tuple[bytes, list[bytes], list[bytes]]]:
    name, comments, samples = b"", list[bytes](), list[bytes]()
    for line in page.splitlines():
        if line.startswith(b"# HELP "):
            if name:
                yield name, comments, samples
            name, comments, samples = line.split(b" ", 3)[2], [line], []
        elif line.startswith(b"#"):
            comments.append(line)
        elif line:
            samples.append(line)
    if name:
        yield name, comments, samples


def _with_label(sample: bytes, number: int) -> bytes:
    label = b'replica="%d"' % number
    name, brace, rest = sample.partition(b"{")
    if brace:
        return name + b"{" + label + b"," + rest
    bare, _, value = sample.partition(b" ")
    return bare + b"{" + label + b"} " + value
