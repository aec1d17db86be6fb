"""Route outputs from request ids to subscribers, for an engine in a thread and an engine in a process.

An engine knows request ids, but its outputs must reach readers. A *subscriber* is the address of outputs: a
queue if the engine is a thread of the same process, a socket and a number if it is another process.

    reader's side   read_outputs()   submits a request, yields its outputs, unsubscribes
                    OutputQueue      outputs that are not read yet, bounded
    engine's side   Subscribers      request id -> subscriber; addresses every output

A reader may unsubscribe, and another may reuse its request id before the last outputs of the first have
arrived. So outputs are addressed by subscriber, never by request id alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeAlias, TypeVar

from infer.engine.engine import Engine
from infer.errors import EngineError, InferError, RequestError
from infer.scheduling.request import Request, StepOutput

logger = logging.getLogger(__name__)

Subscriber = TypeVar("Subscriber")

OnEnd: TypeAlias = Callable[[bool], None]  # ends a subscription; True: the request has ended

CLOSED = "the engine was closed"  # reasons why open requests end
SHUTTING_DOWN = "the server is shutting down; send the request again to another server or later"
MAX_UNREAD = 65_536  # tokens and logprobs that may wait for one reader: a few megabytes


class OutputQueue:
    """The outputs of one request that await its reader. Belongs to the reader's event loop.

    A reader that stops reading does not stop the engine, so its unread outputs are bounded: at the limit the
    request ends, the backlog is dropped, and the reader finds an error in its place.
    """

    def __init__(self) -> None:
        self.on_end: OnEnd | None = None
        self._messages: deque[tuple[int, StepOutput | BaseException]] = deque()
        self._reader: asyncio.Future[None] | None = None  # waits for the next message
        self._num_unread = 0
        self._is_over = False

    def put_nowait(self, message: StepOutput | BaseException) -> None:
        """Add an output, or the error that ends the queue."""
        if self._is_over:
            return
        size = 0
        if isinstance(message, BaseException):
            self._is_over = True
        elif self._num_unread >= MAX_UNREAD:  # one output may exceed it: a reader can always read one
            self._is_over = True
            self._messages.clear()
            message = RequestError(
                f"{self._num_unread} tokens and logprobs of the answer were not read, at most {MAX_UNREAD} "
                "may wait; read faster, or ask for fewer tokens or logprobs"
            )
            if self.on_end is not None:
                self.on_end(False)
        else:
            size = _size_of(message)
            self._num_unread += size
        self._messages.append((size, message))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> StepOutput | BaseException:
        """Wait for the oldest output that has not been read, and return it."""
        while not self._messages:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        size, message = self._messages.popleft()
        self._num_unread -= size
        return message


def _size_of(output: StepOutput) -> int:
    """Return the number of tokens and logprobs in an output, plus one."""
    size = 1 + len(output.token_ids)
    if not output.logprobs and output.prompt_logprobs is None:
        return size
    for row in (*output.logprobs, *(output.prompt_logprobs or ())):
        size += 1 if row is None else 1 + len(row.top)
    return size


async def read_outputs(
    request: Request, submit: Callable[[OutputQueue], OnEnd]
) -> AsyncGenerator[StepOutput, None]:
    """Submit a request at the first iteration and yield its outputs until each of its sequences has ended."""
    num_left = request.params.num_reported
    queue = OutputQueue()
    on_end = queue.on_end = submit(queue)
    has_ended = False
    try:
        while num_left:
            message = await queue.get()
            if isinstance(message, BaseException):
                has_ended = True
                raise message
            if message.param is not None:  # a late error: for example, its constraint cannot be compiled
                has_ended = True
                raise RequestError(message.error or "the request was refused", param=message.param)
            num_left -= message.finish_reason is not None
            has_ended = num_left == 0
            yield message
    finally:
        on_end(has_ended)


class Subscribers(Generic[Subscriber]):
    """An engine and the addresses of its outputs. Not thread-safe: the engine's thread owns it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._by_id: dict[str, Subscriber] = {}

    def all(self) -> list[Subscriber]:
        """Return the subscriber of every request that is being served."""
        return list(self._by_id.values())

    def add(self, request: Request, subscriber: Subscriber) -> Exception | None:
        """Accept a request, or return an error that concerns only its subscriber."""
        try:
            self._engine.add(request)
        except Exception as error:
            if not isinstance(error, InferError):  # a bug
                logger.error("request failed request_id=%s", request.request_id, exc_info=error)
            return error
        self._by_id[request.request_id] = subscriber
        return None

    def unsubscribe(self, request_id: str, subscriber: Subscriber) -> None:
        """End the request of a reader that has left, unless the id belongs to another subscriber by now."""
        if self._by_id.get(request_id) == subscriber:
            del self._by_id[request_id]
            self._engine.abort(request_id)

    def abort(self, request_id: str, index: int | None) -> list[tuple[Subscriber, StepOutput]]:
        """End a request, or one sequence of it; returns the last output of each sequence it ended."""
        subscriber = self._by_id.get(request_id)
        if subscriber is None:
            return []
        try:
            ended = self._engine.abort(request_id, index)
        except EngineError as error:  # no such sequence: must not stop every request
            logger.warning("abort refused request_id=%s reason=%r", request_id, str(error))
            return []
        if not self._engine.is_serving(request_id):
            del self._by_id[request_id]
        return [(subscriber, output) for output in ended]

    def step(self) -> list[tuple[Subscriber, StepOutput]]:
        """Run one step of the engine and return its outputs with their addresses."""
        outputs, by_id = self._engine.step(), self._by_id
        addressed = [(by_id[made.request_id], made) for made in outputs if made.request_id in by_id]
        for output in [made for made in outputs if made.finish_reason is not None]:
            if not self._engine.is_serving(output.request_id):
                by_id.pop(output.request_id, None)
        return addressed
