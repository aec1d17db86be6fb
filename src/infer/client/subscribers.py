"""Who waits for which request: what an engine in a thread and an engine in a process have in common.

An engine knows request ids; outputs must go to callers. A *caller* is whatever address outputs are sent
to: a queue where the engine is a thread of the same process, a number where it is another process.

    reader's side   read_outputs()   open a request, yield its outputs, leave it
                    OutputQueue      what is made and not read yet, of bounded size
    engine's side   Callers          request id -> caller; every answer comes back with its address

A caller may leave and another may come under the same request id before the first one's last outputs
have arrived, so outputs are addressed by caller, never by request id alone.

Embeddings wait in the same line as requests: they count against `max_queue`, whoever leaves before its
turn is dropped, and a turn of the engine's loop makes one of them, beside a step for everybody else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Generic, TypeAlias, TypeVar

from infer.engine.engine import Engine
from infer.engine.stats import EngineStats
from infer.errors import EngineError, InferError, QueueFull, RequestError
from infer.scheduling.request import Request, StepOutput

logger = logging.getLogger(__name__)

Caller = TypeVar("Caller")

Leave: TypeAlias = Callable[[bool], None]  # called at the end, with whether the request has ended

MAX_UNREAD = 65_536  # tokens and logprobs that may wait for one reader: some megabytes


class OutputQueue:
    """The outputs of one request on their way to its reader. Belongs to the reader's event loop.

    A reader that stops reading does not stop the engine, so what it leaves unread is bounded: at the limit
    the request ends, the backlog is let go, and the reader finds an error in its place.
    """

    def __init__(self) -> None:
        self.leave: Leave | None = None  # ends the request
        self._messages: deque[tuple[int, StepOutput | BaseException]] = deque()
        self._arrived = asyncio.Event()
        self._num_unread = 0
        self._is_over = False

    def put_nowait(self, message: StepOutput | BaseException) -> None:
        """Add an output, or the error that takes the place of all further ones."""
        if self._is_over:
            return
        size = 0
        if isinstance(message, BaseException):
            self._is_over = True
        elif self._num_unread >= MAX_UNREAD:  # one output may be larger: a reader can always read one
            self._is_over = True
            self._messages.clear()
            message = RequestError(
                f"{self._num_unread} tokens and logprobs of the answer were not read, at most {MAX_UNREAD} "
                "may wait; read faster, or ask for fewer tokens or logprobs"
            )
            if self.leave is not None:
                self.leave(False)
        else:
            size = _size_of(message)
            self._num_unread += size
        self._messages.append((size, message))
        self._arrived.set()

    async def get(self) -> StepOutput | BaseException:
        """The oldest output not read yet; waits for one."""
        while not self._messages:
            self._arrived.clear()
            await self._arrived.wait()
        size, message = self._messages.popleft()
        self._num_unread -= size
        return message


def _size_of(output: StepOutput) -> int:
    """How much an output holds: its tokens, and every logprob that came with them."""
    size = 1 + len(output.token_ids)
    for row in (*output.logprobs, *(output.prompt_logprobs or ())):
        size += 1 if row is None else 1 + len(row.top)
    return size


async def read_outputs(
    request: Request, submit: Callable[[OutputQueue], Leave]
) -> AsyncGenerator[StepOutput, None]:
    """Submit a request at the first iteration and yield its outputs until each of its sequences has ended."""
    params = request.params
    num_left = params.n if params.use_beam_search else params.num_sequences
    queue = OutputQueue()
    leave = queue.leave = submit(queue)
    has_ended = False
    try:
        while num_left:
            message = await queue.get()
            if isinstance(message, BaseException):
                has_ended = True
                raise message
            num_left -= message.finish_reason is not None
            has_ended = num_left == 0
            yield message
    finally:
        leave(has_ended)


class Callers(Generic[Caller]):
    """An engine and the addresses of those it works for. Not thread-safe: the engine's thread owns it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._callers: dict[str, Caller] = {}
        self._embeds: dict[int, tuple[tuple[int, ...], str, str]] = {}  # by ticket, oldest first

    @property
    def has_work(self) -> bool:
        """Whether a request or an embedding is waiting or running."""
        return self._engine.has_work or bool(self._embeds)

    def stats(self) -> EngineStats:
        """The engine's counts, with the embeddings among those who wait."""
        stats = self._engine.stats()
        return replace(stats, num_waiting=stats.num_waiting + len(self._embeds)) if self._embeds else stats

    def waiting_embeds(self) -> list[int]:
        """The tickets of all embeddings whose turn has not come."""
        return list(self._embeds)

    def everyone(self) -> list[Caller]:
        """All who wait for a request that is being served."""
        return list(self._callers.values())

    def add(self, request: Request, caller: Caller) -> Exception | None:
        """Accept a request for this caller, or return the error that is for this caller alone."""
        try:
            self._check_room()
            self._engine.add(request)
        except Exception as error:
            _log_unless_ours(request.request_id, error)
            return error
        self._callers[request.request_id] = caller
        return None

    def embed(self, ticket: int, prompt: tuple[int, ...], pooling: str, request_id: str) -> Exception | None:
        """Let an embedding wait for its turn, or return the error that there is no room for it."""
        try:
            self._check_room()
        except QueueFull as error:
            return error
        self._embeds[ticket] = prompt, pooling, request_id
        return None

    def withdraw(self, ticket: int) -> None:
        """Forget an embedding nobody waits for any more, if its turn has not come."""
        self._embeds.pop(ticket, None)

    def embed_next(self) -> tuple[int, list[float] | Exception] | None:
        """Make the embedding that has waited longest; returns its ticket, and the vector or the error."""
        if not self._embeds:
            return None
        ticket, (prompt, pooling, request_id) = next(iter(self._embeds.items()))
        try:
            return ticket, self._engine.embed(prompt, pooling)
        except Exception as error:  # it belongs to this caller alone
            _log_unless_ours(request_id, error)
            return ticket, error
        finally:
            del self._embeds[ticket]

    def _check_room(self) -> None:
        scheduler = self._engine.scheduler
        limit, num_waiting = scheduler.config.max_queue, scheduler.num_waiting + len(self._embeds)
        if limit is not None and num_waiting >= limit:
            raise QueueFull(f"{num_waiting} sequences are waiting and max_queue is {limit}")

    def abort(self, request_id: str, index: int | None) -> list[tuple[Caller, StepOutput]]:
        """End a request, or one sequence of it; its caller gets the last output of each it ended."""
        caller = self._callers.get(request_id)
        if caller is None:
            return []
        try:
            ended = self._engine.abort(request_id, index)
        except EngineError as error:  # no such sequence yet: a mistake of one must not stop all
            logger.warning("abort refused: %s", error)
            return []
        if not self._engine.is_serving(request_id):
            del self._callers[request_id]
        return [(caller, output) for output in ended]

    def leave(self, request_id: str, caller: Caller) -> None:
        """End the request of a caller who reads no more, unless the id is another caller's by now."""
        if self._callers.get(request_id) == caller:
            del self._callers[request_id]
            self._engine.abort(request_id)

    def step(self) -> list[tuple[Caller, StepOutput]]:
        """One step of the engine: what it made, with the addresses."""
        outputs, callers = self._engine.step(), self._callers
        known = [(callers[made.request_id], made) for made in outputs if made.request_id in callers]
        for output in [made for made in outputs if made.finish_reason is not None]:
            if not self._engine.is_serving(output.request_id):
                callers.pop(output.request_id, None)
        return known


def _log_unless_ours(request_id: str, error: Exception) -> None:
    """A bug leaves its traceback in the log, with the id it can be found by."""
    if not isinstance(error, InferError):
        logger.error("request %s failed", request_id, exc_info=error)
