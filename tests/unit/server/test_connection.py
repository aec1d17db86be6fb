"""A connection without a network: bytes in, bytes out, and when it is closed."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState as Host

from infer.config.server import ServerConfig
from infer.server.app import build_app
from infer.server.connection import MAX_HEAD_BYTES, MAX_LINGER_BYTES, GuardedConnection
from infer.server.serve import loop_factory
from infer.server.state import ServerState

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class MemoryTransport(asyncio.Transport):
    """What a connection writes to; remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = self.is_ended = False
        self.num_left = 0  # bytes that the client has not taken

    def get_write_buffer_size(self) -> int:
        return self.num_left

    def abort(self) -> None:
        self.is_closed = True

    def write(self, data: Any) -> None:
        assert not self.is_ended and not self.is_closed
        self.written += data

    def write_eof(self) -> None:
        self.is_ended = True

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Peer:
    """A client that is connected to an application."""

    def __init__(self, app: Any, head_timeout_s: float = 1000.0) -> None:
        config = uvicorn.Config(app, http=GuardedConnection, ws="none", lifespan="off", log_config=None)
        self.connection = GuardedConnection(config, Host(), {})
        self.connection.head_timeout_s = head_timeout_s
        self.transport = MemoryTransport()
        self.connection.connection_made(self.transport)

    async def send(self, data: bytes) -> None:
        """Send some bytes, and let the application react to them."""
        if not self.transport.is_closed:
            self.connection.data_received(data)
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def answer(self) -> bytes:
        return self.transport.written

    @property
    def error(self) -> Any:
        return json.loads(self.answer.partition(b"\r\n\r\n")[2])["error"]


def talk(script: Callable[[Peer], Awaitable[None]], **knobs: Any) -> None:
    async def go() -> None:
        peer = Peer(build_app(ServerState(config=ServerConfig(**knobs))))
        await script(peer)
        peer.connection.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(go())


def test_a_refusal_before_the_body_is_read_closes_the_connection() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(CHUNKED)
        assert peer.answer.startswith(b"HTTP/1.1 401")
        assert b"connection: close" in peer.answer.lower()
        assert peer.transport.is_ended and not peer.transport.is_closed, "what still comes is let in, unread"
        await peer.send(b"5\r\nhello\r\n0\r\n\r\n" + HEALTH)
        assert peer.answer.count(b"HTTP/1.1") == 1
        for _ in range(MAX_LINGER_BYTES // 65536 + 1):
            await peer.send(b"x" * 65536)
        assert peer.transport.is_closed

    talk(script, api_key=("k",))


def test_a_refusal_without_a_body_keeps_the_connection() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert peer.answer.startswith(b"HTTP/1.1 401") and b"connection: close" not in peer.answer.lower()
        await peer.send(HEALTH)
        assert peer.answer.count(b"HTTP/1.1 200") == 1
        assert not peer.transport.is_ended and not peer.transport.is_closed

    talk(script, api_key=("k",))


def test_an_answer_of_any_kind_to_half_a_request_is_the_last() -> None:
    """A browser's question whether it may ask has no body; one that has is not read."""

    async def script(peer: Peer) -> None:
        await peer.send(
            b"OPTIONS /v1/models HTTP/1.1\r\nhost: x\r\norigin: http://a\r\ncontent-length: 99999\r\n"
            b"access-control-request-method: POST\r\n\r\n"
        )
        assert peer.answer.startswith(b"HTTP/1.1 200")
        assert peer.transport.is_ended

    talk(script, cors_origin=("http://a",))


@pytest.mark.parametrize("what", ["trailer", "extension", "size"])
def test_what_surrounds_a_body_in_chunks_is_counted(what: str) -> None:
    opening, part = {
        "trailer": (b"0\r\n", b"x-a: " + b"b" * 1000 + b"\r\n"),
        "extension": (b"5;", b"e" * 1000),
        "size": (b"", b"0" * 1000),
    }[what]

    async def script(peer: Peer) -> None:
        await peer.send(CHUNKED + opening)
        num_sent = 0
        while not peer.transport.is_ended and not peer.transport.is_closed:
            await peer.send(part)
            num_sent += len(part)
            assert num_sent < 2 * MAX_HEAD_BYTES
        assert peer.answer[9:12] in (b"431", b"400")  # 400: the parser has limits of its own
        assert peer.error["code"] in (431, 400)

    talk(script)


def test_a_body_in_chunks_of_one_byte_is_no_flood() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(CHUNKED)
        for _ in range(4):
            await peer.send(b"1\r\nx\r\n" * 8000)
        assert peer.answer == b"" and not peer.transport.is_closed
        await peer.send(b"0\r\n\r\n")
        assert peer.error["message"].startswith("the body")

    talk(script)


def test_many_requests_in_one_packet_are_not_one_large_one() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(HEALTH * (1 + MAX_HEAD_BYTES // len(HEALTH)) + HEALTH[:10])
        assert peer.answer.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 431" not in peer.answer
        assert not peer.transport.is_closed

    talk(script)


@pytest.mark.parametrize("before", [b"", HEALTH])
def test_a_head_without_measure_is_refused_in_the_form_of_every_error(before: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(before)
        peer.transport.written = b""
        await peer.send(b"GET /health HTTP/1.1\r\n")
        for _ in range(MAX_HEAD_BYTES // 1000 + 2):
            await peer.send(b"x-a: " + b"b" * 1000 + b"\r\n")
        assert peer.answer.startswith(b"HTTP/1.1 431 ") and peer.transport.is_ended
        assert peer.error == {
            "message": f"the first line, headers and trailers are larger than {MAX_HEAD_BYTES} bytes",
            "type": "RequestHeaderFieldsTooLargeError",
            "param": None,
            "code": 431,
        }

    talk(script)


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00", b"NOTHING / \r\n\r\n", CHUNKED + b"zz\r\n"])
def test_what_is_not_http_is_refused_in_the_form_of_every_error(sent: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(sent)
        assert peer.answer.startswith(b"HTTP/1.1 400 ")
        assert b"content-type: application/json" in peer.answer
        assert peer.error["code"] == 400
        assert peer.transport.is_ended or peer.transport.is_closed

    talk(script)


def test_nonsense_behind_a_request_does_not_write_into_its_answer() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def go() -> None:
        peer = Peer(slow)
        await peer.send(HEALTH)
        await peer.send(b"\x00\x00")
        assert peer.answer == b"" and peer.transport.is_closed
        for task in tuple(peer.connection.tasks):
            task.cancel()

    asyncio.run(go())


def test_empty_lines_between_requests_do_not_stop_the_clock() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(HEALTH)
        await peer.send(b"\r\n")
        assert peer.connection._timer is not None
        await peer.send(HEALTH)
        assert peer.connection._timer is None
        assert peer.answer.count(b"HTTP/1.1 200") == 2

    talk(script)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"GARBAGE secret\r\n\r\n", "this is not a valid HTTP request"),
        (b"\x16\x03\x01\x02\x00\x01", "this port speaks HTTP, not HTTPS; write http:// in the address"),
    ],
)
def test_what_is_no_http_is_told_in_the_log(
    sent: bytes, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(sent)
        assert peer.error["message"] == message

    with caplog.at_level(logging.INFO, logger="infer.server.connection"):
        talk(script)
    assert caplog.messages == [f"connection refused status=400 error={message!r}"]


BODY = b'{"model": "nothing"}'
UPGRADES = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
    "websocket": b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: eA==\r\n",
    "something else": b"upgrade: anything\r\nconnection: upgrade\r\n",
}
FRAMINGS = {
    "length": (b"content-length: %d\r\n" % len(BODY), BODY),
    "chunks": (
        b"transfer-encoding: chunked\r\n",
        b"4\r\n%b\r\n10;a=b\r\n%b\r\n0\r\nx-t: 1\r\n\r\n" % (BODY[:4], BODY[4:]),
    ),
    "none": (b"", b""),
}


async def tell_what_came(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the method, the path and the body of its request."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    said = f"[{scope['method']} {scope['path']} ".encode() + body + b"]"
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]}
    )
    await send({"type": "http.response.body", "body": said})


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("upgrade", UPGRADES)
def test_the_wish_for_another_protocol_is_ignored(
    upgrade: str, framing: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    fields, body = FRAMINGS[framing]
    wish = b"POST /a HTTP/1.1\r\nhost: x\r\n" + UPGRADES[upgrade] + fields + b"\r\n" + body
    plain = b"POST /b HTTP/1.1\r\nhost: x\r\n" + fields + b"\r\n" + body
    sent = wish + plain + wish

    async def go() -> None:
        peer = Peer(tell_what_came)
        for begin in range(0, len(sent), size):
            await peer.send(sent[begin : begin + size])
        said = BODY if body else b""
        answers = [part.partition(b"\r\n\r\n") for part in peer.answer.split(b"HTTP/1.1 ")[1:]]
        assert [body for _, _, body in answers] == [
            b"[POST /%b %b]" % (path, said) for path in (b"a", b"b", b"a")
        ]
        assert all(head.startswith(b"200") and b"close" not in head for head, _, _ in answers)
        assert not peer.transport.is_closed
        peer.connection.connection_lost(None)

    asyncio.run(go())
    assert not caplog.messages


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_last_request_that_asks_for_another_protocol_is_answered(
    version: bytes, framing: str, size: int
) -> None:
    fields, body = FRAMINGS[framing]
    close = b"close, " if version == b"1.1" else b""
    sent = (
        b"POST /a HTTP/%b\r\nhost: x\r\nconnection: %bupgrade\r\nupgrade: b\r\n" % (version, close)
        + fields
        + b"\r\n"
        + body
    )

    async def go() -> None:
        peer = Peer(tell_what_came)
        for begin in range(0, len(sent), size):
            await peer.send(sent[begin : begin + size])
        assert peer.answer.startswith(b"HTTP/1.1 200")
        assert peer.answer.endswith(b"[POST /a %b]" % (BODY if body else b"")) and peer.transport.is_closed
        peer.connection.connection_lost(None)

    asyncio.run(go())


def test_a_client_of_http_1_0_gets_no_second_head() -> None:
    async def go() -> None:
        peer = Peer(tell_what_came)
        await peer.send(b"POST /a HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\nb")
        assert peer.answer.startswith(b"HTTP/1.1 200") and peer.answer.endswith(b"[POST /a b]")
        peer.connection.connection_lost(None)

    asyncio.run(go())


def test_a_trailer_that_ends_the_connection_swallows_no_request() -> None:
    async def go() -> None:
        peer = Peer(tell_what_came)
        await peer.send(CHUNKED + b"0\r\nconnection: close\r\n\r\n" + HEALTH)
        assert peer.answer.count(b"HTTP/1.1 200") == 2 or peer.transport.is_closed
        peer.connection.connection_lost(None)

    asyncio.run(go())


def test_a_body_behind_the_wish_for_another_protocol_is_no_request() -> None:
    async def go() -> None:
        peer = Peer(tell_what_came)
        hidden = b"GET /admin HTTP/1.1\r\nhost: x\r\n\r\n"
        head = (
            b"POST /a HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: b\r\ncontent-length: %d\r\n\r\n"
        )
        await peer.send(head % len(hidden))
        await peer.send(hidden)
        assert peer.answer.count(b"HTTP/1.1 200") == 1 and peer.answer.endswith(b"[POST /a " + hidden + b"]")
        peer.connection.connection_lost(None)

    asyncio.run(go())


def test_thousands_of_wishes_in_one_packet_are_answered() -> None:
    async def go() -> None:
        peer = Peer(tell_what_came)
        peer.connection.data_received(
            b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: b\r\n\r\n" * 3000
        )
        while peer.connection.pipeline:
            await asyncio.sleep(0)
        await peer.send(HEALTH)
        assert peer.answer.count(b"HTTP/1.1 200") == 3001
        peer.connection.connection_lost(None)

    asyncio.run(go())


KINDS = {
    400: "BadRequestError",
    431: "RequestHeaderFieldsTooLargeError",
    501: "NotImplementedError",
    505: "HTTPVersionNotSupportedError",
}


@pytest.mark.parametrize(
    ("sent", "status", "part"),
    [
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\nhello", 501, "CONNECT"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "HTTP/1.1"),
        (b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", 505, "HTTP/1.1"),
        (b"GET / HTTP/0.9\r\nhost: x\r\n\r\n", 505, "HTTP/1.1"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nHost: y\r\n\r\n", 400, "host header"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "no host header"),
        (b"GET / HTTP/1.1\r\naccept: */*\r\n\r\n", 400, "no host header"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\nabc", 501, "chunked"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, "chunked"),
        (b"GET /" + b"a" * 65_534 + b" HTTP/1.1\r\n\r\n", 431, "65536 bytes"),
        (b"GET /" + b"a" * 65_534 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431, "65536 bytes"),
        (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431, "65536 bytes"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 65_534 + b"\r\n\r\n", 431, "65536 bytes"),
    ],
    ids=lambda value: repr(value[:60]) if isinstance(value, bytes) else None,
)
@pytest.mark.parametrize(("before", "size"), [(b"", 40), (HEALTH, 300_000)])
def test_a_head_that_asks_for_what_is_not_served_is_told_so(
    sent: bytes, status: int, part: str, before: bytes, size: int
) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(before)
        peer.transport.written = b""
        for begin in range(0, len(sent), size):
            await peer.send(sent[begin : begin + size])
        assert peer.answer.startswith(b"HTTP/1.1 %d " % status), peer.answer
        assert b"content-type: application/json" in peer.answer
        assert peer.error["code"] == status and part in peer.error["message"]
        assert peer.error["type"] == KINDS[status]
        assert peer.transport.is_ended or peer.transport.is_closed

    talk(script)


@pytest.mark.parametrize("head", [b"GET /health HTTP/1.0\r\n\r\n", b"GET /health HTTP/1.1\r\nhost:\r\n\r\n"])
def test_a_host_header_may_be_empty_and_http_1_0_needs_none(head: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(head)
        assert peer.answer.startswith(b"HTTP/1.1 200 "), peer.answer

    talk(script)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, loop_factory()])
def test_a_client_that_hangs_up_is_told_from_one_that_stops_sending(
    make_loop: Any, version: str, family: int, tmp_path: Path
) -> None:
    heard: list[str] = []

    async def listen(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        try:
            async with asyncio.timeout(0.4):
                heard.append((await receive())["type"])
        except TimeoutError:
            heard.append("nothing")
            await tell_what_came(scope, lambda: asyncio.sleep(0, {}), send)

    async def main() -> None:
        config = uvicorn.Config(listen, http=GuardedConnection, ws="none", lifespan="off", log_config=None)
        loop, host = asyncio.get_running_loop(), Host()
        path = str(tmp_path / "s")
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(path if family == socket.AF_UNIX else ("127.0.0.1", 0))
            listener.listen()
            server = await loop.create_server(lambda: GuardedConnection(config, host, {}), sock=listener)
            for is_half in (True, False):
                with socket.socket(family, socket.SOCK_STREAM) as client:
                    client.setblocking(False)
                    await loop.sock_connect(client, listener.getsockname())
                    await loop.sock_sendall(client, f"GET /a HTTP/{version}\r\nhost: x\r\n\r\n".encode())
                    if is_half:
                        client.shutdown(socket.SHUT_WR)
                        answer = b""
                        while part := await loop.sock_recv(client, 65536):
                            answer += part
                        assert answer.endswith(b"[GET /a ]") or (version == "1.0" and not answer)
                while len(heard) < 2 - is_half or host.connections:
                    await asyncio.sleep(0.01)
            server.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())
    half = "nothing" if version == "1.1" else "http.disconnect"
    assert heard == [half, "http.disconnect"]


def test_a_client_that_takes_nothing_is_cut_off_and_one_that_takes_a_byte_is_not() -> None:
    async def run() -> None:
        peer = Peer(tell_what_came)
        peer.connection.send_timeout_s = 0.05
        peer.transport.num_left = 100
        await peer.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        for _ in range(6):
            await asyncio.sleep(0.03)
            peer.transport.num_left -= 1
        assert not peer.transport.is_closed
        await asyncio.sleep(0.3)
        assert peer.transport.is_closed

    asyncio.run(run())
