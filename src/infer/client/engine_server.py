"""The loop of an engine's process, with a unix socket to each API process (messages.py).

loop     handle all pending commands, run one step, send a `StepReport`
idle     sleep until a command arrives or a constraint is compiled: no polling, no CPU; after the first
         idle second, read the vocabulary of constraints in a thread
asleep   after `Sleep`, until `Wake`: no engine, its weights in host memory (sleeping.py)
end      at `Stop`
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import zmq

from infer.client import messages
from infer.client.sleeping import SleepingEngine
from infer.client.subscribers import Subscribers
from infer.engine.engine import IDLE_S, Engine
from infer.engine.gc_freeze import freeze
from infer.engine.stats import EngineStats, add_counters
from infer.errors import EngineError, InferError
from infer.scheduling.request import StepOutput
from infer.tools.record import Recorder, RecordFile

if TYPE_CHECKING:
    from infer.engine.weights_aside import WeightsAside

logger = logging.getLogger(__name__)

OVERDUE_S = 0.5  # seconds without a report after which commands are acknowledged before the step
STATS_INTERVAL = 0.25  # seconds between two reports without outputs to one API process


@dataclass(slots=True, eq=False)
class Link:
    """The socket to one API process, and the contents of its next report."""

    socket: zmq.Socket[bytes]
    num_commands: int = 0
    is_owed: bool = False  # True: commands were received since the last report
    reported_at: float = 0.0
    tickets: list[int] = field(default_factory=list)
    outputs: list[StepOutput] = field(default_factory=list)
    answers: list[messages.Answer] = field(default_factory=list)
    prefixes: dict[int, bool] = field(default_factory=dict)  # prefixes added to or evicted from the cache


Address: TypeAlias = tuple[Link, int]  # an API process and its ticket


class EngineServer:
    """The engine's loop, which serves a socket for each API process; `set_up` runs on each new engine."""

    def __init__(
        self,
        engine: Engine,
        sockets: Sequence[zmq.Socket[bytes]],
        set_up: Callable[[Engine], None] = lambda engine: None,
        recorder: RecordFile | None = None,
    ) -> None:
        self._set_up, self._recorder = set_up, recorder
        self._weights: WeightsAside | None = None  # what an engine that slept keeps for its next sleep
        self._past: EngineStats | None = None  # the counters of earlier engines, which had their own records
        self._links = [Link(socket) for socket in sockets]
        self._bell, self._ringer = os.pipe()  # written by other threads, which must not touch zmq sockets
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ringer, False)
        self._poll = _poll_all([*sockets, self._bell])
        self._adopt(engine)

    def _adopt(self, engine: Engine) -> None:
        self._engine: Engine | SleepingEngine = engine
        self._subscribers: Subscribers[Address] = Subscribers(engine)
        self._patience_ms: int | None = round(IDLE_S * 1000)  # None: no idle work is left
        engine.compile_aside(partial(_ring, self._ringer))
        if engine.ranks is not None:
            engine.ranks.watch(partial(_ring, self._ringer))

    def run(self) -> None:
        """Serve until a `Stop` command arrives."""
        while True:
            for link, frame in self._receive():
                link.num_commands += 1
                link.is_owed = True
                try:
                    command = messages.decode_command(frame)
                except (InferError, msgspec.DecodeError) as error:  # must not stop every request
                    logger.warning("command refused reason=%r", str(error))
                    answer = messages.refuse_command(frame, error)
                    link.answers += [] if answer is None else [answer]
                    continue
                if isinstance(command, messages.Stop):
                    return
                if isinstance(command, messages.Sleep | messages.Wake | messages.DropPinned):
                    self._turn_over(link, command)
                else:
                    self._carry_out(link, command)
            if self._engine.has_work:
                if self._is_overdue():
                    self._report()
                self._keep(self._subscribers.step())
            elif self._engine.ranks is not None:
                self._engine.ranks.check(is_idle=True)
            self._report()

    def _receive(self) -> list[tuple[Link, bytes]]:
        """Return every command that has arrived; wait for one if the engine is idle."""
        frames: list[tuple[Link, bytes]] = []
        if not self._engine.has_work:
            if self._patience_ms is None and self._wants_new_engine():
                self._patience_ms = round(IDLE_S * 1000)
            while not self._poll(self._patience_ms):
                if self._wants_new_engine():
                    self._renew()
                    continue
                # an engine that woke up prepares, when idle, what its steps have not needed so far
                wait_s = 0.0 if self._engine.prepare() else self._engine.use_idle_time()
                self._patience_ms = None if wait_s is None else round(wait_s * 1000)
            if self._patience_ms is not None:  # interrupted: the next idle work waits like the first
                self._patience_ms = max(self._patience_ms, round(IDLE_S * 1000))
            with contextlib.suppress(BlockingIOError):
                os.read(self._bell, 4096)
        for link in self._links:
            with contextlib.suppress(zmq.Again):
                while True:
                    frames.append((link, link.socket.recv(zmq.NOBLOCK)))
        return frames

    def _wants_new_engine(self) -> bool:
        """Return True if the engine is idle and its record is so full that the next should begin."""
        engine, recorder = self._engine, self._recorder
        if not isinstance(recorder, Recorder) or not isinstance(engine, Engine):
            return False
        return recorder.wants_new_engine and not engine.num_requests

    def _renew(self) -> None:
        """Rebuild an idle engine on the same weights: a record begins with a fresh engine."""
        assert isinstance(self._engine, Engine), "a sleeping engine is rebuilt when it wakes"
        started = time.monotonic()
        self._engine.reset_prefix_cache()
        self._report()  # tells the routers that nothing is cached here
        self._past = self._stats()
        self._engine = SleepingEngine(self._engine, self._weights)
        del self._subscribers  # they refer to the engine
        self._engine.keep_weights(0)  # the weights stay on the device; everything else is freed
        self._wake(self._engine)
        logger.info("engine rebuilt for the next record seconds=%.2f", time.monotonic() - started)

    def _wake(self, sleeping: SleepingEngine) -> None:
        engine = sleeping.wake()
        self._weights = sleeping.weights
        self._set_up(engine)
        freeze()
        self._adopt(engine)

    def _keep(self, made: Sequence[tuple[Address, StepOutput]]) -> None:
        """Add outputs to the reports of their API processes."""
        for (link, ticket), output in made:
            link.tickets.append(ticket)
            link.outputs.append(output)

    def _turn_over(self, link: Link, command: messages.Sleep | messages.Wake | messages.DropPinned) -> None:
        """Free the engine, or rebuild it, or free what it kept for its next sleep."""
        num_bytes = None
        try:
            if isinstance(command, messages.Sleep):
                if not isinstance(self._engine, SleepingEngine):
                    self._engine = SleepingEngine(self._engine, self._weights)
                    del self._subscribers  # they refer to the engine
                num_bytes = self._engine.keep_weights(command.max_bytes)
            elif isinstance(command, messages.Wake):
                if isinstance(self._engine, SleepingEngine):
                    self._wake(self._engine)
                num_bytes = 0 if self._weights is None else self._weights.num_pinned
            elif self._weights is not None and not isinstance(self._engine, SleepingEngine):
                self._weights.drop_pinned()
            link.answers.append(messages.Answer(command.ticket, num_bytes, None))
        except Exception as error:  # the process that asked closes this one
            if not isinstance(error, InferError):
                logger.exception("engine could not sleep or wake")
            self._answer_error(link, command.ticket, error)

    def _carry_out(self, link: Link, command: messages.Command) -> None:
        engine = self._engine
        if isinstance(engine, SleepingEngine):
            if (ticket := getattr(command, "ticket", None)) is not None:
                self._answer_error(link, ticket, EngineError("the engine is asleep"))
        elif isinstance(command, messages.Add):
            refused = self._subscribers.add(command.request, (link, command.ticket))
            if refused is not None:
                self._answer_error(link, command.ticket, refused)
        elif isinstance(command, messages.Unsubscribe):
            self._subscribers.unsubscribe(command.request_id, (link, command.ticket))
        elif isinstance(command, messages.Abort):
            self._keep(self._subscribers.abort(command.request_id, command.index))
        elif isinstance(command, messages.Call):
            try:
                self._answer(link, engine, command)
            except Exception as error:  # it concerns only this call, and must not stop any request
                if not isinstance(error, InferError):
                    logger.exception("call failed call=%s", type(command).__name__)
                self._answer_error(link, command.ticket, error)

    def _answer(self, link: Link, engine: Engine, call: messages.CallCommand) -> None:
        answer = messages.Answer(call.ticket, None, None)
        if isinstance(call, messages.ResetPrefixCache):
            answer = messages.Answer(call.ticket, engine.reset_prefix_cache(), None)
        elif isinstance(call, messages.SetAdapter):
            engine.set_adapter(call.name, call.path, replaces=call.replaces)
        elif isinstance(call, messages.Explain):
            answer = messages.Answer(call.ticket, None, None, engine.explain(call.request_id))
        elif isinstance(call, messages.Watch):
            link.socket.send(messages.encode(messages.LiveReport(call.ticket, engine.look())))
            return
        link.answers.append(answer)

    def _answer_error(self, link: Link, ticket: int, error: Exception) -> None:
        link.answers.append(messages.Answer(ticket, None, messages.to_failure(error)))

    def _is_overdue(self) -> bool:
        """Return True if commands await a report after a silence: the first step may be long."""
        now = time.monotonic()
        return any(link.is_owed and now - link.reported_at > OVERDUE_S for link in self._links)

    def _stats(self) -> EngineStats:
        stats = self._engine.stats()
        return stats if self._past is None else add_counters(stats, self._past)

    def _report(self) -> None:
        """Send each API process its own outputs and all counters, less often if it has no outputs."""
        stats, is_idle = self._stats(), not self._engine.has_work
        now = time.monotonic()
        if news := self._engine.take_prefix_news():
            for link in self._links:
                link.prefixes.update(news)
        for link in self._links:
            if len(self._links) > 1:
                is_due = is_idle or now - link.reported_at >= STATS_INTERVAL
                if not (is_due or link.is_owed or link.outputs or link.answers):
                    continue
            report = messages.StepReport(
                num_commands=link.num_commands,
                stats=stats,
                tickets=link.tickets,
                outputs=link.outputs,
                answers=link.answers,
                prefixes=link.prefixes,
            )
            link.tickets, link.outputs, link.answers, link.prefixes = [], [], [], {}
            link.is_owed, link.reported_at = False, now
            link.socket.send(messages.encode(report))


def _ring(bell: int) -> None:
    with contextlib.suppress(BlockingIOError):  # the pipe is full: it is already readable
        os.write(bell, b"!")


def _poll_all(sockets: Sequence[zmq.Socket[bytes] | int]) -> Callable[[int | None], object]:
    """Return a function that waits, with a timeout in ms, until one of several sockets is readable."""
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    return poller.poll
