"""HTTP connections that cannot be held open for nothing.

uvicorn trusts whoever has connected to send a request one day. Here the head of a request (its first
line and its headers) must arrive whole within HEAD_TIMEOUT_S and within MAX_HEAD_BYTES:

    connected ──► [ head: timed, counted ] ──► body (limits.py) ──► answer ──► idle (keep-alive timeout)
                        ▲                                                        │
                        └────────────── first byte of the next request ◄─────────┘
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S = 15.0
MAX_HEAD_BYTES = 64 * 1024
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class GuardedConnection(HttpToolsProtocol):
    """One connection; counts and times each request's head."""

    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody is there: the first head must come."""
        super().connection_made(transport)
        self._expect_head()

    def on_message_begin(self) -> None:
        """A head has begun."""
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._head_is_done()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Bytes came; if a head is still not whole, they were bytes of it."""
        super().data_received(data)
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(TOO_LARGE)
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there."""
        self._head_is_done()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _head_is_done(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
