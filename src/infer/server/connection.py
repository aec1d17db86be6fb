"""HTTP connections with limits on time and size, so that clients cannot hold them open for nothing.

uvicorn waits forever for the first request of a connection. Here the head of a request (its first line and
its headers) must arrive completely within HEAD_TIMEOUT_S and MAX_HEAD_BYTES:

    connected ──► [ head: timed, counted ] ──► body (limits.py) ──► answer ──► idle (keep-alive timeout)
                        ▲                                                        │
                        └────────────── first byte of the next request ◄─────────┘

Counting continues after the head: limits.py does not count the framing of a chunked body (sizes, extensions,
trailers), so the framing may take MAX_HEAD_BYTES plus a few bytes for each byte of the body.

A request that is answered before its body has arrived (for example with a wrong key) ends its connection. If
we closed it at once, the operating system would answer the rest of the body with a reset, which can discard
the response before the client has read it. So the connection *lingers*: our side is closed, and further input
is discarded, for at most LINGER_S and MAX_LINGER_BYTES.

A client may stop sending after its request and still read (a half-closed connection): it gets its response.
A client that has hung up looks the same until we send something. So a waiting client gets `100 Continue`,
which every HTTP/1.1 client skips; if the client is gone, its machine answers with a reset.

A client that reads nothing of a response for SEND_TIMEOUT_S is cut off, because its unread bytes fill our
buffers, and an orderly close would wait for it, too.

A request for another protocol (`connection: upgrade`: h2c, a websocket) is served, body included, as if it
had not asked for it (RFC 9110, 7.8).

`GuardedConnection` is a protocol class for uvicorn's `http` setting.
"""

from __future__ import annotations

import asyncio
import logging
import select
from http import HTTPStatus
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from infer.server.protocol.errors import ApiError

logger = logging.getLogger(__name__)
uvicorn_logger = logging.getLogger(f"{__name__}.uvicorn")  # uvicorn's lines in our format
uvicorn_logger.addFilter(lambda said: "Invalid HTTP request" not in said.getMessage())  # `_refuse` says why

HEAD_TIMEOUT_S = 15.0
MAX_HEAD_BYTES = 64 * 1024
TOO_LARGE = f"the first line, headers and trailers are larger than {MAX_HEAD_BYTES} bytes"
MAX_FRAMING_PER_BYTE = 8  # one-byte chunks need five: "1\r\n" and "\r\n"
TLS_HELLO = b"\x16\x03"  # the first bytes of a client that uses https://
HTTP2_HELLO = b"PRI * HTTP/2"
PROBE_S = 0.05  # seconds between two checks for a reset of a half-closed connection
SEND_TIMEOUT_S = 60.0
LINGER_S = 1.0
MAX_LINGER_BYTES = 1024 * 1024


class RefusedHead(Exception):
    """A complete head that asks for something we never serve; caught in this file."""


class RequestParser(httptools.HttpRequestParser):
    """A parser that continues after a request asks for another protocol.

    llhttp stops after such a head and treats the message as ended; if it is the last of its connection, the
    rest is dropped. So a new parser takes over: it first gets a neutral head with only the framing of the
    body; its reader knows that the request is still open.
    """

    def __init__(self, reader: GuardedConnection) -> None:
        super().__init__(reader)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # pipelining, as in uvicorn
        self._reader = reader

    def feed_data(self, data: Any) -> None:
        """Parse some bytes."""
        reader = self._reader
        while data:
            try:
                httptools.HttpRequestParser.feed_data(reader.parser, data)
                return
            except httptools.HttpParserUpgrade as stop:
                reader.parser = RequestParser(reader)
                reader.parser.feed_data(b"POST / HTTP/1.1\r\n" + reader.framing + b"\r\n")
                data = memoryview(data)[stop.args[0] :]


class GuardedConnection(HttpToolsProtocol):
    """One connection, which counts and times everything except the bodies of its requests."""

    head_timeout_s = HEAD_TIMEOUT_S
    send_timeout_s = SEND_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = uvicorn_logger
        self.parser = RequestParser(self)
        self._timer: asyncio.TimerHandle | None = None  # timer of a head, the lingering or a probe
        self._send_timer: asyncio.TimerHandle | None = None  # set while the transport buffers output
        self._num_sent = 0  # bytes of responses passed to the transport
        self._is_open = False  # a request has begun and is incomplete
        self._is_body_open = False  # its head is complete
        self._is_lingering = False
        self._first_bytes = b""  # the first bytes of this read, if they begin a request
        self._refusal: tuple[int, str] | None = None  # status and message, if the head just read is refused
        self._num_begun = 0  # requests that begin in this read
        self._num_body_bytes = 0  # body bytes of the request being read
        self._num_other_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._expect_head()

    def on_message_begin(self) -> None:
        """Start the timer of a head, unless it is already running."""
        if self._is_open:  # `RequestParser` repeats the framing of its body
            return
        super().on_message_begin()
        self._is_open = True
        self._num_begun += 1
        self._num_body_bytes = 0
        if self._timer is None:
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; ignore a trailer, which comes after a body."""
        if not self._is_body_open:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the timer: a head is complete."""
        if self._is_body_open:  # repeated
            return
        self._stop_timer()
        self._check_head()
        if self.parser.get_http_version() == "1.0":  # its client would take `100 Continue` as the response
            self.expect_100_continue = False
        super().on_headers_complete()
        self._is_body_open = True
        # older versions of uvicorn ignore the request's header
        self.cycle.keep_alive &= self.parser.should_keep_alive()
        self.cycle.transport = _AnswerTransport(self)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """Count the bytes of a body."""
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that a request is complete."""
        if self.parser.should_upgrade():  # only its head is complete
            return
        self._is_open = self._is_body_open = False
        if not self.parser.should_keep_alive():  # a trailer may set this
            self.cycle.keep_alive = False
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Count the bytes outside of bodies, and reject too many of them."""
        if self._is_lingering:
            self._num_other_bytes += len(data)
            if self._num_other_bytes > MAX_LINGER_BYTES:
                self._hang_up()
            return
        was_open, num_body_bytes = self._is_open, self._num_body_bytes
        self._first_bytes = b"" if was_open else data[:16]
        self._num_begun = 0
        super().data_received(data)
        if self.transport.is_closing() or self._is_lingering:
            return
        if self._num_begun + was_open > 1:  # the start of the last request in these bytes is unknown
            self._num_other_bytes = 0
        else:
            num_before = 0 if self._num_begun else num_body_bytes
            self._num_other_bytes += len(data) - (self._num_body_bytes - num_before)
        if self._num_other_bytes > MAX_HEAD_BYTES + MAX_FRAMING_PER_BYTE * self._num_body_bytes:
            self._refuse(431, TOO_LARGE)
        elif self._timer is None and not self._is_open and self._is_answered():
            self._expect_head()  # empty lines between requests have stopped the keep-alive timer

    def send_400_response(self, msg: str) -> None:
        """Reject bytes that are not HTTP, or a head that `_check_head` has rejected."""
        if self._refusal is not None:
            self._refuse(*self._refusal)
        elif self._first_bytes.startswith(TLS_HELLO):  # text for the log: the client cannot read it
            self._refuse(400, "this port speaks HTTP, not HTTPS; write http:// in the address")
        elif self._first_bytes.startswith(HTTP2_HELLO):
            self._refuse(505, "this server speaks HTTP/1.1, not HTTP/2; let the client use HTTP/1.1")
        else:
            self._refuse(400, "this is not a valid HTTP request")

    def on_response_complete(self) -> None:
        """Close the connection after a response if its request is incomplete: the rest is not needed."""
        if self._is_lingering:
            return
        super().on_response_complete()
        if self._is_body_open and self._is_answered():
            self.close_behind_answer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed connection open until the client has its responses."""
        is_old = self.scope is None or self.scope["http_version"] == "1.0"  # has no `100 Continue`
        if self._is_open or self._is_answered() or is_old or self.scheme == "https":  # TLS cannot half-close
            return False
        self.cycle.keep_alive = False
        if not self.pipeline and not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers: the connection is gone."""
        self._stop_timer()
        if self._send_timer is not None:
            self._send_timer.cancel()
        super().connection_lost(exc)

    def send_answer(self, data: bytes) -> None:
        """Write a part of a response, and check that the client reads it."""
        self.transport.write(data)
        self._num_sent += len(data)
        if self._send_timer is None:
            self._watch_sending()

    def close_behind_answer(self) -> None:
        """Close so that a client that is still sending can read its response."""
        if self._is_lingering or self.transport.is_closing():
            return
        if not self._is_open:  # everything sent so far was read
            self.transport.close()
            return
        self._is_lingering = True
        self._num_other_bytes = 0
        self._stop_timer()
        if not self._is_answered():  # the application has not answered and may stop
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof():  # TLS cannot
            self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGER_S, self._hang_up)

    @property
    def framing(self) -> bytes:
        """The headers that frame the body of the current request, and show whether it is the last."""
        fields = (b"content-length", b"transfer-encoding")
        close = b"" if self.cycle.keep_alive else b"connection: close\r\n"
        return close + b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in fields)

    def _check_head(self) -> None:
        """Reject a head that no inner layer can handle."""
        names = [name for name, _ in self.headers]
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        size = len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)
        if size + len("GET  HTTP/1.1\r\n\r\n") > MAX_HEAD_BYTES:
            self._refusal = (431, TOO_LARGE)
        elif self.parser.get_http_version() not in ("1.0", "1.1"):
            self._refusal = (505, "this server speaks HTTP/1.1; let the client use it")
        elif names.count(b"host") > 1:
            self._refusal = (400, "there is more than one host header; send one")
        elif b"host" not in names and self.parser.get_http_version() != "1.0":
            self._refusal = (400, "there is no host header; HTTP/1.1 needs one, empty if there is no name")
        elif codings not in ([], [b"chunked"]):
            self._refusal = (
                501,
                "the only transfer-encoding is 'chunked'; send the body without another one",
            )
        elif self.parser.get_method() == b"CONNECT":
            self._refusal = (501, "the method CONNECT is for proxies, and this server is not one")
        if self._refusal is not None:
            raise RefusedHead

    def _probe(self) -> None:
        """Close a half-closed connection if it was reset; otherwise check again later."""
        if self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)  # errors and hang-ups only
        if poll.poll(0):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(PROBE_S, self._probe)

    def _watch_sending(self, num_taken: int = -1) -> None:
        """Check again later while bytes are left; cut off a client that read none since the last check."""
        self._send_timer = None
        num_left = self.transport.get_write_buffer_size()
        if not num_left:
            return
        if num_taken == self._num_sent - num_left:
            logger.info("connection closed: the client read nothing for %g s", self.send_timeout_s)
            self.transport.abort()
            return
        delay, num_taken = self.send_timeout_s, self._num_sent - num_left
        self._send_timer = self.loop.call_later(delay, self._watch_sending, num_taken)

    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        if not self._is_answered() and (
            self.cycle.response_started or self.pipeline or not self._is_body_open
        ):
            self.transport.close()  # another response is due first
            return
        logger.info("connection refused status=%d error=%r", status, message)  # not in the access log
        body = orjson.dumps(ApiError(status=status, message=message).body)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.close_behind_answer()

    def _expect_head(self) -> None:
        self._num_other_bytes = 0
        self._timer = self.loop.call_later(self.head_timeout_s, self._hang_up)

    def _hang_up(self) -> None:
        """Close a connection whose client may never do its part of that.

        With TLS the transport would wait, and read, for 30 seconds until the client closes its side, too.
        """
        if self.scheme == "https" and not self.transport.get_write_buffer_size():
            self.loop.call_later(LINGER_S, self.transport.abort)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _AnswerTransport:
    """The transport of one response: the connection's, closed by `close_behind_answer`."""

    def __init__(self, connection: GuardedConnection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        self._connection.send_answer(data)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.close_behind_answer()
