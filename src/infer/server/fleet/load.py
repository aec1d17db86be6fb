"""One load of a model, which others can end.

    loading ──► done     the model is served
        ├─────► failed   with the error of its engines
        └─────► ended    by `end`, with a reason (unload, shutdown), or because its caller was cancelled

A load runs in the task of its caller, and `end` cancels that task. As with `asyncio.timeout`, the caller gets
an error instead of the cancellation. So a load always cleans up in the same way, and `finish` lets no
cancellation interrupt that: a load that has failed can be ended while its engines stop.

A load that waits for its turn (`in_turn`) can be ended, too. It does not reserve its name until it begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeVar

from infer.errors import EngineStopped
from infer.server.fleet.names import name_taken

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Load:
    """A context for loading a model in the current task; `running` has it under its names meanwhile."""

    def __init__(self, name: str, running: dict[str, Load]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.name = name  # empty: the model's own, which is taken when it is known
        self._task, self._num_cancels = task, task.cancelling()
        self._running = running
        self._reason = ""  # why it was ended
        self._is_over = asyncio.Event()

    def take(self, name: str) -> None:
        """Reserve a name, which must be free, until the load is over."""
        assert name not in self._running, name
        self._running[name] = self

    async def end(self, reason: str) -> None:
        """Cancel the load, and wait until its engines are gone."""
        if not self._reason:
            self._reason = reason
            self._task.cancel()
        await self._is_over.wait()
        logger.info("load ended model=%s reason=%r", self.name, reason)

    def __enter__(self) -> Load:
        self.take(self.name)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name in [name for name, load in self._running.items() if load is self]:
            del self._running[name]
        self._is_over.set()
        is_ended = self._reason != "" and self._task.uncancel() <= self._num_cancels
        if is_ended and kind is asyncio.CancelledError:
            raise EngineStopped(f"the load of {self.name!r} was ended: {self._reason}") from None


@asynccontextmanager
async def in_turn(
    name: str, waiting: dict[str, Load], turn: AbstractAsyncContextManager[T]
) -> AsyncIterator[T]:
    """Enter `turn`, which may have to wait for other loads; `waiting` has the load until then."""
    if name in waiting:
        raise name_taken(name, "being loaded")
    async with AsyncExitStack() as stack:
        with Load(name, waiting):
            entered = await stack.enter_async_context(turn)
        yield entered


async def finish(cleanup: Awaitable[object]) -> None:
    """Wait until a cleanup is done; a cancellation of the current task is raised after that."""
    running, cancelled = asyncio.ensure_future(cleanup), None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    running.result()
    if cancelled is not None:
        raise cancelled
