"""Remote calls between two processes of a server, over a socket pair.

    NumberedMessage  number, message            the types of messages.py; number 0: no answer is expected
    NumberedAnswer   number, result or failure  the result has the type that the question names

Messages are handled in the order in which they were sent, but a slow answer does not delay later messages.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec

from infer.client.messages import Failure, to_error, to_failure
from infer.errors import EngineStopped
from infer.server.processes.messages import ProcessMessage, Question

logger = logging.getLogger(__name__)

_SIZE_BYTES = 4
T = TypeVar("T")
P = TypeVar("P")  # encoded with the frame, decoded after it
Received = TypeVar("Received", bound=ProcessMessage)  # the messages that this end may receive


class NumberedMessage(msgspec.Struct, Generic[P], frozen=True, tag=True, array_like=True):
    """A message with its number."""

    number: int
    message: P


class NumberedAnswer(msgspec.Struct, Generic[P], frozen=True, tag=True, array_like=True):
    """The answer to the question with a number."""

    number: int
    result: P
    failure: Failure | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode_frame = msgspec.msgpack.Decoder(NumberedMessage[msgspec.Raw] | NumberedAnswer[msgspec.Raw]).decode


class Channel(Generic[Received]):
    """One end of a socket pair. `open` it, `run` it, and `call` or `tell` the other end.

    `answer` handles a message and returns the answer, or an awaitable of it.
    """

    def __init__(self, link: socket.socket, received: Any, answer: Callable[[Received], Any]) -> None:
        self._link = link
        self._decode: Callable[[msgspec.Raw], Received] = msgspec.msgpack.Decoder(received).decode
        self._answer = answer
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_closed = False  # the other end is gone

    async def open(self) -> None:
        """Open the streams; call this first."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._link)

    async def run(self) -> None:
        """Handle messages until the other end is gone."""
        reader = self._reader
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(_SIZE_BYTES), "little")
                frame = _decode_frame(await reader.readexactly(size))
                if isinstance(frame, NumberedAnswer):
                    self._resolve(frame)
                else:
                    self._carry_out(frame.number, frame.message)
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

    def tell(self, message: ProcessMessage) -> None:
        """Send a message that needs no answer."""
        self._send(NumberedMessage(0, message))

    async def call(self, question: Question[T]) -> T:
        """Send a question and wait for the answer; raises the error of the other end."""
        number = next(self._numbers)
        done: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._calls[number] = done
        try:
            self._send(NumberedMessage(number, question))
            answer: T = msgspec.msgpack.decode(await done, type=question.answer_type())
            return answer
        finally:
            del self._calls[number]

    def _send(self, frame: NumberedMessage[Any] | NumberedAnswer[Any]) -> None:
        if self.is_closed:
            raise EngineStopped("a process of the server has ended")
        data = _encode(frame)
        self._writer.write(len(data).to_bytes(_SIZE_BYTES, "little") + data)

    def _resolve(self, answered: NumberedAnswer[msgspec.Raw]) -> None:
        done = self._calls.get(answered.number)
        if done is None or done.done():
            return
        if answered.failure is not None:
            done.set_exception(to_error(answered.failure))
        else:
            done.set_result(answered.result)

    def _carry_out(self, number: int, data: msgspec.Raw) -> None:
        try:
            answer = self._answer(self._decode(data))
            if inspect.isawaitable(answer):
                task = asyncio.ensure_future(self._reply(number, data, answer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._send_answer(NumberedAnswer(number, answer))
        except Exception as error:
            self._fail(number, data, error)

    async def _reply(self, number: int, data: msgspec.Raw, answer: Awaitable[Any]) -> None:
        try:
            self._send_answer(NumberedAnswer(number, await answer))
        except asyncio.CancelledError:  # the answer's own, unless the channel closes
            self._send_answer(NumberedAnswer(number, None, to_failure(EngineStopped("cancelled"))))
            raise
        except Exception as error:
            self._fail(number, data, error)

    def _send_answer(self, answer: NumberedAnswer[Any]) -> None:
        if answer.number and not self.is_closed:
            self._send(answer)

    def _fail(self, number: int, data: msgspec.Raw, error: Exception) -> None:
        """Send an error to the process that asked; if it expects no answer, log the error."""
        if not number:
            logger.error("message failed name=%s", msgspec.msgpack.decode(data)[0], exc_info=error)
        self._send_answer(NumberedAnswer(number, None, to_failure(error)))
