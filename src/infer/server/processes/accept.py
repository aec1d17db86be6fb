"""Accept connections from a listening socket that several processes share.

All processes wait for the same socket, and the first to accept a connection gets it. A process that has more
connections than another first pauses for PAUSE_S, to leave a new connection to the others: so a burst spreads
evenly, and a process that hangs does not block the rest. Each accepts one connection per iteration of its
event loop; a single process accepts all that wait, up to BURST. A TLS handshake has the same time limit as
the head of a request.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from infer.server.connection import HEAD_TIMEOUT_S
from infer.server.processes.board import Board

logger = logging.getLogger(__name__)

PAUSE_S = 0.001
BURST = 128  # connections
NO_FILES_PAUSE_S = 1.0  # pause after the limit of open files was reached
NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts connections from a shared listening socket until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        board: Board,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._board = board
        self._make_protocol = make_protocol
        self._tls = tls
        self._has_waited = False
        self._timer: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[object]] = set()
        self._resume()

    def close(self) -> None:
        """Accept no more connections."""
        self._loop.remove_reader(self._listener)
        if self._timer is not None:
            self._timer.cancel()

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener, self._accept)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(seconds, self._resume)

    def _accept(self) -> None:
        if self._board.has_more_connections and not self._has_waited:
            self._has_waited = True
            self._pause(PAUSE_S)
            return
        self._has_waited = False
        for _ in range(1 if self._board.num_processes > 1 else BURST):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # another process was first, or the client has left
            except OSError as error:
                if error.errno not in NO_FILES:
                    raise
                logger.error("connection not accepted reason=%r", error.strerror)
                self._pause(NO_FILES_PAUSE_S)
                return
            connection.setblocking(False)
            self._board.count_connection(1)
            task: asyncio.Task[object] = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HEAD_TIMEOUT_S if self._tls else None,
            )
        except (OSError, ssl.SSLError) as error:  # the client left, or does not speak TLS
            self._board.count_connection(-1)
            logger.debug("connection not opened reason=%r", str(error))
