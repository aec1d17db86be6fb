"""One end of the socket between an API process and an engine process.

    EngineLink      the socket: commands out, messages in; another process of this server started the engine
    EngineProcess   (supervisor.py) an engine that this process started, supervises and ends

Every API process has its own socket to every engine, bound at this end; the engine connects to all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import zmq

from infer.client.messages import Command, Failure, Message, Ready, decode_message, encode
from infer.errors import EngineStopped


class EngineLink:
    """A socket to one engine process; another process supervises it and reports its exit."""

    def __init__(self, endpoint: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message: Callable[[Message], None] | None = None
        self._is_receiving = False  # `receive` is about to be called
        self._reason = ""
        self.last_words: Failure | None = None
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.exited = asyncio.Event()
        with contextlib.ExitStack() as resources:
            context = zmq.Context()
            resources.callback(context.term)
            self._socket = context.socket(zmq.PAIR)
            resources.callback(self._socket.close)
            self._socket.set_hwm(0)  # a send must never block the event loop
            self._socket.linger = 0
            self._socket.bind(endpoint)
            self._loop.add_reader(self._socket.fileno(), self.receive)
            resources.callback(self._loop.remove_reader, self._socket.fileno())
            self._resources = resources.pop_all()

    @property
    def pid(self) -> int | None:
        """The id of the engine's process; None: only the process that started it knows."""
        return None

    @property
    def exit_reason(self) -> str:
        """The reason the process ended, for clients of its requests: no paths, no traceback."""
        return self._reason

    def set_exited(self, reason: str) -> None:
        """Note that the engine has exited, as the supervising process reports."""
        self._reason = reason
        self.exited.set()

    def kill(self) -> None:
        """Kill the process, if this process started it."""

    def close_now(self) -> None:
        """Close the socket."""
        self._resources.close()

    async def close(self, *, timeout: float = 0.0) -> None:
        """Close the link; if this process started the engine, stop it within `timeout` seconds."""
        self.close_now()

    def listen(self, on_message: Callable[[Message], None]) -> None:
        """Call this function with every message after `Ready`."""
        self._on_message = on_message
        self.receive()

    def send(self, command: Command) -> None:
        """Queue a command; it never blocks."""
        try:
            self._socket.send(encode(command), zmq.NOBLOCK)
        except zmq.Again:  # no peer: its exit will be noticed soon
            raise EngineStopped("the engine process has ended") from None
        # The descriptor is edge-triggered, and sending may have consumed an edge meant for receive().
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._receive_soon()

    def receive(self) -> None:
        """Handle the next message, if there is one; the one after it waits for the loop's next iteration.

        Otherwise a loop that lags would handle many steps at once, and every stream would get a burst.
        """
        self._is_receiving = False
        if self._take_next():
            self._receive_soon()

    def receive_all(self) -> None:
        """Handle every message that has arrived."""
        while self._take_next():
            pass

    def _receive_soon(self) -> None:
        if not self._is_receiving:
            self._is_receiving = True
            self._loop.call_soon(self.receive)

    def _take_next(self) -> bool:
        """Handle one message; returns False if there is none."""
        if self._socket.closed:
            return False
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        message = decode_message(frame)
        if isinstance(message, Failure):
            self.last_words = message
        elif isinstance(message, Ready):
            self.ready.set_result(message)
        elif self._on_message is not None:
            self._on_message(message)
        return True
