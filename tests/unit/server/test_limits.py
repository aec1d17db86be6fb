from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from infer.config.server import ServerConfig
from infer.server.middleware.limits import BodyLimit, Gate
from infer.server.state import ServerState

LIMIT = 1024


class Connection:
    """The other end of an ASGI application: messages to receive, and those that were sent."""

    def __init__(self, messages: Iterable[dict[str, Any]]) -> None:
        self.messages = list(messages)
        self.num_received = 0
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if not self.messages:
            await asyncio.Event().wait()
        self.num_received += 1
        return self.messages.pop(0)

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


def scope(**fields: Any) -> dict[str, Any]:
    return {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []} | fields


def chunks(*sizes: int) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [
        {"type": "http.request", "body": b"x" * size, "more_body": True} for size in sizes
    ]
    parts[-1]["more_body"] = False
    return parts


async def echo(
    scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    """Answers with the length of what came in one message."""
    message = await receive()
    assert not message["more_body"], "the body comes whole"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(len(message["body"])).encode()})


def through_body_limit(connection: Connection, timeout_s: float = 5.0, **fields: Any) -> None:
    layer = BodyLimit(echo, f"{LIMIT}B", timeout_s=timeout_s)
    asyncio.run(layer(scope(**fields), connection.receive, connection.send))


@pytest.mark.parametrize("sizes", [(0,), (LIMIT,), (LIMIT // 2, LIMIT // 2), (1,) * LIMIT])
def test_a_body_up_to_the_limit_arrives_whole(sizes: tuple[int, ...]) -> None:
    connection = Connection(chunks(*sizes))
    through_body_limit(connection)
    assert connection.sent[1]["body"] == str(sum(sizes)).encode()


def test_a_declared_length_over_the_limit_is_refused_before_a_byte_is_read() -> None:
    connection = Connection(chunks(LIMIT + 1))
    through_body_limit(connection, headers=[(b"content-length", str(LIMIT + 1).encode())])
    assert connection.status == 413
    assert connection.num_received == 0


@pytest.mark.parametrize("encoding", ["gzip", "identity, br", "Deflate"])
def test_a_compressed_body_is_told_to_come_as_it_is(encoding: str) -> None:
    connection = Connection(chunks(5))
    headers = [(b"content-encoding", encoding.encode()), (b"content-length", b"5")]
    through_body_limit(connection, headers=headers)
    assert connection.status == 415 and connection.num_received == 0
    error = json.loads(connection.sent[1]["body"])["error"]
    assert error["message"] == (
        f"the body came with content-encoding {encoding}; send it as it is, not compressed"
    )
    assert error["type"] == "UnsupportedMediaTypeError"
    assert (b"connection", b"close") in connection.sent[0]["headers"]


def test_a_body_that_is_said_to_be_plain_is_read() -> None:
    connection = Connection(chunks(5))
    through_body_limit(connection, headers=[(b"content-encoding", b"Identity")])
    assert connection.sent[1]["body"] == b"5"


def test_chunks_without_a_length_are_counted_and_the_rest_is_not_read() -> None:
    connection = Connection(chunks(*[LIMIT // 2] * 100))
    through_body_limit(connection)
    assert connection.status == 413
    assert connection.num_received == 3
    assert (b"connection", b"close") in connection.sent[0]["headers"]


@pytest.mark.parametrize("length", [b"", b"-5", b"1e3", b"abc", b"12"])
def test_a_length_that_lies_changes_nothing(length: bytes) -> None:
    connection = Connection(chunks(LIMIT, 1))
    through_body_limit(connection, headers=[(b"content-length", length)])
    assert connection.status == 413


def test_a_body_that_trickles_in_is_given_up() -> None:
    connection = Connection([{"type": "http.request", "body": b"x", "more_body": True}])
    through_body_limit(connection, timeout_s=0.02)
    assert connection.status == 408


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
def test_a_body_is_held_to_the_limits_whatever_the_method(method: str) -> None:
    bomb = Connection(chunks(*[LIMIT // 2] * 100))
    through_body_limit(bomb, method=method)
    assert bomb.status == 413 and bomb.num_received == 3
    slow = Connection([{"type": "http.request", "body": b"x", "more_body": True}])
    through_body_limit(slow, timeout_s=0.02, method=method)
    assert slow.status == 408


def test_a_client_that_leaves_half_way_gets_no_work_done() -> None:
    connection = Connection([*chunks(1, 1)[:1], {"type": "http.disconnect"}])
    through_body_limit(connection)
    assert connection.sent == []


def test_after_the_body_the_application_hears_the_connection() -> None:
    heard: list[str] = []

    async def listens(scope: Any, receive: Any, send: Any) -> None:
        heard.extend([(await receive())["type"], (await receive())["type"]])

    connection = Connection([*chunks(1), {"type": "http.disconnect"}])
    asyncio.run(BodyLimit(listens, "1KiB")(scope(), connection.receive, connection.send))
    assert heard == ["http.request", "http.disconnect"]


@pytest.mark.parametrize("state", ["starting", "draining"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/nowhere"])
def test_no_request_comes_in_while_starting_or_draining(state: str, path: str) -> None:
    server = ServerState(config=ServerConfig())
    server.board.is_starting, server.board.is_draining = state == "starting", state == "draining"
    connection = Connection(chunks(1))
    asyncio.run(Gate(echo, server)(scope(path=path), connection.receive, connection.send))
    assert connection.status == 503
    headers = dict(connection.sent[0]["headers"])
    assert headers[b"retry-after"].isdigit() and headers[b"x-infer-refused"] == b"1"
    assert server.board.num_active == 0


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/", "/ui/app.js", "/admin/drain"])
def test_who_watches_or_operates_comes_in_at_any_time(path: str) -> None:
    server = ServerState(config=ServerConfig())
    server.board.is_starting = server.board.is_draining = True
    connection = Connection(chunks(1))
    asyncio.run(Gate(echo, server)(scope(path=path), connection.receive, connection.send))
    assert connection.status == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [("/api/health", 200), ("/api/admin/drain", 200), ("/api/v1/models", 503), ("/api/x/health", 503)],
)
def test_a_root_path_is_no_part_of_the_decision(path: str, status: int) -> None:
    server = ServerState(config=ServerConfig())
    server.board.is_draining = True
    connection = Connection(chunks(1))
    asyncio.run(Gate(echo, server)(scope(path=path, root_path="/api"), connection.receive, connection.send))
    assert connection.status == status


def test_those_inside_are_counted_until_they_leave_however_they_leave() -> None:
    server = ServerState(config=ServerConfig())
    seen: list[int] = []

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        seen.append(server.board.num_active)
        raise RuntimeError

    connection = Connection([])
    with pytest.raises(RuntimeError):
        asyncio.run(Gate(fails, server)(scope(), connection.receive, connection.send))
    assert seen == [1] and server.board.num_active == 0
