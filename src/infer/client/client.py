"""One engine for many readers: requests go in from an event loop, outputs come back to it.

The engine's loop runs in its own thread and sleeps when there is nothing to do. Commands and outputs travel
in batches: commands through an inbox that is emptied before each step, outputs with one wake-up of the event
loop per step, for all requests.

    event loop                                engine thread
    generate() ──► inbox: add ──────────────► Engine.add
               ◄── queue per request ◄─────── Engine.step    (one message per step)
    close      ──► inbox: abort ────────────► Engine.abort, before the next step

Closing the iterator of a request aborts the request, whether it is waiting, running or finished. If the loop
dies, every open request and every later call gets `EngineStopped`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from typing import Protocol, TypeVar

from infer.client.subscribers import CLOSED, OnEnd, OutputQueue, Subscribers, read_outputs
from infer.engine.engine import IDLE_S, Engine
from infer.engine.live import LiveSnapshot
from infer.engine.prefixes import update_prefixes
from infer.engine.stats import EngineStats, is_progress
from infer.engine.stories import EngineStory
from infer.errors import EngineError, EngineLost, EngineStopped, InferError
from infer.finish_reason import FinishReason
from infer.scheduling.request import Request, StepOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineClient(Protocol):
    """The parts of an engine that a server or an `AsyncLLM` needs, in a thread or in a process."""

    def generate(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        """Submit a request and iterate over its outputs; stop iterating to abort it."""

    def has_taken(self, request_id: str) -> bool:
        """Return True if the engine has accepted a request whose outputs are being read."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sequence of it, before the next step."""

    def stats(self) -> EngineStats:
        """Return the engine's last snapshot of its statistics, without a round trip."""

    @property
    def prefixes(self) -> AbstractSet[int]:
        """The hashes (`chain_hashes`) of its cached prefixes; empty if it has no replicas."""

    @property
    def failure(self) -> EngineError | None:
        """The reason it cannot serve: `EngineStopped` if dead, `EngineError` if stuck; None if it can."""

    @property
    def silent_s(self) -> float:
        """Seconds without progress while there is work to do; 0: none is pending."""

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns how many blocks were forgotten."""

    async def set_adapter(self, name: str, path: str | None, *, replaces: bool = False) -> None:
        """Load a LoRA adapter under a name, or unload it (None); `replaces` allows the name to be taken."""

    async def explain(self, request_id: str) -> EngineStory | None:
        """Return the story of a current or past request; None if it is unknown or forgotten."""

    async def look(self) -> LiveSnapshot:
        """Return a snapshot for the live page: recent steps, blocks and the queue."""

    async def close(self, reason: str = CLOSED) -> None:
        """Stop the engine; open requests get `EngineStopped` with the reason."""


async def embed(client: EngineClient, request: Request) -> list[float]:
    """Return the embedding of a request that has a `pooling`; cancelling this aborts the request."""
    async with contextlib.aclosing(client.generate(request)) as outputs:
        async for output in outputs:
            if output.finish_reason == FinishReason.STOP:
                return list(output.embedding)
            reason = output.error or output.finish_reason
            raise EngineError(f"embedding {request.request_id} failed: {reason}")
    raise EngineError(f"embedding {request.request_id} has no output")


class InProcessClient:
    """An engine in a thread of this process, for one event loop."""

    def __init__(self, engine: Engine, *, stuck_timeout: float = 120.0, has_replicas: bool = False) -> None:
        self._engine = engine
        self.prefixes: set[int] = set()  # the engine's thread keeps it up to date
        if has_replicas:
            engine.watch_prefixes()
        self._subscribers: Subscribers[OutputQueue] = Subscribers(engine)
        self._stuck_timeout = stuck_timeout
        self._stats = engine.stats()
        self._progress_at = time.monotonic()
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._is_closing, self._close_reason = False, CLOSED
        self._stopped: EngineStopped | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._patience_s: float | None = IDLE_S  # None: no idle work is left
        engine.compile_aside(self._notify)
        self._thread = threading.Thread(target=self._run, name="infer-engine", daemon=True)
        self._thread.start()

    def generate(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        """Submit a request and iterate over its outputs; closing the iterator aborts it."""
        return read_outputs(request, lambda queue: self._submit(request, queue))

    def has_taken(self, request_id: str) -> bool:
        """Return True if the engine has accepted a request whose outputs are being read."""
        return self._engine.is_serving(request_id)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sequence of it, before the next step; its iterator sees "abort"."""
        self._post(lambda: self._abort(request_id, index))

    def stats(self) -> EngineStats:
        """Return the snapshot taken after the last step."""
        return self._stats

    @property
    def failure(self) -> EngineError | None:
        """`EngineStopped` if the thread is dead, `EngineError` if it makes no progress; else None."""
        silent_s = self.silent_s
        if self._stopped is None and 0 < self._stuck_timeout < silent_s:
            return EngineError(f"the engine has made no progress for {silent_s:.0f} s")
        return self._stopped

    @property
    def silent_s(self) -> float:
        """Seconds without progress while there is work to do; 0: none is pending."""
        owes = self._inbox or self._engine.has_work
        return time.monotonic() - self._progress_at if owes else 0.0

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, between two steps; returns how many blocks were forgotten."""
        return await self._call(self._engine.reset_prefix_cache)

    async def set_adapter(self, name: str, path: str | None, *, replaces: bool = False) -> None:
        """Load or unload an adapter between two steps."""
        await self._call(lambda: self._engine.set_adapter(name, path, replaces=replaces))

    async def explain(self, request_id: str) -> EngineStory | None:
        """Return the story of a request, between two steps; None if it is unknown or forgotten."""
        return await self._call(lambda: self._engine.explain(request_id))

    async def look(self) -> LiveSnapshot:
        """Return a snapshot for the live page, between two steps."""
        return await self._call(self._engine.look)

    async def close(self, reason: str = CLOSED) -> None:
        """Stop the thread after the step in flight; open requests get `EngineStopped` with the reason."""
        with self._wake:
            self._is_closing, self._close_reason = True, reason
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # -- the event loop's side --------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._stopped is not None:
                raise self._stopped
            if not self._inbox and not self._engine.has_work:
                self._progress_at = time.monotonic()  # idle time is not a lack of progress
            self._inbox.append(command)
            self._wake.notify()

    async def _call(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine thread between two steps, and wait for its result."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                if self._stopped is not None:
                    raise self._stopped
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._post(run)
        return await asyncio.wrap_future(done)

    def _notify(self) -> None:
        """Let the engine thread look for work."""
        with self._wake:
            self._wake.notify()

    def _submit(self, request: Request, queue: OutputQueue) -> OnEnd:
        self._loop = asyncio.get_running_loop()
        self._post(lambda: self._add(request, queue))

        def end(has_ended: bool) -> None:
            with self._wake:
                if not has_ended and self._stopped is None:
                    self._inbox.append(lambda: self._forget(request.request_id, queue))
                    self._wake.notify()

        return end

    # -- the engine thread's side -----------------------------------------------------------------

    def _run(self) -> None:
        stopped: EngineStopped | None = None
        try:
            while not self._is_closing and self._engine.prepare():
                self._progress_at = time.monotonic()  # this thread: cuDNN caches plans per thread
            while self._take_commands():
                if self._engine.has_work:
                    self._send(self._subscribers.step())
                if news := self._engine.take_prefix_news():
                    update_prefixes(self.prefixes, news)
                stats = self._engine.stats()
                if is_progress(self._stats, stats):
                    self._progress_at = time.monotonic()
                self._stats = stats
        except BaseException as error:
            logger.exception("engine loop died")
            said = str(error) if isinstance(error, InferError) else type(error).__name__
            stopped = EngineLost(f"the engine loop died: {said}")
        stopped = stopped or EngineStopped(self._close_reason)
        with self._wake:
            self._stopped = stopped
            commands, self._inbox = self._inbox, []
        for command in commands:  # requests that were just submitted get the error, too
            command()
        self._send([(queue, stopped) for queue in self._subscribers.all()])

    def _take_commands(self) -> bool:
        """Run the posted commands, after sleeping until one arrives if idle; False: the client is closing."""
        with self._wake:
            is_idle = not self._wake.wait_for(
                lambda: self._inbox or self._engine.has_work or self._is_closing, self._patience_s
            )
            if self._is_closing:
                return False
            commands, self._inbox = self._inbox, []
        if is_idle:
            self._patience_s = self._engine.use_idle_time()
        elif self._patience_s is not None:
            # requests interrupted the idle work: its next piece waits as long as the first
            self._patience_s = max(self._patience_s, IDLE_S)
        for command in commands:
            command()
        return True

    def _add(self, request: Request, queue: OutputQueue) -> None:
        error = self._stopped or self._subscribers.add(request, queue)
        if error is not None:
            self._send([(queue, error)])

    def _abort(self, request_id: str, index: int | None) -> None:
        if self._stopped is None:
            self._send(self._subscribers.abort(request_id, index))

    def _forget(self, request_id: str, queue: OutputQueue) -> None:
        if self._stopped is None:
            self._subscribers.unsubscribe(request_id, queue)

    def _send(self, messages: Sequence[tuple[OutputQueue, StepOutput | BaseException]]) -> None:
        if messages and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_put_all, messages)


def _put_all(messages: Sequence[tuple[OutputQueue, StepOutput | BaseException]]) -> None:
    for queue, message in messages:
        queue.put_nowait(message)
