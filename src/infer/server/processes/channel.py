"""Questions and answers between two processes of a server, over a socket pair.

    [number, name, body]           a question; number 0: no answer is wanted
    [-number, failure, result]     the answer to it

Bodies are plain data (msgpack), and the handler of a question is its type: a body that does not fit its
parameters is an error (`call_typed`). Messages are handled in the order in which they were sent, except that
a slow answer does not hold up the messages after it.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

import msgspec

from infer.client.messages import Failure, to_error, to_failure
from infer.errors import EngineStopped

logger = logging.getLogger(__name__)

_SIZE_BYTES = 4
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

Answerer = Callable[[str, Any], Any]  # (name, body) -> the answer, or an awaitable of it


def call_typed(handler: Callable[..., Any], body: dict[str, Any] | None) -> Any:
    """Call the handler of a question with a body that has been checked against its parameters."""
    given = msgspec.convert(body or {}, _body_type(handler.__qualname__, handler))
    return handler(**{name: getattr(given, name) for name in given.__struct_fields__})


_body_types: dict[str, type[msgspec.Struct]] = {}


def _body_type(name: str, handler: Callable[..., Any]) -> type[msgspec.Struct]:
    if name not in _body_types:
        hints = get_type_hints(handler)
        fields = [(parameter, hints[parameter]) for parameter in inspect.signature(handler).parameters]
        _body_types[name] = msgspec.defstruct(name, fields, forbid_unknown_fields=True)
    return _body_types[name]


class Channel:
    """One end of a socket pair. `open` it, `run` it, and `call` or `tell` the other end."""

    def __init__(self, link: socket.socket, answer: Answerer) -> None:
        self._link = link
        self._answer = answer
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_closed = False  # the other end is gone

    async def open(self) -> None:
        """Get ready to send; must come first."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._link)

    async def run(self) -> None:
        """Take messages until the other end is gone."""
        reader = self._reader
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(_SIZE_BYTES), "little")
                self._take(*_decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.is_closed = True
            for done in self._calls.values():
                if not done.done():
                    done.set_exception(EngineStopped("a process of the server has ended"))
            for task in self._tasks:
                task.cancel()
            self._writer.close()

    def tell(self, name: str, body: Any = None) -> None:
        """Send a message that wants no answer."""
        self._send([0, name, body])

    async def call(self, name: str, body: Any = None) -> Any:
        """Ask and wait for the answer; raises the error of the other end."""
        number = next(self._numbers)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = done
        try:
            self._send([number, name, body])
            return await done
        finally:
            del self._calls[number]

    def _send(self, message: list[Any]) -> None:
        if self.is_closed:
            raise EngineStopped("a process of the server has ended")
        data = _encode(message)
        self._writer.write(len(data).to_bytes(_SIZE_BYTES, "little") + data)

    def _take(self, number: int, name: Any, body: Any) -> None:
        if number < 0:
            done = self._calls.get(-number)
            if done is None or done.done():
                return
            if name is not None:
                done.set_exception(to_error(msgspec.convert(name, Failure)))
            else:
                done.set_result(body)
            return
        try:
            answer = self._answer(name, body)
        except Exception as error:
            self._fail(number, name, error)
            return
        if inspect.isawaitable(answer):
            task = asyncio.ensure_future(self._reply(number, name, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif number:
            self._send([-number, None, answer])

    async def _reply(self, number: int, name: str, answer: Awaitable[Any]) -> None:
        try:
            result = await answer
        except Exception as error:
            self._fail(number, name, error)
            return
        if number and not self.is_closed:
            self._send([-number, None, result])

    def _fail(self, number: int, name: str, error: Exception) -> None:
        """Let an error be raised where the question was asked; one that nothing waits for is logged."""
        if not number:
            logger.error("message failed name=%s", name, exc_info=error)
        elif not self.is_closed:
            self._send([-number, to_failure(error), None])
