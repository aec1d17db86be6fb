"""Who waits for which request: what an engine in a thread and an engine in a process have in common.

An engine knows request ids; outputs must go to callers. A *caller* is whatever address outputs are sent
to: a queue where the engine is a thread of the same process, a number where it is another process.

    reader's side   read_outputs()   open a request, yield its outputs, leave it
    engine's side   Callers          request id -> caller; every answer comes back with its address

A caller may leave and another may come under the same request id before the first one's last outputs
have arrived, so outputs are addressed by caller, never by request id alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeAlias, TypeVar

from infer.engine.engine import Engine
from infer.engine.request import Request, StepOutput
from infer.errors import EngineError

logger = logging.getLogger(__name__)

Caller = TypeVar("Caller")

OutputQueue: TypeAlias = "asyncio.Queue[StepOutput | BaseException]"
Leave: TypeAlias = Callable[[bool], None]  # called once at the end, with whether the request has ended


async def read_outputs(
    request: Request, submit: Callable[[OutputQueue], Leave]
) -> AsyncGenerator[StepOutput, None]:
    """Submit a request at the first iteration and yield its outputs until each of its sequences has ended."""
    params = request.params
    num_left = params.n if params.use_beam_search else params.num_sequences
    queue: OutputQueue = asyncio.Queue()
    leave = submit(queue)
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

    def everyone(self) -> list[Caller]:
        """All who wait for a request that is being served."""
        return list(self._callers.values())

    def add(self, request: Request, caller: Caller) -> Exception | None:
        """Accept a request for this caller, or return the error that is for this caller alone."""
        try:
            self._engine.add(request)
        except Exception as error:
            return error
        self._callers[request.request_id] = caller
        return None

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
        known = [
            (self._callers[output.request_id], output)
            for output in self._engine.step()
            if output.request_id in self._callers
        ]
        for _, output in known:  # after all have their address: several sequences may end in one step
            if output.finish_reason is not None and not self._engine.is_serving(output.request_id):
                self._callers.pop(output.request_id, None)
        return known
