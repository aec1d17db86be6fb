"""The engine process: `python -m infer.client.process`, started by `supervisor.py`.

HTTP, JSON and detokenizing must not share an interpreter with the loop that feeds the device. So the
scheduler and the model live here, with a unix socket to each API process (see messages.py).

    start    import PyTorch, and meanwhile read one line of JSON from standard input (`Launch`); load the
             model, compile and capture everything that steps may need, send `Ready`
    loop     handle all pending commands, run one step, send a `StepReport`
    idle     sleep until a command arrives or a constraint is compiled: no polling, no CPU; after the first
             idle second, read the vocabulary of constraints in a thread
    asleep   after `Sleep`, until `Wake`: no engine, its weights in host memory
    end      at `Stop`, or when standard input closes because the server is gone

The server keeps its end of standard input open as long as it lives. Only the server handles Ctrl-C and
SIGTERM: a signal to the whole group must not end the engine before requests have drained.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import zmq

from infer.client import messages
from infer.client.imports import quick_imports
from infer.client.placement import take_place
from infer.client.process_limits import spell_shortage
from infer.client.spawn import take_orders
from infer.client.subscribers import Subscribers
from infer.config.settings import EngineConfig
from infer.engine.engine import IDLE_S, Engine
from infer.engine.gc_freeze import freeze
from infer.engine.observer import EngineObserver
from infer.engine.phases import Phases
from infer.engine.stats import EngineStats, add_counters
from infer.errors import ConfigError, DeviceLost, EngineError, InferError
from infer.loader.find.source import resolve_model
from infer.log import setup_logging
from infer.scheduling.request import StepOutput
from infer.tools.record import Recorder, RecordFile, TraceRecorder
from infer.tools.record_files import set_aside

if TYPE_CHECKING:
    from infer.engine.weights_aside import WeightsAside

logger = logging.getLogger(__name__)

LINGER_MS = 2000  # time for the last message to reach the server
OVERDUE_S = 0.5  # seconds without a report after which commands are acknowledged before the step
STATS_INTERVAL = 0.25  # seconds between two reports without outputs to one API process
EXIT_FAILED = 1


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


class SleepingEngine:
    """Stands in for an engine that was freed; its weights are in host memory if they fit there."""

    has_work = False
    ranks = None

    def __init__(self, engine: Engine) -> None:
        if engine.remake is None or engine.has_work:
            raise EngineError("an engine with ranks, adapters or requests cannot sleep; close it")
        self._stats = engine.stats()
        self._remake = engine.remake
        self._weights: WeightsAside | None = None
        self._has_left = False

    def keep_weights(self, max_bytes: int) -> int:
        """Move the weights to host memory if they fit into `max_bytes`; returns their size."""
        from infer.engine.weights_aside import WeightsAside

        self._weights = weights = self._weights or WeightsAside()
        if weights.num_bytes <= max_bytes and not self._has_left:
            weights.leave_device()
            self._has_left = True
        return weights.num_bytes

    def wake(self) -> Engine:
        """Rebuild the engine."""
        if self._weights is not None and self._has_left:
            self._weights.come_back()
        engine = self._remake()
        engine.remake = self._remake
        return engine

    def stats(self) -> EngineStats:
        """Return the statistics of the engine at the time it was freed."""
        return self._stats

    def take_prefix_news(self) -> dict[int, bool]:
        """Return nothing: no prefix is cached."""
        return {}

    def prepare(self) -> bool:
        """Return False: there is nothing to prepare."""
        return False

    def use_idle_time(self) -> None:
        """Do nothing: no idle work is left."""


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
                if isinstance(command, messages.Sleep | messages.Wake):
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
        self._engine = SleepingEngine(self._engine)
        del self._subscribers  # they refer to the engine
        self._engine.keep_weights(0)  # the weights stay on the device; everything else is freed
        self._wake(self._engine)
        logger.info("engine rebuilt for the next record seconds=%.2f", time.monotonic() - started)

    def _wake(self, sleeping: SleepingEngine) -> None:
        engine = sleeping.wake()
        self._set_up(engine)
        freeze()
        self._adopt(engine)

    def _keep(self, made: Sequence[tuple[Address, StepOutput]]) -> None:
        """Add outputs to the reports of their API processes."""
        for (link, ticket), output in made:
            link.tickets.append(ticket)
            link.outputs.append(output)

    def _turn_over(self, link: Link, command: messages.Sleep | messages.Wake) -> None:
        """Free the engine, or rebuild it."""
        num_bytes = None
        try:
            if isinstance(command, messages.Sleep):
                if not isinstance(self._engine, SleepingEngine):
                    self._engine = SleepingEngine(self._engine)
                    del self._subscribers  # they refer to the engine
                num_bytes = self._engine.keep_weights(command.max_bytes)
            elif isinstance(self._engine, SleepingEngine):
                self._wake(self._engine)
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


def open_recorder(orders: messages.RecordOrders) -> RecordFile | None:
    """Return the recorder of a run, after setting aside the record of a previous engine.

    None: the file cannot be written, and the engine serves without a record.
    """
    path = Path(orders.path)
    try:
        set_aside(path)
        return (Recorder if orders.has_text else TraceRecorder)(path, max_bytes=orders.max_bytes)
    except (OSError, ConfigError) as error:
        logger.warning("no record is written: %s; the engine continues without one", error)
        return None


def load_engine(config: EngineConfig, observer: EngineObserver | None = None) -> Engine:
    """Find the model, load it and build its engine; the server handles text."""
    phases = Phases()
    with phases("import"):  # imported here: a test's engine has no model and needs no torch
        from infer.client.load import load_weights
        from infer.engine.build import build_engine, token_bytes_of, wake_libraries
        from infer.loader.headers import read_headers

    with phases("find"):
        source = resolve_model(config.load.model, revision=config.load.revision, show_progress=False)
        headers = read_headers(source, config.load.model_impl)
    token_bytes = token_bytes_of(source, config.load.tokenizer, headers.config, headers.eos_ids, headers)
    with phases("load weights"):
        given = config, token_bytes
        threading.Thread(target=wake_libraries, args=given, name="infer-wake", daemon=True).start()
        loaded = load_weights(config, headers)
    engine = build_engine(config, loaded, observer=observer, phases=phases, token_bytes=token_bytes)
    if loaded.ranks is None and not config.adapters.is_on:
        engine.remake = partial(build_engine, config, loaded, observer=observer, token_bytes=token_bytes)
    return engine


def main(make_engine: Callable[..., Engine] = load_engine) -> int:
    """Run the engine process from the first line of input until it ends; returns the exit code."""
    launch = take_orders(messages.Launch, on_orphaned=_remove_directory)
    spawn_s = time.perf_counter() - (launch.spawned_at or time.perf_counter())
    setup_logging(launch.log_level)
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(context.socket(zmq.PAIR)) for _ in launch.endpoints]
        for socket, endpoint in zip(sockets, launch.endpoints, strict=True):
            socket.set_hwm(0)  # messages in flight are bounded by max_tokens of the requests being served
            socket.linger = LINGER_MS
            socket.connect(endpoint)
        kind: type[InferError] = ConfigError  # the kind of error if memory or files run out while loading
        try:
            recorder = None if launch.record is None else open_recorder(launch.record)
            if launch.record is not None:
                make_engine = partial(make_engine, observer=recorder)
            engine = make_engine(take_place(launch.config, launch.replica))
            if isinstance(recorder, Recorder):
                recorder.goes_on = engine.remake is not None
            set_up = partial(_set_up, launch)
            set_up(engine)
            with engine.phases("capture"):
                while engine.prepare():
                    pass
            freeze()  # the model lives as long as the process, or until the engine sleeps
            phases = {"spawn": spawn_s, **engine.phases}
            served = engine.family, engine.context_len, engine.model_len
            max_queue = engine.scheduler.config.max_queue
            ready = messages.encode(messages.Ready(engine.stats(), *served, phases, max_queue))
            for socket in sockets:
                socket.send(ready)
            kind = EngineError
            server = EngineServer(engine, sockets, set_up, recorder)
            del engine  # it may be freed while it sleeps
            server.run()
        except BaseException as error:
            shortage = spell_shortage(error)
            if shortage is None and (type(error) is DeviceLost or not isinstance(error, InferError)):
                logger.exception("engine process died")
            failure = messages.to_failure(error if shortage is None else kind(shortage))
            for socket in sockets:
                socket.send(messages.encode(failure))
            return EXIT_FAILED
    return 0


def _set_up(launch: messages.Launch, engine: Engine) -> None:
    """Make an engine collect what the server will ask for."""
    engine.keep_stories(launch.num_stories)
    if launch.replica.count > 1:
        engine.watch_prefixes()


def _remove_directory(launch: messages.Launch) -> None:
    """Remove the directory of the sockets, unless the server has already removed it."""
    shutil.rmtree(Path(launch.endpoints[0].removeprefix("ipc://")).parent, ignore_errors=True)


def import_engine() -> None:
    """Import what `load_engine` will need, while the server is not yet ready to send orders."""
    with quick_imports():
        from infer.client import load  # noqa: F401
        from infer.engine import build  # noqa: F401


def wake_gpu() -> None:
    """Initialise the GPU's driver, if there is one, during the imports: PyTorch would otherwise wait for it.

    Then let Triton compute its cache key, which takes half a second because it reads its whole library.
    """
    with contextlib.suppress(OSError, ImportError):
        if ctypes.CDLL("libcuda.so.1").cuInit(0) == 0:
            from triton.runtime.cache import triton_key

            triton_key()


if __name__ == "__main__":
    for work in (wake_gpu, import_engine):
        threading.Thread(target=work, name="infer-import", daemon=True).start()
    sys.exit(main())
