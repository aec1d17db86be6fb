"""An HTTP connection to a replica: sends a request, returns the head and then the pieces of the answer.

    Upstream.ask(request) ──► head ──► read() piece ──► read() piece ──► read() None: the end

HTTP is parsed in C. Nothing is decoded or collected: a piece is what one read of the socket brought. Unread
bytes are bounded: reading from the socket pauses until the client of the front has taken them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from time import monotonic
from typing import NamedTuple, cast

import httptools

CONNECT_S = 5.0
IDLE_S = 20.0  # a server closes idle connections after 30 s
MAX_BACKLOG = 1 << 20  # bytes


class ReplicaGone(Exception):
    """The connection to a replica ended before its answer did."""


class ResponseHead(NamedTuple):
    """The status and headers of an answer."""

    status: int
    headers: list[tuple[bytes, bytes]]


class Upstream(asyncio.Protocol):
    """One connection, which answers one request at a time."""

    def __init__(self) -> None:
        self.idle_since = monotonic()
        self.is_used = False  # True once an answer has come over it
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_lost = False
        self._heard_at = monotonic()
        self._silent_s: float | None = None  # longest silence, if the replica has ended
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._head: ResponseHead | None = None
        self._pieces: deque[bytes] = deque()
        self._backlog = 0
        self.is_whole = False  # True once the answer is complete
        self._is_bodiless = False  # an answer to HEAD has no body, whatever its content-length

    @classmethod
    async def connect(cls, host: str, port: int) -> Upstream:
        """Open a connection, or raise `ReplicaGone`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, made = await loop.create_connection(cls, host, port)
        except (OSError, TimeoutError) as error:
            raise ReplicaGone(f"cannot connect: {error}") from None
        return made

    @property
    def is_reusable(self) -> bool:
        """True if another request may be sent over the connection."""
        return (
            not self._is_lost
            and self._silent_s is None
            and self.is_whole
            and monotonic() - self.idle_since < IDLE_S
        )

    async def ask(self, request: bytes) -> ResponseHead:
        """Send a request; return the head of its answer."""
        self._begin()
        self._is_bodiless = request.startswith(b"HEAD ")
        if self._transport is None or self._is_lost:
            raise ReplicaGone("the connection is closed")
        self._transport.write(request)
        while self._head is None:
            await self._wait()
        return self._head

    async def read(self) -> bytes | None:
        """The next piece of the body; None at its end."""
        while not self._pieces:
            if self.is_whole:
                self.idle_since, self.is_used = monotonic(), True
                return None
            await self._wait()
        piece = b"".join(self._pieces)
        self._pieces.clear()
        if self._backlog > MAX_BACKLOG and self._transport is not None:
            self._transport.resume_reading()
            self._heard_at = monotonic()  # the silence begins anew
        self._backlog = 0
        return piece

    async def pieces(self) -> AsyncIterator[bytes]:
        """The rest of the body, piece by piece."""
        while (piece := await self.read()) is not None:
            yield piece

    def close(self) -> None:
        """Close the connection now; the replica ends an unfinished request."""
        self._is_lost = True
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def close_when_silent(self, silent_s: float) -> None:
        """Close the connection when it has brought nothing for `silent_s` seconds; it is not used again."""
        self._silent_s = silent_s
        self._heard_at = monotonic()
        self._close_if_silent()

    def _close_if_silent(self) -> None:
        assert self._silent_s is not None
        is_paused = self._backlog > MAX_BACKLOG  # the front's client has to read first
        rest_s = self._silent_s if is_paused else self._heard_at + self._silent_s - monotonic()
        if rest_s <= 0:
            self.close()
        elif not self._is_lost:
            asyncio.get_running_loop().call_later(rest_s, self._close_if_silent)

    async def _wait(self) -> None:
        if self._is_lost:
            raise ReplicaGone("the connection was lost")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # methods that asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def data_received(self, data: bytes) -> None:
        """Parse the bytes that came."""
        self._heard_at = monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        if self._backlog > MAX_BACKLOG and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake the waiting reader."""
        self._is_lost = True
        self._wake()

    # methods that the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the head; after a 100 Continue the real head follows."""
        status = self._parser.get_status_code()
        if status >= 200:
            self._head = ResponseHead(status, self._headers)
            self.is_whole = self._is_bodiless
        self._headers = []

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._pieces.append(body)
        self._backlog += len(body)

    def on_message_complete(self) -> None:
        """Note the end of the answer."""
        self.is_whole = self._head is not None
