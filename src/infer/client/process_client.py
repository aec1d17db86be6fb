"""The client of an engine in its own process: it has the same methods as `InProcessClient`, and survives
crashes.

    starting ──► up ──► down (restarting) ──► up ...            with restart=True
                  │          └──► down for good                 after too many restarts, with the reason
                  └─────────────► down for good                 with restart=False

While the engine is down, every call raises `EngineStopped`. Open requests get the same error right after a
crash: their outputs so far are lost, and only the sender knows whether to retry a request.

The engine's reports show whether it is *stuck*. Each report says how many of our commands it has received,
how much work is left and how many tokens it has computed. While work is pending, a report that shows progress
must arrive within `stuck_timeout` seconds; a chunk of a long prompt is progress, even without an output. An
idle engine sleeps and is silent. After `PING_INTERVAL` seconds of silence it gets a `Ping`, which it must
answer with a report like any command. So a frozen idle engine is detected, too, and long before it counts as
stuck, requests go to other replicas (`silent_s`, read by the server's router).

A *full queue* is detected here, because the engine handles commands only between two steps, and a step may
take seconds. The client decides by the last report and the requests in flight, so it rejects a request
unnecessarily only if sequences have ended since that report.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from infer.client import messages
from infer.client.link import EngineLink
from infer.client.messages import Answer
from infer.client.spawn import is_stopped
from infer.client.subscribers import CLOSED, OnEnd, OutputQueue, read_outputs
from infer.client.supervisor import CHECK_INTERVAL, STOP_TIMEOUT, EngineProcess, ProcessOptions
from infer.config.settings import EngineConfig
from infer.engine.live import LiveSnapshot
from infer.engine.prefixes import update_prefixes
from infer.engine.stats import EngineStats, add_counters, is_progress
from infer.engine.stories import EngineStory
from infer.errors import EngineError, EngineLost, EngineStopped, QueueFull
from infer.scheduling.request import Request, StepOutput

logger = logging.getLogger(__name__)

STARTED_AGAIN = "; it is being restarted"
NOT_STARTED_AGAIN = "; the server stops, so it is not restarted"
PING_INTERVAL = 5.0  # seconds of silence after which an idle engine gets a `Ping`


class ProcessClient:
    """An engine in a process of its own, for one event loop. Made by `start`, ended by `close`."""

    _stats: EngineStats  # the last snapshot that arrived
    _num_sent: int  # commands sent, and commands that the engine has received
    _num_taken: int
    _on_way: deque[tuple[int, int]]  # commands in flight: number, and sequences added
    _num_on_way: int  # sequences that they add in total

    def __init__(
        self,
        process: EngineLink,
        ready: messages.Ready,
        options: ProcessOptions,
        start_again: Callable[[], Coroutine[Any, Any, tuple[EngineLink, messages.Ready]]] | None,
    ) -> None:
        self._options = options
        self._start_again = start_again
        self._tickets = itertools.count(1)
        self._readers: dict[int, OutputQueue] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._added: dict[str, int] = {}  # number of the command that added a request, by request id
        self._past = EngineStats()  # the counters of engines that died
        self._down: str | None = None  # why calls fail
        self._is_lost = False  # down for good
        self._is_last_life = False  # the server stops
        self._is_asleep = False
        self._is_turning_over = False  # falling asleep or waking: no reports until done
        self._adopt(process, ready)
        self._supervisor = asyncio.ensure_future(self._supervise())

    @classmethod
    async def start(cls, config: EngineConfig, options: ProcessOptions | None = None) -> ProcessClient:
        """Start an engine and wait until its model is loaded; raises the error if startup fails."""
        options = options or ProcessOptions()
        start = partial(EngineProcess.start, config, options)
        process, ready = await start()
        return cls(process, ready, options, start if options.restart else None)

    @property
    def pid(self) -> int | None:
        """The id of the engine's process; None while it is down."""
        return None if self._down is not None else self._process.pid

    def generate(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        """Submit a request and iterate over its outputs; closing the iterator aborts it."""
        return read_outputs(request, lambda queue: self._submit(request, queue))

    def has_taken(self, request_id: str) -> bool:
        """Return True if a report shows that the engine has received a request that is being read."""
        return self._added.get(request_id, self._num_sent) <= self._num_taken

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sequence of it, before the next step; its iterator sees "abort"."""
        self._send(messages.Abort(request_id, index))

    def stats(self) -> EngineStats:
        """Return the last snapshot that arrived; counters continue across restarts."""
        return add_counters(self._stats, self._past)

    @property
    def failure(self) -> EngineError | None:
        """`EngineStopped` if the process is dead, `EngineError` if it makes no progress; else None."""
        if self._down is not None:
            return EngineLost(self._down) if self._is_lost else EngineStopped(self._down)
        if self._is_stuck():
            return EngineError(f"the engine has made no progress for {self.silent_s:.0f} s")
        return None

    @property
    def silent_s(self) -> float:
        """Seconds without progress while there is work to do; 0: none is pending."""
        return time.monotonic() - self._progress_at if self._owes_us else 0.0

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns how many blocks were forgotten."""
        answer: Answer = await self._call(messages.ResetPrefixCache(next(self._tickets)))
        assert answer.result is not None
        return answer.result

    async def set_adapter(self, name: str, path: str | None, *, replaces: bool = False) -> None:
        """Load a LoRA adapter under a name, or unload it (None); `replaces` allows the name to be taken."""
        await self._call(messages.SetAdapter(next(self._tickets), name, path, replaces))

    async def explain(self, request_id: str) -> EngineStory | None:
        """Return the story of a request; None if this engine does not know it, or has forgotten it."""
        answer: Answer = await self._call(messages.Explain(next(self._tickets), request_id))
        return answer.story

    async def look(self) -> LiveSnapshot:
        """Return a snapshot for the live page."""
        snapshot: LiveSnapshot = await self._call(messages.Watch(next(self._tickets)))
        return snapshot

    async def sleep(self, max_bytes: int) -> int:
        """Free the engine; returns the bytes of its weights, which move to host memory if they fit.

        A process that ends while it is asleep or wakes is not restarted.
        """
        self._is_asleep = True
        answer = await self._turn_over(messages.Sleep(next(self._tickets), max_bytes))
        self.prefixes.clear()
        assert answer.result is not None
        return answer.result

    async def wake(self) -> int:
        """Rebuild the engine; returns the bytes of pinned memory that it keeps for its next sleep."""
        answer = await self._turn_over(messages.Wake(next(self._tickets)))
        self._is_asleep = False
        assert answer.result is not None
        return answer.result

    async def drop_pinned(self) -> None:
        """Free the pinned memory that the engine kept when it woke; it goes on serving."""
        await self._call(messages.DropPinned(next(self._tickets)))

    def stop_restarts(self) -> None:
        """Let the process end if it dies from now on: the server stops."""
        self._is_last_life = True

    async def close(self, reason: str = CLOSED) -> None:
        """Stop the process and wait for its exit; open requests get `EngineStopped` with the reason."""
        self._supervisor.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._supervisor
        is_stuck = self._down is None and self._is_stuck()
        self._lose(reason)
        await self._process.close(timeout=0.0 if is_stuck else STOP_TIMEOUT)

    # -- calls ------------------------------------------------------------------------------------

    async def _call(self, command: messages.CallCommand) -> Any:
        """Send a command and wait for its answer; raises the error if it fails."""
        self._send(command)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[command.ticket] = done
        try:
            return await done
        finally:
            self._calls.pop(command.ticket, None)

    async def _turn_over(self, command: messages.Sleep | messages.Wake) -> Answer:
        """Put the engine to sleep or wake it, which may take as long as a start."""
        self._is_turning_over = True
        try:
            answer: Answer = await self._call(command)
        finally:
            self._is_turning_over = False
        return answer

    def _submit(self, request: Request, queue: OutputQueue) -> OnEnd:
        ticket = next(self._tickets)
        self._check_room()
        self._send(messages.Add(ticket, request), num_added=1)
        self._readers[ticket] = queue
        self._added[request.request_id] = self._num_sent

        def end(has_ended: bool) -> None:
            self._added.pop(request.request_id, None)
            # The reader is gone already if the engine that served it is.
            if self._readers.pop(ticket, None) is not None and not has_ended:
                with contextlib.suppress(EngineStopped):
                    self._send(messages.Unsubscribe(ticket, request.request_id), num_added=-1)

        return end

    def _check_room(self) -> None:
        """Reject a request that the engine would reject in its next iteration."""
        stats, max_queue = self._stats, self.ready.max_queue
        if max_queue is None or self._down is not None:
            return
        num_queued = stats.num_running + stats.num_waiting + self._num_on_way - stats.max_batch_size
        if num_queued >= max_queue:
            raise QueueFull.of(num_queued, max_queue)

    def _send(self, command: messages.Command, num_added: int = 0) -> None:
        if self._down is not None:
            raise EngineStopped(self._down)
        self._process.send(command)
        if not self._owes_us:
            self._progress_at = time.monotonic()
        self._num_sent += 1
        if num_added:
            self._on_way.append((self._num_sent, num_added))
            self._num_on_way += num_added

    # -- reports ----------------------------------------------------------------------------------

    def _take(self, message: messages.Message) -> None:
        if isinstance(message, messages.LiveReport):
            done = self._calls.get(message.ticket)
            if done is not None and not done.done():  # else cancelled meanwhile
                done.set_result(message.snapshot)
            return
        assert isinstance(message, messages.StepReport), message
        if is_progress(self._stats, message.stats):
            self._progress_at = time.monotonic()
        self._stats = message.stats
        if message.prefixes:
            update_prefixes(self.prefixes, message.prefixes)
        self._num_taken = message.num_commands
        while self._on_way and self._on_way[0][0] <= self._num_taken:
            self._num_on_way -= self._on_way.popleft()[1]
        readers = self._readers
        for ticket, output in zip(message.tickets, message.outputs, strict=True):
            if ticket in readers:  # else its reader has left, and the engine will soon know
                readers[ticket].put_nowait(output)
        for answer in message.answers:
            error = messages.to_error(answer.failure) if answer.failure is not None else None
            if answer.ticket in readers:
                assert error is not None, "a request is answered by outputs"
                readers[answer.ticket].put_nowait(error)
            elif (done := self._calls.get(answer.ticket)) is None or done.done():
                continue  # cancelled meanwhile
            elif error is not None:
                done.set_exception(error)
            else:
                done.set_result(answer)

    # -- life and death ---------------------------------------------------------------------------

    def _adopt(self, process: EngineLink, ready: messages.Ready) -> None:
        self._process = process
        self.ready = ready  # the engine's facts about its model and its startup
        self._stats = ready.stats
        self.prefixes: set[int] = set()  # hashes of the engine's cached prefixes, if it has replicas
        self._num_sent = self._num_taken = 0
        self._on_way, self._num_on_way = deque(), 0
        self._progress_at = time.monotonic()
        self._down = None
        process.listen(self._take)

    def _lose(self, reason: str) -> None:
        """End every open request and call with `EngineStopped`."""
        if self._down is None:
            total = self.stats()
            self._past = total
            self._stats = EngineStats(
                max_batch_size=total.max_batch_size, num_blocks=total.num_blocks, block_size=total.block_size
            )
            self._options.on_down(reason)
        self._down = reason
        for queue in self._readers.values():
            queue.put_nowait(EngineStopped(reason))
        for done in self._calls.values():
            if not done.done():
                done.set_exception(EngineStopped(reason))
        self._readers.clear()
        self._calls.clear()

    async def _supervise(self) -> None:
        """Watch the process; when it exits, end open requests and restart it while the policy allows."""
        while True:
            reason = await self._watch()
            logger.error("engine down reason=%r", reason)
            delay = self._next_delay()
            fate = NOT_STARTED_AGAIN if self._is_last_life else "" if delay is None else STARTED_AGAIN
            self._lose(reason + (fate if self._options.restart else ""))
            await self._process.close()
            if not await self._restart(reason, delay):
                self._is_lost = True
                return

    async def _watch(self) -> str:
        """Wait until the process exits and return the reason; kill it if it is stuck."""
        interval, has_stopped = min(CHECK_INTERVAL, (self._options.stuck_timeout or math.inf) / 4), False
        while not self._process.exited.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._process.exited.wait()
            self._ping_if_idle()
            had_stopped, has_stopped = has_stopped, self._is_stopped()
            if self._start_again is not None and (self._is_stuck() or (had_stopped and has_stopped)):
                silent = f"made no progress for {self.silent_s:.0f} s"
                self._process.kill()
                await self._process.exited.wait()
                return f"the engine {'was stopped by a signal' if has_stopped else silent} and was ended"
        return self._process.exit_reason

    def _ping_if_idle(self) -> None:
        idle_s = 0.0 if self._owes_us else time.monotonic() - self._progress_at
        if idle_s > min(PING_INTERVAL, self._options.stuck_timeout or math.inf):
            with contextlib.suppress(EngineStopped):  # its exit will be noticed soon
                self._send(messages.Ping())

    @property
    def _may_restart(self) -> bool:
        return self._start_again is not None and not self._is_asleep and not self._is_last_life

    def _next_delay(self) -> float | None:
        """Return the seconds to wait before the next restart; None: it stays down."""
        return self._options.policy.next_delay(time.monotonic()) if self._may_restart else None

    async def _restart(self, reason: str, delay: float | None) -> bool:
        """Restart the engine after a delay; returns False if it stays down."""
        while delay is not None and self._start_again is not None:
            await asyncio.sleep(delay)
            try:
                process, ready = await self._start_again()
            except Exception as error:  # any error: the next try may succeed
                logger.error("engine restart failed reason=%r", str(error))
                reason = f"the engine could not be restarted ({type(error).__name__})"
                delay = self._next_delay()
                continue
            self._past = replace(self._past, num_restarts=self._past.num_restarts + 1)
            self._adopt(process, ready)
            logger.warning("engine restarted pid=%s", process.pid)
            return True
        if self._may_restart:
            number = self._options.policy.max_restarts
            self._down = f"the engine stays down after {number} restarts; the last: {reason}"
            logger.error("engine lost reason=%r", self._down)
        return False

    # -- progress ---------------------------------------------------------------------------------

    @property
    def _owes_us(self) -> bool:
        """True if a report is due: commands are in flight, or sequences are being served."""
        stats = self._stats
        return self._num_taken < self._num_sent or stats.num_running + stats.num_waiting > 0

    def _is_stopped(self) -> bool:
        """Return True if a signal has stopped the process while work is pending and we may kill it."""
        pid = self._process.pid
        return pid is not None and self._owes_us and self._options.stuck_timeout > 0 and is_stopped(pid)

    def _is_stuck(self) -> bool:
        if self._is_turning_over or not 0 < self._options.stuck_timeout < self.silent_s:
            return False
        self._process.receive_all()  # its reports may have arrived unread
        return self.silent_s > self._options.stuck_timeout
